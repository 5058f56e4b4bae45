//! The `uring-serve` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    uring_serve::run_command_line()
}

//! The product's binary under a name that integration tests of this package can ask Cargo for.

use std::process::ExitCode;

fn main() -> ExitCode {
    uring_serve::run_command_line()
}

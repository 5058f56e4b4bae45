//! The Linux half of `uring-serve`: sockets, threads, files, and the OpenAI API.
//!
//! A library, so that tests and benchmarks start servers in their own process; the binary only calls
//! [`run_command_line`].

pub mod api;
pub mod app;
pub mod args;
pub mod backend;
mod bufs;
pub mod clock;
pub mod config;
mod conn;
pub mod counters;
pub mod engine;
pub mod failure;
pub mod frontend;
pub mod journal;
pub mod listen;
pub mod loading;
pub mod nofile;
pub mod pool;
pub mod prometheus;
pub mod reactor;
pub mod ring;
pub mod serve;
pub mod service;
pub mod signals;
mod slots;
mod token;
pub mod waker;
mod wheel;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use self::args::Invocation;
use self::config::LogFormat;
use self::failure::Failure;

/// Runs the command line of this process and returns its exit code: 0 done, 1 failed, 2 wrong usage.
#[must_use]
pub fn run_command_line() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody is left to tell when stderr is closed; the exit code says it.
            let _ = writeln!(io::stderr(), "{failure}");
            failure.exit_code()
        }
    }
}

fn run() -> Result<(), Failure> {
    match args::parse(std::env::args_os())? {
        Invocation::Print(text) => {
            write!(io::stdout(), "{text}").map_err(|error| Failure::run(error.to_string(), "free stdout"))
        }
        Invocation::Serve(config) => {
            // Dropped last: what is queued is written then.
            let _logs = start_logging(config.log_format)?;
            serve::run(*config)
        }
    }
}

/// Starts logging to stderr, by way of a thread: a terminal that is held, or a full pipe, must not stop a ring or the
/// engine. Its queue is bounded; lines that find it full are lost.
fn start_logging(format: LogFormat) -> Result<WorkerGuard, Failure> {
    let filter = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info".into());
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        Failure::usage(
            format!("RUST_LOG is {filter}: {error}"),
            "set it to a level, such as `info` or `debug`",
        )
    })?;
    let is_colored = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let (writer, guard) =
        NonBlockingBuilder::default().buffered_lines_limit(LOG_LINES_MAX).lossy(true).finish(io::stderr());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(is_colored);
    match format {
        LogFormat::Json => logs.json().init(),
        LogFormat::Text => logs.init(),
    }
    Ok(guard)
}

/// Log lines that wait for stderr, at most.
const LOG_LINES_MAX: usize = 8192;

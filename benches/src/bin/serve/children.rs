//! The two servers, as child processes of this program: each pins itself to the first CPU.

use std::io::{self, BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Names the kind of child in its environment: the command line is the product's own.
const KIND: &str = "URING_SERVE_BENCH_CHILD";
/// What both servers say on stderr, before their address.
pub(crate) const LISTENING: &str = "listening on http://";
/// Name of the peer's serving thread.
pub(crate) const PEER_THREAD: &str = "tokio";

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The product, from its command line on.
    Ours,
    /// hyper 1.x around the same engine.
    Hyper,
}

impl Kind {
    /// Its name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ours => "uring",
            Self::Hyper => "hyper",
        }
    }

    /// The thread that serves sockets.
    pub(crate) const fn thread(self) -> &'static str {
        match self {
            Self::Ours => "ring-0",
            Self::Hyper => PEER_THREAD,
        }
    }
}

/// Runs as a child, if this process is one.
pub(crate) fn run_as_child() -> Option<ExitCode> {
    let kind = std::env::var(KIND).ok()?;
    if let Err(error) = pin(SERVER_CPU) {
        let _ = writeln!(io::stderr(), "not pinned: {error}");
    }
    if kind == Kind::Ours.name() {
        return Some(uring_serve::run_command_line());
    }
    Some(match crate::peer::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    })
}

/// Keeps this process on one CPU; threads started later inherit it.
pub(crate) fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// A server that lives as long as this.
pub(crate) struct Server {
    child: Child,
    /// Who it is.
    pub(crate) kind: Kind,
    /// Where it listens.
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts one with these flags of `serve` and waits until it listens.
    pub(crate) fn start(kind: Kind, flags: &[&str]) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", "--host", "127.0.0.1", "--port", "0", "--engine", "sim"])
            .args(flags)
            .env(KIND, kind.name())
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = child.stderr.take();
        let mut server = Self { child, kind, address: SocketAddr::from(([0, 0, 0, 0], 0)) };
        let mut lines = BufReader::new(stderr.ok_or(io::ErrorKind::BrokenPipe)?).lines();
        let mut said = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some(address) = line.strip_prefix(LISTENING) {
                server.address = address.parse().map_err(io::Error::other)?;
                // What it says later is shown: a server that complains is not worth measuring.
                std::thread::spawn(move || {
                    for line in lines.map_while(Result::ok) {
                        let _ = writeln!(io::stderr(), "{}: {line}", kind.name());
                    }
                });
                return Ok(server);
            }
            said.push_str(&line);
            said.push('\n');
        }
        Err(io::Error::other(format!("{} does not listen: {said}", kind.name())))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Servers run on this CPU, one at a time.
const SERVER_CPU: usize = 0;
/// The load generator runs on this one.
pub(crate) const LOAD_CPU: usize = 1;

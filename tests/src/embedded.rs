//! A server inside the test's own process, on the simulated engine and a clock that the test chooses.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use uring_serve::args::{self, Invocation};
use uring_serve::backend::{self, EngineKind};
use uring_serve::clock::{Clock, VirtualClock};
use uring_serve::serve::{Hooks, Server};
use uring_serve::signals::Stage;
use uring_serve_core::time::MonoNs;

use crate::http::Client;

/// A running server; ends when dropped.
pub struct Embedded {
    server: Option<Server>,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Embedded {
    /// Starts `serve --engine sim ARGS` on a free port of the loopback.
    ///
    /// # Panics
    /// When the arguments are wrong or the host refuses something.
    pub fn start(args: &[&str], clock: Arc<dyn Clock>, hooks: &Hooks) -> Self {
        let fixed = ["uring-serve", "serve", "--engine", "sim", "--host", "127.0.0.1", "--port", "0"];
        let argv = fixed.iter().chain(args).map(OsString::from);
        let Ok(Invocation::Serve(config)) = args::parse(argv) else { panic!("not a server: {args:?}") };
        let loaded = backend::load(&config, EngineKind::Sim, clock.wall_seconds());
        let mut server = Server::bind_with(*config, EngineKind::Sim, clock, hooks)
            .unwrap_or_else(|error| panic!("{error}"));
        let started = loaded.and_then(|loaded| server.start_engine(loaded));
        started.unwrap_or_else(|error| panic!("{error}"));
        let address = server.addresses()[0];
        Self { server: Some(server), address }
    }

    /// Connects to it.
    pub fn connect(&self) -> Client {
        Client::connect(self.address)
    }

    /// Returns a value of its metrics page, read without a request. `sample` is the line's name with its labels.
    ///
    /// # Panics
    /// When there is no such line.
    pub fn metric(&self, sample: &str) -> u64 {
        let mut page = String::new();
        if let Some(server) = &self.server {
            server.app.metrics.write_page(&mut page);
        }
        let value = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {sample} in\n{page}"))
    }

    /// Drains it and waits until its threads have ended and its files are written.
    ///
    /// # Panics
    /// When one of its threads failed.
    pub fn end(mut self) {
        if let Some(server) = self.server.take() {
            server.end().unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            // A drain would wait for connections that a failed test still has open.
            server.app.shutdown.advance(Stage::Ending);
            // That test's own words say more than what its server ends with.
            let _ = server.end();
        }
    }
}

/// A virtual clock that moves only when the engine paces a step, and then only after the ring thread has acted on
/// everything that the steps before gave it. So each stamp of a lone request is the same in every run.
///
/// To know that the ring has acted, the engine's wait makes a round trip through it: a turn that answers a request
/// takes the queues in before it reads the clock, and reads the clock before it answers. It needs a single ring thread.
#[derive(Debug)]
pub struct LockstepClock {
    time: VirtualClock,
    probe: Mutex<Option<Client>>,
}

impl LockstepClock {
    /// Creates a clock that reads one second at the given wall time, in seconds since the UNIX epoch.
    #[must_use]
    pub fn new(wall_start: u64) -> Self {
        Self { time: VirtualClock::new(wall_start), probe: Mutex::default() }
    }

    /// Moves the clock by hand, between requests.
    pub fn advance(&self, by: Duration) {
        self.time.advance(by);
    }

    /// Names the server whose ring waits are to be in step with.
    pub fn follow(&self, server: &Embedded) {
        *self.probe.lock().unwrap_or_else(PoisonError::into_inner) = Some(server.connect());
    }

    /// Leaves the server again: it would wait for the end of this connection, in a time that stands still.
    pub fn release(&self) {
        *self.probe.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Clock for LockstepClock {
    fn now(&self) -> MonoNs {
        self.time.now()
    }

    fn wait_until(&self, deadline: MonoNs) {
        if let Some(client) = &mut *self.probe.lock().unwrap_or_else(PoisonError::into_inner) {
            assert_eq!(client.get("/version").status, 200);
        }
        self.time.wait_until(deadline);
    }

    fn wall_since_epoch(&self) -> Duration {
        self.time.wall_since_epoch()
    }
}

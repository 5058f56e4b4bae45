//! `uring-serve serve`: everything that runs, in the order in which it starts and ends.
//!
//! Sockets are bound first, so that a port in use is told before a model is read. Ring threads answer from then on,
//! generation routes by 503 until the model is there. At the end the order is the other way round: rings drain, the
//! engine ends when no ring can submit, the journal ends when nobody can write a record.

use std::convert::Infallible;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::app::{App, UnknownNames};
use crate::backend::{self, EngineKind, Loaded};
use crate::clock::{Clock, SystemClock};
use crate::config::{Config, LogFormat};
use crate::engine::{Engine, EngineClient, Mailroom};
use crate::failure::Failure;
use crate::frontend::{Frontend, Parts, Pooled};
use crate::journal::{Entry, Journal, JournalHandle};
use crate::listen::{self, Listeners, Probe};
use crate::pool::{Mailbox, Pool, Wake};
use crate::prometheus::{self, EngineShape, Metrics};
use crate::reactor::{Options, Reactor};
use crate::ring::RingError;
use crate::signals::{ControlThread, Shutdown, Stage};
use crate::waker::Handle;
use crate::{nofile, ring};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use uring_serve_kernels::BackendError;

/// Runs the server until a signal ends it.
///
/// # Errors
/// The model cannot be read, this build lacks the engine, or the host refuses something the server needs.
pub fn run(config: Config) -> Result<(), Failure> {
    let kind = EngineKind::choose(config.engine)?;
    backend::check_model(&config, kind)?;
    let weights = match kind {
        EngineKind::Cpu => config.model.clone().into_iter().collect(),
        EngineKind::Sim => Vec::new(),
    };
    ring::check_platform().map_err(|error| ring_failure(&error))?;
    let shutdown = Arc::<Shutdown>::default();
    let control = ControlThread::start(&shutdown, weights)?;
    let hooks = Hooks { shutdown: Arc::clone(&shutdown), ..Hooks::default() };
    let mut server = Server::bind_with(config, kind, Arc::new(SystemClock), &hooks)?;
    let loaded = backend::load(&server.app.config, kind, server.clock.wall_seconds())?;
    server.start_engine(loaded)?;
    // A signal that came while the model was loaded has already ended it.
    if shutdown.stage() == Stage::Serving {
        server.announce();
    }
    shutdown.wait_for(Stage::Draining, None);
    let ended = server.end();
    drop(control);
    ended
}

/// What an embedder shares with a server, and what tests fix or break in it. The default fixes and breaks nothing.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Its stages: whoever advances them begins the server's end.
    pub shutdown: Arc<Shutdown>,
    /// Seeds response ids and sampling, so that a run can be repeated to the byte. `None` takes a new one.
    pub id_seed: Option<u64>,
    /// Buffers, queues and faults of each ring. Number, connections and limits come from the configuration.
    pub ring: Options,
}

/// A running server. Ring threads serve from [`Self::bind`] on, models from [`Self::start_engine`] on.
pub struct Server {
    /// What the rings share.
    pub app: Arc<App>,
    clock: Arc<dyn Clock>,
    addresses: Vec<SocketAddr>,
    handles: Vec<Handle>,
    rings: Vec<JoinHandle<Result<(), RingError>>>,
    mailroom: Option<Mailroom>,
    engine: Option<EngineThread>,
    journal: Option<Journal<Entry>>,
}

impl Server {
    /// Binds the sockets and starts the ring threads, the pool and the journal.
    ///
    /// # Errors
    /// The port is in use, a ring cannot be made, or the host refuses a thread.
    pub fn bind(config: Config, kind: EngineKind, clock: Arc<dyn Clock>) -> Result<Self, Failure> {
        Self::bind_with(config, kind, clock, &Hooks::default())
    }

    /// Does the same with what a test fixes or breaks.
    ///
    /// # Errors
    /// Like [`Self::bind`].
    pub fn bind_with(
        config: Config,
        kind: EngineKind,
        clock: Arc<dyn Clock>,
        hooks: &Hooks,
    ) -> Result<Self, Failure> {
        let open_files_max = nofile::raise();
        let Listeners { workers, addresses } =
            listen::bind(&config.host, config.port, config.workers, Probe::First)
                .map_err(|error| Failure::run(error.to_string(), error.hint()))?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            engine = kind.name(),
            model = config.served_model_name,
            threads = config.threads,
            workers = config.workers,
            open_files_max,
            "starting"
        );
        let journal = match &config.perf_metrics_output_dir {
            Some(dir) => Some(Journal::start(dir, "server", Arc::clone(&clock)).map_err(Failure::thread)?),
            None => None,
        };
        let handles: Vec<Handle> =
            workers.iter().map(|_| Handle::new()).collect::<io::Result<_>>().map_err(|error| {
                Failure::run(format!("cannot make an eventfd: {error}"), "raise the limit on open files")
            })?;
        let wakers = handles.iter().map(|handle| Arc::new(handle.waker().clone()) as Arc<dyn Wake>);
        let (mailroom, clients) = Mailroom::new(wakers.collect(), config.max_queued_requests.max(1) as usize);
        let pool = Pool::start(config.frontend_threads, POOL_JOBS_MAX).map_err(Failure::thread)?;
        let app = Arc::new(App {
            metrics: metrics_of(&config, kind, &handles, journal.as_ref()),
            config,
            model: OnceLock::new(),
            shutdown: Arc::clone(&hooks.shutdown),
            clock_offset_ns: AtomicI64::new(0),
            unknown_fields: UnknownNames::default(),
        });
        let mut server = Self {
            app,
            clock,
            addresses,
            handles,
            rings: Vec::new(),
            mailroom: Some(mailroom),
            engine: None,
            journal,
        };
        server.start_rings(workers, clients, &Arc::new(pool), open_files_max, hooks)?;
        Ok(server)
    }

    /// Returns what it listens on.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Starts the engine thread and opens the generation routes. The first call counts.
    ///
    /// # Errors
    /// The host refuses the thread, or the sizes contradict each other.
    pub fn start_engine(&mut self, loaded: Loaded) -> Result<(), Failure> {
        let Some(mailroom) = self.mailroom.take() else { return Ok(()) };
        let Loaded { backend, shape, model } = loaded;
        let (device, context) = (model.spec.device.clone(), model.context_tokens);
        self.app.metrics.engine().set_shape(EngineShape {
            max_batch_size: shape.batch_seqs_max,
            max_num_tokens: shape.batch_tokens_max,
            max_seq_len: context,
            kv_blocks: shape.block_count,
            tokens_per_block: shape.block_tokens,
        });
        let (clock, metrics) = (Arc::clone(&self.clock), Arc::clone(&self.app.metrics));
        let tokenizer = Arc::clone(&model.tokenizer);
        let engine = Engine::new(backend, clock, shape, tokenizer, mailroom, metrics)
            .map_err(|error| Failure::run(error.to_string(), "see --help for the sizes' ranges"))?;
        let shutdown = Arc::clone(&self.app.shutdown);
        let (alive, ended) = bounded(0);
        let run = move || {
            // An engine that panics leaves nothing to serve: the process ends, by the same way as on a signal.
            let guard = EndOnPanic(Arc::clone(&shutdown));
            // One whose backend broke can still say so to each request: readiness goes off, and the server ends.
            let ended = engine.run(|| shutdown.advance(Stage::Draining));
            drop((guard, alive));
            ended
        };
        let thread = thread::Builder::new().name("engine".into()).spawn(run).map_err(Failure::thread)?;
        self.engine = Some(EngineThread { thread, ended });
        // Nothing else sets it: the mailroom was there once.
        let _ = self.app.model.set(model);
        tracing::info!(device, context_tokens = context, "ready");
        Ok(())
    }

    /// Says on stderr where it listens.
    fn announce(&self) {
        let host = match (self.app.config.host.as_str(), self.addresses.first()) {
            ("localhost", Some(address)) => format!("localhost:{}", address.port()),
            (_, Some(address)) => address.to_string(),
            (host, None) => host.to_owned(),
        };
        match self.app.config.log_format {
            LogFormat::Json => tracing::info!("listening on http://{host}"),
            // A closed stderr does not stop a server.
            LogFormat::Text => drop(writeln!(io::stderr(), "listening on http://{host}")),
        }
    }

    /// Drains: readiness off, no new connections, what runs is finished within the configured time or until
    /// [`Stage::Ending`].
    ///
    /// # Errors
    /// A thread of the server failed.
    pub fn end(mut self) -> Result<(), Failure> {
        self.app.shutdown.advance(Stage::Draining);
        tracing::info!(at_most_s = self.app.config.drain_timeout.as_secs_f64(), "draining");
        for handle in &self.handles {
            handle.begin_drain(self.app.config.drain_timeout);
        }
        let stopper = Stopper::start(&self.app.shutdown, &self.handles);
        let mut failed = None;
        for ring in self.rings.drain(..) {
            match ring.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed = Some(ring_failure(&error)),
                Err(_panic) => {
                    failed = Some(Failure::run("a ring thread panicked", "report this with the log"))
                }
            }
        }
        drop(stopper);
        // Without an engine thread nobody took the jobs; with one, it ends now that every client is gone.
        self.mailroom = None;
        if let Some(engine) = self.engine.take() {
            failed = engine.end().err().or(failed);
        }
        if let Some(journal) = self.journal.take() {
            journal.close();
        }
        failed.map_or(Ok(()), Err)
    }

    fn start_rings(
        &mut self,
        workers: Vec<Vec<TcpListener>>,
        clients: Vec<EngineClient>,
        pool: &Arc<Pool<Pooled>>,
        open_files_max: Option<u64>,
        hooks: &Hooks,
    ) -> Result<(), Failure> {
        let (ready, wait_ready) = bounded(workers.len());
        let rings = workers.into_iter().zip(clients).zip(self.handles.clone());
        for (worker, ((listeners, engine), handle)) in (0_u16..).zip(rings) {
            let mailbox = Mailbox::new(POOL_JOBS_MAX, Arc::new(handle.waker().clone()));
            let parts = Parts {
                app: Arc::clone(&self.app),
                worker,
                engine,
                pool: Arc::clone(pool),
                mailbox,
                journal: self.journal.as_ref().map(Journal::handle),
                clock: Arc::clone(&self.clock),
                seed: hooks.id_seed.unwrap_or_else(|| seed(self.clock.as_ref(), worker)),
            };
            let options = ring_options(&self.app.config, worker, open_files_max, &hooks.ring);
            let clock = Arc::clone(&self.clock);
            let ready = ready.clone();
            let run = move || run_ring(options, listeners, handle, clock, parts, &ready);
            let name = format!("ring-{worker}");
            self.rings.push(thread::Builder::new().name(name).spawn(run).map_err(Failure::thread)?);
        }
        drop(ready);
        for _ in 0..self.rings.len() {
            // A ring that panicked has dropped its sender: `end` says so.
            wait_ready.recv().unwrap_or(Ok(()))?;
        }
        Ok(())
    }
}

/// A server that is dropped before its end stops without a drain, and without waiting for its threads.
impl Drop for Server {
    fn drop(&mut self) {
        self.handles.iter().for_each(Handle::stop_now);
    }
}

/// Runs one ring thread: the ring is made where it is used (SINGLE_ISSUER).
fn run_ring(
    options: Options,
    listeners: Vec<TcpListener>,
    handle: Handle,
    clock: Arc<dyn Clock>,
    parts: Parts,
    ready: &Sender<Result<(), Failure>>,
) -> Result<(), RingError> {
    let shutdown = Arc::clone(&parts.app.shutdown);
    let reactor = Reactor::new(options, listeners, handle, clock, Frontend::new(parts));
    match reactor {
        Ok(mut reactor) => {
            // The receiver waits for one message of each ring.
            let _ = ready.send(Ok(()));
            let _guard = EndOnPanic(Arc::clone(&shutdown));
            // A server without one of its rings is none.
            reactor.run().inspect_err(|_| shutdown.advance(Stage::Ending))
        }
        Err(error) => {
            let _ = ready.send(Err(ring_failure(&error)));
            Ok(())
        }
    }
}

fn ring_options(config: &Config, worker: u16, open_files_max: Option<u64>, base: &Options) -> Options {
    let connections_max = nofile::connections_max(open_files_max, config.workers);
    Options { worker, connections_max, http: config.http, ..base.clone() }
}

/// The engine's thread, and how long it lives: nothing is sent on `ended`, its sender is dropped with the thread.
struct EngineThread {
    thread: JoinHandle<Result<(), BackendError>>,
    ended: Receiver<Infallible>,
}

impl EngineThread {
    /// Waits for its end, but for no step that outlasts the drain: such a thread ends with the process.
    fn end(self) -> Result<(), Failure> {
        if self.ended.recv_timeout(ENGINE_END_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the engine is left in the middle of a step");
            return Ok(());
        }
        let hint = "report this with the log";
        match self.thread.join() {
            Ok(ended) => ended.map_err(|error| Failure::run(error.to_string(), hint)),
            Err(_panic) => Err(Failure::run("the engine panicked", hint)),
        }
    }
}

/// Lets a second signal end the rings that a drain still waits for.
struct Stopper(Option<JoinHandle<()>>, Arc<Shutdown>);

impl Stopper {
    fn start(shutdown: &Arc<Shutdown>, handles: &[Handle]) -> Self {
        let (watched, handles) = (Arc::clone(shutdown), handles.to_vec());
        let watch = move || {
            watched.wait_for(Stage::Ending, None);
            handles.iter().for_each(Handle::stop_now);
        };
        Self(thread::Builder::new().name("stopper".into()).spawn(watch).ok(), Arc::clone(shutdown))
    }
}

impl Drop for Stopper {
    fn drop(&mut self) {
        self.1.advance(Stage::Ending);
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

/// Begins the end of the server when its thread panics.
struct EndOnPanic(Arc<Shutdown>);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.advance(Stage::Ending);
        }
    }
}

fn metrics_of(
    config: &Config,
    kind: EngineKind,
    handles: &[Handle],
    journal: Option<&Journal<Entry>>,
) -> Arc<Metrics> {
    let mut metrics = Metrics::new(&config.served_model_name, kind.name(), config.workers);
    let counters: Vec<_> = handles.iter().map(Handle::counters).collect();
    metrics.add_source(move |page| {
        let Some(first) = counters.first() else { return };
        for (index, (name, _)) in first.values().enumerate() {
            let total =
                counters.iter().filter_map(|ring| ring.values().nth(index)).map(|(_, value)| value).sum();
            page.counter(&format!("uring_serve_ring_{name}_total"), "Sum over ring threads.", &[("", total)]);
        }
    });
    if let Some(handle) = journal.map(Journal::handle) {
        let handle: JournalHandle<Entry> = handle;
        metrics.add_source(move |page| prometheus::write_journal(handle.counters(), page));
    }
    Arc::new(metrics)
}

/// Different for each process and ring: ids must not repeat across restarts.
fn seed(clock: &dyn Clock, worker: u16) -> u64 {
    let wall = clock.wall_since_epoch().as_nanos() as u64;
    wall ^ u64::from(std::process::id()) << 32 ^ u64::from(worker) << 48
}

fn ring_failure(error: &RingError) -> Failure {
    Failure::run(error.to_string(), error.hint())
}

/// Jobs that wait for the front-end pool; more are answered 429.
const POOL_JOBS_MAX: usize = 1024;
/// Longest wait for the engine's step when nobody waits for its tokens any more.
const ENGINE_END_MAX: Duration = Duration::from_secs(1);

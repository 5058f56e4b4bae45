//! The control thread: signals become stages of the server's end, and the model is read ahead meanwhile.
//!
//! It runs a tokio-uring runtime of its own, beside the rings of the serving threads.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::failure::Failure;
use crate::loading;

/// How far the server's end has come. Stages only go forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Not at all: new work is taken.
    Serving,
    /// Readiness is off, no new work; what runs goes on.
    Draining,
    /// Open requests are dropped.
    Ending,
}

/// The stage, shared by every thread. Reading it is one atomic load.
#[derive(Default)]
pub struct Shutdown {
    stage: AtomicU8,
    /// Held while the stage changes, so that nobody checks it before and sleeps after.
    changing: Mutex<()>,
    changed: Condvar,
}

impl Shutdown {
    /// Returns the stage.
    #[must_use]
    pub fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Serving,
            1 => Stage::Draining,
            _ => Stage::Ending,
        }
    }

    /// Moves on to `stage`, unless that or a later one is reached already, and wakes whoever waits for it.
    pub fn advance(&self, stage: Stage) {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stage.fetch_max(stage as u8, Ordering::AcqRel) < stage as u8 {
            self.changed.notify_all();
        }
    }

    /// Blocks until the stage is `stage` or later, or `at_most` has passed. Returns the stage then.
    pub fn wait_for(&self, stage: Stage, at_most: Option<Duration>) -> Stage {
        let changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let is_early = |(): &mut ()| self.stage() < stage;
        // A poisoned lock guards nothing that could be broken.
        match at_most {
            Some(at_most) => drop(self.changed.wait_timeout_while(changing, at_most, is_early)),
            None => drop(self.changed.wait_while(changing, is_early)),
        }
        self.stage()
    }
}

/// The running control thread. Dropping it ends and joins the thread.
#[derive(Debug)]
pub struct ControlThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ControlThread {
    /// Starts the thread and returns once SIGTERM and SIGINT are caught: the first begins the drain, the second ends
    /// open requests, a third ends the process at once with exit code 1. `weights` are read ahead in the background.
    ///
    /// # Errors
    /// The thread, its ring, or a signal handler could not be made.
    pub fn start(shutdown: &Arc<Shutdown>, weights: Vec<PathBuf>) -> Result<Self, Failure> {
        let (stop, stopped) = oneshot::channel();
        let (ready, wait_ready) = bounded(1);
        let shutdown = Arc::clone(shutdown);
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || run(shutdown, weights, &ready, stopped))
            .map_err(Failure::thread)?;
        let control = Self { stop: Some(stop), thread: Some(thread) };
        match wait_ready.recv() {
            Ok(Ok(())) => Ok(control),
            Ok(Err(error)) => Err(Failure::run(
                format!("cannot set up the control thread's io_uring: {error}"),
                "docs/containers.md says what the server needs from its host",
            )),
            Err(_) => Err(Failure::run("the control thread ended", "report this with the log")),
        }
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed and has nothing left to break.
            let _ = thread.join();
        }
    }
}

fn run(
    shutdown: Arc<Shutdown>,
    weights: Vec<PathBuf>,
    ready: &Sender<io::Result<()>>,
    stopped: oneshot::Receiver<()>,
) {
    let mut builder = tokio_uring::builder();
    builder.entries(RING_ENTRIES);
    let runtime = match tokio_uring::Runtime::new(&builder) {
        Ok(runtime) => runtime,
        Err(error) => return drop(ready.send(Err(error))),
    };
    runtime.block_on(async {
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            match signal(kind) {
                Ok(signals) => drop(tokio_uring::spawn(follow(signals, Arc::clone(&shutdown)))),
                Err(error) => return drop(ready.send(Err(error))),
            }
        }
        // A metrics file at the limit on file sizes is a failed write, not the end of the server. The handler stays when
        // its stream is dropped.
        if let Err(error) = signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())) {
            return drop(ready.send(Err(error)));
        }
        let _ = ready.send(Ok(()));
        drop(tokio_uring::spawn(read_weights(weights, shutdown)));
        // Either way the owner wants the thread to end.
        let _ = stopped.await;
    });
}

async fn follow(mut signals: Signal, shutdown: Arc<Shutdown>) {
    while signals.recv().await.is_some() {
        match shutdown.stage() {
            Stage::Serving => {
                tracing::info!("a signal asks the server to end: finishing what runs");
                shutdown.advance(Stage::Draining);
            }
            Stage::Draining => {
                tracing::warn!("a second signal: ending open requests");
                shutdown.advance(Stage::Ending);
            }
            Stage::Ending => std::process::exit(1),
        }
    }
}

async fn read_weights(files: Vec<PathBuf>, shutdown: Arc<Shutdown>) {
    if files.is_empty() {
        return;
    }
    match loading::read_ahead(&files, || shutdown.stage() == Stage::Serving).await {
        Ok(bytes) => tracing::info!(bytes, "the model's weights were read ahead"),
        // The engine opens the files itself and says what is wrong with them.
        Err(error) => tracing::warn!("cannot read the model ahead: {error}"),
    }
}

/// One read and the runtime's own few operations are in flight at a time.
const RING_ENTRIES: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_go_forward_only() {
        let shutdown = Shutdown::default();
        // (advance to, stage afterwards)
        let rows = [
            (Stage::Serving, Stage::Serving),
            (Stage::Draining, Stage::Draining),
            (Stage::Draining, Stage::Draining),
            (Stage::Ending, Stage::Ending),
            (Stage::Draining, Stage::Ending),
        ];
        for (to, stage) in rows {
            shutdown.advance(to);
            assert_eq!(shutdown.stage(), stage);
        }
    }

    #[test]
    fn a_waiter_sees_the_stage_that_another_thread_sets() {
        let shutdown = Arc::new(Shutdown::default());
        assert_eq!(shutdown.wait_for(Stage::Draining, Some(Duration::ZERO)), Stage::Serving);
        let other = Arc::clone(&shutdown);
        let thread = thread::spawn(move || other.advance(Stage::Draining));
        assert_eq!(shutdown.wait_for(Stage::Draining, None), Stage::Draining);
        thread.join().unwrap();
    }
}

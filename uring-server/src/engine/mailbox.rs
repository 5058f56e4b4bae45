//! The two joints between ring threads and the engine thread: submissions in, step batches out.
//!
//! In: one bounded channel for all rings. Out: per ring a bounded queue of batches, and a second one that brings the
//! emptied batches back. A ring that does not drain its queue costs nothing but its own latency: the engine goes on
//! filling the batch it has until one comes back, and that batch is bounded by what the ring's running sequences can
//! still produce, since new work for a ring comes only from that ring.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};
use crossbeam_queue::ArrayQueue;
use uring_serve_core::metrics::EngineReport;

use super::{Delta, End, Ended, Job, StepBatch, Submission};
use crate::pool::Wake;

/// Batches per ring, all together: one being filled, the others on their way.
const BATCHES_PER_RING: usize = 4;

/// How long an idle engine waits before it looks again for a returned batch that it still owes a ring.
const RETRY: Duration = Duration::from_millis(1);

/// The engine's end: the inbox of all rings and one outbox each.
pub struct Mailroom {
    inbox: Receiver<Submission>,
    outboxes: Vec<Outbox>,
}

/// One ring's end.
pub struct EngineClient {
    inbox: Sender<Submission>,
    ready: Arc<ArrayQueue<StepBatch>>,
    spare: Arc<ArrayQueue<StepBatch>>,
}

struct Outbox {
    filling: StepBatch,
    ready: Arc<ArrayQueue<StepBatch>>,
    spare: Arc<ArrayQueue<StepBatch>>,
    waker: Arc<dyn Wake>,
}

impl Mailroom {
    /// Connects an engine with one ring per waker; `submissions_max` bounds what rings may have handed over and the
    /// engine not yet taken.
    #[must_use]
    pub fn new(wakers: Vec<Arc<dyn Wake>>, submissions_max: usize) -> (Self, Vec<EngineClient>) {
        let (sender, inbox) = crossbeam_channel::bounded(submissions_max);
        let (outboxes, clients) = wakers
            .into_iter()
            .map(|waker| {
                let ready = Arc::new(ArrayQueue::new(BATCHES_PER_RING));
                let spare = Arc::new(ArrayQueue::new(BATCHES_PER_RING));
                for _ in 1..BATCHES_PER_RING {
                    // Cannot fail: fewer batches than places.
                    let _ = spare.push(StepBatch::default());
                }
                let client = EngineClient {
                    inbox: sender.clone(),
                    ready: Arc::clone(&ready),
                    spare: Arc::clone(&spare),
                };
                (Outbox { filling: StepBatch::default(), ready, spare, waker }, client)
            })
            .unzip();
        (Self { inbox, outboxes }, clients)
    }

    /// Takes what the rings have handed over, blocking while there is nothing and the engine is `idle`.
    /// False when every ring is gone and nothing was taken.
    pub(super) fn collect(&self, idle: bool, arrivals: &mut Vec<Submission>) -> bool {
        if idle {
            let owes = self.outboxes.iter().any(|outbox| !outbox.filling.deltas.is_empty());
            let first = if owes {
                match self.inbox.recv_timeout(RETRY) {
                    Ok(submission) => Some(submission),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return false,
                }
            } else {
                match self.inbox.recv() {
                    Ok(submission) => Some(submission),
                    Err(_) => return false,
                }
            };
            arrivals.extend(first);
        }
        // Bounded by the channel: rings that go on sending wait for the next turn.
        let at_most = self.inbox.len();
        arrivals.extend(self.inbox.try_iter().take(at_most));
        true
    }

    /// Returns the batch being filled for a ring.
    pub(super) fn batch(&mut self, worker: u16) -> &mut StepBatch {
        &mut self.outboxes[usize::from(worker)].filling
    }

    /// Queues the end of a job that never ran.
    pub(super) fn send_end(&mut self, job: &Job, ended: Ended, report: EngineReport) {
        self.batch(job.exchange.worker).deltas.push(Delta {
            exchange: job.exchange,
            choice: job.choice,
            text: 0..0,
            tokens: 0,
            first_token: None,
            end: Some(Box::new(End { ended, report })),
        });
    }

    /// Hands every ring its news: at most one message and one wake each.
    pub(super) fn deliver(&mut self) {
        for outbox in &mut self.outboxes {
            if outbox.filling.deltas.is_empty() {
                continue;
            }
            let Some(empty) = outbox.spare.pop() else { continue };
            let full = std::mem::replace(&mut outbox.filling, empty);
            // Cannot fail: as many places as batches.
            let _ = outbox.ready.push(full);
            outbox.waker.wake();
        }
    }
}

impl EngineClient {
    /// Hands a request to the engine, or gives it back when the engine is behind by the whole bound, or gone.
    ///
    /// # Errors
    /// The submission itself.
    pub fn submit(&self, submission: Submission) -> Result<(), Submission> {
        self.inbox.try_send(submission).map_err(|error| match error {
            TrySendError::Full(submission) | TrySendError::Disconnected(submission) => submission,
        })
    }

    /// Takes the oldest batch that is ready.
    #[must_use]
    pub fn take_batch(&self) -> Option<StepBatch> {
        self.ready.pop()
    }

    /// Gives a batch back once its deltas were handled.
    pub fn return_batch(&self, mut batch: StepBatch) {
        batch.clear();
        // Cannot fail: as many places as batches.
        let _ = self.spare.push(batch);
    }
}

//! The front-end pool: work that could take longer than a ring thread's 1 ms turn (product contract 4).
//!
//! A ring submits a job and goes on; the result comes back through that ring's [`Mailbox`], followed by one wake.
//! Both directions are bounded: a mailbox takes no more jobs than it has room for results, so a finished job never
//! waits for its ring.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use crossbeam_queue::ArrayQueue;

use crate::service::ExchangeId;

/// Wakes a thread that sleeps in its ring. Callable from any thread; waking one that is awake costs little.
pub trait Wake: Send + Sync {
    /// Makes the thread's next wait return at once.
    fn wake(&self);
}

/// The threads and the queue of jobs that they share.
#[derive(Debug)]
pub struct Pool<R: Send + 'static> {
    /// Taken when the pool ends: that disconnects the threads.
    jobs: Option<Sender<Job<R>>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl<R: Send + 'static> Pool<R> {
    /// Starts `threads` threads over a queue of `jobs_max` jobs, at least one of each.
    ///
    /// # Errors
    /// The operating system refused a thread.
    pub fn start(threads: u16, jobs_max: usize) -> io::Result<Self> {
        let (sender, receiver) = bounded(jobs_max.max(1));
        let mut pool = Self { jobs: Some(sender), threads: Vec::new() };
        for index in 0..threads.max(1) {
            let receiver = receiver.clone();
            let thread = thread::Builder::new().name(format!("frontend-{index}"));
            pool.threads.push(thread.spawn(move || run(&receiver))?);
        }
        Ok(pool)
    }

    /// Queues `work` for `exchange`. Its result appears in `mailbox`.
    ///
    /// # Errors
    /// [`PoolFull`] when the queue has no room or the mailbox could not hold the result; nothing was queued.
    pub fn submit(
        &self,
        mailbox: &Arc<Mailbox<R>>,
        exchange: ExchangeId,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<(), PoolFull> {
        let jobs = self.jobs.as_ref().ok_or(PoolFull)?;
        mailbox.reserve()?;
        let job = Job { exchange, mailbox: Arc::clone(mailbox), work: Box::new(work) };
        jobs.try_send(job).map_err(|error| {
            error.into_inner().mailbox.release();
            PoolFull
        })
    }
}

/// Ends the threads: queued jobs are still done first.
impl<R: Send + 'static> Drop for Pool<R> {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A job's panic is caught, so a thread ends by returning.
            let _ = thread.join();
        }
    }
}

/// The queue or the mailbox is full: answer 429.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFull;

/// One ring's finished jobs.
///
/// Invariant: queued, running and finished jobs that have not been taken number `reserved`, at most the capacity.
pub struct Mailbox<R> {
    finished: ArrayQueue<Finished<R>>,
    reserved: AtomicUsize,
    waker: Arc<dyn Wake>,
}

impl<R> Mailbox<R> {
    /// Creates a mailbox for at most `jobs_max` jobs at a time, at least one. `waker` is woken for each result.
    #[must_use]
    pub fn new(jobs_max: usize, waker: Arc<dyn Wake>) -> Arc<Self> {
        let finished = ArrayQueue::new(jobs_max.max(1));
        Arc::new(Self { finished, reserved: AtomicUsize::new(0), waker })
    }

    /// Takes the next result, in the order in which the jobs ended.
    pub fn take(&self) -> Option<Finished<R>> {
        let finished = self.finished.pop()?;
        self.release();
        Some(finished)
    }

    fn reserve(&self) -> Result<(), PoolFull> {
        let room = |reserved| (reserved < self.finished.capacity()).then_some(reserved + 1);
        self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).map(drop).map_err(|_| PoolFull)
    }

    fn release(&self) {
        self.reserved.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A job that has ended.
#[derive(Debug)]
pub struct Finished<R> {
    /// Whose.
    pub exchange: ExchangeId,
    /// What it returned.
    pub result: Result<R, Panicked>,
}

/// The job panicked: a bug in the server. The thread goes on; answer 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

struct Job<R> {
    exchange: ExchangeId,
    mailbox: Arc<Mailbox<R>>,
    work: Box<dyn FnOnce() -> R + Send>,
}

fn run<R: Send>(jobs: &Receiver<Job<R>>) {
    for Job { exchange, mailbox, work } in jobs {
        // The closure is consumed by the call: nothing it broke can be seen afterwards.
        let result = catch_unwind(AssertUnwindSafe(work)).map_err(|_| Panicked);
        if mailbox.finished.push(Finished { exchange, result }).is_err() {
            debug_assert!(false, "reserved on submit");
        }
        mailbox.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_back_with_one_wake_each() {
        let (pool, mailbox, woken) = pool_of(2, 8, 8);
        for serial in 1..=8 {
            pool.submit(&mailbox, exchange(serial), move || serial * 10).unwrap();
        }
        let mut results = Vec::new();
        for _ in 0..8 {
            woken.recv().unwrap();
            results.push(mailbox.take().unwrap());
        }
        assert!(mailbox.take().is_none());
        results.sort_by_key(|finished| finished.exchange.serial);
        for (finished, serial) in results.iter().zip(1..) {
            assert_eq!((finished.exchange.serial, finished.result), (serial, Ok(serial * 10)));
        }
    }

    #[test]
    fn a_full_queue_and_a_full_mailbox_refuse() {
        // (name, queue, mailbox, jobs taken while the only thread is busy)
        for (name, jobs_max, mailbox_max, taken) in
            [("queue", 2, 9, 2), ("mailbox", 9, 3, 2), ("both", 2, 3, 2)]
        {
            let (pool, mailbox, woken) = pool_of(1, jobs_max, mailbox_max);
            let (busy, wait_busy) = bounded(0);
            let (release, wait_release) = bounded::<()>(0);
            let work = move || {
                busy.send(()).unwrap();
                let _ = wait_release.recv();
                0
            };
            pool.submit(&mailbox, exchange(1), work).unwrap();
            wait_busy.recv().unwrap();
            for serial in 0..taken {
                assert_eq!(pool.submit(&mailbox, exchange(serial), || 1), Ok(()), "{name}");
            }
            assert_eq!(pool.submit(&mailbox, exchange(9), || 1), Err(PoolFull), "{name}");
            drop(release);
            for _ in 0..=taken {
                woken.recv().unwrap();
                mailbox.take().unwrap();
            }
            assert_eq!(pool.submit(&mailbox, exchange(10), || 2), Ok(()), "{name}: room again");
        }
    }

    #[test]
    fn a_panic_costs_its_own_job_only() {
        let (pool, mailbox, woken) = pool_of(1, 4, 4);
        pool.submit(&mailbox, exchange(1), || panic!("expected by this test")).unwrap();
        pool.submit(&mailbox, exchange(2), || 5).unwrap();
        for expected in [Err(Panicked), Ok(5)] {
            woken.recv().unwrap();
            assert_eq!(mailbox.take().unwrap().result, expected);
        }
    }

    #[test]
    fn ending_the_pool_finishes_what_was_queued() {
        let (pool, mailbox, _woken) = pool_of(1, 4, 4);
        for serial in 0..4 {
            pool.submit(&mailbox, exchange(serial), move || serial).unwrap();
        }
        drop(pool);
        let serials: Vec<u64> = std::iter::from_fn(|| mailbox.take()).map(|f| f.exchange.serial).collect();
        assert_eq!(serials, [0, 1, 2, 3]);
    }

    type Parts = (Pool<u64>, Arc<Mailbox<u64>>, Receiver<()>);

    fn pool_of(threads: u16, jobs_max: usize, mailbox_max: usize) -> Parts {
        let (wake, woken) = bounded(64);
        let mailbox = Mailbox::new(mailbox_max, Arc::new(ChannelWake(wake)));
        (Pool::start(threads, jobs_max).unwrap(), mailbox, woken)
    }

    fn exchange(serial: u64) -> ExchangeId {
        ExchangeId { worker: 0, slot: 0, serial }
    }

    struct ChannelWake(Sender<()>);

    impl Wake for ChannelWake {
        fn wake(&self) {
            let _ = self.0.try_send(());
        }
    }
}

//! How another thread gets a ring thread's attention: at most one eventfd write per sleep.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::counters::Counters;
use crate::pool::Wake;
use crate::ring;

/// Wakes one ring thread. Cheap to clone; put the work into a queue first, then call [`Self::wake`].
// No wake is lost: every change of the one state word is a read-modify-write, so they have one order. Of a `wake` that
// `end_sleep` comes after, the queued work is visible to the drain that follows. A later one finds either `ASLEEP`, and
// writes the eventfd, or leaves `NOTIFIED`, on which `begin_sleep` refuses to sleep.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: AtomicU8,
    event: File,
    counters: Arc<Counters>,
}

impl Wake for Waker {
    fn wake(&self) {
        Self::wake(self);
    }
}

impl Waker {
    pub(crate) fn new(counters: Arc<Counters>) -> io::Result<Self> {
        let event = File::from(ring::eventfd()?);
        Ok(Self(Arc::new(Shared { state: AtomicU8::new(AWAKE), event, counters })))
    }

    /// Makes the ring thread run a turn that begins after this call. Costs a system call only if it sleeps.
    pub fn wake(&self) {
        if self.0.state.swap(NOTIFIED, Ordering::AcqRel) != ASLEEP {
            self.0.counters.wakes_skipped.add_shared(1);
            return;
        }
        self.0.counters.wakes_sent.add_shared(1);
        // A failed write means that the counter stands at its end: the poll has then been triggered already.
        let _ = (&self.0.event).write(&1_u64.to_ne_bytes());
    }

    /// Announces sleep; `false` when a wake came since the last [`Self::end_sleep`]: do not sleep.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.0.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the sleep, or the attempt; queues are drained after this.
    pub(crate) fn end_sleep(&self) {
        self.0.state.swap(AWAKE, Ordering::AcqRel);
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }
}

/// What other threads hold of one ring thread: its waker, its counters, and the ways to end it.
#[derive(Clone, Debug)]
pub struct Handle {
    waker: Waker,
    control: Arc<Control>,
}

#[derive(Debug)]
struct Control {
    counters: Arc<Counters>,
    /// Milliseconds that a drain may take; `NO_DRAIN` until one is asked for.
    drain_ms: AtomicU64,
    stop: AtomicBool,
}

/// What the ring thread is asked for, the strongest wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Drain(Duration),
    Nothing,
    Stop,
}

impl Handle {
    /// Makes the handle of a ring thread that is yet to be made.
    ///
    /// # Errors
    /// No eventfd can be had (file descriptors).
    pub fn new() -> io::Result<Self> {
        let counters = Arc::<Counters>::default();
        let control = Control {
            counters: Arc::clone(&counters),
            drain_ms: AtomicU64::new(NO_DRAIN),
            stop: AtomicBool::new(false),
        };
        Ok(Self { waker: Waker::new(counters)?, control: Arc::new(control) })
    }

    /// Returns the thread's waker.
    #[must_use]
    pub const fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Returns the thread's counters.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.control.counters)
    }

    /// Stops accepting, once the backlog is taken, and lets the thread end when its connections have, or after
    /// `limit`, in whole milliseconds. The first call counts.
    pub fn begin_drain(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(NO_DRAIN).min(NO_DRAIN - 1);
        let _ = self.control.drain_ms.compare_exchange(NO_DRAIN, limit, Ordering::Release, Ordering::Relaxed);
        self.waker.wake();
    }

    /// Ends the thread without waiting for its requests.
    pub fn stop_now(&self) {
        self.control.stop.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(crate) fn asked(&self) -> Asked {
        if self.control.stop.load(Ordering::Acquire) {
            return Asked::Stop;
        }
        match self.control.drain_ms.load(Ordering::Acquire) {
            NO_DRAIN => Asked::Nothing,
            limit => Asked::Drain(Duration::from_millis(limit)),
        }
    }
}

const NO_DRAIN: u64 = u64::MAX;
/// The ring thread runs, and nobody has called since its last drain began.
const AWAKE: u8 = 0;
/// The ring thread sleeps, or is about to: a wake must write.
const ASLEEP: u8 = 1;
/// Somebody has work for a drain that has not begun.
const NOTIFIED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sleeper_costs_a_write() {
        let counters = Arc::new(Counters::default());
        let waker = Waker::new(Arc::clone(&counters)).unwrap();
        waker.wake();
        waker.wake();
        assert_eq!((counters.wakes_sent.value(), counters.wakes_skipped.value()), (0, 2));
        assert!(!waker.begin_sleep(), "a wake since the last turn forbids sleep");
        waker.end_sleep();
        assert!(waker.begin_sleep());
        waker.wake();
        waker.wake();
        assert_eq!((counters.wakes_sent.value(), counters.wakes_skipped.value()), (1, 3));
    }
}

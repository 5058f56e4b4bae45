//! What one ring thread counts, readable by every thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count that one thread raises and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns the count.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Raises it from the one thread that owns it: a plain load and store, no locked instruction.
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Raises it from any thread.
    pub(crate) fn add_shared(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The counters of one ring thread, all from its start.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: Counter,)+
        }

        impl Counters {
            /// Returns every counter by name, in the order of declaration.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.value()),)+].into_iter()
            }
        }
    };
}

counters! {
    /// Accepted connections that got a slot.
    accepted,
    /// Times that accepting paused because file descriptors or kernel memory ran out.
    accept_no_files,
    /// Times that accepting paused because the connection table was full.
    accept_table_full,
    /// Bytes received.
    bytes_received,
    /// Bytes sent.
    bytes_sent,
    /// Clients that went away while a response was owed.
    clients_gone,
    /// Connections closed; `accepted - closed` are open.
    closed,
    /// Turns that found the kernel's completion queue overflown.
    cq_overflow,
    /// `io_uring_enter` calls.
    enters,
    /// Submissions that the kernel refused for now (EBUSY, EAGAIN).
    enters_refused,
    /// Calls of a [`Reply`](crate::service::Reply) in the wrong order or with a bad length.
    misuse,
    /// Requests refused by the protocol or its limits, answered or not.
    peer_errors,
    /// Interim responses and comments sent to find out whether a half-closed peer is there.
    probes,
    /// Receives that found no free buffer.
    recv_no_buffers,
    /// Requests handed to the service.
    requests,
    /// Sends that the kernel took only in part.
    short_sends,
    /// Clients dropped because they did not read.
    slow_readers,
    /// Times that the submission queue was full before the turn's end.
    sq_full,
    /// Completions for nobody: a slot's former tenant, or unknown bits.
    stale_completions,
    /// Turns of the loop.
    turns,
    /// Wakes from other threads that needed a system call.
    wakes_sent,
    /// Wakes from other threads that needed none.
    wakes_skipped,
}

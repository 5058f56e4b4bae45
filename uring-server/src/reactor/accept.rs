//! Accepting: when to, when not to, and what to do with a socket for which there is no slot.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use uring_serve_core::time::MonoNs;

use crate::counters::Counters;
use crate::listen::LISTEN_BACKLOG;
use crate::ring::{Completion, Ring};

/// The listeners of one ring thread and the sockets that wait for a slot.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listeners: Vec<Listener>,
    /// Accepted before a cancellation took effect; at most what the kernel's backlog held.
    parked: VecDeque<OwnedFd>,
    /// Accepting rests until then, as files or kernel memory ran out.
    resume_at: Option<MonoNs>,
}

#[derive(Debug)]
struct Listener {
    /// Closed by drain, once its accept has ended.
    socket: Option<TcpListener>,
    accepting: Accepting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accepting {
    Armed,
    Cancelling,
    Off,
}

/// Whether new connections are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Drain: take what the backlog holds, then close the listeners.
    Draining,
    /// No slot is free.
    Full,
    Some,
}

impl Acceptor {
    pub(crate) fn new(sockets: Vec<TcpListener>) -> Self {
        let listener = |socket| Listener { socket: Some(socket), accepting: Accepting::Off };
        let listeners = sockets.into_iter().map(listener).collect();
        Self { listeners, parked: VecDeque::new(), resume_at: None }
    }

    /// Takes in a completion of an accept.
    pub(crate) fn handle_accepted(&mut self, now: MonoNs, completion: Completion, counters: &Counters) {
        if let Some(listener) = self.listeners.get_mut(completion.token.key.index as usize)
            && !completion.more
        {
            listener.accepting = Accepting::Off;
        }
        if let (Some(socket), Ok(_)) = (completion.accepted, completion.result) {
            self.parked.push_back(socket);
        }
        match completion.result {
            // A connection that was reset in the backlog, or a cancellation, only ends the multishot.
            Ok(_) | Err(libc::ECANCELED | libc::ECONNABORTED) => return,
            Err(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                counters.accept_no_files.add(1)
            }
            Err(error) => tracing::warn!(error, "accepting failed; it is tried again"),
        }
        self.resume_at = Some(now.saturating_add(ACCEPT_PAUSE));
    }

    /// Returns a socket that has no slot yet.
    pub(crate) fn poll_accepted(&mut self) -> Option<OwnedFd> {
        self.parked.pop_front()
    }

    /// Tells that a file descriptor was closed.
    pub(crate) fn handle_closed(&mut self) {
        self.resume_at = None;
    }

    /// Arms, cancels or ends accepting as `room` asks.
    pub(crate) fn settle(&mut self, now: MonoNs, room: Room, ring: &mut Ring, counters: &Counters) {
        if self.resume_at.is_some_and(|at| at <= now) {
            self.resume_at = None;
        }
        let wanted = room == Room::Some && self.parked.is_empty();
        for (listener, index) in self.listeners.iter_mut().zip(0..) {
            let Some(socket) = &listener.socket else { continue };
            match listener.accepting {
                Accepting::Off if wanted && self.resume_at.is_none() => {
                    ring.accept_many(socket.as_raw_fd(), index);
                    listener.accepting = Accepting::Armed;
                }
                Accepting::Off if room == Room::Draining => {
                    take_backlog(socket, &mut self.parked);
                    listener.socket = None;
                }
                Accepting::Armed if !wanted => {
                    if room == Room::Full {
                        counters.accept_table_full.add(1);
                    }
                    ring.cancel_accept(index);
                    listener.accepting = Accepting::Cancelling;
                }
                Accepting::Armed | Accepting::Cancelling | Accepting::Off => {}
            }
        }
    }

    /// Returns when a pause ends by itself.
    pub(crate) const fn resume_at(&self) -> Option<MonoNs> {
        self.resume_at
    }

    /// Returns whether nothing will be accepted any more.
    pub(crate) fn is_done(&self) -> bool {
        self.parked.is_empty() && self.listeners.iter().all(|listener| listener.socket.is_none())
    }
}

/// Accepts what is waiting, without waiting for more.
fn take_backlog(socket: &TcpListener, parked: &mut VecDeque<OwnedFd>) {
    if socket.set_nonblocking(true).is_err() {
        return;
    }
    for _ in 0..LISTEN_BACKLOG {
        match socket.accept() {
            Ok((accepted, _)) => parked.push_back(accepted.into()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(_) => return,
        }
    }
}

/// A pause ends when a connection closes, or after this: files may come free elsewhere in the process.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

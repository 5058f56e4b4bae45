//! One accepted socket: what is in flight for it, what it owes, and when it must be looked at.

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use uring_serve_core::http1::Connection;
use uring_serve_core::time::MonoNs;

use crate::service::Gone;

/// A connection from accept to close. It leaves its slot only when `in_flight` is 0, so no completion outlives it.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) socket: TcpStream,
    pub(crate) http: Connection,
    /// Received bytes that had to outlive their lease; empty and without capacity when there are none.
    pub(crate) input: Vec<u8>,
    /// Gathers what the next send takes.
    pub(crate) out: Vec<u8>,
    /// Exchanges whose last byte is in `out`, by serial.
    pub(crate) finished: Vec<u64>,
    /// The request that is being served.
    pub(crate) exchange: Option<Exchange>,
    /// When the head of the request under way was complete.
    pub(crate) head_at: MonoNs,
    pub(crate) phase: Phase,
    pub(crate) reading: Reading,
    pub(crate) fin: Fin,
    /// Bytes of the buffer in flight that the kernel has taken; `None` when no send is in flight.
    pub(crate) sent: Option<usize>,
    /// A hang-up poll is armed.
    pub(crate) polling: bool,
    /// Everything was cancelled; once is enough.
    pub(crate) cancelled: bool,
    /// Is in the list of connections to settle this turn.
    pub(crate) dirty: bool,
    /// Submitted operations whose last completion has not come.
    pub(crate) in_flight: u8,
    /// Bytes that may still be read and thrown away once the last response is written.
    pub(crate) discard_left: u32,
    /// When a connection without a request is closed although its idle time is not over (drain).
    pub(crate) close_at: Option<MonoNs>,
    /// A request has been served.
    pub(crate) used: bool,
    /// When the wheel fires for it; later deadlines do not move it.
    pub(crate) armed_for: Option<MonoNs>,
}

/// What the connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Requests, or the answer to one.
    Open,
    /// The last response to leave; then it shuts down writing.
    Flushing,
    /// The peer's end of stream (RFC 9112 §9.6), at most until then; what comes is thrown away.
    Lingering(MonoNs),
    /// Its last completion.
    Dying,
}

/// State of the receive operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    Armed,
    /// Asked to end; its last completion is to come.
    Cancelling,
    Off,
    /// Ended for want of a buffer.
    Starved,
}

/// What is known of the peer's end of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fin {
    None,
    /// A poll saw it; bytes before it may be unread.
    Seen,
    /// Everything before it was received.
    Read,
}

/// A request handed to the service, until its response is finished.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) serial: u64,
    pub(crate) http11: bool,
    /// The status line is in the output, or was.
    pub(crate) begun: bool,
    /// A comment may go between two body calls.
    pub(crate) event_stream: bool,
    pub(crate) end_at_fin: bool,
    /// The service's timer.
    pub(crate) timer: Option<MonoNs>,
    /// Of response bytes, or of a probe.
    pub(crate) wrote_at: MonoNs,
    pub(crate) probed: bool,
}

impl Conn {
    pub(crate) const fn new(socket: TcpStream, http: Connection, now: MonoNs) -> Self {
        Self {
            socket,
            http,
            input: Vec::new(),
            out: Vec::new(),
            finished: Vec::new(),
            exchange: None,
            head_at: now,
            phase: Phase::Open,
            reading: Reading::Off,
            fin: Fin::None,
            sent: None,
            polling: false,
            cancelled: false,
            dirty: false,
            in_flight: 0,
            discard_left: LINGER_BYTES_MAX,
            close_at: None,
            used: false,
            armed_for: None,
        }
    }

    /// Ends the connection once `out` has left.
    pub(crate) fn close(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Flushing;
            self.input = Vec::new();
        }
    }

    /// Ends the connection at once and returns the exchanges that end with it.
    pub(crate) fn abort(&mut self, why: Gone, mut ended: impl FnMut(u64)) {
        self.phase = Phase::Dying;
        self.input = Vec::new();
        self.out = Vec::new();
        self.finished.drain(..).for_each(&mut ended);
        if let Some(exchange) = self.exchange.take() {
            ended(exchange.serial);
        }
        if why == Gone::SlowReader {
            // A reset also frees what the kernel holds for a peer that does not read.
            let _ = socket2::SockRef::from(&self.socket).set_linger(Some(Duration::ZERO));
        }
    }

    /// Lets the connection end with its answer, or soon: an idle one at once, one that is new after a short while, as
    /// its first request may be on the way.
    pub(crate) fn drain(&mut self, now: MonoNs) {
        self.http.close_after_response();
        if self.used && self.is_idle() {
            self.close();
        } else if !self.used {
            self.close_at = Some(now.saturating_add(DRAIN_FIRST_REQUEST));
        }
    }

    /// Counts down an operation's last completion.
    pub(crate) const fn end_operation(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Moves on a closing connection whose output has left.
    pub(crate) fn step_close(&mut self, now: MonoNs) {
        if self.phase == Phase::Flushing && self.sent.is_none() && self.out.is_empty() {
            let shut = self.socket.shutdown(Shutdown::Write);
            let lingers = shut.is_ok() && self.fin != Fin::Read && self.discard_left > 0;
            let until = now.saturating_add(LINGER_TIME_MAX);
            self.phase = if lingers { Phase::Lingering(until) } else { Phase::Dying };
        }
        if let Phase::Lingering(until) = self.phase
            && (self.fin == Fin::Read || self.discard_left == 0 || until <= now)
        {
            self.phase = Phase::Dying;
        }
    }

    /// Returns whether the next request may be read from the input.
    pub(crate) fn takes_requests(&self) -> bool {
        self.phase == Phase::Open && self.exchange.is_none() && self.out.len() <= BACKLOG_BYTES_MAX
    }

    /// Returns whether a receive should be armed.
    pub(crate) fn wants_read(&self) -> bool {
        match self.phase {
            _ if self.fin == Fin::Read => false,
            Phase::Open => self.takes_requests() || self.input.len() < PIPELINE_BYTES_MAX,
            Phase::Flushing | Phase::Lingering(_) => self.discard_left > 0,
            Phase::Dying => false,
        }
    }

    /// Returns whether the hang-up poll should be armed: while an answer is owed and no receive would tell.
    pub(crate) fn wants_poll(&self) -> bool {
        let silent = self.phase == Phase::Open && self.exchange.is_some() && self.reading != Reading::Armed;
        silent && !self.polling
    }

    /// Returns when to look at this connection again.
    pub(crate) fn due(&self) -> Option<MonoNs> {
        match self.phase {
            Phase::Lingering(until) => Some(until),
            Phase::Open => {
                let timer = self.exchange.as_ref().and_then(|exchange| exchange.timer);
                // While a send is in flight the kernel's own timeouts watch the peer.
                let quiet = self.sent.is_none();
                let http = self.http.poll_timeout().filter(|_| quiet).map(|(at, _)| at);
                let probe = self.probe_at().filter(|_| quiet);
                [timer, http, probe, self.close_at.filter(|_| self.is_idle())].into_iter().flatten().min()
            }
            Phase::Flushing | Phase::Dying => None,
        }
    }

    /// Returns when the peer, which ended its stream while an answer is owed, is to be probed.
    fn probe_at(&self) -> Option<MonoNs> {
        let exchange = self.exchange.as_ref().filter(|_| self.fin != Fin::None)?;
        match (exchange.begun, exchange.http11) {
            (false, true) if !exchange.probed => Some(exchange.wrote_at),
            (false, true) => Some(exchange.wrote_at.saturating_add(PROBE_INTERVAL)),
            (true, _) if exchange.event_stream => Some(exchange.wrote_at.saturating_add(PROBE_INTERVAL)),
            (_, false) | (true, true) => None,
        }
    }

    /// Appends the probe if it is due and nothing else is under way; returns whether it did.
    pub(crate) fn send_probe(&mut self, now: MonoNs) -> bool {
        let due = self.probe_at().is_some_and(|at| at <= now);
        if self.phase != Phase::Open || !due || self.sent.is_some() || !self.out.is_empty() {
            return false;
        }
        let Some(exchange) = &mut self.exchange else { return false };
        let sent = if exchange.begun {
            self.http.send_body(b":\n\n", &mut self.out)
        } else {
            self.http.send_continue(&mut self.out)
        };
        exchange.probed = true;
        exchange.wrote_at = now;
        sent.is_ok()
    }

    /// Returns whether no request, or part of one, is here. The last answer may still be leaving.
    pub(crate) fn is_idle(&self) -> bool {
        self.phase == Phase::Open && self.exchange.is_none() && self.input.is_empty()
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Exchange {
    pub(crate) const fn new(serial: u64, http11: bool, now: MonoNs) -> Self {
        Self {
            serial,
            http11,
            begun: false,
            event_stream: false,
            end_at_fin: false,
            timer: None,
            wrote_at: now,
            probed: false,
        }
    }
}

/// Unsent bytes beside the send in flight; a client behind by more than that when more is written does not read.
pub(crate) const BACKLOG_BYTES_MAX: usize = 1 << 20;
/// Bytes kept of later requests while an answer is owed; past it the socket is not read, and TCP holds the peer back.
pub(crate) const PIPELINE_BYTES_MAX: usize = 64 << 10;
/// How long, and how much, a closed connection reads on so that the peer can read our last answer.
const LINGER_TIME_MAX: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: u32 = 256 << 10;
/// Between two questions to a peer that ended its stream.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// For the first request of a connection that drain took from the backlog.
const DRAIN_FIRST_REQUEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_connection_is_small() {
        // Ten thousand of them: 5 MiB here, beside what the kernel holds.
        assert!(size_of::<Conn>() <= 512, "{}", size_of::<Conn>());
    }
}

//! What the reactor asks of the application, and what it offers in return.

use std::time::Duration;

use uring_serve_core::http1::{Framing, RequestHead};
use uring_serve_core::time::MonoNs;

/// One request on one connection of one ring thread. Never reused: late work for it is recognised and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExchangeId {
    /// The ring thread.
    pub worker: u16,
    /// The connection's slot in that thread's table.
    pub slot: u32,
    /// Counts the requests of that thread, from 1.
    pub serial: u64,
}

/// Why an exchange ended without its response having been submitted whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// Reset, socket error, or a failed probe.
    Client,
    /// Unsent bytes passed the limit: the client does not read.
    SlowReader,
    /// The server ends (drain time over, second signal).
    Shutdown,
}

/// The application on one ring thread. Single-threaded; every call comes from that thread's turn of the loop.
///
/// One turn: wait → take completions → [`Self::drain_queues`] → read the clock once → act (the other calls, all with
/// that `now`) → submit once.
pub trait Service {
    /// Judges a request by its head, before the body is read. `Some` refuses: the reactor sends it and closes.
    fn handle_head(&mut self, now: MonoNs, head: &RequestHead<'_>) -> Option<Refusal>;

    /// Takes over a complete request. Answers at once through `reply`, or later from [`Self::handle_queues`] or
    /// [`Self::handle_timer`]. The body may be changed in place.
    fn handle_request(&mut self, now: MonoNs, request: Request<'_>, reply: &mut dyn Reply);

    /// Moves whatever other threads have queued for this ring into the service. Reads no clock.
    fn drain_queues(&mut self);

    /// Returns whether the requests of this turn, since [`Self::drain_queues`], have taken as much time as a turn may: the
    /// reactor leaves the rest to the next turn.
    fn is_spent(&self) -> bool {
        false
    }

    /// Acts on what [`Self::drain_queues`] took.
    fn handle_queues(&mut self, now: MonoNs, replies: &mut dyn Replies);

    /// The timer that `reply.set_timer` armed for this exchange has come.
    fn handle_timer(&mut self, now: MonoNs, id: ExchangeId, reply: &mut dyn Reply);

    /// The send with the last byte of a finished response was submitted: the exchange is complete, whatever the client
    /// does from here on.
    fn handle_submitted(&mut self, now: MonoNs, id: ExchangeId);

    /// Returns whether no exchange is left, nor anything that other threads still have to say of one whose client left.
    /// A ring that ends waits for that, within the time that it has.
    fn is_settled(&self) -> bool {
        true
    }

    /// The exchange is over without that. Called at most once, and never after `handle_submitted`. For exchanges that
    /// [`Self::handle_request`] took over exactly one of the two is called, late work for it finds no reply.
    fn handle_gone(&mut self, now: MonoNs, id: ExchangeId, why: Gone);
}

/// A complete request.
#[derive(Debug)]
pub struct Request<'a> {
    /// Names the exchange in every later call.
    pub id: ExchangeId,
    /// The `now` of the turn in which the head was complete.
    pub head_at: MonoNs,
    /// Method, path, header fields.
    pub head: RequestHead<'a>,
    /// The whole body, decoded.
    pub body: &'a mut [u8],
}

/// A status and a message, to be sent before the connection closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// 400..=599.
    pub status: u16,
    /// Extra header fields.
    pub headers: Vec<(&'static str, String)>,
    /// JSON body.
    pub body: Vec<u8>,
}

/// The response side of one exchange. Bytes gather in the connection's output and leave as one send per turn.
/// Misuse (two heads, bytes past the length) is the service's bug: it is logged, counted, and closes the connection.
pub trait Reply {
    /// The exchange.
    fn id(&self) -> ExchangeId;

    /// Sends a whole response with a `Content-Length`.
    fn send(&mut self, status: u16, headers: &[(&str, &[u8])], body: &[u8]);

    /// Begins a response.
    fn begin(&mut self, status: u16, headers: &[(&str, &[u8])], framing: Framing);

    /// Appends body bytes to a response that was begun. Empty data appends nothing. In a response whose content type
    /// is `text/event-stream` each call ends where an event ends: there the reactor may put in a comment, to find out
    /// whether a client that ended its stream is still there.
    fn body(&mut self, data: &[u8]);

    /// Ends the response.
    fn finish(&mut self);

    /// Takes the end of the client's stream for its leaving where no interim response can find out (HTTP/1.0). For
    /// routes that generate; elsewhere such a client still gets its answer.
    fn end_at_fin(&mut self) {}

    /// Arms (or with `None` disarms) this exchange's single timer, `after` the current `now`.
    fn set_timer(&mut self, after: Option<Duration>);
}

/// Finds the reply of an exchange that is still open.
pub trait Replies {
    /// Returns it, or `None` when the exchange is over (late work is normal: drop it).
    fn reply(&mut self, id: ExchangeId) -> Option<&mut dyn Reply>;
}

//! One server-side HTTP/1 connection as a state machine (RFC 9110, RFC 9112).
//!
//! The driver owns all memory. It keeps the connection's unconsumed bytes in a buffer of its own (a leased receive
//! buffer, or a `Vec` it copied a partial message into) and shows the whole of it to [`Connection::poll_event`],
//! which remembers how far it has looked, so no byte is scanned twice. A body that arrives whole is handed out as a
//! range of that buffer. Commands append wire bytes to the driver's `out`.
//!
//! Memory: one message takes at most `head_bytes_max + body_bytes_max` of [`Limits`] plus
//! [`CHUNK_FRAMING_BYTES_MAX`](crate::limits::CHUNK_FRAMING_BYTES_MAX) and
//! [`TRAILER_BYTES_MAX`](crate::limits::TRAILER_BYTES_MAX). What a peer pipelines behind it is the driver's to bound: it
//! need not read while a response is owed.
//!
//! One turn of a driver, with an in-memory peer that pipelines two requests and splits one:
//!
//! ```
//! use uring_serve_core::http1::{Connection, Error, Event, Framing, Limits, Next, ResponseHead};
//! use uring_serve_core::time::MonoNs;
//!
//! const DATE: &[u8; 29] = b"Tue, 01 Dec 2026 12:00:00 GMT";
//!
//! /// Serves what `buffer` holds. Returns false once the connection must close.
//! fn serve(connection: &mut Connection, now: MonoNs, buffer: &mut Vec<u8>, out: &mut Vec<u8>) -> bool {
//!     loop {
//!         let event = match connection.poll_event(now, buffer) {
//!             Ok(Some(event)) => event,
//!             Ok(None) => return true, // wait for bytes, or for connection.poll_timeout()
//!             Err(Error::Peer(error)) => {
//!                 connection.send_error(error, DATE, out);
//!                 return false;
//!             }
//!             Err(Error::Misuse(misuse)) => unreachable!("{misuse}"),
//!         };
//!         match event {
//!             Event::Head => {} // judge the head by connection.request(buffer), refuse here or go on
//!             Event::ExpectContinue => connection.send_continue(out).unwrap(),
//!             Event::Body { body } => {
//!                 let request = connection.request(buffer).unwrap();
//!                 let answer = [request.path.as_bytes(), b" says ", &buffer[body]].concat();
//!                 let head = ResponseHead { status: 200, headers: &[("X-A", b"b")], date: DATE };
//!                 connection.send_head(&head, Framing::Length(answer.len() as u64), out).unwrap();
//!                 connection.send_body(&answer, out).unwrap();
//!                 match connection.finish(now, out).unwrap() {
//!                     Next::KeepAlive { consumed } => drop(buffer.drain(..consumed)),
//!                     Next::Close => return false,
//!                 }
//!             }
//!         }
//!     }
//! }
//!
//! let now = MonoNs::from_raw(0);
//! let mut connection = Connection::new(Limits::default(), now);
//! let (mut buffer, mut out) = (Vec::new(), Vec::new());
//!
//! buffer.extend_from_slice(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\nPOST /b HTTP/1.1\r\nHost: h\r\nContent-Le");
//! assert!(serve(&mut connection, now, &mut buffer, &mut out));
//! buffer.extend_from_slice(b"ngth: 5\r\n\r\nhello");
//! assert!(serve(&mut connection, now, &mut buffer, &mut out));
//! assert!(buffer.is_empty());
//! assert_eq!(
//!     String::from_utf8(out.split_off(0)).unwrap(),
//!     "HTTP/1.1 200 OK\r\nDate: Tue, 01 Dec 2026 12:00:00 GMT\r\nContent-Length: 8\r\nX-A: b\r\n\r\n/a says \
//!      HTTP/1.1 200 OK\r\nDate: Tue, 01 Dec 2026 12:00:00 GMT\r\nContent-Length: 13\r\nX-A: b\r\n\r\n/b says hello"
//! );
//!
//! // A bare LF could hide a field from us that a proxy saw: refused, and nothing behind it is read.
//! buffer.extend_from_slice(b"GET /c HTTP/1.1\nHost: h\r\n\r\n");
//! assert!(!serve(&mut connection, now, &mut buffer, &mut out));
//! assert!(out.starts_with(b"HTTP/1.1 400 Bad Request\r\n"));
//! assert!(out.ends_with(b"\"param\":null,\"code\":null}}"));
//! ```

mod body;
mod encode;
mod error;
mod head;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;
use core::ops::Range;

use self::body::Body;
use self::encode::{Persistence, Write};
pub use self::error::{Error, Misuse, PeerError};
use self::head::{Field, Head, Scan};
use crate::limits::{
    BODY_BYTES_DEFAULT, BODY_TIMEOUT_DEFAULT, HEAD_BYTES_CEILING, HEAD_BYTES_DEFAULT, HEAD_TIMEOUT_DEFAULT,
    IDLE_TIMEOUT_DEFAULT,
};
use crate::time::MonoNs;

/// Bounds that a deployment may lower or raise. The fixed ones are in [`crate::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of request line plus header section. Default 16 KiB; clamped to 1..=[`HEAD_BYTES_CEILING`].
    pub head_bytes_max: u32,
    /// Most bytes of request body, decoded. Default 16 MiB.
    pub body_bytes_max: u32,
    /// From the first byte of a head to its last. Default 10 s.
    pub head_timeout: core::time::Duration,
    /// From the end of a head to the end of its body. Default 30 s.
    pub body_timeout: core::time::Duration,
    /// Between two requests, or before the first. Default 75 s.
    pub idle_timeout: core::time::Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head_bytes_max: HEAD_BYTES_DEFAULT,
            body_bytes_max: BODY_BYTES_DEFAULT,
            head_timeout: HEAD_TIMEOUT_DEFAULT,
            body_timeout: BODY_TIMEOUT_DEFAULT,
            idle_timeout: IDLE_TIMEOUT_DEFAULT,
        }
    }
}

/// What the driver should act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The head is complete: see [`Connection::request`]. Comes once per request, before its other events.
    /// The driver may refuse here (`send_head` … `finish`): the body is then not read and the connection closes.
    Head,
    /// The peer waits for `100 Continue`. Answer by [`Connection::send_continue`] to go on. Left out when bytes of the
    /// body are there already (RFC 9110 §10.1.1), so this one event depends on how the bytes came.
    ExpectContinue,
    /// The message is complete. `body` indexes the driver's buffer (chunked framing already removed, in place) and
    /// stays valid until [`Connection::finish`]. Also sent, empty, for a request without a body.
    Body {
        /// Where the body lies in the buffer shown to `poll_event`.
        body: Range<usize>,
    },
}

/// Why a timeout is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// The body has begun and must end.
    Body,
    /// The head has begun and must end.
    Head,
    /// No request is under way.
    Idle,
}

/// What becomes of the connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Flush, shut down writing, then the staged close of RFC 9112 §9.6.
    Close,
    /// Drop `consumed` bytes from the front of the buffer and poll again: a pipelined request may be there.
    KeepAlive {
        /// Bytes of the buffer that belonged to the finished request.
        consumed: usize,
    },
}

/// How a response body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Chunked for HTTP/1.1; until close for HTTP/1.0.
    Chunked,
    /// `Content-Length: n`, in bytes.
    Length(u64),
}

/// One server-side connection, from accept to close, over any number of requests.
///
/// Once warm it allocates nothing: header fields are offsets in a vector kept from request to request.
#[derive(Debug)]
pub struct Connection {
    limits: Limits,
    state: State,
    cursor: Cursor,
    scan: Scan,
    head: Head,
    body: Body,
    /// Close after the response, whatever the request says.
    draining: bool,
    /// No bytes will follow those in the buffer.
    at_eof: bool,
}

impl Connection {
    /// Creates a connection that expects a request head.
    #[must_use]
    pub fn new(limits: Limits, now: MonoNs) -> Self {
        Self {
            limits: Limits { head_bytes_max: limits.head_bytes_max.clamp(1, HEAD_BYTES_CEILING), ..limits },
            state: State::AwaitHead { since: now },
            cursor: Cursor::default(),
            scan: Scan::default(),
            head: Head::new(),
            body: Body::Length { end: 0 },
            draining: false,
            at_eof: false,
        }
    }

    /// Looks at the driver's unconsumed bytes and returns the next event, or `None` until more come. Any split gives
    /// the same events, but for [`Event::ExpectContinue`].
    ///
    /// `buffer` is all of them, earlier ones first, as the last call left them except for bytes appended. From the end
    /// of the head to the end of the message the call may move bytes: chunk data moves down over its framing.
    ///
    /// `None` after [`Self::handle_eof`] means that the connection is done: close it.
    ///
    /// # Errors
    /// [`Error::Peer`] once the peer broke a rule or a limit; latched. Answer it by [`Self::send_error`].
    /// [`Misuse::BufferShrank`] if `buffer` is shorter than what was looked at already.
    pub fn poll_event(&mut self, now: MonoNs, buffer: &mut [u8]) -> Result<Option<Event>, Error> {
        match self.state {
            State::AwaitHead { .. } | State::AwaitHeadEnd { .. } => {
                self.cursor.check(buffer.len())?;
                self.poll_head(now, buffer)
            }
            State::AwaitBodyEnd { .. } => {
                self.cursor.check(buffer.len())?;
                self.poll_body(buffer)
            }
            State::AwaitResponse | State::AwaitResponseEnd { .. } | State::Closed => Ok(None),
            State::AwaitAnswer(error) | State::Dead(error) => Err(Error::Peer(error)),
        }
    }

    /// Accepts the peer's end of stream: an error inside a request, otherwise nothing more to read. Call it when
    /// [`Self::poll_event`] has seen all bytes that came before. Requests that are complete are still to be answered.
    ///
    /// # Errors
    /// [`PeerError::Truncated`] inside a head or body; an earlier error of the peer, again.
    pub fn handle_eof(&mut self) -> Result<(), Error> {
        self.at_eof = true;
        match self.state {
            State::AwaitHeadEnd { .. } | State::AwaitBodyEnd { .. } => self.fail(PeerError::Truncated),
            State::AwaitHead { .. }
            | State::AwaitResponse
            | State::AwaitResponseEnd { .. }
            | State::Closed => Ok(()),
            State::AwaitAnswer(error) | State::Dead(error) => Err(Error::Peer(error)),
        }
    }

    /// Tells the connection that `now` has come. Early or repeated calls do nothing.
    ///
    /// # Errors
    /// [`PeerError::HeadTimeout`], [`PeerError::BodyTimeout`], [`PeerError::IdleTimeout`] (no answer).
    pub fn handle_timeout(&mut self, now: MonoNs) -> Result<(), Error> {
        match self.poll_timeout() {
            Some((at, Deadline::Body)) if at <= now => self.fail(PeerError::BodyTimeout),
            Some((at, Deadline::Head)) if at <= now => self.fail(PeerError::HeadTimeout),
            Some((at, Deadline::Idle)) if at <= now => self.fail(PeerError::IdleTimeout),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns when to call [`Self::handle_timeout`], and why. None while a response is owed.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(MonoNs, Deadline)> {
        match self.state {
            State::AwaitHead { since } => {
                Some((since.saturating_add(self.limits.idle_timeout), Deadline::Idle))
            }
            State::AwaitHeadEnd { since } => {
                Some((since.saturating_add(self.limits.head_timeout), Deadline::Head))
            }
            State::AwaitBodyEnd { since } => {
                Some((since.saturating_add(self.limits.body_timeout), Deadline::Body))
            }
            State::AwaitResponse
            | State::AwaitResponseEnd { .. }
            | State::Closed
            | State::AwaitAnswer(_)
            | State::Dead(_) => None,
        }
    }

    /// Returns the request being served, from [`Event::Head`] until [`Self::finish`]. `buffer` is the one shown to
    /// [`Self::poll_event`].
    #[must_use]
    pub fn request<'b>(&'b self, buffer: &'b [u8]) -> Option<RequestHead<'b>> {
        match self.state {
            State::AwaitBodyEnd { .. } | State::AwaitResponse | State::AwaitResponseEnd { .. } => {
                RequestHead::new(&self.head, buffer)
            }
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::Closed
            | State::AwaitAnswer(_)
            | State::Dead(_) => None,
        }
    }

    /// Lends the head of the request being served, so that commands can be given while it is read. Give it back by
    /// [`Self::return_head`], for its allocation; until then [`Self::request`] knows no fields.
    ///
    /// ```
    /// # use uring_serve_core::{http1::*, time::MonoNs};
    /// # let (now, mut out) = (MonoNs::from_raw(0), Vec::new());
    /// # let mut connection = Connection::new(Limits::default(), now);
    /// let mut buffer = *b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhiGET /b";
    /// while !matches!(connection.poll_event(now, &mut buffer)?, Some(Event::Body { .. })) {}
    /// let lent = connection.lend_head().expect("a request is served");
    /// let request = lent.request(&buffer).expect("the same buffer");
    /// connection.send_continue(&mut out)?;
    /// assert_eq!(request.header_values("host").next(), Some(&b"h"[..]));
    /// connection.return_head(lent);
    /// assert_eq!(connection.message_end(), Some(buffer.len() - "GET /b".len()));
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn lend_head(&mut self) -> Option<LentHead> {
        match self.state {
            State::AwaitBodyEnd { .. } | State::AwaitResponse | State::AwaitResponseEnd { .. } => {
                let fields = core::mem::take(&mut self.head.fields);
                Some(LentHead(Head { fields, ..self.head }))
            }
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::Closed
            | State::AwaitAnswer(_)
            | State::Dead(_) => None,
        }
    }

    /// Takes back what [`Self::lend_head`] lent.
    pub fn return_head(&mut self, lent: LentHead) {
        self.head.fields = lent.0.fields;
    }

    /// Returns where the message ends in the buffer, from [`Event::Body`] until [`Self::finish`]. A driver that needs
    /// the request no longer may drop that many bytes before the response is finished; it then does not drop
    /// [`Next::KeepAlive`]'s `consumed` again.
    #[must_use]
    pub const fn message_end(&self) -> Option<usize> {
        match self.state {
            State::AwaitResponse | State::AwaitResponseEnd { .. } => Some(self.cursor.parsed),
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::Closed
            | State::AwaitAnswer(_)
            | State::Dead(_) => None,
        }
    }

    /// Makes every response from here on say `Connection: close` (drain). A response that has begun ends as it is, and
    /// the connection closes behind it.
    pub fn close_after_response(&mut self) {
        self.draining = true;
        if let State::AwaitResponseEnd { close, .. } = &mut self.state {
            *close = true;
        }
    }

    /// Appends `100 Continue`: an interim answer, allowed until the response begins; also the probe for a peer that
    /// half-closed. Does nothing on HTTP/1.0.
    ///
    /// # Errors
    /// [`Misuse::ResponseNotOwed`] when no request is being served or its response has begun.
    pub fn send_continue(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        match self.state {
            State::AwaitBodyEnd { .. } | State::AwaitResponse => {
                if self.head.http11 {
                    out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
                }
                Ok(())
            }
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitResponseEnd { .. }
            | State::Closed => Err(Misuse::ResponseNotOwed.into()),
            State::AwaitAnswer(error) | State::Dead(error) => Err(error.into()),
        }
    }

    /// Appends a status line and header section; `framing` fixes how the body will be delimited. HEAD and 304 keep the
    /// framing field and drop the body; 204 has neither (RFC 9110 §8.6).
    ///
    /// Always in HTTP/1.1. `Date`, `Connection` and framing come before the caller's fields.
    ///
    /// # Errors
    /// [`Misuse`] when no response is owed, for a status outside 200..=599, or for a field that is the encoder's own or
    /// not a valid field line. Nothing is appended then.
    pub fn send_head(
        &mut self,
        head: &ResponseHead<'_>,
        framing: Framing,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let named = match (head.status, framing) {
            (204, _) => None,
            (_, Framing::Chunked) if !self.head.http11 => None,
            (_, Framing::Chunked | Framing::Length(_)) => Some(framing),
        };
        let write = match (head.status, named) {
            (204 | 304, _) => Write::Nothing,
            _ if self.head.is_head_method => Write::Nothing,
            (_, Some(Framing::Chunked)) => Write::Chunked,
            (_, Some(Framing::Length(left))) => Write::Length { left },
            (_, None) => Write::UntilClose,
        };
        let refusal = matches!(self.state, State::AwaitBodyEnd { .. });
        let close = self.draining || refusal || !self.head.keep_alive || write == Write::UntilClose;
        let state = transition(self.state, Step::ResponseBegun { write, close })?;
        encode::check_head(head)?;
        self.state = state;
        let persistence = match (close, self.head.http11) {
            (true, _) => Persistence::Close,
            (false, true) => Persistence::Default,
            (false, false) => Persistence::KeepAlive,
        };
        encode::write_head(head, named, persistence, out);
        Ok(())
    }

    /// Appends `data` framed as [`Self::send_head`] promised. Empty `data` appends nothing.
    ///
    /// # Errors
    /// [`Misuse`] before `send_head`, or for more bytes than the promised length. Nothing is appended then.
    pub fn send_body(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        match &mut self.state {
            State::AwaitResponseEnd { write, .. } => Ok(write.data(data, out)?),
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::AwaitResponse
            | State::Closed => Err(Misuse::ResponseNotBegun.into()),
            State::AwaitAnswer(error) | State::Dead(error) => Err(Error::Peer(*error)),
        }
    }

    /// Ends the response (last chunk, if chunked) and says what becomes of the connection. The time for the next head
    /// counts from `now`.
    ///
    /// # Errors
    /// [`Misuse`] before `send_head`, or for fewer bytes than the promised length.
    pub fn finish(&mut self, now: MonoNs, out: &mut Vec<u8>) -> Result<Next, Error> {
        let state = transition(self.state, Step::ResponseEnded { now })?;
        if let State::AwaitResponseEnd { write, .. } = self.state {
            write.end(out)?;
        }
        self.state = state;
        if state == State::Closed {
            return Ok(Next::Close);
        }
        let consumed = self.cursor.parsed;
        self.cursor = Cursor::default();
        self.scan = Scan::default();
        Ok(Next::KeepAlive { consumed })
    }

    /// Appends the complete answer for `error` (an OpenAI error object, `Connection: close`), or nothing when a
    /// response was already under way or the error has no status. The connection closes after it.
    ///
    /// `error` is the one that [`Self::poll_event`] or [`Self::handle_timeout`] returned; one that the driver finds
    /// itself kills the connection too.
    pub fn send_error(&mut self, error: PeerError, date: &[u8; 29], out: &mut Vec<u8>) {
        let answerable = match self.state {
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::AwaitResponse
            | State::AwaitAnswer(_) => true,
            State::AwaitResponseEnd { .. } | State::Closed | State::Dead(_) => false,
        };
        if answerable {
            encode::write_error(error, &self.limits, date, !self.head.is_head_method, out);
        }
        if let Ok(state) = transition(self.state, Step::Answered(error)) {
            self.state = state;
        }
    }

    fn poll_head(&mut self, now: MonoNs, buffer: &[u8]) -> Result<Option<Event>, Error> {
        let found = self.scan.find_end(&mut self.cursor, buffer, self.limits.head_bytes_max);
        let begun = found.and_then(|found| {
            let Some(at) = found else { return Ok(false) };
            self.head.parse(buffer, at)?;
            self.body = Body::begin(self.head.body, self.cursor.parsed, self.limits.body_bytes_max)?;
            Ok(true)
        });
        match begun {
            Ok(true) => {
                self.state = transition(self.state, Step::HeadEnded { now })?;
                Ok(Some(Event::Head))
            }
            Ok(false) => {
                // Whoever answers an error, a timeout included, must know that HEAD has no body.
                self.head.is_head_method = self.scan.is_head_method(buffer);
                if self.scan.has_begun(buffer) {
                    self.state = transition(self.state, Step::HeadBegun { now })?;
                    if self.at_eof {
                        self.fail(PeerError::Truncated)?;
                    }
                }
                Ok(None)
            }
            Err(error) => {
                self.head.is_head_method = self.scan.is_head_method(buffer);
                self.fail(error)?;
                Ok(None)
            }
        }
    }

    fn poll_body(&mut self, buffer: &mut [u8]) -> Result<Option<Event>, Error> {
        let body_bytes_seen = buffer.len() > self.cursor.parsed;
        if core::mem::take(&mut self.head.expects_continue) && !body_bytes_seen {
            return Ok(Some(Event::ExpectContinue));
        }
        match self.body.read(&mut self.cursor, buffer) {
            Ok(Some(body)) => {
                self.state = transition(self.state, Step::BodyEnded)?;
                Ok(Some(Event::Body { body }))
            }
            Ok(None) if self.at_eof => self.fail(PeerError::Truncated).map(|()| None),
            Ok(None) => Ok(None),
            Err(error) => self.fail(error).map(|()| None),
        }
    }

    /// Latches `error` and returns it, or the one latched before.
    fn fail(&mut self, error: PeerError) -> Result<(), Error> {
        self.state = transition(self.state, Step::Failed(error))?;
        Err(Error::Peer(error))
    }
}

/// A request head apart from its connection.
#[derive(Debug)]
pub struct LentHead(Head);

impl LentHead {
    /// Returns the head; `buffer` begins like the one shown to [`Connection::poll_event`] and holds at least the head.
    #[must_use]
    pub fn request<'b>(&'b self, buffer: &'b [u8]) -> Option<RequestHead<'b>> {
        RequestHead::new(&self.0, buffer)
    }
}

/// A borrowed request head.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'b> {
    /// Method token, case kept, e.g. `POST`.
    pub method: &'b str,
    /// Path of the request target, without scheme, authority and query, e.g. `/v1/chat/completions`.
    pub path: &'b str,
    /// Query after `?`, empty if none.
    pub query: &'b str,
    /// Whether the request line said HTTP/1.1 (otherwise 1.0).
    pub http11: bool,
    fields: &'b [Field],
    buffer: &'b [u8],
}

impl<'b> RequestHead<'b> {
    /// Returns the values of every field of that name, matched without case, in wire order, outer whitespace removed.
    pub fn header_values(&self, name: &str) -> impl Iterator<Item = &'b [u8]> {
        let Self { fields, buffer, .. } = *self;
        fields.iter().filter_map(move |field| {
            let matches = field.name.bytes(buffer)?.eq_ignore_ascii_case(name.as_bytes());
            if matches { field.value.bytes(buffer) } else { None }
        })
    }

    fn new(head: &'b Head, buffer: &'b [u8]) -> Option<Self> {
        let text = |span: head::Span| core::str::from_utf8(span.bytes(buffer)?).ok();
        let path = text(head.path)?;
        Some(Self {
            method: text(head.method)?,
            // The absolute form `http://host` names the root (RFC 9110 §4.2.3).
            path: if path.is_empty() { "/" } else { path },
            query: text(head.query)?,
            http11: head.http11,
            fields: &head.fields,
            buffer,
        })
    }
}

/// A response head to encode.
#[derive(Clone, Copy, Debug)]
pub struct ResponseHead<'a> {
    /// Status code, 200..=599.
    pub status: u16,
    /// Fields in wire order. `Content-Length`, `Transfer-Encoding`, `Connection` and `Date` are the encoder's own.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// The 29 bytes of an IMF-fixdate, formatted by the driver once a second.
    pub date: &'a [u8; 29],
}

/// Offsets into the driver's buffer, all that is remembered of it.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// End of the last complete part: a line, a chunk, at last the message.
    parsed: usize,
    /// End of what was looked at.
    scanned: usize,
}

impl Cursor {
    /// Invariant: `parsed <= scanned <= buffer.len()`. Only a driver that drops bytes unasked can break it.
    const fn check(self, buffer_len: usize) -> Result<(), Misuse> {
        if self.parsed <= self.scanned && self.scanned <= buffer_len {
            Ok(())
        } else {
            Err(Misuse::BufferShrank)
        }
    }
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The first byte of a head.
    AwaitHead {
        since: MonoNs,
    },
    AwaitHeadEnd {
        since: MonoNs,
    },
    AwaitBodyEnd {
        since: MonoNs,
    },
    AwaitResponse,
    AwaitResponseEnd {
        write: Write,
        close: bool,
    },
    /// Nothing: the last response is out.
    Closed,
    /// [`Connection::send_error`]: the peer failed and may be told.
    AwaitAnswer(PeerError),
    /// Nothing: the peer failed and cannot be told, or has been.
    Dead(PeerError),
}

/// What happened to it.
#[derive(Clone, Copy, Debug)]
enum Step {
    HeadBegun { now: MonoNs },
    HeadEnded { now: MonoNs },
    BodyEnded,
    ResponseBegun { write: Write, close: bool },
    ResponseEnded { now: MonoNs },
    Failed(PeerError),
    Answered(PeerError),
}

/// All transitions. A step that a state does not know is the embedder's mistake and changes nothing.
fn transition(state: State, step: Step) -> Result<State, Error> {
    match (state, step) {
        (State::AwaitHead { .. }, Step::HeadBegun { now }) => Ok(State::AwaitHeadEnd { since: now }),
        (State::AwaitHeadEnd { .. }, Step::HeadBegun { .. }) => Ok(state),
        (State::AwaitHead { .. } | State::AwaitHeadEnd { .. }, Step::HeadEnded { now }) => {
            Ok(State::AwaitBodyEnd { since: now })
        }
        (State::AwaitBodyEnd { .. }, Step::BodyEnded) => Ok(State::AwaitResponse),
        (State::AwaitBodyEnd { .. } | State::AwaitResponse, Step::ResponseBegun { write, close }) => {
            Ok(State::AwaitResponseEnd { write, close })
        }
        (State::AwaitResponseEnd { close: false, .. }, Step::ResponseEnded { now }) => {
            Ok(State::AwaitHead { since: now })
        }
        (State::AwaitResponseEnd { close: true, .. }, Step::ResponseEnded { .. }) => Ok(State::Closed),

        // The first failure is kept. Behind the beginning of a response the peer cannot be told.
        (State::AwaitAnswer(error), Step::Answered(_)) => Ok(State::Dead(error)),
        (State::AwaitAnswer(error) | State::Dead(error), _) => Err(Error::Peer(error)),
        (
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::AwaitResponse,
            Step::Failed(error),
        ) => Ok(State::AwaitAnswer(error)),
        (
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::AwaitResponse,
            Step::Answered(error),
        )
        | (State::AwaitResponseEnd { .. }, Step::Failed(error) | Step::Answered(error)) => {
            Ok(State::Dead(error))
        }

        (
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitBodyEnd { .. }
            | State::AwaitResponse
            | State::Closed,
            Step::ResponseEnded { .. },
        ) => Err(Misuse::ResponseNotBegun.into()),
        (
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitResponseEnd { .. }
            | State::Closed,
            Step::ResponseBegun { .. },
        ) => Err(Misuse::ResponseNotOwed.into()),
        // Nothing is read in these states, and a closed connection cannot fail.
        (
            State::AwaitBodyEnd { .. }
            | State::AwaitResponse
            | State::AwaitResponseEnd { .. }
            | State::Closed,
            Step::HeadBegun { .. } | Step::HeadEnded { .. },
        )
        | (
            State::AwaitHead { .. }
            | State::AwaitHeadEnd { .. }
            | State::AwaitResponse
            | State::AwaitResponseEnd { .. }
            | State::Closed,
            Step::BodyEnded,
        )
        | (State::Closed, Step::Failed(_) | Step::Answered(_)) => Ok(state),
    }
}

//! A connection's driver in memory, which answers each request with its body and keeps all it saw.

use alloc::string::String;
use alloc::vec::Vec;

use crate::http1::{Connection, Deadline, Error, Event, Framing, Limits, Next, RequestHead, ResponseHead};
use crate::limits::{CHUNK_FRAMING_BYTES_MAX, EMPTY_LINES_MAX, TRAILER_BYTES_MAX};
use crate::time::MonoNs;

/// What a driver sees of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Served {
    seen: Vec<Seen>,
    out: Vec<u8>,
    timeout: Option<(MonoNs, Deadline)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Body(Vec<u8>),
    Closed(Result<(), Error>),
    Failed(Error),
    Head { line: [String; 3], http11: bool, fields: Vec<Vec<u8>> },
    Next(Next),
}

/// Shows a connection the pieces, one after the other.
pub(super) fn serve(limits: Limits, pieces: &[&[u8]], half_closes: bool) -> Served {
    let mut driver = Driver {
        connection: Connection::new(limits, NOW),
        buffer: Vec::new(),
        bytes_max: head_bytes_max(limits),
        limits,
        served: Served { seen: Vec::new(), out: Vec::new(), timeout: None },
    };
    let open = pieces.iter().all(|piece| {
        driver.buffer.extend_from_slice(piece);
        driver.serve_buffer()
    });
    if open && half_closes {
        let closed = driver.connection.handle_eof();
        driver.served.seen.push(Seen::Closed(closed));
    }
    driver.served.timeout = driver.connection.poll_timeout();
    driver.served
}

struct Driver {
    connection: Connection,
    limits: Limits,
    buffer: Vec<u8>,
    /// Most bytes of what is under way.
    bytes_max: usize,
    served: Served,
}

impl Driver {
    /// Handles all events that are there. Returns whether the connection goes on.
    fn serve_buffer(&mut self) -> bool {
        loop {
            match self.connection.poll_event(NOW, &mut self.buffer) {
                Ok(None) => {
                    assert!(
                        self.buffer.len() <= self.bytes_max,
                        "{} > {}",
                        self.buffer.len(),
                        self.bytes_max
                    );
                    return true;
                }
                Ok(Some(Event::Head)) => self.handle_head(),
                // This one may depend on the split.
                Ok(Some(Event::ExpectContinue)) => {
                    self.connection.send_continue(&mut Vec::new()).expect("a request is being served");
                }
                Ok(Some(Event::Body { body })) => {
                    let body = self.buffer[body].to_vec();
                    if !self.answer(body) {
                        return false;
                    }
                }
                Err(error) => {
                    self.handle_error(error);
                    return false;
                }
            }
        }
    }

    fn handle_head(&mut self) {
        let request = self.connection.request(&self.buffer).expect("its head is complete");
        let is_chunked = request.header_values("transfer-encoding").next().is_some();
        let framing = if is_chunked { CHUNK_FRAMING_BYTES_MAX + TRAILER_BYTES_MAX } else { 0 };
        self.bytes_max = head_bytes_max(self.limits) + (self.limits.body_bytes_max + framing) as usize;
        self.served.seen.push(see_head(request));
    }

    fn answer(&mut self, body: Vec<u8>) -> bool {
        assert!(body.len() <= self.limits.body_bytes_max as usize, "{} bytes of body", body.len());
        let out = &mut self.served.out;
        let head = ResponseHead { status: 200, headers: &[], date: DATE };
        self.connection.send_head(&head, Framing::Length(body.len() as u64), out).expect("it is owed");
        self.connection.send_body(&body, out).expect("as long as promised");
        let next = self.connection.finish(NOW, out).expect("as long as promised");
        self.served.seen.extend([Seen::Body(body), Seen::Next(next)]);
        let Next::KeepAlive { consumed } = next else { return false };
        self.buffer.drain(..consumed);
        self.bytes_max = head_bytes_max(self.limits);
        true
    }

    fn handle_error(&mut self, error: Error) {
        let Error::Peer(cause) = error else { panic!("the driver made no mistake: {error:?}") };
        assert_eq!(self.connection.poll_event(NOW, &mut self.buffer), Err(error), "it is latched");
        self.connection.send_error(cause, DATE, &mut self.served.out);
        self.served.seen.push(Seen::Failed(error));
    }
}

fn see_head(request: RequestHead<'_>) -> Seen {
    let fields = ["host", "content-length", "transfer-encoding", "x-a"];
    Seen::Head {
        line: [request.method, request.path, request.query].map(String::from),
        http11: request.http11,
        fields: fields.iter().flat_map(|name| request.header_values(name)).map(Vec::from).collect(),
    }
}

/// Returns the most bytes of a head, and of the empty lines before it.
const fn head_bytes_max(limits: Limits) -> usize {
    (limits.head_bytes_max + 2 * EMPTY_LINES_MAX) as usize
}

const NOW: MonoNs = MonoNs::from_raw(0);
const DATE: &[u8; 29] = b"Tue, 01 Dec 2026 12:00:00 GMT";

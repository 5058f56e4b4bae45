//! Closed-loop load over keep-alive connections, on one thread.
//!
//! Every connection sends its request, reads the answer to its end, and sends again. Plain answers are delimited by
//! `Content-Length`, streams by the last chunk. The generator checks that each answer is a 200 and counts the events of
//! streams; it does not parse more, so that it costs the same whoever answers.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use memchr::memmem;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

/// What to send, and for how long.
#[derive(Clone, Debug)]
pub struct Load {
    /// Whom.
    pub address: SocketAddr,
    /// Connections, each with one request under way.
    pub connections: usize,
    /// The bytes of one request.
    pub request: Vec<u8>,
    /// Whether the answer is an event stream.
    pub stream: bool,
}

/// What came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Whole answers.
    pub answers: u64,
    /// Events of streams.
    pub events: u64,
    /// Answers that were not a 200, and connections that broke.
    pub failures: u64,
}

impl Counts {
    /// What was added since an earlier reading.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            answers: self.answers - earlier.answers,
            events: self.events - earlier.events,
            failures: self.failures - earlier.failures,
        }
    }
}

/// Connections that keep their load up for as long as [`Self::run`] is called.
pub struct Generator {
    poll: Poll,
    peers: Vec<Peer>,
    load: Load,
    counts: Counts,
    chunk: Vec<u8>,
}

struct Peer {
    stream: TcpStream,
    unsent: usize,
    /// The answer so far; of a stream that has begun, only the end in which a delimiter could be cut.
    received: Vec<u8>,
    /// The stream's status was looked at.
    begun: bool,
}

impl Generator {
    /// Connects all.
    ///
    /// # Errors
    /// When a connection cannot be made.
    pub fn start(load: Load) -> io::Result<Self> {
        let poll = Poll::new()?;
        let mut peers = Vec::with_capacity(load.connections);
        for index in 0..load.connections {
            let stream = std::net::TcpStream::connect(load.address)?;
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let mut stream = TcpStream::from_std(stream);
            poll.registry().register(&mut stream, Token(index), Interest::READABLE | Interest::WRITABLE)?;
            peers.push(Peer { stream, unsent: load.request.len(), received: Vec::new(), begun: false });
        }
        Ok(Self { poll, peers, load, counts: Counts::default(), chunk: vec![0; CHUNK_BYTES] })
    }

    /// Keeps the load up until `clock` says that `for_time` has passed, and returns all counts so far.
    ///
    /// # Errors
    /// When polling fails.
    pub fn run(&mut self, for_time: Duration, mut clock: impl FnMut() -> Duration) -> io::Result<Counts> {
        let mut events = Events::with_capacity(1024);
        let end = clock() + for_time;
        for index in 0..self.peers.len() {
            self.turn(index);
        }
        while clock() < end {
            match self.poll.poll(&mut events, Some(Duration::from_millis(5))) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            for event in &events {
                self.turn(event.token().0);
            }
        }
        Ok(self.counts)
    }

    /// Sends and reads as far as one connection goes.
    fn turn(&mut self, index: usize) {
        let Self { peers, load, counts, chunk, .. } = self;
        let peer = &mut peers[index];
        loop {
            while peer.unsent > 0 {
                let from = load.request.len() - peer.unsent;
                match peer.stream.write(&load.request[from..]) {
                    Ok(sent) => peer.unsent -= sent,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {
                        counts.failures += 1;
                        peer.unsent = 0;
                    }
                }
            }
            match peer.stream.read(chunk) {
                Ok(0) => {
                    counts.failures += 1;
                    return;
                }
                Ok(count) => {
                    peer.receive(&chunk[..count], load, counts);
                    // A short read has emptied the socket: the next edge tells of more.
                    if count < chunk.len() && peer.unsent == 0 {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}

impl Peer {
    fn receive(&mut self, bytes: &[u8], load: &Load, counts: &mut Counts) {
        let is_over =
            if load.stream { self.receive_events(bytes, counts) } else { self.receive_whole(bytes, counts) };
        if is_over {
            self.received.clear();
            self.begun = false;
            self.unsent = load.request.len();
        }
    }

    fn receive_events(&mut self, bytes: &[u8], counts: &mut Counts) -> bool {
        if !self.begun {
            self.begun = true;
            counts.failures += u64::from(!bytes.starts_with(OK));
        }
        // A mark that is cut lies over the end kept from before; one in that end alone was counted then.
        let counted = memmem::find_iter(&self.received, EVENT).count();
        self.received.extend_from_slice(bytes);
        counts.events += (memmem::find_iter(&self.received, EVENT).count() - counted) as u64;
        let is_over = self.received.ends_with(LAST_CHUNK);
        counts.answers += u64::from(is_over);
        let keep_from = self.received.len().saturating_sub(LAST_CHUNK.len());
        self.received.drain(..keep_from);
        is_over
    }

    fn receive_whole(&mut self, bytes: &[u8], counts: &mut Counts) -> bool {
        self.received.extend_from_slice(bytes);
        let is_over = answer_end(&self.received).is_some_and(|end| self.received.len() >= end);
        if is_over && self.received.starts_with(OK) {
            counts.answers += 1;
        } else if is_over {
            counts.failures += 1;
        }
        is_over
    }
}

/// Where the answer at the front ends.
fn answer_end(bytes: &[u8]) -> Option<usize> {
    let head_end = memmem::find(bytes, b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..head_end]).ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    })?;
    Some(head_end + length)
}

const OK: &[u8] = b"HTTP/1.1 200";
const EVENT: &[u8] = b"data: ";
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";
const CHUNK_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_whatever_the_split() {
        let answer = b"HTTP/1.1 200 OK\r\n\r\n9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n";
        for at in 13..answer.len() {
            let mut counts = Counts::default();
            let poll_free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = std::net::TcpStream::connect(poll_free.local_addr().unwrap()).unwrap();
            let mut peer =
                Peer { stream: TcpStream::from_std(stream), unsent: 0, received: Vec::new(), begun: false };
            assert!(!peer.receive_events(&answer[..at], &mut counts));
            assert!(peer.receive_events(&answer[at..], &mut counts), "split at {at}");
            assert_eq!(counts, Counts { answers: 1, events: 2, failures: 0 }, "split at {at}");
        }
    }
}

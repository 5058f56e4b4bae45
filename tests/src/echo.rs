//! A service that answers with what it was asked, a server that runs it, and a client that speaks raw bytes.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine as _;
use uring_serve::clock::SystemClock;
use uring_serve::counters::Counters;
use uring_serve::listen::{self, Probe};
use uring_serve::reactor::{Options, Reactor};
use uring_serve::ring::RingError;
use uring_serve::service::{ExchangeId, Gone, Refusal, Replies, Reply, Request, Service};
use uring_serve::waker::Handle;
use uring_serve_core::http1::{Framing, RequestHead};
use uring_serve_core::time::MonoNs;

/// What the service saw, for tests to wait on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A request was handed over.
    Began(ExchangeId),
    /// Its response was submitted whole.
    Submitted(ExchangeId),
    /// It ended without.
    Gone(ExchangeId, Gone),
}

/// Answers by path; the number in the query is the path's parameter. Everything else is echoed as JSON.
///
/// | path | answer |
/// |---|---|
/// | `/big?n` | n bytes |
/// | `/chunks?n` | n chunks of 10 bytes |
/// | `/flood?n` | a stream of 64 KiB each millisecond, n times |
/// | `/http10` | none, as `/never`, and the end of the client's stream is its leaving |
/// | `/later?n` | after n milliseconds |
/// | `/misuse` | a response that breaks its framing |
/// | `/never` | none |
/// | `/queued` | when the test says so through [`EchoServer::answer`] |
/// | `/refused` | 401 by its head |
/// | `/stream?n` | an event stream: n events, one each 10 milliseconds, or with 0 one event and no end |
pub struct Echo {
    notes: Sender<Note>,
    queue: Receiver<ExchangeId>,
    taken: Vec<ExchangeId>,
    /// Events or pieces left.
    streams: HashMap<ExchangeId, (u64, Kind)>,
    json: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Events,
    Flood,
    Later,
}

impl Echo {
    fn begin_stream(&mut self, id: ExchangeId, count: u64, kind: Kind, reply: &mut dyn Reply) {
        match kind {
            Kind::Events => {
                let headers: [(&str, &[u8]); 1] = [("Content-Type", b"text/event-stream")];
                reply.begin(200, &headers, Framing::Chunked);
                reply.body(b"data: first\n\n");
                if count == 0 {
                    return;
                }
            }
            Kind::Flood => reply.begin(200, &[], Framing::Chunked),
            Kind::Later => {}
        }
        let after = if kind == Kind::Later { count } else { 1 };
        self.streams.insert(id, (count, kind));
        reply.set_timer(Some(Duration::from_millis(after)));
    }

    fn echo(&mut self, head: &RequestHead<'_>, body: &[u8], reply: &mut dyn Reply) {
        let body = base64::engine::general_purpose::STANDARD.encode(body);
        let mark = if head.query.is_empty() { "" } else { "?" };
        self.json.clear();
        let _ = write!(
            self.json,
            r#"{{"m":{},"u":{},"b":"{body}"}}"#,
            serde_json::Value::from(head.method),
            serde_json::Value::from(format!("{}{mark}{}", head.path, head.query)),
        );
        reply.send(200, &[("Content-Type", b"application/json")], self.json.as_bytes());
    }
}

impl Service for Echo {
    fn handle_head(&mut self, _: MonoNs, head: &RequestHead<'_>) -> Option<Refusal> {
        (head.path == "/refused").then(|| Refusal {
            status: 401,
            headers: vec![("WWW-Authenticate", "Bearer".to_owned())],
            body: b"{}".to_vec(),
        })
    }

    fn handle_request(&mut self, now: MonoNs, request: Request<'_>, reply: &mut dyn Reply) {
        assert!(request.head_at <= now);
        let (id, head) = (request.id, request.head);
        assert_eq!(reply.id(), id);
        let _ = self.notes.send(Note::Began(id));
        let count = head.query.parse().unwrap_or(0);
        match head.path {
            "/big" => reply.send(200, &[], &vec![b'x'; count as usize]),
            "/chunks" => {
                reply.begin(200, &[], Framing::Chunked);
                (0..count).for_each(|_| reply.body(b"0123456789"));
                reply.finish();
            }
            "/flood" => self.begin_stream(id, count, Kind::Flood, reply),
            "/http10" => reply.end_at_fin(),
            "/later" => self.begin_stream(id, count, Kind::Later, reply),
            "/misuse" => {
                reply.begin(200, &[], Framing::Length(2));
                reply.body(b"three");
                reply.finish();
            }
            "/never" | "/queued" => {}
            "/stream" => self.begin_stream(id, count, Kind::Events, reply),
            _ => self.echo(&head, request.body, reply),
        }
    }

    fn drain_queues(&mut self) {
        self.taken.extend(self.queue.try_iter());
    }

    fn handle_queues(&mut self, _: MonoNs, replies: &mut dyn Replies) {
        for id in self.taken.drain(..) {
            if let Some(reply) = replies.reply(id) {
                reply.send(200, &[], b"queued");
            }
        }
    }

    fn handle_timer(&mut self, _: MonoNs, id: ExchangeId, reply: &mut dyn Reply) {
        let Some((left, kind)) = self.streams.get_mut(&id) else { return };
        *left = left.saturating_sub(1);
        let again = match kind {
            Kind::Events => {
                reply.body(b"data: next\n\n");
                10
            }
            Kind::Flood => {
                reply.body(&[b'x'; 64 << 10]);
                1
            }
            Kind::Later => return reply.send(200, &[], b"later"),
        };
        if *left == 0 {
            reply.finish();
        } else {
            reply.set_timer(Some(Duration::from_millis(again)));
        }
    }

    fn handle_submitted(&mut self, _: MonoNs, id: ExchangeId) {
        self.streams.remove(&id);
        let _ = self.notes.send(Note::Submitted(id));
    }

    fn handle_gone(&mut self, _: MonoNs, id: ExchangeId, why: Gone) {
        self.streams.remove(&id);
        let _ = self.notes.send(Note::Gone(id, why));
    }
}

/// An [`Echo`] on a ring thread of its own, stopped when dropped.
pub struct EchoServer {
    /// Where it listens.
    pub address: SocketAddr,
    /// To wake, drain and stop it.
    pub handle: Handle,
    /// Its counters.
    pub counters: Arc<Counters>,
    notes: Mutex<Receiver<Note>>,
    queue: Sender<ExchangeId>,
    thread: Option<JoinHandle<Result<(), RingError>>>,
}

impl EchoServer {
    /// Starts one on a free port of 127.0.0.1.
    #[must_use]
    pub fn start(options: Options) -> Self {
        let bound = listen::bind("127.0.0.1", 0, 1, Probe::First).expect("a free port");
        let listeners = bound.workers.into_iter().flatten().collect();
        Self::start_on(bound.addresses[0], listeners, options).expect("a ring")
    }

    /// Starts one on these listeners.
    ///
    /// # Errors
    /// There can be no handle or no thread.
    pub fn start_on(address: SocketAddr, listeners: Vec<TcpListener>, options: Options) -> io::Result<Self> {
        let handle = Handle::new()?;
        let (notes_in, notes) = mpsc::channel();
        let (queue, queue_out) = mpsc::channel();
        let of_thread = handle.clone();
        let thread = std::thread::Builder::new().name("ring".into()).spawn(move || {
            let service = Echo {
                notes: notes_in,
                queue: queue_out,
                taken: Vec::new(),
                streams: HashMap::new(),
                json: String::new(),
            };
            Reactor::new(options, listeners, of_thread, SystemClock, service)?.run()
        })?;
        let counters = handle.counters();
        Ok(Self { address, handle, counters, notes: Mutex::new(notes), queue, thread: Some(thread) })
    }

    /// Returns the next note of the service; `None` when none comes within `limit`.
    pub fn note_within(&self, limit: Duration) -> Option<Note> {
        self.notes.lock().ok()?.recv_timeout(limit).ok()
    }

    /// Returns the next note of the service.
    ///
    /// # Panics
    /// None comes within 10 seconds.
    pub fn note(&self) -> Note {
        self.note_within(Duration::from_secs(10)).expect("a note within 10 s")
    }

    /// Answers a `/queued` request from this thread.
    pub fn answer(&self, id: ExchangeId) {
        let _ = self.queue.send(id);
        self.handle.waker().wake();
    }

    /// Opens a connection.
    ///
    /// # Panics
    /// It cannot be opened.
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(self.address).expect("a connection")
    }

    /// Waits until the thread has ended by itself.
    ///
    /// # Panics
    /// The ring failed.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic").expect("no ring error");
        }
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.handle.stop_now();
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            thread.join().expect("no panic").expect("no ring error");
        }
    }
}

/// A blocking client whose every wait is bounded.
#[derive(Debug)]
pub struct Client {
    /// The socket.
    pub socket: TcpStream,
    /// Received and not yet read as a response.
    pub pending: Vec<u8>,
}

/// A response as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Status line and header section, as text.
    pub head: String,
    /// Body with chunked framing removed.
    pub body: Vec<u8>,
}

impl Client {
    /// Connects; reads and writes time out after 10 seconds.
    ///
    /// # Errors
    /// Those of the connect.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, LIMIT)?;
        socket.set_read_timeout(Some(LIMIT))?;
        socket.set_write_timeout(Some(LIMIT))?;
        socket.set_nodelay(true)?;
        Ok(Self { socket, pending: Vec::new() })
    }

    /// Sends bytes.
    ///
    /// # Panics
    /// They cannot be sent.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.socket.write_all(bytes.as_ref()).expect("sent");
    }

    /// Sends a GET.
    pub fn send_get(&mut self, target: &str) {
        self.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
    }

    /// Sends a GET and reads the answer.
    pub fn get(&mut self, target: &str) -> Response {
        self.send_get(target);
        self.response()
    }

    /// Reads a response to anything but HEAD, interim ones included.
    ///
    /// # Panics
    /// None comes.
    pub fn response(&mut self) -> Response {
        let mut response = self.response_head();
        let head = response.head.to_ascii_lowercase();
        if head.contains("\r\ntransfer-encoding: chunked") {
            while let Some(chunk) = self.chunk() {
                response.body.extend_from_slice(&chunk);
            }
        } else if let Some((_, rest)) = head.split_once("\r\ncontent-length: ") {
            let digits = rest.split("\r\n").next().expect("a value");
            let length = digits.parse().expect("a length");
            self.fill(length);
            response.body = self.pending.drain(..length).collect();
        }
        response
    }

    /// Reads a response's head only.
    ///
    /// # Panics
    /// None comes.
    pub fn response_head(&mut self) -> Response {
        let end = loop {
            match find(&self.pending, b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => assert!(self.receive() > 0, "closed before a head: {:?}", self.text()),
            }
        };
        let head = String::from_utf8(self.pending.drain(..end).collect()).expect("text");
        let status = head.get(9..12).and_then(|status| status.parse().ok()).expect("a status");
        Response { status, head, body: Vec::new() }
    }

    /// Reads one chunk; `None` for the last.
    ///
    /// # Panics
    /// The framing is broken.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let end = loop {
            match find(&self.pending, b"\r\n") {
                Some(at) => break at,
                None => assert!(self.receive() > 0, "closed inside a chunk"),
            }
        };
        let size = std::str::from_utf8(&self.pending[..end]).expect("text");
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        self.fill(end + 2 + size + 2);
        let chunk = self.pending[end + 2..end + 2 + size].to_vec();
        assert_eq!(&self.pending[end + 2 + size..end + 4 + size], b"\r\n");
        self.pending.drain(..end + 4 + size);
        (size > 0).then_some(chunk)
    }

    /// Reads until the server ends its stream and returns what was left; an error is a reset.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn read_to_end(&mut self) -> io::Result<Vec<u8>> {
        let mut all = std::mem::take(&mut self.pending);
        self.socket.read_to_end(&mut all)?;
        Ok(all)
    }

    /// Closes by a reset.
    ///
    /// # Panics
    /// The socket refuses.
    pub fn reset(self) {
        let linger = socket2::SockRef::from(&self.socket).set_linger(Some(Duration::ZERO));
        linger.expect("linger");
    }

    fn fill(&mut self, length: usize) {
        while self.pending.len() < length {
            assert!(self.receive() > 0, "closed inside a body: {} of {length}", self.pending.len());
        }
    }

    fn receive(&mut self) -> usize {
        let mut chunk = [0; 65_536];
        let count = self.socket.read(&mut chunk).expect("received within 10 s");
        self.pending.extend_from_slice(&chunk[..count]);
        count
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

const LIMIT: Duration = Duration::from_secs(10);

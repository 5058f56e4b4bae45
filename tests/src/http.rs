//! A plain blocking HTTP/1.1 client that shows what is on the wire. Written for tests: strict, bounded, and not ours in
//! `core`, so that a fault shared by both ends does not hide.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// Longest silence the client accepts.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    unread: Vec<u8>,
}

/// One response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Fields in wire order, names as sent.
    pub headers: Vec<(String, String)>,
    /// Decoded body.
    pub body: Vec<u8>,
    /// Every byte of it as received.
    pub raw: Vec<u8>,
}

impl Response {
    /// The value of the first field of that name, compared without case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|field| field.0.eq_ignore_ascii_case(name)).map(|field| field.1.as_str())
    }

    /// The body as text.
    ///
    /// # Panics
    /// When it is not UTF-8.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body in UTF-8")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The `data` of each event of an SSE body, in order, with the event's name (empty if unnamed).
    pub fn events(&self) -> Vec<(String, String)> {
        self.text()
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| {
                let field = |name: &str| {
                    event
                        .lines()
                        .find_map(|line| line.strip_prefix(name))
                        .unwrap_or_default()
                        .trim()
                        .to_owned()
                };
                (field("event:"), field("data:"))
            })
            .collect()
    }
}

impl Client {
    /// Connects.
    ///
    /// # Panics
    /// When nobody listens.
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, SILENCE_MAX).expect("a listener");
        stream.set_read_timeout(Some(SILENCE_MAX)).expect("a socket option");
        stream.set_write_timeout(Some(SILENCE_MAX)).expect("a socket option");
        stream.set_nodelay(true).expect("a socket option");
        Self { stream, unread: Vec::new() }
    }

    /// The socket, for tests that tear at it.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends bytes as they are.
    ///
    /// # Panics
    /// When the peer does not take them.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
    }

    /// Sends a POST of JSON and reads the whole answer.
    pub fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        self.send(&post_bytes(path, headers, body));
        self.read_response()
    }

    /// Sends a GET and reads the whole answer.
    pub fn get(&mut self, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
        self.read_response()
    }

    /// Reads one final response to a request that was not HEAD.
    ///
    /// # Panics
    /// When the peer closes early, breaks the framing, or is silent too long.
    pub fn read_response(&mut self) -> Response {
        let mut response = self.read_head();
        if response.header("transfer-encoding").is_some() {
            while self.read_chunk_of(&mut response).is_some() {}
        } else {
            let length: usize =
                response.header("content-length").map_or(0, |text| text.parse().expect("a length"));
            self.fill_until(|bytes| (bytes.len() >= length).then_some(length));
            response.body.extend(self.unread.drain(..length));
            response.raw.extend_from_slice(&response.body);
        }
        response
    }

    /// Reads the head of a final response; its body is still to come.
    ///
    /// # Panics
    /// Like [`Self::read_response`].
    pub fn read_head(&mut self) -> Response {
        loop {
            let head_end = self.fill_until(|bytes| find(bytes, b"\r\n\r\n").map(|at| at + 4));
            let raw: Vec<u8> = self.unread.drain(..head_end).collect();
            let head = std::str::from_utf8(&raw).expect("a head in UTF-8");
            let mut lines = head.trim_end().split("\r\n");
            let status_line = lines.next().expect("a status line");
            assert!(status_line.starts_with("HTTP/1.1 "), "{status_line}");
            let status: u16 = status_line[9..12].parse().expect("a status code");
            let headers: Vec<(String, String)> = lines
                .map(|line| {
                    let (name, value) =
                        line.split_once(": ").unwrap_or_else(|| panic!("field line {line:?}"));
                    (name.to_owned(), value.to_owned())
                })
                .collect();
            if status >= 200 {
                return Response { status, headers, body: Vec::new(), raw };
            }
        }
    }

    /// Reads one chunk and adds it to `response`, whose head said that its body comes in chunks. Returns where in the
    /// body the chunk begins, or `None` for the last one, which is empty.
    ///
    /// # Panics
    /// Like [`Self::read_response`].
    pub fn read_chunk_of(&mut self, response: &mut Response) -> Option<usize> {
        let line = self.fill_until(|bytes| find(bytes, b"\r\n").map(|at| at + 2));
        let text = std::str::from_utf8(&self.unread[..line - 2]).expect("a chunk size");
        let size = usize::from_str_radix(text, 16).unwrap_or_else(|_| panic!("chunk size {text:?}"));
        self.fill_until(|bytes| (bytes.len() >= line + size + 2).then_some(0));
        assert_eq!(&self.unread[line + size..line + size + 2], b"\r\n", "end of chunk");
        let from = response.body.len();
        response.body.extend_from_slice(&self.unread[line..line + size]);
        response.raw.extend(self.unread.drain(..line + size + 2));
        (size > 0).then_some(from)
    }

    /// Ends the sending half, as a client does that has said all.
    ///
    /// # Panics
    /// When the connection is already gone.
    pub fn end_sending(&self) {
        self.stream.shutdown(Shutdown::Write).expect("a connected socket");
    }

    /// Ends the connection with a reset.
    ///
    /// # Panics
    /// When the socket does not take the option.
    pub fn reset(self) {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).expect("a socket option");
    }

    /// Reads until the peer closes and returns what came.
    ///
    /// # Panics
    /// When the peer is silent too long.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.unread);
        loop {
            match self.read_some() {
                Some(0) | None => break,
                Some(_) => all.append(&mut self.unread),
            }
        }
        all
    }

    /// Reads what is there, waiting for at least one byte; returns the bytes not yet consumed.
    ///
    /// # Panics
    /// When the peer closed or is silent too long.
    pub fn read_more(&mut self) -> &[u8] {
        assert!(self.read_some().is_some_and(|count| count > 0), "the peer closed");
        &self.unread
    }

    fn fill_until(&mut self, found: impl Fn(&[u8]) -> Option<usize>) -> usize {
        loop {
            if let Some(at) = found(&self.unread) {
                return at;
            }
            let count = self.read_some();
            assert!(
                count.is_some_and(|count| count > 0),
                "the peer closed after {:?}",
                String::from_utf8_lossy(&self.unread)
            );
        }
    }

    /// Reads once; `None` on a reset.
    fn read_some(&mut self) -> Option<usize> {
        let mut chunk = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(count) => {
                    self.unread.extend_from_slice(&chunk[..count]);
                    return Some(count);
                }
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("read: {error}"),
            }
        }
    }
}

/// The bytes of a POST of JSON.
pub fn post_bytes(path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut request = format!("POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n");
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str(&format!("Content-Length: {}\r\n\r\n{body}", body.len()));
    request.into_bytes()
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

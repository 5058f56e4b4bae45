use core::fmt;

use crate::limits::{
    CHUNK_FRAMING_BYTES_MAX, CHUNK_LINE_BYTES_MAX, EMPTY_LINES_MAX, HEADER_COUNT_MAX, METHOD_BYTES_MAX,
    TRAILER_BYTES_MAX,
};

/// Why a call failed, and whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// The embedder called a method in the wrong state. Nothing was appended and the state is unchanged.
    Misuse(Misuse),
    /// The peer broke the protocol or a limit. Latched: every later call that could fail repeats it.
    Peer(PeerError),
}

/// What the peer did wrong. One variant per cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// A CR without LF in the head (400).
    BareCr,
    /// A LF without CR in the head (400). RFC 9112 §2.2 lets a server take it as a line end; a proxy that does not
    /// would see other fields, so it is refused.
    BareLf,
    /// The body did not end before its deadline (408).
    BodyTimeout,
    /// The body, as announced or as received, is longer than [`Limits::body_bytes_max`](super::Limits) (413).
    BodyTooLarge {
        /// In bytes.
        limit: u32,
    },
    /// A chunk's data is not followed by CRLF (400).
    ChunkEnd,
    /// A chunk extension that is not one (400).
    ChunkExtension,
    /// More chunk framing than [`CHUNK_FRAMING_BYTES_MAX`] (413).
    ChunkFramingTooLarge,
    /// A chunk-size line longer than [`CHUNK_LINE_BYTES_MAX`] (400).
    ChunkLineTooLong,
    /// A chunk size that is not 1 to 16 hexadecimal digits (400).
    ChunkSize,
    /// The CONNECT method: this server is no proxy (501).
    Connect,
    /// A `Content-Length` that is not one decimal number (400).
    ContentLength,
    /// A control byte other than HTAB and CRLF in the head (400).
    ControlByte {
        /// Its value.
        byte: u8,
    },
    /// More than [`EMPTY_LINES_MAX`] empty lines before a request line (400).
    EmptyLines,
    /// An `Expect` with something else than `100-continue` (417).
    Expectation,
    /// A header line without a valid name and colon (400).
    FieldName,
    /// A header value with a byte that may not be there (400).
    FieldValue,
    /// A header line that begins with whitespace (400).
    FoldedField,
    /// The head did not end before its deadline (408).
    HeadTimeout,
    /// Head longer than [`Limits::head_bytes_max`](super::Limits) (431).
    HeadTooLarge {
        /// In bytes.
        limit: u32,
    },
    /// A `Host` that is not `host` or `host:port` (400).
    Host,
    /// HTTP/1.1 without `Host` (400).
    HostMissing,
    /// More than one `Host` (400).
    HostRepeated,
    /// No request came (no reply).
    IdleTimeout,
    /// Both `Content-Length` and `Transfer-Encoding` (400). RFC 9112 §6.1 lets a server drop the length; refusing
    /// is what it calls the safe choice.
    LengthAndCoding,
    /// More than one `Content-Length`, equal or not (400).
    LengthRepeated,
    /// A method longer than [`METHOD_BYTES_MAX`] (501).
    MethodTooLong,
    /// Not a request line (400).
    RequestLine,
    /// Request line longer than [`Limits::head_bytes_max`](super::Limits) (414).
    RequestLineTooLong {
        /// In bytes.
        limit: u32,
    },
    /// A request target in none of the forms that its method allows, or with a fragment or a byte beyond ASCII (400).
    Target,
    /// More header fields than [`HEADER_COUNT_MAX`] (431).
    TooManyFields,
    /// A trailer line that is not a field (400).
    Trailer,
    /// More trailer bytes than [`TRAILER_BYTES_MAX`], or fields than [`HEADER_COUNT_MAX`] (431).
    TrailerTooLarge,
    /// `Transfer-Encoding` ends in `chunked`, but after a coding that this server does not undo (501).
    TransferCoding,
    /// `Transfer-Encoding` does not end in exactly one `chunked`: the body has no certain end (400, RFC 9112 §6.3).
    TransferCodingFraming,
    /// `Transfer-Encoding` in an HTTP/1.0 request (400, RFC 9112 §6.1).
    TransferCodingHttp10,
    /// More than one `Transfer-Encoding` line (400).
    TransferCodingRepeated,
    /// End of stream inside a request (no reply).
    Truncated,
    /// Not HTTP/1.0 or HTTP/1.1 (505).
    Version,
}

/// What the embedder did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Misuse {
    /// A header field that is the encoder's own, or not a valid field line.
    BadField,
    /// A final status outside 200..=599.
    BadStatus,
    /// The buffer shown is shorter than what was already looked at.
    BufferShrank,
    /// A response was continued before it was begun.
    ResponseNotBegun,
    /// A response was begun twice, or none is owed.
    ResponseNotOwed,
    /// More or fewer body bytes than [`Framing::Length`](super::Framing) promised.
    WrongLength,
}

impl PeerError {
    /// Returns the status to answer with, or `None` if there is nobody to answer.
    #[must_use]
    pub const fn status(self) -> Option<u16> {
        self.describe().status
    }

    const fn describe(self) -> Description {
        match self {
            Self::BareCr => refuse(400, "the request head has a CR without LF"),
            Self::BareLf => refuse(400, "the request head has a LF without CR"),
            Self::BodyTimeout => refuse(408, "the request body did not end in time"),
            Self::BodyTooLarge { limit } => refuse(413, "the request body is too long").over(limit, "bytes"),
            Self::ChunkEnd => refuse(400, "a chunk is not followed by CRLF"),
            Self::ChunkExtension => refuse(400, "a chunk extension is malformed"),
            Self::ChunkFramingTooLarge => {
                refuse(413, "the body's chunk framing is too long").over(CHUNK_FRAMING_BYTES_MAX, "bytes")
            }
            Self::ChunkLineTooLong => {
                refuse(400, "a chunk-size line is too long").over(CHUNK_LINE_BYTES_MAX, "bytes")
            }
            Self::ChunkSize => refuse(400, "a chunk size is malformed"),
            Self::Connect => refuse(501, "CONNECT is not implemented"),
            Self::ContentLength => refuse(400, "Content-Length is not one decimal number"),
            Self::ControlByte { .. } => refuse(400, "the request head has a control byte"),
            Self::EmptyLines => {
                refuse(400, "too many empty lines before the request line").over(EMPTY_LINES_MAX, "lines")
            }
            Self::Expectation => refuse(417, "only the expectation 100-continue is supported"),
            Self::FieldName => refuse(400, "a header line has no valid name and colon"),
            Self::FieldValue => refuse(400, "a header value is malformed"),
            Self::FoldedField => refuse(400, "a header line begins with whitespace"),
            Self::HeadTimeout => refuse(408, "the request head did not end in time"),
            Self::HeadTooLarge { limit } => refuse(431, "the request head is too long").over(limit, "bytes"),
            Self::Host => refuse(400, "Host is malformed"),
            Self::HostMissing => refuse(400, "Host is missing"),
            Self::HostRepeated => refuse(400, "Host is repeated"),
            Self::IdleTimeout => silent("no request came in time"),
            Self::LengthAndCoding => refuse(400, "both Content-Length and Transfer-Encoding are present"),
            Self::LengthRepeated => refuse(400, "Content-Length is repeated"),
            Self::MethodTooLong => refuse(501, "the method is too long").over(METHOD_BYTES_MAX, "bytes"),
            Self::RequestLine => refuse(400, "the request line is malformed"),
            Self::RequestLineTooLong { limit } => {
                refuse(414, "the request line is too long").over(limit, "bytes")
            }
            Self::Target => refuse(400, "the request target is malformed"),
            Self::TooManyFields => refuse(431, "too many header fields").over(FIELDS_MAX, "fields"),
            Self::Trailer => refuse(400, "a trailer line is malformed"),
            Self::TrailerTooLarge => {
                refuse(431, "the trailer section is too long").over(TRAILER_BYTES_MAX, "bytes")
            }
            Self::TransferCoding => refuse(501, "only the transfer coding chunked is implemented"),
            Self::TransferCodingFraming => refuse(400, "Transfer-Encoding does not end in one chunked"),
            Self::TransferCodingHttp10 => refuse(400, "Transfer-Encoding is not part of HTTP/1.0"),
            Self::TransferCodingRepeated => refuse(400, "Transfer-Encoding is repeated"),
            Self::Truncated => silent("the peer closed inside a request"),
            Self::Version => refuse(505, "only HTTP/1.0 and HTTP/1.1 are supported"),
        }
    }
}

impl fmt::Display for PeerError {
    /// Writes the cause and, where there is one, the limit. The text needs no escaping in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Description { text, limit, .. } = self.describe();
        f.write_str(text)?;
        if let Self::ControlByte { byte } = self {
            write!(f, " (0x{byte:02x})")?;
        }
        match limit {
            Some((limit, unit)) => write!(f, " (limit {limit} {unit})"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for PeerError {}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BadField => "a response field is the encoder's own or malformed",
            Self::BadStatus => "a final status must be 200 to 599",
            Self::BufferShrank => "the buffer is shorter than what was already looked at",
            Self::ResponseNotBegun => "no response was begun",
            Self::ResponseNotOwed => "no response is owed, or one was begun already",
            Self::WrongLength => "the body's length is not the promised one",
        })
    }
}

impl core::error::Error for Misuse {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Misuse(misuse) => misuse.fmt(f),
            Self::Peer(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for Error {}

impl From<Misuse> for Error {
    fn from(misuse: Misuse) -> Self {
        Self::Misuse(misuse)
    }
}

impl From<PeerError> for Error {
    fn from(error: PeerError) -> Self {
        Self::Peer(error)
    }
}

/// One row of [`PeerError::describe`].
struct Description {
    status: Option<u16>,
    text: &'static str,
    limit: Option<(u32, &'static str)>,
}

impl Description {
    const fn over(self, limit: u32, unit: &'static str) -> Self {
        Self { limit: Some((limit, unit)), ..self }
    }
}

const fn refuse(status: u16, text: &'static str) -> Description {
    Description { status: Some(status), text, limit: None }
}

const fn silent(text: &'static str) -> Description {
    Description { status: None, text, limit: None }
}

const FIELDS_MAX: u32 = {
    assert!(HEADER_COUNT_MAX < u32::MAX as usize);
    HEADER_COUNT_MAX as u32
};

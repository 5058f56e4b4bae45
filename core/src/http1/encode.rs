use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::head::{find_control, is_token_byte, is_value_byte};
use super::{Framing, Limits, Misuse, PeerError, ResponseHead};

/// What of a response body is still to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    Chunked,
    Length {
        /// In bytes.
        left: u64,
    },
    /// Nothing: HEAD, 204, 304. Data is dropped.
    Nothing,
    UntilClose,
}

impl Write {
    /// Appends `data` in its framing.
    pub(super) fn data(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<(), Misuse> {
        match self {
            Self::Nothing => {}
            Self::UntilClose => out.extend_from_slice(data),
            Self::Length { left } => {
                *left = left.checked_sub(data.len() as u64).ok_or(Misuse::WrongLength)?;
                out.extend_from_slice(data);
            }
            // An empty chunk would end the body.
            Self::Chunked if data.is_empty() => {}
            Self::Chunked => {
                out.reserve(CHUNK_EXTRA_BYTES_MAX + data.len());
                write_hexadecimal(data.len() as u64, out);
                out.extend_from_slice(b"\r\n");
                out.extend_from_slice(data);
                out.extend_from_slice(b"\r\n");
            }
        }
        Ok(())
    }

    /// Appends what ends the body.
    pub(super) fn end(self, out: &mut Vec<u8>) -> Result<(), Misuse> {
        match self {
            Self::Chunked => out.extend_from_slice(b"0\r\n\r\n"),
            Self::Length { left: 1.. } => return Err(Misuse::WrongLength),
            Self::Length { left: 0 } | Self::Nothing | Self::UntilClose => {}
        }
        Ok(())
    }
}

/// What a response head says about the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Persistence {
    Close,
    /// HTTP/1.1's default goes without saying.
    Default,
    /// HTTP/1.0 must be told.
    KeepAlive,
}

/// Checks that `head` can be written.
pub(super) fn check_head(head: &ResponseHead<'_>) -> Result<(), Misuse> {
    if !(200..=599).contains(&head.status) {
        return Err(Misuse::BadStatus);
    }
    let fits = |&(name, value): &(&str, &[u8])| {
        !name.is_empty()
            && name.bytes().all(is_token_byte)
            && (find_control(value).is_none() || value.iter().all(|&byte| is_value_byte(byte)))
            && !is_own_field(name)
    };
    if head.headers.iter().all(fits) { Ok(()) } else { Err(Misuse::BadField) }
}

/// Appends status line and header section. The fields that say where the message ends come first, whatever the caller
/// adds. `framing` is `None` where none may be named (204) or none is known (until close).
pub(super) fn write_head(
    head: &ResponseHead<'_>,
    framing: Option<Framing>,
    persistence: Persistence,
    out: &mut Vec<u8>,
) {
    let fields: usize = head.headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    out.reserve(HEAD_BYTES_TYPICAL + fields);
    out.extend_from_slice(b"HTTP/1.1 ");
    write_decimal(u64::from(head.status), out);
    out.extend_from_slice(b" ");
    out.extend_from_slice(reason(head.status).as_bytes());
    out.extend_from_slice(b"\r\nDate: ");
    out.extend_from_slice(head.date);
    out.extend_from_slice(match persistence {
        Persistence::Close => b"\r\nConnection: close\r\n".as_slice(),
        Persistence::Default => b"\r\n",
        Persistence::KeepAlive => b"\r\nConnection: keep-alive\r\n",
    });
    match framing {
        Some(Framing::Chunked) => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        Some(Framing::Length(length)) => {
            out.extend_from_slice(b"Content-Length: ");
            write_decimal(length, out);
            out.extend_from_slice(b"\r\n");
        }
        None => {}
    }
    for (name, value) in head.headers {
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends the whole answer to a peer's mistake: an OpenAI error object, without a body if the request was HEAD.
pub(super) fn write_error(
    error: PeerError,
    limits: &Limits,
    date: &[u8; 29],
    with_body: bool,
    out: &mut Vec<u8>,
) {
    let Some(status) = error.status() else { return };
    let deadline = if error == PeerError::BodyTimeout {
        format!(" (limit {:?})", limits.body_timeout)
    } else if error == PeerError::HeadTimeout {
        format!(" (limit {:?})", limits.head_timeout)
    } else {
        String::new()
    };
    let body = format!(
        r#"{{"error":{{"message":"{error}{deadline}","type":"invalid_request_error","param":null,"code":null}}}}"#
    );
    let headers: &[(&str, &[u8])] = &[("Content-Type", b"application/json")];
    let head = ResponseHead { status, headers, date };
    write_head(&head, Some(Framing::Length(body.len() as u64)), Persistence::Close, out);
    if with_body {
        out.extend_from_slice(body.as_bytes());
    }
}

fn is_own_field(name: &str) -> bool {
    ["content-length", "transfer-encoding", "connection", "date"]
        .iter()
        .any(|own| name.eq_ignore_ascii_case(own))
}

/// RFC 9110 §15; empty for a status without a registered name.
const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        206 => "Partial Content",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        411 => "Length Required",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        426 => "Upgrade Required",
        428 => "Precondition Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

fn write_decimal(mut number: u64, out: &mut Vec<u8>) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

fn write_hexadecimal(mut number: u64, out: &mut Vec<u8>) {
    let mut digits = [0; 16];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b"0123456789abcdef"[(number % 16) as usize];
        number /= 16;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

/// Room for everything but the caller's fields: an estimate, not a bound.
const HEAD_BYTES_TYPICAL: usize = 192;

/// Size digits and the two CRLF of one chunk.
const CHUNK_EXTRA_BYTES_MAX: usize = 16 + 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_core_writes_them() {
        for number in [0, 1, 9, 10, 15, 16, 99, 100, 255, 256, 65_535, u64::MAX - 1, u64::MAX] {
            let (mut decimal, mut hexadecimal) = (Vec::new(), Vec::new());
            write_decimal(number, &mut decimal);
            write_hexadecimal(number, &mut hexadecimal);
            assert_eq!(decimal, format!("{number}").into_bytes());
            assert_eq!(hexadecimal, format!("{number:x}").into_bytes());
        }
    }
}

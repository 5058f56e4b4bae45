use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::time::Duration;

use super::*;
use crate::limits::{
    CHUNK_FRAMING_BYTES_MAX, CHUNK_LINE_BYTES_MAX, EMPTY_LINES_MAX, HEADER_COUNT_MAX, METHOD_BYTES_MAX,
    TRAILER_BYTES_MAX,
};

// ---- Reading: rows of (name, bytes, expected), each under every segmentation.

#[test]
fn requests_that_are_read() {
    let chunked = |rest: &str| get("Transfer-Encoding: chunked\r\n") + rest;
    let line = |line: &str| format!("{line}\r\nHost: a\r\n\r\n");
    let long = format!("GET /x  {}", "x".repeat(170));
    // Expected: method, path, query and body of each request, one space between them.
    let rows: &[(&str, String, &[&str])] = &[
        ("no body", get(""), &["GET /x  "]),
        ("a query", line("GET /x?a=b?c HTTP/1.1"), &["GET /x a=b?c "]),
        ("an empty query", line("GET /x? HTTP/1.1"), &["GET /x  "]),
        ("slashes kept", line("GET ///x HTTP/1.1"), &["GET ///x  "]),
        ("what browsers send", line("GET /{x}|^?\"<>` HTTP/1.1"), &["GET /{x}|^ \"<>` "]),
        ("absolute", line("GET http://b/x?q HTTP/1.1"), &["GET /x q "]),
        ("absolute, port", line("GET HTTPS://b:1/x HTTP/1.1"), &["GET /x  "]),
        ("absolute, no path", line("GET http://b HTTP/1.1"), &["GET /  "]),
        ("absolute, query only", line("GET http://b?q HTTP/1.1"), &["GET / q "]),
        ("absolute, IPv6", line("GET http://[::1]:8/x HTTP/1.1"), &["GET /x  "]),
        ("asterisk", line("OPTIONS * HTTP/1.1"), &["OPTIONS *  "]),
        ("a method of no protocol", line("get /x HTTP/1.1"), &["get /x  "]),
        ("an empty Host", "GET /x HTTP/1.1\r\nHost:\r\n\r\n".into(), &["GET /x  "]),
        ("1.0 without Host", "GET /x HTTP/1.0\r\n\r\n".into(), &["GET /x  "]),
        ("1.0 with an expectation", "GET /x HTTP/1.0\r\nExpect: tea\r\n\r\n".into(), &["GET /x  "]),
        ("empty lines before", "\r\n\r\n".to_owned() + &get(""), &["GET /x  "]),
        ("a length", get("Content-Length: 5\r\n") + "hello", &["GET /x  hello"]),
        ("a length with zeros", get("content-LENGTH: 005\r\n") + "hello", &["GET /x  hello"]),
        ("an upgrade, ignored", get("Connection: Upgrade\r\nUpgrade: h2c\r\n"), &["GET /x  "]),
        (
            "framing named hop by hop",
            get("Connection: Content-Length\r\nContent-Length: 1\r\n") + "a",
            &["GET /x  a"],
        ),
        ("one chunk", chunked("5\r\nhello\r\n0\r\n\r\n"), &["GET /x  hello"]),
        ("chunks", chunked("1\r\na\r\n0002\r\nbc\r\n3\r\ndef\r\n0\r\n\r\n"), &["GET /x  abcdef"]),
        ("no chunk", chunked("000\r\n\r\n"), &["GET /x  "]),
        ("a size in both cases", chunked(&format!("aA\r\n{}\r\n0\r\n\r\n", "x".repeat(170))), &[&long]),
        ("data like framing", chunked("6\r\n\r\n0\r\n\r\r\n0\r\n\r\n"), &["GET /x  \\r\\n0\\r\\n\\r"]),
        ("extensions", chunked("5 ; a\t= b;c;d=\"e\\\";\" ;f\r\nhello\r\n0;x\r\n\r\n"), &["GET /x  hello"]),
        ("trailers", chunked("1\r\na\r\n0\r\nHost: b\r\nContent-Length: 9\r\nx:\r\n\r\n"), &["GET /x  a"]),
        (
            "pipelined",
            get("Content-Length: 2\r\n")
                + "ab"
                + &chunked("1\r\nc\r\n1\r\nd\r\n0\r\n\r\n")
                + "\r\n"
                + &get(""),
            &["GET /x  ab", "GET /x  cd", "GET /x  "],
        ),
        (
            "a head in a body",
            get("Content-Length: 22\r\n") + "GET /evil HTTP/1.1\r\n\r\n",
            &["GET /x  GET /evil HTTP/1.1\\r\\n\\r\\n"],
        ),
    ];
    for (name, bytes, expected) in rows {
        let trace = read_every_way(name, bytes.as_bytes());
        assert_eq!(trace.seen, *expected, "{name}");
        assert_eq!((trace.error, trace.left), (None, 0), "{name}");
    }
}

#[test]
fn lines_that_are_refused() {
    assert_refused(&[
        ("bare LF after the request line", "GET /x HTTP/1.1\nHost: a\r\n\r\n".into(), PeerError::BareLf),
        ("bare LF hides a length", get("A: b\nContent-Length: 5\r\n"), PeerError::BareLf),
        ("bare LF at the end", "GET /x HTTP/1.1\r\nHost: a\r\n\n".into(), PeerError::BareLf),
        ("bare LF first", "\nGET /x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::BareLf),
        ("bare CR", get("A: b\rc\r\n"), PeerError::BareCr),
        ("CR CR LF", get("A: b\r\r\n"), PeerError::BareCr),
        ("CR ends the head", "GET /x HTTP/1.1\r\nHost: a\r\n\rx".into(), PeerError::BareCr),
        ("NUL in a value", get("A: b\0c\r\n"), PeerError::ControlByte { byte: 0 }),
        ("DEL in a value", get("A: b\x7fc\r\n"), PeerError::ControlByte { byte: 0x7f }),
        ("control byte in the target", "GET /\x01 HTTP/1.1\r\n".into(), PeerError::ControlByte { byte: 1 }),
        ("TLS hello", "\x16\x03\x01".into(), PeerError::ControlByte { byte: 0x16 }),
        ("folded", get("A: b\r\n c\r\n"), PeerError::FoldedField),
        ("folded with a tab", get("A: b\r\n\tc\r\n"), PeerError::FoldedField),
        ("folded first", "GET /x HTTP/1.1\r\n Host: a\r\n\r\n".into(), PeerError::FoldedField),
        ("space before the colon", get("A : b\r\n"), PeerError::FieldName),
        ("tab before the colon", get("A\t: b\r\n"), PeerError::FieldName),
        ("no colon", get("A b\r\n"), PeerError::FieldName),
        ("empty name", get(": b\r\n"), PeerError::FieldName),
        ("delimiter in a name", get("A/b: c\r\n"), PeerError::FieldName),
    ]);
}

#[test]
fn fields_that_are_refused() {
    assert_refused(&[
        ("no Host", "GET /x HTTP/1.1\r\n\r\n".into(), PeerError::HostMissing),
        ("two Hosts", get("host: a\r\n"), PeerError::HostRepeated),
        ("two Hosts in 1.0", "GET /x HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n".into(), PeerError::HostRepeated),
        ("bad Host", "GET /x HTTP/1.1\r\nHost: a, b\r\n\r\n".into(), PeerError::Host),
        ("bad Host in 1.0", "GET /x HTTP/1.0\r\nHost: a/b\r\n\r\n".into(), PeerError::Host),
        ("two equal lengths", get("Content-Length: 5\r\ncontent-length: 5\r\n"), PeerError::LengthRepeated),
        ("a list of lengths", get("Content-Length: 5, 5\r\n"), PeerError::ContentLength),
        ("empty length", get("Content-Length:\r\n"), PeerError::ContentLength),
        ("signed length", get("Content-Length: +5\r\n"), PeerError::ContentLength),
        ("length in Latin-1", get("Content-Length: 5\u{a0}\r\n"), PeerError::ContentLength),
        (
            "length, then coding",
            get("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
            PeerError::LengthAndCoding,
        ),
        (
            "coding, then length",
            get("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
            PeerError::LengthAndCoding,
        ),
        (
            "two codings",
            get("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
            PeerError::TransferCodingRepeated,
        ),
        ("chunked twice", get("Transfer-Encoding: chunked, chunked\r\n"), PeerError::TransferCodingFraming),
        ("chunked not last", get("Transfer-Encoding: chunked, gzip\r\n"), PeerError::TransferCodingFraming),
        (
            "coding with an empty member",
            get("Transfer-Encoding: ,chunked\r\n"),
            PeerError::TransferCodingFraming,
        ),
        ("empty coding", get("Transfer-Encoding:\r\n"), PeerError::TransferCodingFraming),
        ("only gzip", get("Transfer-Encoding: gzip\r\n"), PeerError::TransferCodingFraming),
        ("chunked with NBSP", get("Transfer-Encoding: chunked\u{a0}\r\n"), PeerError::TransferCodingFraming),
        ("gzip, chunked", get("Transfer-Encoding: gzip, chunked\r\n"), PeerError::TransferCoding),
        (
            "chunked in 1.0",
            "POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".into(),
            PeerError::TransferCodingHttp10,
        ),
        ("unknown expectation", get("Expect: 100-continue, tea\r\n"), PeerError::Expectation),
        (
            "unknown expectation, again",
            get("Expect: 100-continue\r\nExpect: tea\r\n"),
            PeerError::Expectation,
        ),
    ]);
}

#[test]
fn request_lines_that_are_refused() {
    assert_refused(&[
        ("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\n".into(), PeerError::Version),
        ("HTTP/0.9", "GET /x HTTP/0.9\r\nHost: a\r\n\r\n".into(), PeerError::Version),
        ("HTTP/1.2", "GET /x HTTP/1.2\r\nHost: a\r\n\r\n".into(), PeerError::Version),
        ("other protocol", "GET /x RTSP/1.0\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("two-digit version", "GET /x HTTP/1.10\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("not HTTP, one line", "*1\r\n".into(), PeerError::RequestLine),
        ("no version", "GET /x\r\n\r\n".into(), PeerError::RequestLine),
        ("space in the target", "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("tab as separator", "GET\t/x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("two spaces", "GET  /x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("space first", " GET /x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("space last", "GET /x HTTP/1.1 \r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("delimiter in the method", "G(T /x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::RequestLine),
        ("relative target", "GET x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("asterisk for GET", "GET * HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("fragment", "GET /x#y HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("raw UTF-8", "GET /\u{3b4} HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("other scheme", "GET ftp://a/x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("user in the target", "GET http://u@a/x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("no authority", "GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Target),
        ("CONNECT", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n".into(), PeerError::Connect),
    ]);
}

#[test]
fn chunked_bodies_that_are_refused() {
    let rows = [
        ("no size", "\r\n", PeerError::ChunkSize),
        ("plus", "+5\r\nhello\r\n0\r\n\r\n", PeerError::ChunkSize),
        ("0x", "0x5\r\nhello\r\n0\r\n\r\n", PeerError::ChunkSize),
        ("underscore", "0_5\r\n", PeerError::ChunkSize),
        ("space first", " 5\r\n", PeerError::ChunkSize),
        ("17 digits", "00000000000000005\r\nhello\r\n0\r\n\r\n", PeerError::ChunkSize),
        ("bare LF after the size", "5\nhello\r\n0\r\n\r\n", PeerError::ChunkSize),
        ("CR CR after the size", "5\r\rhello", PeerError::ChunkSize),
        ("2^64 - 1", "ffffffffffffffff\r\n", PeerError::BodyTooLarge { limit: LIMITS.body_bytes_max }),
        ("space after the size", "5 \r\nhello\r\n0\r\n\r\n", PeerError::ChunkExtension),
        ("empty extension", "5;\r\nhello\r\n0\r\n\r\n", PeerError::ChunkExtension),
        ("extension without value", "5;a=\r\n", PeerError::ChunkExtension),
        ("open quote", "5;a=\"b\r\n", PeerError::ChunkExtension),
        ("LF in an extension", "5;a\nb\r\n", PeerError::ChunkExtension),
        ("CR in an extension", "5;a=b\rc\r\n", PeerError::ChunkSize),
        ("no CR after data", "5\r\nhello\n0\r\n\r\n", PeerError::ChunkEnd),
        ("no LF after data", "5\r\nhello\rx", PeerError::ChunkEnd),
        ("any two bytes after data", "5\r\nhelloXX0\r\n\r\n", PeerError::ChunkEnd),
        ("trailer without name", "0\r\n:b\r\n\r\n", PeerError::Trailer),
        ("trailer without colon", "0\r\na\r\n\r\n", PeerError::Trailer),
        ("trailer with a space before the colon", "0\r\na : b\r\n\r\n", PeerError::Trailer),
        ("trailer with NUL", "0\r\na: b\0\r\n\r\n", PeerError::Trailer),
        ("trailer with a bare LF", "0\r\na: b\n\r\n", PeerError::Trailer),
        ("folded trailer", "0\r\na: b\r\n c\r\n\r\n", PeerError::Trailer),
        ("bare LF at the end", "0\r\n\n", PeerError::Trailer),
        ("CR and another byte at the end", "0\r\n\rx", PeerError::Trailer),
    ];
    assert_refused(
        &rows.map(|(name, body, error)| (name, get("Transfer-Encoding: chunked\r\n") + body, error)),
    );
}

#[test]
fn incomplete_requests_wait_and_end_of_stream_tells() {
    for bytes in [
        "G",
        "GET /x HTTP/1.1",
        "GET /x HTTP/1.1\r",
        "GET /x HTTP/1.1\r\nHost: a\r\n",
        "GET /x HTTP/1.1\r\nHost: a\r\n\r",
        "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhell",
        "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r",
    ] {
        let trace = read_every_way(bytes, bytes.as_bytes());
        assert_eq!((trace.error, trace.seen.len()), (None, 0), "{bytes:?}");
        let mut connection = Connection::new(LIMITS, at_ms(0));
        while connection.poll_event(at_ms(0), &mut bytes.as_bytes().to_vec()).unwrap().is_some() {}
        let truncated = Err(Error::Peer(PeerError::Truncated));
        assert_eq!(connection.handle_eof(), truncated, "{bytes:?}");
        assert_eq!(connection.handle_eof(), truncated, "{bytes:?} again");
        let mut out = Vec::new();
        connection.send_error(PeerError::Truncated, DATE, &mut out);
        assert_eq!(out, b"", "{bytes:?}");
    }
    for bytes in ["", "\r", "\r\n", "\r\n\r\n"] {
        let mut connection = Connection::new(LIMITS, at_ms(0));
        assert_eq!(connection.poll_event(at_ms(0), &mut bytes.as_bytes().to_vec()), Ok(None));
        assert_eq!(connection.handle_eof(), Ok(()), "{bytes:?}");
    }
}

#[test]
fn end_of_stream_behind_pipelined_requests_answers_the_complete_ones() {
    let bytes = (get("") + &get("")).into_bytes();
    let whole = bytes.len();
    for cut in [whole / 2, whole - 1, whole] {
        let mut connection = Connection::new(LIMITS, at_ms(0));
        let mut buffer = bytes[..cut].to_vec();
        assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(Some(Event::Head)));
        assert!(matches!(connection.poll_event(at_ms(0), &mut buffer), Ok(Some(Event::Body { .. }))));
        assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(None));
        assert_eq!(connection.handle_eof(), Ok(()));
        let mut out = Vec::new();
        let consumed = answer(&mut connection, at_ms(0), 200, b"", &mut out).unwrap();
        buffer.drain(..consumed);
        let then = connection.poll_event(at_ms(0), &mut buffer);
        if cut == whole {
            assert_eq!(then, Ok(Some(Event::Head)));
        } else if buffer.is_empty() {
            assert_eq!(then, Ok(None));
        } else {
            assert_eq!(then, Err(Error::Peer(PeerError::Truncated)));
        }
    }
}

#[test]
fn header_values_are_found_without_case_in_order_and_trimmed() {
    let mut buffer = b"GET /x HTTP/1.1\r\nA: 1\r\nHost:\ta\r\na:  2 \t\r\nB:\r\nAa: \xff\r\n\r\n".to_vec();
    let mut connection = Connection::new(LIMITS, at_ms(0));
    assert!(connection.request(&buffer).is_none(), "no request yet");
    connection.poll_event(at_ms(0), &mut buffer).unwrap();
    let request = connection.request(&buffer).unwrap();
    let rows: [(&str, &[&[u8]]); 6] = [
        ("a", &[b"1", b"2"]),
        ("A", &[b"1", b"2"]),
        ("host", &[b"a"]),
        ("b", &[b""]),
        ("AA", &[b"\xff"]),
        ("c", &[]),
    ];
    for (name, expected) in rows {
        assert_eq!(request.header_values(name).collect::<Vec<_>>(), expected, "{name}");
    }
    assert!(connection.request(&buffer[..20]).is_some_and(|short| short.header_values("aa").count() == 0));
    assert!(connection.request(b"").is_none(), "another buffer");
}

#[test]
fn expect_continue_is_told_only_while_no_body_byte_is_there() {
    let head = get("Expect: 100-Continue\r\nContent-Length: 5\r\n");
    let http10 = head.replace("HTTP/1.1", "HTTP/1.0");
    let no_body = get("Expect: 100-continue\r\n");
    let empty = get("Expect: 100-continue\r\nContent-Length: 0\r\n");
    let rows: [(&str, String, bool); 5] = [
        ("head alone", head.clone(), true),
        ("head and a byte", head + "h", false),
        ("HTTP/1.0", http10, false),
        ("no body", no_body, false),
        ("empty body", empty, false),
    ];
    for (name, bytes, expected) in rows {
        let mut buffer = bytes.into_bytes();
        let mut connection = Connection::new(LIMITS, at_ms(0));
        assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(Some(Event::Head)), "{name}");
        let told = connection.poll_event(at_ms(0), &mut buffer) == Ok(Some(Event::ExpectContinue));
        assert_eq!(told, expected, "{name}");
        assert_ne!(
            connection.poll_event(at_ms(0), &mut buffer),
            Ok(Some(Event::ExpectContinue)),
            "{name}: once"
        );
    }
}

#[test]
fn the_first_chunk_stays_where_it_came_and_nothing_behind_the_message_moves() {
    let mut buffer =
        (get("Transfer-Encoding: chunked\r\n") + "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\nGET /next").into_bytes();
    let first = buffer.windows(3).position(|window| window == b"abc").unwrap();
    let mut connection = Connection::new(LIMITS, at_ms(0));
    connection.poll_event(at_ms(0), &mut buffer).unwrap();
    assert_eq!(
        connection.poll_event(at_ms(0), &mut buffer),
        Ok(Some(Event::Body { body: first..first + 5 }))
    );
    assert_eq!(&buffer[first..first + 5], b"abcde");
    let consumed = answer(&mut connection, at_ms(0), 200, b"", &mut Vec::new()).unwrap();
    assert_eq!(&buffer[consumed..], b"GET /next");
}

#[test]
fn a_shrunk_buffer_is_misuse_and_recoverable() {
    let mut buffer = get("").into_bytes();
    let end = buffer.len() - 2;
    let mut connection = Connection::new(LIMITS, at_ms(0));
    assert_eq!(connection.poll_event(at_ms(0), &mut buffer[..end]), Ok(None));
    let misuse = Err(Error::Misuse(Misuse::BufferShrank));
    assert_eq!(connection.poll_event(at_ms(0), &mut buffer[..end - 1]), misuse);
    assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(Some(Event::Head)));
}

#[test]
fn a_warm_connection_keeps_its_memory() {
    let request = get("A: b\r\nContent-Length: 5\r\n") + "hello";
    let mut connection = Connection::new(LIMITS, at_ms(0));
    let mut out = Vec::new();
    let mut homes = Vec::new();
    for _ in 0..3 {
        out.clear();
        let mut buffer = request.as_bytes().to_vec();
        while connection.poll_event(at_ms(0), &mut buffer).unwrap().is_some() {}
        answer(&mut connection, at_ms(0), 200, b"hello", &mut out).unwrap();
        homes.push((connection.head.fields.as_ptr(), connection.head.fields.capacity(), out.as_ptr()));
    }
    assert_eq!(homes[1], homes[0]);
    assert_eq!(homes[2], homes[0]);
}

// ---- Limits: one below, at, one above.

#[test]
fn limits_hold_to_the_byte() {
    let max = LIMITS.head_bytes_max as usize;
    let head_of = |bytes: usize| get(&format!("A: {}\r\n", "v".repeat(bytes - get("A: \r\n").len())));
    let line_of =
        |bytes: usize| format!("GET /{} HTTP/1.1\r\n", "a".repeat(bytes - "GET / HTTP/1.1\r\n".len()));
    let fields = |count: usize| get(&"a: b\r\n".repeat(count - 1));
    let method = |bytes: usize| format!("{} /x HTTP/1.1\r\nHost: a\r\n\r\n", "M".repeat(bytes));
    let body = |bytes: usize| get(&format!("Content-Length: {bytes}\r\n")) + &"b".repeat(bytes);
    let chunked = |rest: String| get("Transfer-Encoding: chunked\r\n") + &rest;
    let one_chunk = |bytes: usize| chunked(format!("{bytes:x}\r\n{}\r\n0\r\n\r\n", "b".repeat(bytes)));
    let two_chunks = |bytes: usize| {
        chunked(format!("1\r\nb\r\n{:x}\r\n{}\r\n0\r\n\r\n", bytes - 1, "b".repeat(bytes - 1)))
    };
    let size_line =
        |bytes: usize| chunked(format!("1;{}\r\nb\r\n0\r\n\r\n", "e".repeat(bytes - "1;\r\n".len())));
    let trailer =
        |bytes: usize| chunked(format!("0\r\na:{}\r\n\r\n", "v".repeat(bytes - "a:\r\n\r\n".len())));
    let trailers = |count: usize| chunked(format!("0\r\n{}\r\n", "a:\r\n".repeat(count)));
    let size_digits = |count: usize| chunked(format!("{:0>count$}\r\nb\r\n0\r\n\r\n", 1));
    let empty_lines = |count: usize| "\r\n".repeat(count) + &get("");
    let body_limit = PeerError::BodyTooLarge { limit: LIMITS.body_bytes_max };
    let body_max = LIMITS.body_bytes_max as usize;

    type Make<'f> = &'f dyn Fn(usize) -> String;
    let rows: &[(&str, Make<'_>, usize, PeerError)] = &[
        ("head", &head_of, max, PeerError::HeadTooLarge { limit: LIMITS.head_bytes_max }),
        ("fields", &fields, HEADER_COUNT_MAX, PeerError::TooManyFields),
        ("method", &method, METHOD_BYTES_MAX as usize, PeerError::MethodTooLong),
        ("empty lines", &empty_lines, EMPTY_LINES_MAX as usize, PeerError::EmptyLines),
        ("body by length", &body, body_max, body_limit),
        ("body in one chunk", &one_chunk, body_max, body_limit),
        ("body in two chunks", &two_chunks, body_max, body_limit),
        ("chunk-size digits", &size_digits, 16, PeerError::ChunkSize),
        ("chunk-size line", &size_line, CHUNK_LINE_BYTES_MAX as usize, PeerError::ChunkLineTooLong),
        ("trailer bytes", &trailer, TRAILER_BYTES_MAX as usize, PeerError::TrailerTooLarge),
        ("trailer fields", &trailers, HEADER_COUNT_MAX, PeerError::TrailerTooLarge),
    ];
    for (name, make, limit, error) in rows {
        for (amount, expected) in [(limit - 1, None), (*limit, None), (limit + 1, Some(*error))] {
            let bytes = make(amount);
            let trace = read_every_way(name, bytes.as_bytes());
            assert_eq!(trace.error, expected, "{name}: {amount}");
            assert_eq!(trace.seen.len(), usize::from(expected.is_none()), "{name}: {amount}");
        }
    }
    // The request line may fill the head but for its end; then the head is what is too long.
    let line_limit = PeerError::RequestLineTooLong { limit: LIMITS.head_bytes_max };
    let head_limit = PeerError::HeadTooLarge { limit: LIMITS.head_bytes_max };
    for (bytes, expected) in [(max - 1, head_limit), (max, head_limit), (max + 1, line_limit)] {
        let trace = read_every_way("line", (line_of(bytes) + "Host: a\r\n\r\n").as_bytes());
        assert_eq!(trace.error, Some(expected), "request line of {bytes}");
    }
}

#[test]
fn skipped_empty_lines_do_not_count_as_head() {
    let limits = Limits { head_bytes_max: u32::try_from(get("").len()).unwrap(), ..LIMITS };
    let bytes = "\r\n".to_owned() + &get("");
    assert_eq!(read(limits, &[bytes.as_bytes()]).seen.len(), 1);
    assert_eq!(read(limits, &[("\r\n".to_owned() + &get("a:\r\n")).as_bytes()]).seen.len(), 0);
}

#[test]
fn chunk_framing_is_bounded() {
    // Five bytes of framing around each chunk of one byte; three for the last chunk.
    let most = (CHUNK_FRAMING_BYTES_MAX as usize - 3) / 5;
    let limits = Limits { body_bytes_max: u32::MAX, ..LIMITS };
    for (chunks, expected) in [(most, None), (most + 1, Some(PeerError::ChunkFramingTooLarge))] {
        let bytes = get("Transfer-Encoding: chunked\r\n") + &"1\r\nb\r\n".repeat(chunks) + "0\r\n\r\n";
        let whole = read(limits, &[bytes.as_bytes()]);
        assert_eq!(whole.error, expected, "{chunks}");
        let pieces: Vec<&[u8]> = bytes.as_bytes().chunks(1).collect();
        assert_eq!(read(limits, &pieces), whole, "{chunks}, byte by byte");
    }
}

#[test]
fn a_length_over_the_limit_is_refused_by_the_head_alone() {
    for length in ["1001", "18446744073709551615", "18446744073709551616", "99999999999999999999999999"] {
        let bytes = get(&format!("Content-Length: {length}\r\n"));
        let trace = read_every_way(length, bytes.as_bytes());
        assert_eq!(trace.error, Some(PeerError::BodyTooLarge { limit: 1000 }), "{length}");
    }
}

#[test]
fn limits_out_of_range_are_clamped() {
    let limits = Limits { head_bytes_max: 0, ..LIMITS };
    let mut connection = Connection::new(limits, at_ms(0));
    assert_eq!(connection.poll_event(at_ms(0), &mut []), Ok(None));
    assert!(connection.poll_event(at_ms(0), &mut [b'G']).is_err());
    let limits = Limits { head_bytes_max: u32::MAX, ..LIMITS };
    assert_eq!(read(limits, &[get("").as_bytes()]).seen.len(), 1);
}

// ---- Deadlines.

#[test]
fn deadlines_follow_the_request() {
    let mut connection = Connection::new(LIMITS, at_ms(1));
    let mut buffer = b"\r\n".to_vec();
    assert_eq!(connection.poll_event(at_ms(5), &mut buffer), Ok(None));
    assert_eq!(connection.poll_timeout(), Some((at_ms(1 + 300), Deadline::Idle)), "an empty line is no head");
    buffer.push(b'\r');
    assert_eq!(connection.poll_event(at_ms(6), &mut buffer), Ok(None));
    assert_eq!(connection.poll_timeout(), Some((at_ms(1 + 300), Deadline::Idle)), "half of one neither");
    buffer.extend_from_slice(b"\nPOST /x HTTP/1.1\r\n");
    assert_eq!(connection.poll_event(at_ms(10), &mut buffer), Ok(None));
    assert_eq!(connection.poll_timeout(), Some((at_ms(10 + 100), Deadline::Head)));
    buffer.extend_from_slice(b"Host: a\r\n");
    assert_eq!(connection.poll_event(at_ms(50), &mut buffer), Ok(None));
    assert_eq!(
        connection.poll_timeout(),
        Some((at_ms(10 + 100), Deadline::Head)),
        "more bytes, no more time"
    );
    buffer.extend_from_slice(b"Content-Length: 2\r\n\r\n");
    assert_eq!(connection.poll_event(at_ms(60), &mut buffer), Ok(Some(Event::Head)));
    assert_eq!(connection.poll_event(at_ms(61), &mut buffer), Ok(None));
    assert_eq!(connection.poll_timeout(), Some((at_ms(60 + 200), Deadline::Body)));
    buffer.extend_from_slice(b"ab");
    assert!(matches!(connection.poll_event(at_ms(70), &mut buffer), Ok(Some(Event::Body { .. }))));
    assert_eq!(connection.poll_timeout(), None, "the answer is ours");
    assert_eq!(connection.handle_timeout(at_ms(1_000_000)), Ok(()));
    let consumed = answer(&mut connection, at_ms(80), 200, b"", &mut Vec::new()).unwrap();
    assert_eq!(connection.poll_timeout(), Some((at_ms(80 + 300), Deadline::Idle)));
    buffer.drain(..consumed);
    buffer.push(b'G');
    assert_eq!(connection.poll_event(at_ms(90), &mut buffer), Ok(None));
    assert_eq!(
        connection.poll_timeout(),
        Some((at_ms(90 + 100), Deadline::Head)),
        "the next head's own time"
    );
}

#[test]
fn timeouts_fire_at_their_time_and_are_latched() {
    let rows: [(&str, String, u64, PeerError, Option<u16>); 3] = [
        ("idle", String::new(), 300, PeerError::IdleTimeout, None),
        ("head", "GET /x".into(), 100, PeerError::HeadTimeout, Some(408)),
        ("body", get("Content-Length: 1\r\n"), 200, PeerError::BodyTimeout, Some(408)),
    ];
    for (name, bytes, after, error, status) in rows {
        let mut buffer = bytes.into_bytes();
        let mut connection = Connection::new(LIMITS, at_ms(0));
        while connection.poll_event(at_ms(0), &mut buffer).unwrap().is_some() {}
        assert_eq!(connection.handle_timeout(at_ms(after - 1)), Ok(()), "{name}: early");
        let latched = Error::Peer(error);
        assert_eq!(connection.handle_timeout(at_ms(after)), Err(latched), "{name}");
        assert_eq!(connection.poll_timeout(), None, "{name}");
        assert_eq!(connection.handle_timeout(at_ms(after)), Ok(()), "{name}: repeated");
        assert_eq!(connection.poll_event(at_ms(after), &mut buffer), Err(latched), "{name}");
        let mut out = Vec::new();
        connection.send_error(error, DATE, &mut out);
        assert_eq!(status_of(&out), status, "{name}");
        assert!(
            status.is_none() || String::from_utf8(out).unwrap().contains("00ms)"),
            "{name}: names the limit"
        );
    }
}

// ---- Writing.

#[test]
fn responses_to_the_byte() {
    let head = get("").replace("GET", "HEAD");
    let (length, chunked) = (Framing::Length(5), Framing::Chunked);
    let length_field = "Content-Length: 5\r\n";
    let chunked_field = "Transfer-Encoding: chunked\r\n";
    let chunks = "5\r\nhello\r\n0\r\n\r\n";
    let rows = [
        ("length", get(""), "200 OK", length, length_field, "hello"),
        ("chunked", get(""), "200 OK", chunked, chunked_field, chunks),
        ("HEAD, length", head.clone(), "200 OK", length, length_field, ""),
        ("HEAD, chunked", head, "200 OK", chunked, chunked_field, ""),
        ("304", get(""), "304 Not Modified", length, length_field, ""),
        ("204", get(""), "204 No Content", length, "", ""),
        ("204, chunked", get(""), "204 No Content", chunked, "", ""),
        ("no registered name", get(""), "599 ", length, length_field, "hello"),
    ];
    for (name, request, status, framing, fields, body) in rows {
        assert_response(name, &request, status, framing, (fields, body, true));
    }
}

#[test]
fn responses_say_whether_the_connection_goes_on() {
    let http11 = |connection: &str| get(&format!("Connection: {connection}\r\n"));
    let http10 = |connection: &str| format!("GET /x HTTP/1.0\r\nConnection: {connection}\r\n\r\n");
    let kept = ("Content-Length: 5\r\n", "hello", true);
    let told = ("Connection: keep-alive\r\nContent-Length: 5\r\n", "hello", true);
    let closed = ("Connection: close\r\nContent-Length: 5\r\n", "hello", false);
    let until_close = ("Connection: close\r\n", "hello", false);
    let (length, chunked) = (Framing::Length(5), Framing::Chunked);
    let rows = [
        ("close", http11("x, Close"), length, closed),
        ("close in another line", http11("keep-alive\r\nConnection: close"), length, closed),
        ("closed is another word", http11("closed"), length, kept),
        ("1.0", http10(""), length, closed),
        ("1.0 kept", http10("Keep-Alive"), length, told),
        ("1.0 kept and closed", http10("keep-alive, close"), length, closed),
        ("1.0 without a length", http10("keep-alive"), chunked, until_close),
    ];
    for (name, request, framing, expected) in rows {
        assert_response(name, &request, "200 OK", framing, expected);
    }
}

#[test]
fn a_field_that_cannot_be_written_appends_nothing() {
    let rows: [(&str, &[u8]); 11] = [
        ("", b"b"),
        ("a b", b"c"),
        ("a:", b"b"),
        ("a\r\nb", b"c"),
        ("\u{e4}", b"b"),
        ("a", b"b\r\nc: d"),
        ("a", b"b\n"),
        ("a", b"b\0"),
        ("content-length", b"5"),
        ("Connection", b"close"),
        ("DATE", b"now"),
    ];
    for (name, value) in rows {
        let mut connection = connection_owing(&get(""));
        let mut out = b"before".to_vec();
        let head = ResponseHead { status: 200, headers: &[("x", b"y"), (name, value)], date: DATE };
        let refused = connection.send_head(&head, Framing::Length(0), &mut out);
        assert_eq!(refused, Err(Error::Misuse(Misuse::BadField)), "{name:?}");
        assert_eq!(out, b"before", "{name:?}");
        answer(&mut connection, at_ms(0), 200, b"", &mut out).expect("the state is as it was");
    }
    for (status, fits) in [(199, false), (200, true), (599, true), (600, false), (100, false)] {
        let mut connection = connection_owing(&get(""));
        let head = ResponseHead { status, headers: &[], date: DATE };
        let sent = connection.send_head(&head, Framing::Length(0), &mut Vec::new());
        assert_eq!(sent, if fits { Ok(()) } else { Err(Error::Misuse(Misuse::BadStatus)) }, "{status}");
    }
}

#[test]
fn calls_out_of_order_are_misuse_and_change_nothing() {
    let head = ResponseHead { status: 200, headers: &[], date: DATE };
    let mut out = Vec::new();
    let mut connection = Connection::new(LIMITS, at_ms(0));
    let not_owed = Err(Error::Misuse(Misuse::ResponseNotOwed));
    let not_begun = Err(Error::Misuse(Misuse::ResponseNotBegun));
    assert_eq!(connection.send_head(&head, Framing::Chunked, &mut out), not_owed);
    assert_eq!(connection.send_continue(&mut out), not_owed);
    assert_eq!(connection.send_body(b"x", &mut out), not_begun);
    assert_eq!(connection.finish(at_ms(0), &mut out).map(drop), not_begun);

    let mut connection = connection_owing(&get(""));
    assert_eq!(connection.send_body(b"x", &mut out), not_begun);
    assert_eq!(connection.finish(at_ms(0), &mut out).map(drop), not_begun);
    assert_eq!(out, b"");
    connection.send_head(&head, Framing::Length(5), &mut out).unwrap();
    out.clear();
    assert_eq!(connection.send_head(&head, Framing::Length(5), &mut out), not_owed);
    assert_eq!(connection.send_continue(&mut out), not_owed);
    let wrong = Err(Error::Misuse(Misuse::WrongLength));
    connection.send_body(b"hell", &mut out).unwrap();
    assert_eq!(connection.send_body(b"o!", &mut out), wrong);
    assert_eq!(connection.finish(at_ms(0), &mut out).map(drop), wrong);
    connection.send_body(b"o", &mut out).unwrap();
    assert_eq!(out, b"hello");
    connection.finish(at_ms(0), &mut out).unwrap();
    assert_eq!(connection.finish(at_ms(0), &mut out).map(drop), not_begun);
}

#[test]
fn continue_is_interim() {
    let mut out = Vec::new();
    let mut connection = connection_owing(&get(""));
    connection.send_continue(&mut out).unwrap();
    connection.send_continue(&mut out).unwrap();
    assert_eq!(out, b"HTTP/1.1 100 Continue\r\n\r\n".repeat(2));
    out.clear();
    connection_owing("GET /x HTTP/1.0\r\n\r\n").send_continue(&mut out).unwrap();
    assert_eq!(out, b"", "HTTP/1.0 knows no interim answer");
}

#[test]
fn a_refusal_by_the_head_closes_unread() {
    for bytes in [get(""), get("Content-Length: 5\r\n"), get("Content-Length: 5\r\n") + "hello" + &get("")] {
        let mut buffer = bytes.into_bytes();
        let mut connection = Connection::new(LIMITS, at_ms(0));
        assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(Some(Event::Head)));
        let mut out = Vec::new();
        assert_eq!(answer(&mut connection, at_ms(0), 401, b"no", &mut out), None);
        assert!(out.windows(19).any(|window| window == b"Connection: close\r\n"));
        assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Ok(None));
        assert_eq!((connection.poll_timeout(), connection.handle_eof()), (None, Ok(())));
        assert!(connection.request(&buffer).is_none());
    }
}

#[test]
fn drain_closes_behind_the_response_under_way_and_says_so_on_the_next() {
    let mut out = Vec::new();
    let mut connection = connection_owing(&get(""));
    connection.close_after_response();
    assert_eq!(answer(&mut connection, at_ms(0), 200, b"", &mut out), None);
    assert!(out.windows(19).any(|window| window == b"Connection: close\r\n"));

    let mut connection = connection_owing(&get(""));
    let head = ResponseHead { status: 200, headers: &[], date: DATE };
    connection.send_head(&head, Framing::Chunked, &mut out).unwrap();
    connection.close_after_response();
    assert_eq!(connection.finish(at_ms(0), &mut out), Ok(Next::Close));
}

#[test]
fn errors_are_answered_once_by_an_openai_object() {
    let mut buffer = get("Content-Length: 1001\r\n").into_bytes();
    let mut connection = Connection::new(LIMITS, at_ms(0));
    let error = PeerError::BodyTooLarge { limit: 1000 };
    assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Err(Error::Peer(error)));
    let mut out = Vec::new();
    connection.send_error(error, DATE, &mut out);
    let body = r#"{"error":{"message":"the request body is too long (limit 1000 bytes)","type":"invalid_request_error","param":null,"code":null}}"#;
    let expected = format!(
        "HTTP/1.1 413 Content Too Large\r\nDate: {}\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\n\r\n{body}",
        core::str::from_utf8(DATE).unwrap(),
        body.len()
    );
    assert_eq!(String::from_utf8(out.split_off(0)).unwrap(), expected);
    connection.send_error(error, DATE, &mut out);
    assert_eq!(out, b"", "once");
    assert_eq!(connection.poll_event(at_ms(0), &mut buffer), Err(Error::Peer(error)), "latched");
    let head = ResponseHead { status: 200, headers: &[], date: DATE };
    assert_eq!(connection.send_head(&head, Framing::Chunked, &mut out), Err(Error::Peer(error)));
    assert_eq!(connection.send_body(b"", &mut out), Err(Error::Peer(error)));
    assert_eq!(connection.finish(at_ms(0), &mut out).map(drop), Err(Error::Peer(error)));
}

#[test]
fn errors_behind_the_beginning_of_a_response_are_not_written() {
    let mut connection = connection_owing(&get(""));
    let head = ResponseHead { status: 200, headers: &[], date: DATE };
    let mut out = Vec::new();
    connection.send_head(&head, Framing::Chunked, &mut out).unwrap();
    out.clear();
    connection.send_error(PeerError::BareLf, DATE, &mut out);
    assert_eq!(out, b"");
    assert_eq!(
        connection.send_body(b"x", &mut out),
        Err(Error::Peer(PeerError::BareLf)),
        "the connection is dead"
    );
}

#[test]
fn an_error_answer_to_head_has_no_body() {
    for bytes in ["HEAD /x HTTP/1.1\r\n\r\n", "HEAD /x HTTP/1.1\n", "\r\nHEAD /x HTTP/9.9\r\n\r\n", "HEAD "] {
        let mut connection = Connection::new(LIMITS, at_ms(0));
        let error = match connection.poll_event(at_ms(0), &mut bytes.as_bytes().to_vec()) {
            Err(Error::Peer(error)) => error,
            waits => {
                assert_eq!(waits, Ok(None), "{bytes:?}");
                connection.handle_timeout(at_ms(100)).unwrap_err();
                PeerError::HeadTimeout
            }
        };
        let mut out = Vec::new();
        connection.send_error(error, DATE, &mut out);
        assert!(out.ends_with(b"\r\n\r\n"), "{bytes:?}");
    }
}

#[test]
fn every_error_has_its_status_and_a_message_that_is_plain_json_text() {
    let limit = 7;
    let rows = [
        (PeerError::BareCr, Some(400)),
        (PeerError::BareLf, Some(400)),
        (PeerError::BodyTimeout, Some(408)),
        (PeerError::BodyTooLarge { limit }, Some(413)),
        (PeerError::ChunkEnd, Some(400)),
        (PeerError::ChunkExtension, Some(400)),
        (PeerError::ChunkFramingTooLarge, Some(413)),
        (PeerError::ChunkLineTooLong, Some(400)),
        (PeerError::ChunkSize, Some(400)),
        (PeerError::Connect, Some(501)),
        (PeerError::ContentLength, Some(400)),
        (PeerError::ControlByte { byte: 0x1f }, Some(400)),
        (PeerError::EmptyLines, Some(400)),
        (PeerError::Expectation, Some(417)),
        (PeerError::FieldName, Some(400)),
        (PeerError::FieldValue, Some(400)),
        (PeerError::FoldedField, Some(400)),
        (PeerError::HeadTimeout, Some(408)),
        (PeerError::HeadTooLarge { limit }, Some(431)),
        (PeerError::Host, Some(400)),
        (PeerError::HostMissing, Some(400)),
        (PeerError::HostRepeated, Some(400)),
        (PeerError::IdleTimeout, None),
        (PeerError::LengthAndCoding, Some(400)),
        (PeerError::LengthRepeated, Some(400)),
        (PeerError::MethodTooLong, Some(501)),
        (PeerError::RequestLine, Some(400)),
        (PeerError::RequestLineTooLong { limit }, Some(414)),
        (PeerError::Target, Some(400)),
        (PeerError::TooManyFields, Some(431)),
        (PeerError::Trailer, Some(400)),
        (PeerError::TrailerTooLarge, Some(431)),
        (PeerError::TransferCoding, Some(501)),
        (PeerError::TransferCodingFraming, Some(400)),
        (PeerError::TransferCodingHttp10, Some(400)),
        (PeerError::TransferCodingRepeated, Some(400)),
        (PeerError::Truncated, None),
        (PeerError::Version, Some(505)),
    ];
    for (error, status) in rows {
        let message = error.to_string();
        assert_eq!(error.status(), status, "{message}");
        assert!(message.len() > 10 && !message.contains(['"', '\\']) && !message.contains(char::is_control));
    }
    assert_eq!(
        PeerError::ControlByte { byte: 0x1f }.to_string(),
        "the request head has a control byte (0x1f)"
    );
    assert_eq!(PeerError::HeadTooLarge { limit }.to_string(), "the request head is too long (limit 7 bytes)");
    assert_eq!(PeerError::TooManyFields.to_string(), "too many header fields (limit 64 fields)");
}

// ---- Helpers.

const DATE: &[u8; 29] = b"Tue, 01 Dec 2026 12:00:00 GMT";

/// Small enough that rows can cross them.
const LIMITS: Limits = Limits {
    head_bytes_max: 700,
    body_bytes_max: 1000,
    head_timeout: Duration::from_millis(100),
    body_timeout: Duration::from_millis(200),
    idle_timeout: Duration::from_millis(300),
};

/// What a stream came to.
#[derive(Debug, PartialEq, Eq)]
struct Trace {
    /// Method, path, query and escaped body of each request.
    seen: Vec<String>,
    error: Option<PeerError>,
    /// Bytes that no finished request consumed.
    left: usize,
    answers: Vec<u8>,
}

/// A GET with further header lines; a body may follow.
fn get(lines: &str) -> String {
    format!("GET /x HTTP/1.1\r\nHost: a\r\n{lines}\r\n")
}

fn at_ms(ms: u64) -> MonoNs {
    MonoNs::from_raw(ms * 1_000_000)
}

/// Feeds `pieces` as they come and answers every request at once.
fn read(limits: Limits, pieces: &[&[u8]]) -> Trace {
    let mut connection = Connection::new(limits, at_ms(0));
    let mut trace = Trace { seen: vec![], error: None, left: 0, answers: vec![] };
    let mut buffer = Vec::new();
    for piece in pieces {
        buffer.extend_from_slice(piece);
        if let Err(error) = read_more(&mut connection, &mut buffer, &mut trace) {
            connection.send_error(error, DATE, &mut trace.answers);
            trace.error = Some(error);
            break;
        }
    }
    trace.left = if trace.error.is_some() { 0 } else { buffer.len() };
    trace
}

fn read_more(connection: &mut Connection, buffer: &mut Vec<u8>, trace: &mut Trace) -> Result<(), PeerError> {
    loop {
        match connection.poll_event(at_ms(0), buffer) {
            Ok(Some(Event::Head | Event::ExpectContinue)) => {}
            Ok(Some(Event::Body { body })) => {
                let request = connection.request(buffer).unwrap();
                let RequestHead { method, path, query, .. } = request;
                trace.seen.push(format!("{method} {path} {query} {}", buffer[body].escape_ascii()));
                let Some(consumed) = answer(connection, at_ms(0), 200, b"", &mut trace.answers) else {
                    buffer.clear();
                    return Ok(());
                };
                buffer.drain(..consumed);
            }
            Ok(None) => return Ok(()),
            Err(Error::Peer(error)) => return Err(error),
            Err(Error::Misuse(misuse)) => panic!("{misuse}"),
        }
    }
}

/// Reads `bytes` whole, byte by byte, cut in two at each position, and with bytes behind it; all must agree.
fn read_every_way(name: &str, bytes: &[u8]) -> Trace {
    let whole = read(LIMITS, &[bytes]);
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(read(LIMITS, &single), whole, "{name}: byte by byte");
    // Every cut, but for the rows that are about a limit of kilobytes: there some, and those around the end.
    let step = 1 + bytes.len() / 1500 * 100;
    for cut in (0..bytes.len()).step_by(step).chain(bytes.len().saturating_sub(8)..=bytes.len()) {
        let (first, second) = bytes.split_at(cut);
        assert_eq!(read(LIMITS, &[first, second]), whole, "{name}: cut at {cut}");
    }
    let complete = !whole.seen.is_empty() && whole.left == 0 || whole.error.is_some();
    if complete {
        let more = read(LIMITS, &[&[bytes, b"x"].concat()]);
        assert_eq!((&more.seen, more.error), (&whole.seen, whole.error), "{name}: with a byte behind");
    }
    whole
}

fn assert_refused(rows: &[(&str, String, PeerError)]) {
    for (name, bytes, expected) in rows {
        let trace = read_every_way(name, bytes.as_bytes());
        assert_eq!((trace.error, trace.seen.len()), (Some(*expected), 0), "{name}");
    }
}

/// Answers `request` with `hello`; `expected` is the encoder's fields, the body, and whether the connection goes on.
fn assert_response(
    name: &str,
    request: &str,
    status: &str,
    framing: Framing,
    (fields, body, kept): (&str, &str, bool),
) {
    let mut connection = connection_owing(request);
    let mut out = Vec::new();
    let code = status[..3].parse().unwrap();
    let head = ResponseHead { status: code, headers: &[("X-A", b"b\xff c")], date: DATE };
    connection.send_head(&head, framing, &mut out).unwrap();
    connection.send_body(b"", &mut out).unwrap();
    connection.send_body(b"hello", &mut out).unwrap();
    let next = connection.finish(at_ms(0), &mut out).unwrap();
    let date = core::str::from_utf8(DATE).unwrap();
    let start = format!("HTTP/1.1 {status}\r\nDate: {date}\r\n{fields}X-A: b");
    let expected = [start.as_bytes(), b"\xff c\r\n\r\n", body.as_bytes()].concat();
    assert_eq!(out.escape_ascii().to_string(), expected.escape_ascii().to_string(), "{name}");
    let expected = if kept { Next::KeepAlive { consumed: request.len() } } else { Next::Close };
    assert_eq!(next, expected, "{name}");
}

fn connection_owing(request: &str) -> Connection {
    let mut connection = Connection::new(LIMITS, at_ms(0));
    let mut buffer = request.as_bytes().to_vec();
    while connection.poll_event(at_ms(0), &mut buffer).unwrap().is_some() {}
    connection
}

/// Answers with a length; returns the bytes to drop, or `None` to close.
fn answer(
    connection: &mut Connection,
    now: MonoNs,
    status: u16,
    body: &[u8],
    out: &mut Vec<u8>,
) -> Option<usize> {
    let head = ResponseHead { status, headers: &[], date: DATE };
    connection.send_head(&head, Framing::Length(body.len() as u64), out).unwrap();
    connection.send_body(body, out).unwrap();
    match connection.finish(now, out).unwrap() {
        Next::Close => None,
        Next::KeepAlive { consumed } => Some(consumed),
    }
}

fn status_of(out: &[u8]) -> Option<u16> {
    core::str::from_utf8(out.get(9..12)?).ok()?.parse().ok()
}

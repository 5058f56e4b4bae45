//! Server-sent events (WHATWG HTML §9.2): what a stream's answer is made of, and the parser for a peer's.

mod parser;

use alloc::vec::Vec;
use core::fmt;

pub use self::parser::{End, Event, EventTooLarge, Item, Parser};
use crate::headers::HeaderSet;
use crate::metrics::text::{write_json_string, write_number};

/// Data of the last event of an OpenAI stream. Data like any other to [`Parser`]: the reader compares.
pub const DONE: &str = "[DONE]";
/// Name of the metrics event (UF 1.1).
pub const METRICS_EVENT: &str = "trtllm.perf_metrics";

/// Appends an event of type `message`. A line end within `data` (CR, LF or both) begins another `data:` line, so that
/// the reader gets a line feed in its place.
pub fn write_data(data: &[u8], out: &mut Vec<u8>) {
    write_lines(b"data: ", data, out);
    out.push(b'\n');
}

/// Appends an event of type `name`.
///
/// # Errors
/// [`InvalidName`] if `name` holds a line end: it could begin another field. Nothing is appended then.
pub fn write_event(name: &str, data: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidName> {
    if name.bytes().any(is_line_end) {
        return Err(InvalidName);
    }
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    write_data(data, out);
    Ok(())
}

/// Appends `data: [DONE]`.
pub fn write_done(out: &mut Vec<u8>) {
    write_data(DONE.as_bytes(), out);
}

/// Appends a comment, which readers skip: `: text`, or `:` alone for an empty one.
pub fn write_comment(text: &str, out: &mut Vec<u8>) {
    write_lines(if text.is_empty() { b":" } else { b": " }, text.as_bytes(), out);
    out.push(b'\n');
}

/// Appends a stream's end as one piece: the final chunk, `[DONE]`, and the metrics event if there is something to tell.
pub fn write_end(final_chunk: &[u8], metrics: Option<&MetricsEvent<'_>>, out: &mut Vec<u8>) {
    write_data(final_chunk, out);
    write_done(out);
    if let Some(metrics) = metrics {
        metrics.write(out);
    }
}

/// The metrics event of a stream. The header set is the proof of a grant: nothing else fills one.
///
/// Beside the header strings the event has the members of a chunk without choices, so that strict clients accept it.
#[derive(Clone, Copy, Debug)]
pub struct MetricsEvent<'a> {
    /// What to tell, limited to the event's budget. Empty: no event.
    pub headers: &'a HeaderSet,
    /// `id` of the stream's chunks.
    pub id: &'a str,
    /// `object` of the stream's chunks.
    pub object: &'a str,
    /// `created` of the stream's chunks, in seconds since the UNIX epoch.
    pub created: u64,
    /// `model` of the stream's chunks.
    pub model: &'a str,
}

impl MetricsEvent<'_> {
    /// Appends the event, or nothing if there is nothing to tell (UF 1.6).
    pub fn write(&self, out: &mut Vec<u8>) {
        if self.headers.is_empty() {
            return;
        }
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(METRICS_EVENT.as_bytes());
        out.extend_from_slice(b"\ndata: {");
        for (name, value) in self.headers.iter() {
            write_json_string(name, out);
            out.extend_from_slice(b":\"");
            // Header values are tokens, digits and delimiters: nothing to escape.
            out.extend_from_slice(value);
            out.extend_from_slice(b"\",");
        }
        out.extend_from_slice(b"\"id\":");
        write_json_string(self.id, out);
        out.extend_from_slice(b",\"object\":");
        write_json_string(self.object, out);
        out.extend_from_slice(b",\"created\":");
        write_number(self.created, out);
        out.extend_from_slice(b",\"model\":");
        write_json_string(self.model, out);
        out.extend_from_slice(b",\"choices\":[]}\n\n");
    }
}

/// An event's name holds a line end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidName;

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the event's name holds a line end")
    }
}

impl core::error::Error for InvalidName {}

const fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n')
}

/// Appends each line of `text` behind `field`, ended by a line feed.
fn write_lines(field: &[u8], text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    loop {
        out.extend_from_slice(field);
        let end = rest.iter().position(|&byte| is_line_end(byte));
        out.extend_from_slice(&rest[..end.unwrap_or(rest.len())]);
        out.push(b'\n');
        rest = match end.map(|end| &rest[end..]) {
            None => return,
            Some([b'\r', b'\n', next @ ..] | [_, next @ ..]) => next,
            Some([]) => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{Policy, Response, ResponseGrant, Tokens, decide};
    use crate::headers::{CLOCK_SYNC, WriteOptions};
    use crate::metrics::{Record, Times};
    use crate::time::ReportNs;
    use alloc::string::String;
    use alloc::vec;

    fn text(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = vec![];
        write(&mut out);
        String::from_utf8(out).expect("UTF-8")
    }

    fn grant() -> ResponseGrant {
        let policy = Policy { response: Response::AllowOnRequest, ..Policy::default() };
        decide(policy, [b"1".as_slice()].into_iter()).response.expect("asked")
    }

    fn headers(budget: u32) -> HeaderSet {
        let at = |ns| Some(ReportNs::from_raw(ns));
        let times = Times { arrival: at(1_000_000_000), first_token: at(1_020_000_000), ..Times::default() };
        let mut headers = HeaderSet::new(CLOCK_SYNC);
        let options = WriteOptions { budget, tokens: Tokens::Upstream, clock: None };
        headers.write_records(grant(), &[Record { times, ..Record::default() }], &options);
        headers
    }

    #[test]
    fn no_line_end_reaches_the_reader_as_a_field() {
        let rows = [
            ("", "data: \n\n"),
            ("{}", "data: {}\n\n"),
            ("a\nb", "data: a\ndata: b\n\n"),
            ("a\rb", "data: a\ndata: b\n\n"),
            ("a\r\nb", "data: a\ndata: b\n\n"),
            ("a\n\rb", "data: a\ndata: \ndata: b\n\n"),
            ("a\n", "data: a\ndata: \n\n"),
        ];
        for (data, expected) in rows {
            assert_eq!(text(|out| write_data(data.as_bytes(), out)), expected, "{data:?}");
        }
        assert_eq!(text(|out| write_comment("", out)), ":\n\n");
        assert_eq!(text(|out| write_comment("keep-alive", out)), ": keep-alive\n\n");
        assert_eq!(text(|out| write_comment("a\ndata: b", out)), ": a\n: data: b\n\n");
        assert_eq!(
            text(|out| write_event("error", b"{}", out).expect("valid")),
            "event: error\ndata: {}\n\n"
        );
        for name in ["a\nb", "a\r", "\n"] {
            assert_eq!(
                text(|out| assert_eq!(write_event(name, b"x", out), Err(InvalidName))),
                "",
                "{name:?}"
            );
        }
    }

    #[test]
    fn the_end_is_one_piece() {
        let headers = headers(81_920);
        let event = MetricsEvent {
            headers: &headers,
            id: "chatcmpl-1",
            object: "chat.completion.chunk",
            created: 1_700_000_000,
            model: "a \"b\"\né",
        };
        let without = "data: {\"x\":1}\n\ndata: [DONE]\n\n";
        assert_eq!(text(|out| write_end(b"{\"x\":1}", None, out)), without);
        let with = text(|out| write_end(b"{\"x\":1}", Some(&event), out));
        let expected = "event: trtllm.perf_metrics\ndata: {\"Server-Timing\":\"server_ttft;dur=20.000000\",\
                        \"X-TRTLLM-Start-End-Time\":\"server-start;ts=1.000000000\",\"id\":\"chatcmpl-1\",\
                        \"object\":\"chat.completion.chunk\",\"created\":1700000000,\
                        \"model\":\"a \\\"b\\\"\\n\\u00e9\",\"choices\":[]}\n\n";
        assert_eq!(with.strip_prefix(without), Some(expected));
        assert!(!with.contains("\"usage\"") && !with.contains("\"error\""));
    }

    #[test]
    fn a_cut_event_says_so_and_an_empty_one_is_not_sent() {
        let event = |headers: &HeaderSet| {
            let event = MetricsEvent { headers, id: "", object: "", created: 0, model: "" };
            text(|out| event.write(out))
        };
        assert!(
            event(&headers(95))
                .contains("{\"X-TRTLLM-Metrics-Truncated\":\"record=1, step=0, ctx-chunk=0\",")
        );
        assert_eq!(event(&headers(10)), "");
    }
}

//! Fuzz targets (feature `fuzzing`): one function each, and in it the property that must hold for any input.
//!
//! A target decodes its bytes into a case; every sequence of bytes is one. It panics where the property does not hold.
//! The `fuzz` folder drives them, and the committed corpus is replayed by the tests.

mod http1;
mod input;
mod json;
mod sched;
mod sse;

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::slice;
use core::time::Duration;

use self::input::Input;
use crate::gate::{self, Grants, Policy, Tokens, decide};
use crate::headers::server_timing::{InvalidMetric, read_metrics, write_metric};
use crate::headers::{CLOCK_SYNC, ClockStamp, HeaderSet, WriteOptions, read_phase};
use crate::http1::Limits;
use crate::jsonl::{Extras, write_line};
use crate::metrics::{Mark, Record, Status, Steps};
use crate::sse::{InvalidName, write_comment, write_data, write_event};
use crate::time::ClockOffset;

/// Any split of what a peer sends gives the same requests, answers, error and deadline as the whole, and a message
/// under way is never longer than the limits allow.
///
/// Input: limits, whether the peer half-closes at the end, cuts, stream.
///
/// # Panics
/// If that does not hold; likewise all others here.
pub fn http1_split(data: &[u8]) {
    let mut input = Input::new(data);
    let limits = Limits {
        head_bytes_max: *input.choose(&[64, 256, 1 << 10, 16 << 10]),
        body_bytes_max: *input.choose(&[0, 16, 256, 1 << 20]),
        ..Limits::default()
    };
    let half_closes = input.flag();
    let (stream, pieces) = input.split();
    let whole = http1::serve(limits, slice::from_ref(&stream), half_closes);
    assert_eq!(http1::serve(limits, &pieces, half_closes), whole);
}

/// Any split of an event stream gives the same items and the same end as the whole, and no item is longer than the
/// limit. Within the limit a parser of the whole text, which is as plain as the standard, reads the same.
///
/// Input: limit, cuts, stream.
pub fn sse_split(data: &[u8]) {
    let mut input = Input::new(data);
    let limit = if input.flag() { u32::from(input.byte()) } else { u32::MAX };
    let (stream, pieces) = input.split();
    let whole = sse::read_pieces(limit, slice::from_ref(&stream));
    assert_eq!(sse::read_pieces(limit, &pieces), whole);
    assert!(whole.items.iter().all(|item| item.len() <= limit as usize), "{whole:?}");
    if whole.end.is_ok() {
        let (items, last_event_id, retry_ms) = sse::read_whole(stream);
        assert_eq!((whole.items, whole.last_event_id, whole.retry_ms), (items, last_event_id, retry_ms));
    }
}

/// What the writer writes, the parser reads: each payload is one event with its line ends as line feeds, each comment
/// as many comments as it has lines, and a refused name has left nothing.
///
/// Input: events and comments.
pub fn sse_roundtrip(data: &[u8]) {
    let mut input = Input::new(data);
    let (mut stream, mut expected) = (Vec::new(), Vec::new());
    while !input.is_empty() {
        match input.below(3) {
            0 => {
                let payload = input.bytes();
                write_data(payload, &mut stream);
                expected.push(sse::Owned::event(b"", payload));
            }
            1 => {
                let (name, payload) = (input.text(), input.bytes());
                let before = stream.len();
                match write_event(&name, payload, &mut stream) {
                    Ok(()) => expected.push(sse::Owned::event(name.as_bytes(), payload)),
                    Err(InvalidName) => {
                        assert!(name.contains(['\r', '\n']), "{name:?} is refused");
                        assert_eq!(stream.len(), before);
                    }
                }
            }
            _ => {
                let text = input.text();
                write_comment(&text, &mut stream);
                expected.extend(sse::Owned::comments(&text));
            }
        }
    }
    let read = sse::read_pieces(u32::MAX, &[&stream]);
    assert_eq!(read.items, expected);
    assert_eq!(read.end, Ok(crate::sse::End::BetweenEvents));
}

/// A record in headers reads back as it was, but for what headers do not carry; and a budget is kept.
///
/// Input: record, tokens, clock stamp, budget.
pub fn headers_roundtrip(data: &[u8]) {
    let mut input = Input::new(data);
    let written = Record { steps: input.spans(), x_request_id: None, ..input.record() };
    let grant = grants().response.expect("asked for");
    let mut set = HeaderSet::new(CLOCK_SYNC);

    let mut options = WriteOptions { budget: u32::MAX, tokens: Tokens::Extended, clock: None };
    set.write_records(grant, slice::from_ref(&written), &options);
    let read = read_phase(set.iter(), written.phase, ClockOffset::default());
    if written.status == Status::Complete {
        let nothing = || Record {
            phase: written.phase,
            steps: Steps::Spans { steps: vec![], chunks: vec![] },
            ..Record::default()
        };
        assert_eq!(read.unwrap_or_else(nothing), readable(written.clone()));
    } else {
        assert!(set.is_empty(), "{set:?}");
    }

    let both = [written.clone(), written];
    options.tokens = *input.choose(&[Tokens::Extended, Tokens::Upstream]);
    let clock = input.maybe(|input| (input.moment(), input.moment()));
    options.clock = clock.map(|(receive, transmit)| ClockStamp { receive, transmit });
    set.write_records(grant, &both, &options);
    // A little less than all, or anything.
    let less = budget_bytes(&set).saturating_sub(input.byte().into());
    let budget = if input.flag() { input.number() } else { less };
    options.budget = u32::try_from(budget).unwrap_or(u32::MAX);
    set.write_records(grant, &both, &options);
    assert!(
        budget_bytes(&set) <= options.budget.into(),
        "{} bytes of {}",
        budget_bytes(&set),
        options.budget
    );
    if let Some((_, value)) = set.iter().find(|(name, _)| *name == CLOCK_SYNC) {
        assert_eq!(ClockStamp::read_value(value), options.clock);
    }
}

/// No field value stops the reader, whose metrics are tokens from that value and numbers that are finite; and a list
/// that the writer made reads back whole.
///
/// Input: read as a value, then as metrics to write.
pub fn server_timing(data: &[u8]) {
    for metric in read_metrics(data) {
        assert!(
            data.windows(metric.name.len()).any(|window| window == metric.name) && !metric.name.is_empty()
        );
        assert!(metric.dur().is_finite());
        assert!(metric.desc().len() <= data.len());
    }
    let mut input = Input::new(data);
    let (mut line, mut written) = (Vec::new(), Vec::new());
    while !input.is_empty() {
        let (name, ns, desc) = (input.text(), input.maybe(Input::number), input.text());
        let before = line.len();
        match write_metric(&name, ns.map(Duration::from_nanos), &desc, &mut line) {
            Ok(()) => {
                assert!(is_token(&name) && !has_control(&desc), "{name:?} or {desc:?} is let through");
                written.push((name, ns.map(milliseconds), desc));
            }
            Err(error) => {
                assert_eq!(line.len(), before);
                match error {
                    InvalidMetric::Description => assert!(has_control(&desc)),
                    InvalidMetric::Name => assert!(!is_token(&name)),
                }
            }
        }
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let read: Vec<_> = read_metrics(&line)
        .map(|metric| (text(metric.name), metric.param("dur").map(|dur| text(&dur)), text(&metric.desc())))
        .collect();
    assert_eq!(read, written, "{}", text(&line));
}

/// A record becomes one line: ASCII, one line feed, at its end, and before it one JSON object that says what was put in.
///
/// Input: record, count of dropped records.
pub fn jsonl_line(data: &[u8]) {
    let mut input = Input::new(data);
    let record = Record { steps: input.trace(), ..input.record() };
    let extras = Extras { dropped_before: input.number() };
    let mut line = Vec::new();
    write_line(grants().file.expect("switched on"), &record, extras, &mut line);

    let Some((b'\n', object)) = line.split_last() else { panic!("no line feed at the end") };
    assert!(object.iter().all(|byte| matches!(byte, b' '..=b'~')), "a byte that is not printable ASCII");
    let members = json::read_object(object).expect("valid JSON");
    let member = |key: &str| {
        let mut found = members.iter().filter(|(name, _)| name == key).map(|(_, value)| value);
        (found.next(), found.next())
    };
    let is = |key, value: Option<json::Value>| assert_eq!(member(key), (value.as_ref(), None), "{key}");
    let number = |n: u64| json::Value::Other(format!("{n}").into_bytes());
    is("request_id", Some(record.request_id.map_or_else(|| json::Value::Other(b"null".into()), number)));
    is("ctx_request_id", record.ctx_request_id.map(number));
    is("disagg_request_id", record.disagg_request_id.map(number));
    is("status", Some(json::Value::Text(record.status.name().into())));
    is("x_request_id", record.x_request_id.clone().map(json::Value::Text));
    is("dropped_before", Some(extras.dropped_before).filter(|&n| n > 0).map(number));
}

/// Whatever is admitted, cancelled and answered: every block is free or held by one sequence, a plan keeps its bounds,
/// and once nothing more is admitted all sequences end within the steps that their tokens need.
///
/// Input: shape, calls.
pub fn sched_ops(data: &[u8]) {
    let mut input = Input::new(data);
    let mut model = sched::Model::new(&mut input);
    while !input.is_empty() {
        model.call(&mut input);
    }
    model.drain();
}

fn grants() -> Grants {
    let policy = Policy { response: gate::Response::AllowOnRequest, file: gate::File::On };
    decide(policy, [b"1".as_slice()].into_iter())
}

/// Returns what a set counts in a budget (UF 1.4).
fn budget_bytes(set: &HeaderSet) -> u64 {
    set.iter().map(|(name, value)| (name.len() + value.len() + 4) as u64).sum()
}

/// Drops what headers do not tell of a record: a first step or first token that cannot be told as a duration.
fn readable(mut record: Record) -> Record {
    for mark in [Mark::FirstScheduled, Mark::FirstToken] {
        let arrival = record.times.arrival;
        record.times[mark] =
            record.times[mark].filter(|_| arrival.is_some() && record.times[mark] >= arrival);
    }
    record
}

fn milliseconds(ns: u64) -> String {
    format!("{}.{:06}", ns / 1_000_000, ns % 1_000_000)
}

fn has_control(text: &str) -> bool {
    text.contains(|c: char| c.is_ascii_control())
}

fn is_token(name: &str) -> bool {
    let delimiter = |c| "\"(),/:;<=>?@[\\]{}".contains(c);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_graphic() && !delimiter(c))
}

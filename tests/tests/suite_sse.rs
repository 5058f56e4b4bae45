//! The server-sent event suite: streams to events in every split, and events to streams.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use uring_serve_core::limits::SSE_EVENT_BYTES_MAX;
use uring_serve_core::sse::{Item, Parser, write_data, write_event};

/// Cases that are read otherwise, with the reason. All others must hold.
const PINNED: [(&str, &str); 0] = [];

#[test]
fn every_case_holds() {
    let suite: Suite = serde_json::from_str(include_str!("../suites/sse.json")).expect("valid suite");
    assert_eq!(suite.cases.len(), suite.count);
    let mut counts = BTreeMap::<&str, usize>::new();
    let mut failed = Vec::new();
    let mut splits = 0;
    for case in &suite.cases {
        *counts.entry(&case.level).or_default() += 1;
        let result = match &case.encode {
            Some(encode) => check_writer(case, encode, &mut splits),
            None => check_parser(case, &mut splits),
        };
        let pinned = PINNED.iter().any(|(id, _)| *id == case.id);
        match result {
            Ok(()) if pinned => failed.push(format!("{}: pinned, but it holds", case.id)),
            Err(why) if !pinned => failed.push(format!("{} {} ({}): {why}", case.id, case.name, case.level)),
            Ok(()) | Err(_) => {}
        }
    }
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), suite.count, failed.join("\n"));
    tell(&counts, splits);
}

#[expect(clippy::print_stderr, reason = "a suite prints its counts")]
fn tell(counts: &BTreeMap<&str, usize>, splits: usize) {
    eprintln!("sse suite: {counts:?}, {} pinned, {splits} splits", PINNED.len());
}

fn check_writer(case: &Case, encode: &Encode, splits: &mut usize) -> Result<(), String> {
    let mut stream = Vec::new();
    let mut refused = false;
    match &encode.event {
        Some(name) => refused = write_event(name, encode.data.as_bytes(), &mut stream).is_err(),
        None => write_data(encode.data.as_bytes(), &mut stream),
    }
    if case.expect.events.iter().any(|event| event.kind == "REJECT") {
        return if refused && stream.is_empty() { Ok(()) } else { Err("was written".into()) };
    }
    check_splits(case, &stream, splits)
}

fn check_parser(case: &Case, splits: &mut usize) -> Result<(), String> {
    let decode = |text: &str| STANDARD.decode(text).expect("base64");
    let stream = match &case.stream_b64 {
        Some(text) => decode(text),
        None => case.stream_parts.iter().flat_map(|part| decode(&part.b64).repeat(part.repeat)).collect(),
    };
    assert_eq!(Some(stream.len()), case.stream_len, "{}", case.id);
    check_splits(case, &stream, splits)
}

fn check_splits(case: &Case, stream: &[u8], splits: &mut usize) -> Result<(), String> {
    let whole = parse(&[stream]);
    compare(case, &whole)?;
    let cut_at = |mut cuts: Vec<usize>| {
        cuts.retain(|cut| *cut < stream.len());
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect::<Vec<_>>()
    };
    let mut ways = vec![cut_at(case.foreign_chunking.clone())];
    match case.splits.as_str() {
        "all" => {
            ways.push(stream.chunks(1).collect());
            ways.extend((0..=stream.len()).map(|cut| cut_at(vec![cut])));
        }
        "sample" => ways.push(cut_at(random_cuts(stream.len()))),
        other => panic!("unknown split {other}"),
    }
    for way in ways {
        *splits += 1;
        if parse(&way) != whole {
            return Err(format!("a split of {} pieces differs from the whole", way.len()));
        }
    }
    Ok(())
}

/// 64 places in a stream, the same on every run (xorshift64).
fn random_cuts(length: usize) -> Vec<usize> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let cuts = (0..64).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize % (length + 1)
    });
    cuts.collect()
}

#[derive(Debug, Default, PartialEq)]
struct Parsed {
    /// Type, data, last event id.
    events: Vec<(String, String, String)>,
    comments: Vec<String>,
    retry_ms: Option<u64>,
    last_event_id: String,
}

fn parse(pieces: &[&[u8]]) -> Parsed {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut parser = Parser::new(SSE_EVENT_BYTES_MAX);
    let mut parsed = Parsed::default();
    for piece in pieces {
        let mut input = *piece;
        while let Some(item) = parser.next_item(&mut input).expect("within the limit") {
            match item {
                Item::Comment(comment) => parsed.comments.push(text(comment)),
                Item::Event(event) => {
                    let name = if event.name.is_empty() { b"message" } else { event.name };
                    let (name, data) = (text(name), text(event.data));
                    parsed.events.push((name, data, text(parser.last_event_id())));
                }
            }
        }
        assert!(input.is_empty());
    }
    parsed.retry_ms = parser.retry_ms();
    parsed.last_event_id = text(parser.last_event_id());
    parsed
}

fn compare(case: &Case, parsed: &Parsed) -> Result<(), String> {
    let expect = &case.expect;
    if parsed.events.len() != expect.events.len() {
        return Err(format!("{} events: {:?}", parsed.events.len(), parsed.events));
    }
    for ((kind, data, id), expected) in parsed.events.iter().zip(&expect.events) {
        if *kind != expected.kind || *id != expected.last_event_id {
            return Err(format!("type {kind:?}, id {id:?}"));
        }
        // Of big data, which is one letter over and over, the suite has the length (and a digest).
        let same = expected.data.as_ref().is_some_and(|text| data == text)
            || expected.data_len == Some(data.len()) && data.bytes().all(|byte| b"xy\n".contains(&byte));
        if !same {
            return Err(format!("data of {} bytes: {data:.80?}", data.len()));
        }
    }
    if case.encode.is_some() {
        return Ok(());
    }
    if parsed.retry_ms != expect.retry_ms || parsed.last_event_id != expect.last_event_id_at_end {
        return Err(format!("retry {:?}, id at the end {:?}", parsed.retry_ms, parsed.last_event_id));
    }
    let same = match &expect.comments {
        Comments::List(expected) => *expected == parsed.comments,
        Comments::Sum { count, total_chars } => {
            let chars: usize = parsed.comments.iter().map(|comment| comment.chars().count()).sum();
            (parsed.comments.len(), chars) == (*count, *total_chars)
        }
    };
    if same { Ok(()) } else { Err(format!("comments {:.200?}", parsed.comments)) }
}

#[derive(Deserialize)]
struct Suite {
    count: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    name: String,
    level: String,
    stream_b64: Option<String>,
    #[serde(default)]
    stream_parts: Vec<Part>,
    stream_len: Option<usize>,
    #[serde(default)]
    foreign_chunking: Vec<usize>,
    encode: Option<Encode>,
    expect: Expect,
    splits: String,
}

#[derive(Deserialize)]
struct Part {
    b64: String,
    repeat: usize,
}

#[derive(Deserialize)]
struct Encode {
    event: Option<String>,
    data: String,
}

#[derive(Deserialize)]
struct Expect {
    events: Vec<ExpectedEvent>,
    retry_ms: Option<u64>,
    #[serde(default)]
    last_event_id_at_end: String,
    #[serde(default)]
    comments: Comments,
}

#[derive(Deserialize)]
struct ExpectedEvent {
    #[serde(rename = "type")]
    kind: String,
    data: Option<String>,
    data_len: Option<usize>,
    last_event_id: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Comments {
    List(Vec<String>),
    Sum { count: usize, total_chars: usize },
}

impl Default for Comments {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

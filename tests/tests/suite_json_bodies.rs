//! The foreign suite `json-bodies.json`: bytes that are JSON or not, through the parser and through the chat endpoint.
//!
//! `suite-*` cases are about JSON, whatever the value: the parser alone accepts or rejects them. None of them is a chat
//! request, so the endpoint answers each with a 400. `own-*` cases are bodies of the chat endpoint, which accepts or
//! rejects them.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use uring_serve::api::escape::write_string;
use uring_serve::api::json;
use uring_serve::api::request::{Endpoint, Generation, ModelContext, read_generation};
use uring_serve::clock::{Clock, SystemClock};

#[derive(Deserialize)]
struct Suite {
    count: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    category: String,
    name: String,
    level: String,
    expect: String,
    body_b64: Option<String>,
    body_parts: Option<Vec<Part>>,
    body_len: usize,
}

#[derive(Deserialize)]
struct Part {
    b64: String,
    repeat: usize,
}

/// What we do where the suite leaves it open.
const PINNED: [(&str, Outcome, &str); 11] = [
    ("json-0342", Outcome::Reject, "64 levels are the limit: no request of the API needs ten"),
    ("json-0348", Outcome::Reject, "a known field given twice could be read as two requests"),
    ("json-0349", Outcome::Reject, "so could one spelt with an escape"),
    ("json-0355", Outcome::Reject, "text that is no Unicode is not JSON to us, wherever it stands"),
    ("json-0364", Outcome::Reject, "RFC 8259 section 8.1: a sender must not add a byte order mark"),
    (
        "json-0320",
        Outcome::Accept,
        "an integer below 64 bits becomes a float: a field that wants integers says so",
    ),
    ("json-0324", Outcome::Accept, "it fits 64 bits without a sign"),
    ("json-0332", Outcome::Accept, "duplicates are JSON; one of a known field is refused by the endpoint"),
    ("json-0379", Outcome::Accept, "an unknown field may have any name; the log gets an excerpt"),
    ("json-0380", Outcome::Accept, "unknown fields are ignored, however many"),
    ("json-0381", Outcome::Accept, "a number of a million digits is a number"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Accept,
    Reject,
}

#[test]
fn every_body_is_judged_as_the_suite_says() {
    let suite: Suite = serde_json::from_str(include_str!("../suites/json-bodies.json")).unwrap();
    assert_eq!(suite.cases.len(), suite.count);
    let mut counts = [0; 3];
    for case in &suite.cases {
        let body = case.body();
        assert_eq!(body.len(), case.body_len, "{}", case.id);
        let started = SystemClock.now();
        let parsed = match json::parse(&mut body.clone(), &[]) {
            Ok(_) => Outcome::Accept,
            Err(_) => Outcome::Reject,
        };
        let answered = post(&body);
        let took = SystemClock.now().checked_since(started).unwrap();
        assert!(took < Duration::from_secs(5), "{} takes {took:?}", case.id);
        let own = case.category.starts_with("own");
        let outcome = match (own, &answered) {
            (false, _) => parsed,
            (true, Ok(_)) => Outcome::Accept,
            (true, Err(_)) => Outcome::Reject,
        };
        let pinned = PINNED.iter().find(|(id, _, _)| *id == case.id).map(|(_, outcome, _)| *outcome);
        let expected = match case.expect.as_str() {
            "accept" => Outcome::Accept,
            "reject" => Outcome::Reject,
            _ => pinned.unwrap_or_else(|| panic!("{} {} is left open and not pinned", case.id, case.name)),
        };
        assert_eq!(outcome, expected, "{} {}", case.id, case.name);
        assert!(own || answered.is_err(), "{} is no chat request", case.id);
        counts[["MUST", "SHOULD", "MAY"].iter().position(|level| *level == case.level).unwrap()] += 1;
    }
    println!(
        "json-bodies: MUST {}, SHOULD {}, MAY {}: all pass, of {}",
        counts[0], counts[1], counts[2], suite.count
    );
}

#[test]
fn values_are_what_they_were_written_as() {
    let generation = |fields: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{fields}}}"#);
        post(body.as_bytes())
    };
    let sampling = |fields: &str| generation(fields).unwrap().sampling;
    assert_eq!(sampling(r#""temperature":-0"#).temperature.to_bits(), 0.0_f32.to_bits());
    assert_eq!(sampling(r#""temperature":1.000000000000000005"#).temperature, 1.0);
    assert_eq!(sampling(r#""temperature":1E-999"#).temperature, 0.0);
    assert_eq!(sampling(r#""seed":-9223372036854775808"#).seed, Some(i64::MIN));
    for seed in ["9223372036854775808", "18446744073709551616", "-9223372036854775809", "1.0", "1e3"] {
        let error = generation(&format!("\"seed\":{seed}")).expect_err(seed);
        assert_eq!(error.param.as_deref(), Some("seed"), "{seed}");
    }
    let error = generation(r#""n":1,"n":1"#).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("n"), "a duplicate of a known field");
    let unknown = generation(r#""\u00e9":"NFC","e\u0301":"NFD","\u0000":1"#).unwrap().unknown;
    assert_eq!(unknown.names(), ["\u{e9}", "e\u{301}", "\0"]);
}

#[test]
fn strings_are_written_as_serde_json_writes_them() {
    let every = (0..0x3000).filter_map(char::from_u32).chain("😀\u{10ffff}".chars());
    let mut all = String::new();
    for letter in every {
        all.push(letter);
        for text in [letter.to_string(), format!("a{letter}"), format!("{letter}{letter}b")] {
            assert_eq!(written(&text), serde_json::to_string(&text).unwrap());
        }
    }
    assert_eq!(written(&all), serde_json::to_string(&all).unwrap());
}

#[test]
fn every_prefix_of_a_body_is_refused() {
    let whole = br#"{"model":"m","messages":[{"role":"user","content":"h\u00e9llo \ud83d\ude00"}],"stop":["a",null,{"b":[1.5e3]}],"stream":false}"#;
    for length in 0..whole.len() {
        let error = post(&whole[..length]).expect_err("a prefix is no JSON");
        assert_eq!((error.status, error.param), (400, None), "{length}");
    }
    assert_eq!(post(whole).unwrap_err().param.as_deref(), Some("stop"), "whole, it is JSON with a bad field");
}

fn written(text: &str) -> String {
    let mut out = Vec::new();
    write_string(&mut out, text);
    String::from_utf8(out).expect("a JSON string is UTF-8")
}

fn post(body: &[u8]) -> Result<Generation, uring_serve::api::error::ApiError> {
    let context = ModelContext { vocab: 512, context_tokens: 8192, strict_name: None };
    let result = read_generation(Endpoint::Chat, &mut body.to_vec(), &context);
    if let Err(error) = &result {
        assert_eq!((error.status, error.kind.as_str()), (400, "invalid_request_error"));
        assert!(error.message.len() < 400, "{}", error.message);
        let mut out = Vec::new();
        error.write_json(&mut out);
        serde_json::from_slice::<serde_json::Value>(&out).expect("an error is JSON");
    }
    result
}

impl Case {
    fn body(&self) -> Vec<u8> {
        match (&self.body_b64, &self.body_parts) {
            (Some(body), _) => decode(body),
            (None, Some(parts)) => {
                parts.iter().flat_map(|part| decode(&part.b64).repeat(part.repeat)).collect()
            }
            (None, None) => panic!("{} has no body", self.id),
        }
    }
}

fn decode(text: &str) -> Vec<u8> {
    STANDARD.decode(text).expect("the suite's bytes are base64")
}

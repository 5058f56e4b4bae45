//! The `Server-Timing` suite: field lines to metrics as browsers read them, and metrics to a line.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use uring_serve_core::headers::server_timing::{read_metrics, write_metric};

/// Cases that are read otherwise, with the reason. All others must hold.
const PINNED: [(&str, &str); 1] = [(
    "st-0107",
    "MAY: the HTTP layer refuses a NUL before this parser sees it; here it is a byte like others",
)];

#[test]
fn every_case_holds() {
    let suite: Suite =
        serde_json::from_str(include_str!("../suites/server-timing.json")).expect("valid suite");
    assert_eq!(suite.cases.len(), suite.count);
    let mut counts = BTreeMap::<&str, usize>::new();
    let mut failed = Vec::new();
    for case in &suite.cases {
        *counts.entry(&case.level).or_default() += 1;
        let result = if case.encode.is_empty() { check_parser(case) } else { check_writer(case) };
        let pinned = PINNED.iter().any(|(id, _)| *id == case.id);
        match result {
            Ok(()) if pinned => failed.push(format!("{}: pinned, but it holds", case.id)),
            Err(why) if !pinned => failed.push(format!("{} {} ({}): {why}", case.id, case.name, case.level)),
            Ok(()) | Err(_) => {}
        }
    }
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), suite.count, failed.join("\n"));
    tell(&counts);
}

#[expect(clippy::print_stderr, reason = "a suite prints its counts")]
fn tell(counts: &BTreeMap<&str, usize>) {
    eprintln!("server-timing suite: {counts:?}, {} pinned", PINNED.len());
}

fn check_parser(case: &Case) -> Result<(), String> {
    let decode = |text: &String| STANDARD.decode(text).expect("base64");
    let lines: Vec<Vec<u8>> = case.headers_b64.iter().map(decode).collect();
    let read: Vec<_> = lines.iter().flat_map(|line| read_metrics(line)).collect();
    let expected = case.expect.metrics.as_deref().expect("a reading");
    if read.len() != expected.len() {
        return Err(format!("{} metrics", read.len()));
    }
    for (metric, expected) in read.iter().zip(expected) {
        let desc = match (&expected.desc_b64, &expected.desc) {
            (Some(text), _) => decode(text),
            (None, Some(text)) => text.clone().into_bytes(),
            (None, None) => Vec::new(),
        };
        let same =
            metric.name == expected.name.as_bytes() && metric.dur() == expected.dur && *metric.desc() == desc;
        if !same {
            return Err(format!("{metric:?}, dur {}, desc {:?}", metric.dur(), metric.desc()));
        }
    }
    Ok(())
}

fn check_writer(case: &Case) -> Result<(), String> {
    let expect = &case.expect;
    let mut line = Vec::new();
    let mut refused = false;
    for metric in &case.encode {
        // What is no number, or more than can be counted, is no duration.
        let duration = match metric.dur {
            Dur::Number(ms) => Duration::try_from_secs_f64(ms / 1e3).ok(),
            Dur::Text(_) => None,
        };
        refused |= write_metric(&metric.name, duration, &metric.desc, &mut line).is_err();
    }
    if refused {
        let may = expect.or.as_deref() == Some("refused") && line.is_empty();
        return if may { Ok(()) } else { Err("was refused".into()) };
    }
    let text = String::from_utf8(line).expect("UTF-8");
    if let Some(found) = expect.must_not_contain.iter().find(|part| text.contains(*part)) {
        return Err(format!("contains {found:?}: {text}"));
    }
    if read_metrics(text.as_bytes()).count() != expect.parse_back_n.unwrap_or(case.encode.len()) {
        return Err(format!("does not read back: {text}"));
    }
    let bytes = "Server-Timing: \r\n".len() + text.len();
    if expect.max_header_line_bytes.is_some_and(|max| bytes > max) {
        return Err(format!("{bytes} bytes"));
    }
    Ok(())
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
    #[serde(default)]
    headers_b64: Vec<String>,
    #[serde(default)]
    encode: Vec<Encode>,
    expect: Expect,
}

#[derive(Deserialize)]
struct Encode {
    name: String,
    dur: Dur,
    desc: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Dur {
    Number(f64),
    Text(#[expect(dead_code, reason = "only says that it is no number")] String),
}

#[derive(Deserialize)]
struct Expect {
    metrics: Option<Vec<Expected>>,
    or: Option<String>,
    #[serde(default)]
    must_not_contain: Vec<String>,
    parse_back_n: Option<usize>,
    max_header_line_bytes: Option<usize>,
}

#[derive(Deserialize)]
struct Expected {
    name: String,
    dur: f64,
    desc: Option<String>,
    desc_b64: Option<String>,
}

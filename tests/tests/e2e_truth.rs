//! Reported times against a client's own clock, and against each other: the real model, one machine, one clock.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use uring_serve::clock::{Clock as _, SystemClock};
use uring_serve_core::time::MonoNs;
use uring_serve_tests::http::{Client, post_bytes};
use uring_serve_tests::server::{Server, eventually, journal_lines, scratch};

#[test]
fn no_time_is_reported_that_the_client_did_not_see_pass() {
    let server = Server::real(&["--return-perf-metrics", "--kv-cache-tokens", "16384"]);
    let (mut ttft_gaps, mut e2e_gaps) = (Vec::new(), Vec::new());
    for index in 0..REQUESTS {
        let seen = streamed(&server, index);
        let [ttft, e2e] = ["server_ttft", "server_e2e"].map(|name| span_ns(&seen.event, name));
        let [client_ttft, client_e2e] = [seen.first, seen.last].map(|at| at.as_raw() - seen.sent.as_raw());
        assert!(ttft <= e2e, "request {index}: ttft {ttft} ns, e2e {e2e} ns");
        assert!(ttft <= client_ttft, "request {index}: ttft {ttft} ns reported, {client_ttft} ns seen");
        assert!(e2e <= client_e2e, "request {index}: e2e {e2e} ns reported, {client_e2e} ns seen");
        // The machine has one clock: each moment lies between what the client did before and saw after.
        let [start, end] = ["server-start", "server-end"].map(|name| point_ns(&seen.event, name));
        let sent_to_seen = [seen.sent.as_raw(), start, end, seen.last.as_raw()];
        assert!(sent_to_seen.is_sorted(), "request {index}: {sent_to_seen:?}");
        ttft_gaps.push(client_ttft - ttft);
        e2e_gaps.push(client_e2e - e2e);
    }
    for (name, mut gaps) in [("ttft", ttft_gaps), ("e2e", e2e_gaps)] {
        gaps.sort_unstable();
        let [median, max] = [gaps[gaps.len() / 2], gaps[gaps.len() - 1]].map(|ns| ns as f64 / 1e6);
        println!("{name}: {REQUESTS} streams, client minus server: median {median:.3} ms, max {max:.3} ms");
    }
}

#[test]
fn one_request_tells_the_same_numbers_wherever_it_tells_them() {
    let dir = scratch("e2e_truth");
    let flags = ["--return-perf-metrics", "--perf-metrics-output-dir", dir.to_str().expect("UTF-8")];
    let server = Server::real(&[&flags[..], &["--kv-cache-tokens", "16384"]].concat());
    // The second kind asks for every time, in names of ours.
    let rows: [(bool, &[(&str, &str)]); 4] =
        [(true, &[OPT_IN]), (false, &[OPT_IN]), (true, &[OPT_IN, ALL]), (false, &[OPT_IN, ALL])];
    for (at, (stream, headers)) in rows.into_iter().enumerate() {
        let body =
            json!({"prompt": "Numbers: one, two,", "max_tokens": 6, "ignore_eos": true, "stream": stream});
        let response = Client::connect(server.address).post("/v1/completions", headers, &body.to_string());
        assert_eq!(response.status, 200);
        let told: BTreeMap<String, String> = if stream {
            let events = response.events();
            let event: Value = serde_json::from_str(&events.last().expect("an event").1).expect("JSON");
            let fields = event.as_object().expect("an object").iter();
            fields.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
        } else {
            response.headers.iter().cloned().collect()
        };
        let line = line_at(&dir, at);
        let row = format!("stream {stream}, {headers:?}\n{told:?}\n{line}");
        check_points(&told, &line, headers.contains(&ALL), &row);
        check_spans(&told, &line, &row);
        // The clock header says when the request came, in every answer that was asked for.
        let clock = response.header("X-TRTLLM-Clock-Sync").expect("a clock header");
        let receive = items(clock)["receive"].to_owned();
        assert_eq!(digits_of(&line, "server_arrival_time"), [receive], "{row}");
    }
}

/// What a client saw of one stream.
struct Seen {
    sent: MonoNs,
    /// The first chunk with text.
    first: MonoNs,
    /// The chunk with the last text, or with the end of it.
    last: MonoNs,
    event: Value,
}

fn streamed(server: &Server, index: usize) -> Seen {
    let body = json!({
        "prompt": format!("{}The {index}th word of the book is", "And then, ".repeat(index)),
        "max_tokens": 1 + index % 7,
        "stream": true,
    });
    let mut client = Client::connect(server.address);
    let request = post_bytes("/v1/completions", &[OPT_IN], &body.to_string());
    let sent = SystemClock.now();
    client.send(&request);
    let mut response = client.read_head();
    assert_eq!(response.status, 200);
    let (mut first, mut last) = (None, None);
    while let Some(from) = client.read_chunk_of(&mut response) {
        let now = SystemClock.now();
        if response.text()[from..].contains("\"text\":") {
            first.get_or_insert(now);
            last = Some(now);
        }
    }
    let event = response.events().last().expect("an event").clone();
    assert_eq!(event.0, "trtllm.perf_metrics");
    let event = serde_json::from_str(&event.1).expect("JSON");
    Seen { sent, first: first.expect("a chunk"), last: last.expect("a chunk"), event }
}

/// Points and numbers are the very digits of the line.
fn check_points(told: &BTreeMap<String, String>, line: &str, all: bool, row: &str) {
    let points = items(&told["X-TRTLLM-Start-End-Time"]);
    let mut expected = vec![("server-start", "arrival_time"), ("server-end", "last_token_time")];
    if all {
        expected.extend([
            ("server-srv-start", "server_arrival_time"),
            ("server-srv-first-token", "server_first_token_time"),
            ("server-request-id", "request_id"),
            ("server-first-iter", "first_iter"),
            ("server-last-iter", "last_iter"),
            ("server-kv-blocks-total", "num_total_allocated_blocks"),
            ("server-kv-blocks-new", "num_new_allocated_blocks"),
            ("server-kv-blocks-reused", "num_reused_blocks"),
            ("server-kv-blocks-missed", "num_missed_blocks"),
        ]);
    }
    let told: Vec<&str> = points.keys().copied().collect();
    let mut names: Vec<&str> = expected.iter().map(|(point, _)| *point).collect();
    names.sort_unstable();
    assert_eq!(told, names, "{row}");
    for (point, key) in expected {
        assert_eq!(digits_of(line, key), [points[point].to_owned()], "{point}: {row}");
    }
}

/// Durations are the differences of the line's times, to the nanosecond.
fn check_spans(told: &BTreeMap<String, String>, line: &str, row: &str) {
    let spans = items(&told["Server-Timing"]);
    let time = |key: &str| nanos(&digits_of(line, key)[0]);
    for (span, end) in [
        ("server_queue", "first_scheduled_time"),
        ("server_ttft", "first_token_time"),
        ("server_e2e", "last_token_time"),
    ] {
        assert_eq!(millis_ns(spans[span]), time(end) - time("arrival_time"), "{span}: {row}");
    }
    let parsed: Value = serde_json::from_str(line).expect("JSON");
    let breakdown = &parsed["time_breakdown_metrics"];
    let count = |key: &str| breakdown[key].as_array().map_or(0, Vec::len);
    assert_eq!((count("step_metrics"), count("ctx_chunk_metrics")), (5, 1), "{row}");
    let (steps, chunks) = (items(&told["X-TRTLLM-Step-Metrics"]), items(&told["X-TRTLLM-Ctx-Chunk-Metrics"]));
    assert_eq!((steps.len(), chunks.len()), (2 * 5, 2), "forward and sample, no GPU: {row}");
    // The line lists steps, then chunks.
    let texts = |key: &str| digits_of(line, key);
    let keys = ["forward_start_time", "forward_end_time", "sample_start_time", "sample_end_time"].map(texts);
    let iters =
        breakdown["step_metrics"].as_array().expect("steps").iter().map(|step| step["iter"].to_string());
    let names = iters.map(|iter| format!("server-step-{iter}")).chain(["server-ctx-chunk-0".to_owned()]);
    for (index, name) in names.enumerate() {
        let [forward_start, forward_end, sample_start, sample_end] =
            keys.each_ref().map(|key| nanos(&key[index]));
        for (what, span) in [("forward", forward_end - forward_start), ("sample", sample_end - sample_start)]
        {
            let item = format!("{name}-{what}");
            let text = steps.get(item.as_str()).or_else(|| chunks.get(item.as_str()));
            assert_eq!(text.map(|text| millis_ns(text)), Some(span), "{item}: {row}");
        }
    }
}

/// `name;key=value` items by name.
fn items(value: &str) -> BTreeMap<&str, &str> {
    let mut items = BTreeMap::new();
    for text in value.split(", ") {
        let (name, rest) = text.split_once(';').unwrap_or_else(|| panic!("item {text:?}"));
        let (_, value) = rest.split_once('=').unwrap_or_else(|| panic!("item {text:?}"));
        items.insert(name, value);
    }
    items
}

/// The digits of every `"key":` of a line, as they stand there.
fn digits_of(line: &str, key: &str) -> Vec<String> {
    let marker = format!("\"{key}\":");
    let digits = |rest: &str| rest.split([',', '}']).next().expect("a value").to_owned();
    line.split(&marker).skip(1).map(digits).collect()
}

fn line_at(dir: &Path, at: usize) -> String {
    eventually("a line", std::time::Duration::from_secs(10), || journal_lines(dir).get(at).cloned())
}

fn span_ns(event: &Value, name: &str) -> u64 {
    millis_ns(items(event["Server-Timing"].as_str().expect("text"))[name])
}

fn point_ns(event: &Value, name: &str) -> u64 {
    nanos(items(event["X-TRTLLM-Start-End-Time"].as_str().expect("text"))[name])
}

/// Seconds with nine digits.
fn nanos(text: &str) -> u64 {
    decimal(text, 9)
}

/// Milliseconds with six digits, in nanoseconds.
fn millis_ns(text: &str) -> u64 {
    decimal(text, 6)
}

fn decimal(text: &str, digits: usize) -> u64 {
    let (whole, rest) = text.split_once('.').unwrap_or_else(|| panic!("{text:?} has no point"));
    assert_eq!(rest.len(), digits, "{text}");
    format!("{whole}{rest}").parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

/// Streams that are timed.
const REQUESTS: usize = 50;
const OPT_IN: (&str, &str) = ("X-TRTLLM-return-metrics", "1");
const ALL: (&str, &str) = ("X-TRTLLM-Metrics-Budget", "81920");

//! Clients that go away, on the real model: while queued, during prefill, in the middle of the answer, streamed or
//! not, by reset or by an orderly end. What they held is free at once, and each has its line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use uring_serve_tests::http::{Client, post_bytes};
use uring_serve_tests::server::{RUNNING, Server, WAITING, eventually, journal_lines, journal_of, scratch};

#[test]
fn a_client_that_leaves_frees_what_it_held_and_has_its_line() {
    let (server, dir) = start("e2e_leavers", &["--max-batch-size", "2", "--max-num-tokens", "32"]);
    let mut lines_before = 0;
    for stage in [Stage::Prefill, Stage::Decode, Stage::Queued] {
        // What a queued leaver waits behind.
        let mut holders = Vec::new();
        if stage == Stage::Queued {
            holders.extend((0..2).map(|_| send(&server, &request(SHORT_PROMPT, Form::Streamed))));
            await_sample(&server, RUNNING, 2.0);
        }
        for form in [Form::Streamed, Form::Whole] {
            for way in [Way::Reset, Way::Close] {
                let row = format!("{stage:?}, {form:?}, {way:?}");
                println!("{row}");
                leave_at(&server, stage, form, way);
                let held = holders.len() as f64;
                eventually(&row, FREED_MAX, || {
                    let left = (server.sample(RUNNING), server.sample(WAITING));
                    (left == (held, 0.0)).then_some(())
                });
                if holders.is_empty() {
                    server.settle(FREED_MAX);
                }
                let lines = journal_of(&dir, lines_before + 1);
                assert_eq!(lines.len(), lines_before + 1, "{row}");
                check_line(&lines[lines_before], stage, &row);
                lines_before += 1;
            }
        }
        if !holders.is_empty() {
            holders.into_iter().for_each(Client::reset);
            server.settle(FREED_MAX);
            lines_before += 2;
            journal_of(&dir, lines_before);
        }
    }
    let aborted = server.sample("uring_serve_requests_total{status=\"aborted\"}");
    assert_eq!(aborted, lines_before as f64);
    assert_eq!(server.sample("uring_serve_requests_total"), aborted);
    assert!(server.stop().success());
    assert_eq!(journal_lines(&dir).len(), lines_before, "no line came late");
}

#[test]
fn each_prompt_of_a_request_that_is_left_has_its_own_line() {
    let (server, dir) = start("e2e_leavers_prompts", &["--max-batch-size", "2"]);
    // Six sequences for two slots: both choices of the first prompt run, the others wait.
    let body = json!({
        "prompt": [SHORT_PROMPT, "The second prompt", "The third"], "n": 2,
        "max_tokens": 1000, "ignore_eos": true, "stream": true,
    });
    let mut client = send(&server, &body.to_string());
    let mut begun = client.read_head();
    client.read_chunk_of(&mut begun).expect("a first chunk");
    assert_eq!((server.sample(RUNNING), server.sample(WAITING)), (2.0, 4.0));
    client.reset();
    server.settle(FREED_MAX);
    let lines = journal_of(&dir, 3);
    assert_eq!(lines.len(), 3);
    for (prompt, stage) in [Stage::Decode, Stage::Queued, Stage::Queued].into_iter().enumerate() {
        check_line(&lines[prompt], stage, &format!("prompt {prompt}"));
    }
}

#[test]
fn a_client_that_leaves_before_its_body_is_read_has_a_line_too() {
    let (server, dir) = start("e2e_leavers_pool", &[]);
    // Long enough for the pool: the reset is on the wire before the prompt is in tokens.
    let client = send(&server, &request(&"long ".repeat(7_000), Form::Whole));
    client.reset();
    let lines = journal_of(&dir, 1);
    assert_eq!((lines.len(), &lines[0]["status"]), (1, &json!("aborted")));
    server.settle(FREED_MAX);
    assert!(server.stop().success());
    assert_eq!(journal_lines(&dir).len(), 1);
}

#[test]
fn a_client_that_only_ends_its_sending_gets_its_answer() {
    let (server, dir) = start("e2e_leavers_half_closed", &[]);
    for (at, form) in [Form::Streamed, Form::Whole].into_iter().enumerate() {
        let body = json!({"prompt": SHORT_PROMPT, "max_tokens": 40, "ignore_eos": true, "stream": form == Form::Streamed});
        let mut client = Client::connect(server.address);
        client.send(&post_bytes("/v1/completions", &[], &body.to_string()));
        client.end_sending();
        let response = client.read_response();
        assert_eq!(response.status, 200, "{form:?}");
        match form {
            Form::Streamed => assert!(response.text().ends_with("data: [DONE]\n\n"), "{}", response.text()),
            Form::Whole => assert_eq!(response.json()["usage"]["completion_tokens"], 40),
        }
        assert!(client.read_to_end().is_empty(), "{form:?}: then the server closes too");
        assert_eq!(journal_of(&dir, at + 1)[at]["status"], "complete", "{form:?}");
    }
    server.settle(FREED_MAX);
}

#[test]
fn a_silent_stream_asks_a_client_that_ended_its_sending_whether_it_is_there() {
    // The question comes after 5 s, the second and last token after 6.5 s.
    let begin = |name: &str| {
        let dir = scratch(name);
        let server = Server::sim(&["--perf-metrics-output-dir", path(&dir), "--sim-tpot-us", "6500000"]);
        let body = json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true, "stream": true}).to_string();
        let mut client = send(&server, &body);
        let mut begun = client.read_head();
        client.read_chunk_of(&mut begun).expect("a first chunk");
        (server, dir, client, begun)
    };
    let (_server, dir_of_stayer, mut stayer, mut begun) = begin("e2e_leavers_silent_stays");
    let (_server, dir_of_leaver, leaver, _) = begin("e2e_leavers_silent_leaves");
    stayer.end_sending();
    // It has read all there was: nothing but its FIN tells.
    drop(leaver);
    while stayer.read_chunk_of(&mut begun).is_some() {}
    assert_eq!(begun.text().matches("\n\n:\n\n").count(), 1, "{}", begun.text());
    assert!(begun.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(journal_of(&dir_of_stayer, 1)[0]["status"], "complete");
    // Had only the last token found out, its request would be complete.
    assert_eq!(journal_of(&dir_of_leaver, 1)[0]["status"], "aborted");
}

#[test]
fn on_http_1_0_the_end_of_sending_is_leaving() {
    let (server, dir) = start("e2e_leavers_http10", &[]);
    let body = request(SHORT_PROMPT, Form::Whole);
    let mut client = Client::connect(server.address);
    let head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n";
    client.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
    await_sample(&server, RUNNING, 1.0);
    client.end_sending();
    server.settle(FREED_MAX);
    assert!(client.read_to_end().is_empty(), "nothing is answered");
    assert_eq!(journal_of(&dir, 1)[0]["status"], "aborted");
}

#[test]
fn a_client_that_closes_at_done_is_a_completed_request() {
    let (server, dir) = start("e2e_leavers_done", &["--return-perf-metrics"]);
    let mut lines_before = 0;
    for asked in [&[][..], &[("X-TRTLLM-return-metrics", "1")]] {
        for way in [Way::Reset, Way::Close] {
            let body = json!({"prompt": SHORT_PROMPT, "max_tokens": 5, "stream": true}).to_string();
            let mut client = Client::connect(server.address);
            client.send(&post_bytes("/v1/completions", asked, &body));
            let mut response = client.read_head();
            while !response.text().contains("data: [DONE]\n\n") {
                client.read_chunk_of(&mut response).expect("[DONE] before the end");
            }
            leave(client, way);
            lines_before += 1;
            let lines = journal_of(&dir, lines_before);
            assert_eq!(lines[lines_before - 1]["status"], "complete", "{asked:?} {way:?}");
        }
    }
    server.settle(FREED_MAX);
    assert_eq!(server.sample("uring_serve_requests_total{status=\"complete\"}"), lines_before as f64);
    assert_eq!(server.sample("uring_serve_requests_total"), lines_before as f64);
    assert!(server.stop().success());
    assert_eq!(journal_lines(&dir).len(), lines_before);
}

/// Where the request is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Queued,
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Streamed,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// RST.
    Reset,
    /// FIN, and RST to whatever comes then.
    Close,
}

fn start(name: &str, args: &[&str]) -> (Server, PathBuf) {
    let dir = scratch(name);
    let mut all = vec!["--perf-metrics-output-dir", path(&dir), "--kv-cache-tokens", "32768"];
    all.extend_from_slice(args);
    (Server::real(&all), dir)
}

fn path(dir: &Path) -> &str {
    dir.to_str().expect("a path in UTF-8")
}

/// A request that does not end by itself while a test looks on.
fn request(prompt: &str, form: Form) -> String {
    json!({"prompt": prompt, "max_tokens": 1000, "ignore_eos": true, "stream": form == Form::Streamed})
        .to_string()
}

fn send(server: &Server, body: &str) -> Client {
    let mut client = Client::connect(server.address);
    client.send(&post_bytes("/v1/completions", &[], body));
    client
}

fn await_sample(server: &Server, name: &str, value: f64) {
    eventually(name, Duration::from_secs(20), || (server.sample(name) == value).then_some(()));
}

fn leave(client: Client, way: Way) {
    match way {
        Way::Reset => client.reset(),
        Way::Close => drop(client),
    }
}

/// Sends a request and leaves once it has reached `stage`.
fn leave_at(server: &Server, stage: Stage, form: Form, way: Way) {
    let long = "word ".repeat(6_000);
    let prompt = if stage == Stage::Prefill { &long } else { SHORT_PROMPT };
    let steps_before = server.sample(STEPS);
    let mut client = send(server, &request(prompt, form));
    match (stage, form) {
        (Stage::Queued, Form::Streamed | Form::Whole) => await_sample(server, WAITING, 1.0),
        (Stage::Prefill, Form::Streamed | Form::Whole) => await_sample(server, RUNNING, 1.0),
        (Stage::Decode, Form::Streamed) => {
            let mut response = client.read_head();
            assert_eq!(response.status, 200);
            client.read_chunk_of(&mut response).expect("a first chunk");
        }
        // One step has the whole prompt; nothing else runs.
        (Stage::Decode, Form::Whole) => eventually("steps", Duration::from_secs(20), || {
            (server.sample(STEPS) >= steps_before + 3.0).then_some(())
        }),
    }
    leave(client, way);
}

/// Aborted, with the times that were reached, and null for the others.
fn check_line(line: &Value, stage: Stage, row: &str) {
    assert_eq!(line["status"], "aborted", "{row}");
    let timing = &line["perf_metrics"]["timing_metrics"];
    let (scheduled, sampled) = (stage != Stage::Queued, stage == Stage::Decode);
    // (time, reached)
    let rows = [
        ("server_arrival_time", true),
        ("arrival_time", true),
        ("first_scheduled_time", scheduled),
        ("first_token_time", sampled),
        ("last_token_time", sampled),
        ("server_first_token_time", sampled),
    ];
    for (name, reached) in rows {
        let time = timing.get(name).unwrap_or_else(|| panic!("{row}: no {name} in {line}"));
        assert_eq!(
            (time.is_null(), time.as_f64().is_some_and(|time| time > 0.0)),
            (!reached, reached),
            "{row}: {name} in {line}"
        );
    }
}

const SHORT_PROMPT: &str = "Once upon a time";
const STEPS: &str = "uring_serve_engine_steps_total";
/// One engine step, on a machine that builds and tests beside it.
const FREED_MAX: Duration = Duration::from_secs(2);

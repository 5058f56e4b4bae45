//! Upstream's end-to-end test of per-request metrics (UF 8.5) by its numbers, on the real model; which request makes how
//! many records (UF 3.4), and what the record of one says that was refused or whose time was over.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use uring_serve_tests::http::{Client, Response, post_bytes};
use uring_serve_tests::server::{RUNNING, Server, WAITING, eventually, journal_of, scratch};

#[test]
fn u_8_5_1_an_opted_in_completion_has_four_headers_and_one_line() {
    let (server, dir) = start("u_8_5_1");
    let response = complete(&server, &body(), OPT_IN);
    assert_eq!(response.status, 200);
    for name in HEADERS {
        assert!(response.header(name).is_some_and(|value| !value.is_empty()), "{name}");
    }
    let lines = journal_of(&dir, 1);
    assert_eq!(lines.len(), 1);
    let line = &lines[0];
    assert_eq!(line["status"], "complete");
    assert_eq!(keys(line), ["perf_metrics", "request_id", "status", "time_breakdown_metrics"]);
    let metrics = &line["perf_metrics"];
    assert_eq!(keys(metrics), ["first_iter", "kv_cache_metrics", "last_iter", "timing_metrics"]);
    assert!(metrics["first_iter"].as_u64() <= metrics["last_iter"].as_u64(), "{line}");
    let timing = &metrics["timing_metrics"];
    let names = ["arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"];
    let [arrival, scheduled, first, last] = names.map(|name| timing[name].as_f64().expect(name));
    assert!(arrival < scheduled && scheduled < first && first <= last, "{timing}");
    // No `ctx_request_id` above; no KV transfer here.
    let mut expected = [&names[..], &["server_arrival_time", "server_first_token_time"]].concat();
    expected.sort_unstable();
    assert_eq!(keys(timing), expected);
    let blocks = &metrics["kv_cache_metrics"];
    let [new, all] =
        ["num_new_allocated_blocks", "num_total_allocated_blocks"].map(|name| blocks[name].as_u64());
    assert!(new.is_some() && new <= all, "{blocks}");
}

#[test]
fn u_8_5_2_without_the_opt_in_there_is_no_header_and_still_a_line() {
    let (server, dir) = start("u_8_5_2");
    // (value of the opt-in header, if sent)
    for asked in [None, Some("0"), Some("true"), Some("01")] {
        let headers: Vec<(&str, &str)> = asked.map(|value| (OPT_IN[0].0, value)).into_iter().collect();
        let response = complete(&server, &body(), &headers);
        assert_eq!(response.status, 200, "{asked:?}");
        for (name, _) in &response.headers {
            assert!(!name.to_lowercase().contains("trtllm") && name != "Server-Timing", "{asked:?}: {name}");
        }
    }
    assert_eq!(journal_of(&dir, 4).len(), 4);
}

#[test]
fn u_8_5_3_a_stream_has_the_event_behind_done_only_when_asked() {
    let (server, dir) = start("u_8_5_3");
    for (asked, events) in [(&[][..], 0), (OPT_IN, 1)] {
        let response = complete(&server, &with(body(), json!({"stream": true})), asked);
        assert_eq!(response.status, 200);
        let text = response.text();
        let (chunks, behind) = text.split_once("data: [DONE]\n\n").expect(text);
        assert!(!chunks.contains("event:"), "{chunks}");
        assert_eq!(behind.matches("event: trtllm.perf_metrics\n").count(), events, "{behind}");
        assert_eq!(behind.is_empty(), events == 0, "{behind}");
        for name in HEADERS {
            assert_eq!(response.header(name), None, "a stream's metrics are in its event");
            assert_eq!(behind.contains(name), events == 1, "{name}");
        }
    }
    assert_eq!(journal_of(&dir, 2).len(), 2);
}

#[test]
fn each_prompt_has_its_record_however_many_choices_share_it() {
    let (server, dir) = start("prompts_by_choices");
    let mut lines_before = 0;
    // (prompts, choices of each, streamed)
    for (prompts, n, stream) in
        [(1, 1, false), (3, 1, false), (3, 1, true), (1, 3, false), (2, 2, false), (2, 2, true)]
    {
        let row = format!("{prompts} prompts, n = {n}, stream = {stream}");
        let texts: Vec<String> = (0..prompts).map(|index| format!("Item {index} of the list is")).collect();
        let body = with(body(), json!({"prompt": texts, "n": n, "stream": stream}));
        let response = complete(&server, &body, OPT_IN);
        assert_eq!(response.status, 200, "{row}: {}", response.text());
        let (timing, indices) = if stream {
            let (chunks, metrics) = response.text().split_once("data: [DONE]\n\n").expect("an end");
            let event: Value = metrics
                .split("data: ")
                .nth(1)
                .and_then(|text| serde_json::from_str(text).ok())
                .expect("an event");
            let indices = chunks
                .split("\n\n")
                .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok())
                .filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null())
                .filter_map(|chunk| chunk["choices"][0]["index"].as_u64())
                .collect();
            (event["Server-Timing"].as_str().expect("text").to_owned(), indices)
        } else {
            let choices = response.json()["choices"].as_array().expect("choices").clone();
            let indices: Vec<u64> = choices.iter().filter_map(|choice| choice["index"].as_u64()).collect();
            (response.header("Server-Timing").expect("a header").to_owned(), indices)
        };
        let mut indices: Vec<u64> = indices;
        indices.sort_unstable();
        assert!(indices.iter().copied().eq(0..prompts * n), "{row}: {indices:?}");
        for name in ["server_queue;", "server_ttft;", "server_e2e;"] {
            assert_eq!(timing.matches(name).count(), prompts as usize, "{row}: {timing}");
        }
        let lines = journal_of(&dir, lines_before + prompts as usize);
        assert_eq!(lines.len(), lines_before + prompts as usize, "{row}");
        let mut ids: Vec<u64> =
            lines.iter().map(|line| line["request_id"].as_u64().expect("a number")).collect();
        ids.dedup();
        assert_eq!(ids.len(), lines.len(), "{row}: a number of its own for each");
        assert!(lines.iter().all(|line| line["status"] == "complete"), "{row}");
        lines_before = lines.len();
    }
}

#[test]
fn a_request_s_own_id_is_told_back_and_stands_in_its_line() {
    let (server, dir) = start("own_id");
    let response = complete(&server, &body(), &[("x-request-id", "bench-17")]);
    assert_eq!((response.status, response.header("x-request-id")), (200, Some("bench-17")));
    let lines = journal_of(&dir, 1);
    assert_eq!(lines[0]["x_request_id"], "bench-17");
    let expected = ["perf_metrics", "request_id", "status", "time_breakdown_metrics", "x_request_id"];
    assert_eq!(keys(&lines[0]), expected);
}

#[test]
fn a_refused_request_has_a_line_of_its_own_and_no_metrics() {
    for (records, flags) in [(true, &[][..]), (false, &["--perf-metrics-failed-requests", "false"])] {
        let dir = scratch(&format!("refused_{records}"));
        let mut args = vec!["--return-perf-metrics", "--perf-metrics-output-dir", path(&dir)];
        args.extend(["--max-batch-size", "1", "--max-queued-requests", "1", "--sim-tpot-us", "20000"]);
        args.extend_from_slice(flags);
        let server = Server::sim(&args);
        let endless = with(body(), json!({"max_tokens": 5000, "ignore_eos": true})).to_string();
        // One runs and one waits: the queue is full.
        let busy = [RUNNING, WAITING].map(|gauge| {
            let mut client = Client::connect(server.address);
            client.send(&post_bytes("/v1/completions", &[], &endless));
            eventually(gauge, Duration::from_secs(10), || (server.sample(gauge) == 1.0).then_some(()));
            client
        });
        // (fields of the request, status, lines: one for each prompt that could be read)
        let rows = [
            (json!({}), 429, 1),
            (json!({"stream": true}), 429, 1),
            (json!({"prompt": ["a", "b", "c"]}), 400, 1),
            (json!({"temperature": 9}), 400, 1),
            (json!({"stream": true, "prompt": "a".repeat(20_000)}), 400, 1),
        ];
        let mut lines_before = 0;
        for (fields, status, count) in rows {
            let response = complete(&server, &with(body(), fields), OPT_IN);
            assert_eq!(response.status, status, "{}", response.text());
            assert!(response.json()["error"]["message"].is_string(), "{}", response.text());
            assert_eq!(response.header("Retry-After").is_some(), status == 429);
            assert!(
                HEADERS.iter().all(|name| response.header(name).is_none()),
                "only what is complete is shown"
            );
            if records {
                let lines = journal_of(&dir, lines_before + count);
                assert_eq!(lines.len(), lines_before + count, "{status}");
                for line in &lines[lines_before..] {
                    let timing = &line["perf_metrics"]["timing_metrics"];
                    assert_eq!(line["status"], "rejected");
                    assert!(timing["server_arrival_time"].is_f64(), "{line}");
                    for name in ["first_scheduled_time", "first_token_time", "last_token_time"] {
                        assert_eq!(timing.get(name), Some(&Value::Null), "{name} in {line}");
                    }
                }
                lines_before += count;
            }
        }
        busy.into_iter().for_each(Client::reset);
        server.settle(Duration::from_secs(2));
        assert!(server.stop().success());
        assert_eq!(journal_of(&dir, 0).len(), if records { lines_before + 2 } else { 0 });
    }
}

#[test]
fn a_request_whose_time_is_over_says_so_in_its_answer_and_in_its_line() {
    let dir = scratch("timeout");
    let args = ["--return-perf-metrics", "--perf-metrics-output-dir", path(&dir)];
    let limits = ["--request-timeout", "1", "--sim-tpot-us", "20000"];
    let server = Server::sim(&[&args[..], &limits].concat());
    for (at, stream) in [false, true].into_iter().enumerate() {
        let endless = json!({"max_tokens": 5000, "ignore_eos": true, "stream": stream});
        let response = complete(&server, &with(body(), endless), OPT_IN);
        if stream {
            // The head had left: the error is the stream's last event, then its end, and nothing is shown behind.
            let (_, end) = response.text().split_once("event: error\n").expect("an error event");
            let end = end.strip_suffix("\n\ndata: [DONE]\n\n").and_then(|end| end.strip_prefix("data: "));
            let error: Value = serde_json::from_str(end.expect("one event")).expect("JSON");
            assert_eq!((response.status, &error["error"]["code"]), (200, &json!("timeout")));
        } else {
            assert_eq!((response.status, &response.json()["error"]["code"]), (504, &json!("timeout")));
            assert!(
                HEADERS.iter().all(|name| response.header(name).is_none()),
                "only what is complete is shown"
            );
        }
        let lines = journal_of(&dir, at + 1);
        assert_eq!((lines.len(), &lines[at]["status"]), (at + 1, &json!("timeout")));
        assert!(lines[at]["perf_metrics"]["timing_metrics"]["first_token_time"].is_f64(), "{}", lines[at]);
    }
    server.settle(Duration::from_secs(2));
}

/// The request of UF 8.5.
fn body() -> Value {
    json!({"model": "Server", "prompt": "Hello, my name is", "max_tokens": 2})
}

fn with(mut body: Value, fields: Value) -> Value {
    let (Value::Object(body_fields), Value::Object(fields)) = (&mut body, fields) else { panic!("objects") };
    body_fields.extend(fields);
    body
}

fn start(name: &str) -> (Server, PathBuf) {
    let dir = scratch(name);
    (
        Server::real(&[
            "--return-perf-metrics",
            "--perf-metrics-output-dir",
            path(&dir),
            "--kv-cache-tokens",
            "16384",
        ]),
        dir,
    )
}

fn path(dir: &Path) -> &str {
    dir.to_str().expect("a path in UTF-8")
}

fn complete(server: &Server, body: &Value, headers: &[(&str, &str)]) -> Response {
    Client::connect(server.address).post("/v1/completions", headers, &body.to_string())
}

fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

const OPT_IN: &[(&str, &str)] = &[("X-TRTLLM-return-metrics", "1")];
const HEADERS: [&str; 4] =
    ["Server-Timing", "X-TRTLLM-Start-End-Time", "X-TRTLLM-Step-Metrics", "X-TRTLLM-Ctx-Chunk-Metrics"];

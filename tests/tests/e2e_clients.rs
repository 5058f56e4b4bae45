//! The clients that people use, on the real model: the `OpenAI` SDK for Python and curl.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use uring_serve_tests::server::{Server, journal_of, scratch};
use uring_serve_tests::setup;

#[test]
fn the_openai_sdk_gets_what_it_expects() {
    let dir = scratch("e2e_clients_sdk");
    let server = Server::real(&["--return-perf-metrics", "--perf-metrics-output-dir", path(&dir)]);
    let strict = Server::real(&["--strict-model", "--kv-cache-tokens", "16384"]);
    let output = Command::new(setup::python())
        .arg(setup::root().join("tests/python/openai_client.py"))
        .args([&server, &strict].map(|server| format!("http://{}/v1", server.address)))
        .output()
        .expect("python runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let held: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("ok ")).collect();
    println!("{} promises held:\n{}", held.len(), held.join("\n"));
    assert!(output.status.success(), "after {held:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    // Seven of each route, twice of each client, two of each client, one of the async client.
    assert_eq!(held.len(), 7 * 2 * 2 + 2 * 2 + 1);
    server.settle(Duration::from_secs(2));

    // Both clients close at [DONE], which completes a request, and both left one stream early.
    assert!(server.stop().success());
    let lines = journal_of(&dir, 0);
    let count = |status: &str| lines.iter().filter(|line| line["status"] == status).count();
    let told = ["complete", "rejected", "aborted"].map(count);
    // Of each client and route 17 answers and 14 refusals; of each client one answer more; 17 at once.
    assert_eq!((told, lines.len()), ([4 * 17 + 2 + 17, 4 * 14, 2], told.iter().sum()));
}

#[test]
fn curl_shows_the_metrics_where_they_belong() {
    let dir = scratch("e2e_clients_curl");
    let server = Server::real(&["--return-perf-metrics", "--perf-metrics-output-dir", path(&dir)]);
    let chat =
        json!({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0});
    let completion = json!({"prompt": "Hello, my name is", "max_tokens": 8, "temperature": 0});
    let mut count = 0;
    for (route, body) in [("/v1/chat/completions", chat), ("/v1/completions", completion)] {
        let mut texts = Vec::new();
        for stream in [false, true] {
            for asked in [false, true] {
                let row = format!("{route}, stream {stream}, asked {asked}");
                let mut body = body.clone();
                body["stream"] = json!(stream);
                let (head, answer) = curl(&server, route, &body, asked);
                assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{row}: {head}");
                for name in METRICS {
                    let shown =
                        head.lines().any(|line| line.split_once(": ").is_some_and(|field| field.0 == name));
                    assert_eq!(shown, asked && !stream, "{row}: {name}\n{head}");
                }
                let end = if asked {
                    "data: [DONE]\n\nevent: trtllm.perf_metrics\ndata: {"
                } else {
                    "data: [DONE]\n\n"
                };
                if stream {
                    let (chunks, behind) = answer.split_at(answer.find("data: [DONE]").expect(&answer));
                    assert!(behind.starts_with(end) && (asked || behind == end), "{row}: {behind}");
                    assert!(behind.ends_with("\n\n"), "{row}");
                    assert!(
                        METRICS.iter().all(|name| behind.contains(&format!("\"{name}\":\"server")) == asked)
                    );
                    texts.push(chunks.split("\n\n").filter(|chunk| !chunk.is_empty()).map(text_of).collect());
                } else {
                    texts.push(text_of(&answer));
                }
                count += 1;
            }
        }
        assert!(!texts[0].is_empty() && texts.iter().all(|text: &String| *text == texts[0]), "{texts:?}");
    }
    let lines = journal_of(&dir, count);
    assert_eq!(lines.len(), count, "asked or not");
    assert!(lines.iter().all(|line| line["status"] == "complete"));
}

/// Runs curl as a person would; returns the head and the body.
fn curl(server: &Server, route: &str, body: &Value, asked: bool) -> (String, String) {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--no-buffer", "--include", "--max-time", "60"]);
    curl.args(["--header", "Content-Type: application/json", "--data", &body.to_string()]);
    if asked {
        curl.args(["--header", "X-TRTLLM-return-metrics: 1"]);
    }
    let output = curl.arg(format!("http://{}{route}", server.address)).output().expect("curl is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

/// The text of a whole answer or of one event.
fn text_of(json: &str) -> String {
    let json: Value = serde_json::from_str(json.trim_start_matches("data: "))
        .unwrap_or_else(|error| panic!("{error}: {json}"));
    let choice = &json["choices"][0];
    let texts = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
    texts.into_iter().filter_map(Value::as_str).collect()
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

const METRICS: [&str; 4] =
    ["Server-Timing", "X-TRTLLM-Start-End-Time", "X-TRTLLM-Step-Metrics", "X-TRTLLM-Ctx-Chunk-Metrics"];

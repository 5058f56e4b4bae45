//! Sixty-four streams at once on the real model: each gets what it would get alone, and nothing stays behind.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use uring_serve_tests::http::Client;
use uring_serve_tests::server::{Server, journal_of, scratch};

#[test]
fn sixty_four_streams_get_the_text_that_each_gets_alone() {
    let dir = scratch("e2e_streams");
    // Half of them wait for a slot at first; a small step budget makes long prompts come in chunks beside decode.
    let server = Server::real(&[
        "--perf-metrics-output-dir",
        dir.to_str().expect("a path in UTF-8"),
        "--max-batch-size",
        "32",
        "--max-num-tokens",
        "64",
        "--workers",
        "2",
        "--kv-cache-tokens",
        "32768",
    ]);
    let address = server.address;
    let alone: Vec<String> = (0..PROMPTS).map(|index| whole(address, index)).collect();
    assert!(alone.iter().all(|text| !text.is_empty()));
    let distinct: std::collections::BTreeSet<&String> = alone.iter().collect();
    assert!(distinct.len() > PROMPTS / 2, "prompts that lead to different texts: {distinct:?}");

    let together: Vec<String> = thread::scope(|scope| {
        let streams: Vec<_> =
            (0..STREAMS).map(|index| scope.spawn(move || streamed(address, index % PROMPTS))).collect();
        streams.into_iter().map(|stream| stream.join().expect("a complete stream")).collect()
    });
    for (index, text) in together.iter().enumerate() {
        assert_eq!(text, &alone[index % PROMPTS], "stream {index}");
    }

    server.settle(Duration::from_secs(1));
    let lines = journal_of(&dir, PROMPTS + STREAMS);
    assert_eq!(lines.len(), PROMPTS + STREAMS);
    assert!(lines.iter().all(|line| line["status"] == "complete"));
    let mut ids: Vec<Option<u64>> = lines.iter().map(|line| line["request_id"].as_u64()).collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq((1..=PROMPTS as u64 + STREAMS as u64).map(Some)), "each request once");
    let complete = (PROMPTS + STREAMS) as f64;
    assert_eq!(server.sample("uring_serve_requests_total"), complete);
    assert_eq!(server.sample("trtllm_num_requests_completed_total"), complete);
    assert_eq!(server.sample("uring_serve_journal_dropped_total"), 0.0);
    assert!(server.stop().success());
}

#[test]
fn comments_keep_a_silent_stream_alive_only_when_the_operator_asks() {
    // (flags, tokens, whether there are comments); a token takes the time of its flag, the head at most 1 s.
    let rows: [(&[&str], u32, bool); 4] = [
        (&["--sim-tpot-us", "60000"], 40, false),
        (&["--sim-tpot-us", "2400000"], 2, false),
        (&["--sim-tpot-us", "60000", "--sse-keepalive", "1"], 40, false),
        (&["--sim-tpot-us", "2400000", "--sse-keepalive", "1"], 2, true),
    ];
    for (flags, tokens, comments) in rows {
        let server = Server::sim(&[flags, &["--stream-head-after", "1"]].concat());
        let body =
            json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true, "stream": true}).to_string();
        let response = Client::connect(server.address).post("/v1/completions", &[], &body);
        assert_eq!(response.status, 200);
        assert!(response.text().ends_with("data: [DONE]\n\n"));
        assert_eq!(response.text().contains("\n\n:"), comments, "{flags:?}: {}", response.text());
    }
}

/// A request of its own prompt, length and output for each index.
fn request(index: usize, stream: bool) -> String {
    let subjects = ["rivers", "clocks", "bread", "whales", "violins", "glass", "maps", "snow"];
    let subject = subjects[index % subjects.len()];
    let lead = format!("Chapter {index}. Notes on {subject}, for readers who like {subject}. ");
    let question =
        format!("{}\nQ: What is the first thing to know about {subject}?\nA:", lead.repeat(index % 6));
    json!({"prompt": question, "max_tokens": 8 + index, "temperature": 0, "ignore_eos": true, "stream": stream})
        .to_string()
}

fn whole(address: SocketAddr, index: usize) -> String {
    let response = Client::connect(address).post("/v1/completions", &[], &request(index, false));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
}

fn streamed(address: SocketAddr, index: usize) -> String {
    let response = Client::connect(address).post("/v1/completions", &[], &request(index, true));
    assert_eq!(response.status, 200, "{}", response.text());
    let events = response.events();
    let (last, chunks) = events.split_last().expect("events");
    assert_eq!(last, &(String::new(), "[DONE]".to_owned()));
    let (mut text, mut reasons) = (String::new(), Vec::new());
    for (name, data) in chunks {
        assert_eq!(name, "", "{data}");
        let choice = &serde_json::from_str::<Value>(data).expect("JSON")["choices"][0];
        text.push_str(choice["text"].as_str().expect("a text"));
        reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    assert_eq!(reasons, ["length"]);
    text
}

/// Streams at once.
const STREAMS: usize = 64;
/// Different requests among them.
const PROMPTS: usize = 16;

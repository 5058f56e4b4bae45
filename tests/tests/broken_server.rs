//! Faults that were found by attacking a running server, each by the command that showed it.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;
use uring_serve::clock::{Clock as _, SystemClock};
use uring_serve_core::time::MonoNs;
use uring_serve_tests::http::{Client, post_bytes};
use uring_serve_tests::server::{RUNNING, Server, eventually, journal_of, scratch};

#[test]
fn a_step_that_outlasts_the_drain_does_not_hold_the_process() {
    let mut server = Server::sim(&["--sim-ttft-us", LONG_STEP_US, "--drain-timeout", "0.2"]);
    let mut client = send(&server, &json!({"prompt": "hi", "max_tokens": 1}));
    await_running(&server);
    let signalled = SystemClock.now();
    server.signal(15);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    assert!(since(signalled) < LONG_STEP / 4, "{:?}", since(signalled));
    assert!(client.read_to_end().is_empty());
}

#[test]
fn a_sequence_counts_as_running_during_its_first_step() {
    let server = Server::sim(&["--sim-ttft-us", LONG_STEP_US]);
    let _client = send(&server, &json!({"prompt": "hi", "max_tokens": 1}));
    await_running(&server);
}

#[test]
fn a_health_probe_is_bounded_by_the_request_timeout() {
    let server = Server::sim(&["--sim-ttft-us", LONG_STEP_US, "--request-timeout", "0.2"]);
    let asked = SystemClock.now();
    let response = Client::connect(server.address).get("/health_generate");
    assert_eq!((response.status, response.text()), (500, "Generation health check failed"));
    assert!(since(asked) < LONG_STEP / 4, "{:?}", since(asked));
}

#[test]
fn a_health_probe_is_no_generation_request() {
    let server = Server::sim(&[]);
    assert_eq!(Client::connect(server.address).get("/health_generate").status, 200);
    for name in [REQUESTS, "trtllm_num_requests_completed_total", "trtllm_generation_tokens_total"] {
        assert_eq!(server.sample(name), 0.0, "{name}");
    }
}

#[test]
fn a_request_is_counted_as_its_record_says_even_if_its_last_step_still_ends() {
    let dir = scratch("broken_last_step");
    let folder = dir.to_str().expect("a path in UTF-8");
    let server = Server::sim(&["--sim-ttft-us", "300000", "--perf-metrics-output-dir", folder]);
    let client = send(&server, &json!({"prompt": "hi", "max_tokens": 1}));
    await_running(&server);
    client.reset();
    let lines = journal_of(&dir, 1);
    assert_eq!(lines[0]["status"], "aborted", "{lines:?}");
    assert_eq!(server.sample(REQUESTS), 1.0);
    assert_eq!(server.sample(&format!("{REQUESTS}{{status=\"aborted\"}}")), 1.0);
}

#[test]
fn no_stop_string_ends_a_sequence_before_min_tokens() {
    let server = Server::sim(&[]);
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let body = json!({"prompt": "hi", "seed": 7, "stop": letters, "min_tokens": 30, "max_tokens": 60, "ignore_eos": true});
    let response = Client::connect(server.address).post("/v1/completions", &[], &body.to_string()).json();
    let tokens = response["usage"]["completion_tokens"].as_u64().expect("a number");
    assert!((31..60).contains(&tokens), "{response}");
    assert_eq!(response["choices"][0]["finish_reason"], "stop");
}

#[test]
fn a_metrics_file_at_the_limit_on_file_sizes_does_not_end_the_server() {
    let dir = scratch("broken_file_size");
    let server = Server::sim(&["--perf-metrics-output-dir", dir.to_str().expect("a path in UTF-8")]);
    let id = i32::try_from(server.id()).expect("a process id");
    let limit = Rlimit { current: Some(100), maximum: Some(100) };
    prlimit(Pid::from_raw(id), Resource::Fsize, limit).expect("a limit of a child of ours");
    let mut client = Client::connect(server.address);
    let mut complete = || client.post("/v1/completions", &[], r#"{"prompt":"hi","max_tokens":1}"#).status;
    assert_eq!(complete(), 200);
    eventually("a failed write", Duration::from_secs(10), || {
        (server.sample("uring_serve_journal_errors_total") > 0.0).then_some(())
    });
    assert_eq!(complete(), 200);
    assert_eq!(server.stop().code(), Some(0));
}

const REQUESTS: &str = "uring_serve_requests_total";
const LONG_STEP_US: &str = "40000000";
const LONG_STEP: Duration = Duration::from_secs(40);

fn send(server: &Server, body: &serde_json::Value) -> Client {
    let mut client = Client::connect(server.address);
    client.send(&post_bytes("/v1/completions", &[], &body.to_string()));
    client
}

fn await_running(server: &Server) {
    eventually("a sequence that runs", Duration::from_secs(10), || {
        (server.sample(RUNNING) == 1.0).then_some(())
    });
}

fn since(start: MonoNs) -> Duration {
    SystemClock.now().checked_since(start).expect("later")
}

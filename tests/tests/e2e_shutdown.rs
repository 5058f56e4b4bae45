//! How a server ends: drained by a signal, at once by a second, in time whatever runs; and how it does not begin.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use uring_serve::clock::{Clock as _, SystemClock};
use uring_serve_tests::http::{Client, Response, post_bytes};
use uring_serve_tests::server::{
    RUNNING, Server, WAITING, eventually, journal_lines, journal_of, run_to_end, scratch,
};
use uring_serve_tests::setup;

#[test]
fn a_signal_lets_what_runs_and_waits_finish() {
    for signal in [TERM, INT] {
        // One slot, so that the second request waits.
        let (mut server, dir) = start(&format!("e2e_shutdown_drain_{signal}"), &["--max-batch-size", "1"]);
        let mut stream = send(&server, &request(40, Form::Streamed));
        let mut begun = begin_stream(&mut stream);
        let mut waiting = send(&server, &request(3, Form::Whole));
        await_sample(&server, WAITING);
        // Connected before, asked after.
        let mut late = Client::connect(server.address);

        server.signal(signal);
        await_refusal(server.address);
        let health = late.get("/health");
        assert_eq!(health.status, 503, "{}", health.text());
        assert!(health.header("Retry-After").is_some(), "{health:?}");
        assert_eq!(health.header("Connection"), Some("close"));
        assert!(late.read_to_end().is_empty());

        while stream.read_chunk_of(&mut begun).is_some() {}
        assert!(begun.text().contains("\"completion_tokens\":40,"), "{}", begun.text());
        assert!(begun.text().ends_with("data: [DONE]\n\n"), "{}", begun.text());
        assert!(stream.read_to_end().is_empty(), "closed behind the answer");
        let whole = waiting.read_response();
        assert_eq!((whole.status, &whole.json()["usage"]["completion_tokens"]), (200, &json!(3)));
        assert_eq!(whole.header("Connection"), Some("close"));

        assert_eq!(server.wait().code(), Some(0), "{}", server.log());
        // No waiting: what was written is there when the process is gone.
        let statuses = statuses(&dir);
        assert_eq!(statuses, ["complete", "complete"]);
    }
}

#[test]
fn a_second_signal_ends_what_runs_at_once() {
    let (mut server, dir) = start("e2e_shutdown_second", &["--max-batch-size", "1"]);
    let mut stream = send(&server, &request(4_000, Form::Streamed));
    let begun = begin_stream(&mut stream);
    let mut waiting = send(&server, &request(3, Form::Whole));
    await_sample(&server, WAITING);
    server.signal(TERM);
    await_refusal(server.address);
    let signalled = SystemClock.now();
    server.signal(TERM);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    let took = SystemClock.now().checked_since(signalled).expect("later");
    assert!(took < Duration::from_secs(2), "{took:?}");
    let rest = String::from_utf8(stream.read_to_end()).expect("UTF-8");
    assert!(begun.status == 200 && !rest.contains("[DONE]"), "the stream is cut: {rest}");
    assert!(waiting.read_to_end().is_empty());
    assert_eq!(statuses(&dir), ["aborted", "aborted"]);
    let lines = journal_of(&dir, 2);
    let times = |line: &Value| !line["perf_metrics"]["timing_metrics"]["first_token_time"].is_null();
    assert_eq!(lines.iter().filter(|line| times(line)).count(), 1, "one had a token: {lines:?}");
}

#[test]
fn the_drain_lasts_as_long_as_it_may_and_no_longer() {
    let (mut server, dir) = start("e2e_shutdown_timeout", &["--drain-timeout", "1"]);
    let mut short = send(&server, &request(20, Form::Streamed));
    let mut long = send(&server, &request(4_000, Form::Streamed));
    let mut begun = begin_stream(&mut short);
    begin_stream(&mut long);
    let signalled = SystemClock.now();
    server.signal(TERM);
    while short.read_chunk_of(&mut begun).is_some() {}
    assert!(begun.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    let took = SystemClock.now().checked_since(signalled).expect("later");
    assert!((Duration::from_secs(1)..Duration::from_secs(3)).contains(&took), "{took:?}");
    assert!(!String::from_utf8_lossy(&long.read_to_end()).contains("[DONE]"));
    assert_eq!(statuses(&dir), ["complete", "aborted"]);
}

#[test]
fn a_client_that_leaves_as_the_server_ends_has_its_line() {
    // One step lasts longer than the rest of the drain: the engine's last word comes after the last connection.
    let dir = scratch("e2e_shutdown_left");
    let mut server = Server::sim(&["--perf-metrics-output-dir", path(&dir), "--sim-tpot-us", "700000"]);
    let mut stream = send(&server, &request(4_000, Form::Streamed));
    begin_stream(&mut stream);
    server.signal(TERM);
    await_refusal(server.address);
    stream.reset();
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    assert_eq!(statuses(&dir), ["aborted"]);
    let line = &journal_of(&dir, 1)[0];
    assert!(line["perf_metrics"]["timing_metrics"]["first_token_time"].is_f64(), "{line}");
}

#[test]
fn an_idle_connection_does_not_hold_the_drain() {
    let (server, dir) = start("e2e_shutdown_idle", &[]);
    let mut idle = Client::connect(server.address);
    assert_eq!(idle.get("/health").status, 200);
    let signalled = SystemClock.now();
    assert_eq!(server.stop().code(), Some(0));
    let took = SystemClock.now().checked_since(signalled).expect("later");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(idle.read_to_end().is_empty());
    assert_eq!(journal_lines(&dir), [""; 0], "nothing was asked of the engine");
}

#[test]
fn a_port_in_use_ends_the_start_with_a_sentence() {
    let server = Server::sim(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let other = listener.local_addr().expect("an address");
    for address in [server.address, other] {
        let port = address.port().to_string();
        let (what, hint) = refusal(&["serve", "--engine", "sim", "--host", "127.0.0.1", "--port", &port]);
        assert!(what.contains(&address.to_string()) && what.contains("in use"), "{what}");
        assert!(hint.contains("--port"), "{hint}");
    }
    assert_eq!(Client::connect(server.address).get("/health").status, 200, "the first is not disturbed");
}

#[test]
fn a_model_that_is_missing_or_broken_ends_the_start_with_a_sentence() {
    let dir = scratch("e2e_shutdown_models");
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).expect("a folder under target");
        path
    };
    let mut models =
        vec![dir.join("absent.gguf"), file("empty.gguf", b""), file("text.gguf", b"hello, this is no model")];
    // A model cut short: the first mebibyte of the real one.
    let whole = std::fs::read(setup::model()).expect("the model file");
    models.push(file("cut.gguf", &whole[..1 << 20]));
    let suite = std::fs::read_to_string(setup::root().join("tests/suites/gguf.json")).expect("the suite");
    let suite: Value = serde_json::from_str(&suite).expect("JSON");
    for case in suite["cases"].as_array().expect("cases") {
        if case["expect"]["kind"] == "clean-error" {
            let bytes = case["file_b64"].as_str().and_then(|text| STANDARD.decode(text).ok());
            if let Some(bytes) = bytes {
                models.push(file(&format!("{}.gguf", case["name"].as_str().expect("a name")), &bytes));
            }
        }
    }
    assert!(models.len() > 20, "the suite has broken files");
    println!("{} files", models.len());
    for model in &models {
        let model = path(model);
        let (what, hint) =
            refusal(&["serve", model, "--engine", "cpu", "--host", "127.0.0.1", "--port", "0"]);
        assert!(what.contains(model), "{what}");
        assert!(!hint.is_empty());
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Streamed,
    Whole,
}

/// A simulated engine that makes a token every 20 ms.
fn start(name: &str, args: &[&str]) -> (Server, PathBuf) {
    let dir = scratch(name);
    let mut all = vec!["--perf-metrics-output-dir", path(&dir), "--sim-tpot-us", "20000"];
    all.extend_from_slice(args);
    (Server::sim(&all), dir)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn request(tokens: u32, form: Form) -> String {
    let mut body = json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true});
    if form == Form::Streamed {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

fn send(server: &Server, body: &str) -> Client {
    let mut client = Client::connect(server.address);
    client.send(&post_bytes("/v1/completions", &[], body));
    client
}

fn begin_stream(client: &mut Client) -> Response {
    let mut response = client.read_head();
    assert_eq!(response.status, 200);
    client.read_chunk_of(&mut response).expect("a first chunk");
    response
}

fn await_sample(server: &Server, name: &str) {
    eventually(name, Duration::from_secs(10), || (server.sample(name) == 1.0).then_some(()));
    assert_eq!(server.sample(RUNNING), 1.0);
}

/// Waits until nobody accepts connections.
fn await_refusal(address: SocketAddr) {
    eventually("a closed port", Duration::from_secs(5), || {
        TcpStream::connect(address).is_err().then_some(())
    });
}

fn statuses(dir: &Path) -> Vec<String> {
    let lines = journal_lines(dir);
    let status = |line: &String| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        line["status"].as_str().expect("a status").to_owned()
    };
    lines.iter().map(status).collect()
}

/// Runs a start that fails; returns what happened and what to do.
fn refusal(args: &[&str]) -> (String, String) {
    let output = run_to_end(args);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}");
    let (what, hint) = stderr.split_once("\n\nhint: ").unwrap_or_else(|| panic!("{args:?}: {stderr}"));
    let what = what.strip_prefix("error: ").unwrap_or_else(|| panic!("{args:?}: {stderr}"));
    assert!(!what.contains('\n') && hint.lines().count() == 1, "{args:?}: one sentence each: {stderr}");
    (what.to_owned(), hint.trim_end().to_owned())
}

const INT: i32 = 2;
const TERM: i32 = 15;

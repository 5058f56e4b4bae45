//! The foreign suites about HTTP and request bodies, over real connections to a running server process.
//!
//! The pure runners (`suite_http1`, `suite_json_bodies`, `suite_api_validation`) pin each case's outcome. These check that
//! the same holds through sockets, the front-end pool and the writer of answers, and what only a connection can show:
//! it stays usable, an error of a stream is plain JSON, HEAD has no body.

use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use uring_serve_tests::http::{Client, Response, post_bytes};
use uring_serve_tests::server::Server;
use uring_serve_tests::setup;

#[derive(Deserialize)]
struct Suite<C> {
    count: usize,
    cases: Vec<C>,
}

#[derive(Deserialize)]
struct Body {
    body_b64: Option<String>,
    body_parts: Option<Vec<Part>>,
}

#[derive(Deserialize)]
struct Part {
    b64: String,
    repeat: usize,
}

#[derive(Deserialize)]
struct JsonCase {
    id: String,
    category: String,
    name: String,
    expect: String,
    #[serde(flatten)]
    body: Body,
}

#[derive(Deserialize)]
struct ApiCase {
    id: String,
    name: String,
    level: String,
    method: String,
    endpoint: String,
    headers: std::collections::BTreeMap<String, String>,
    expect: ApiExpect,
    #[serde(flatten)]
    body: Body,
}

#[derive(Deserialize)]
struct ApiExpect {
    status_any_of: Vec<u16>,
    error: Option<ErrorExpect>,
    #[serde(default)]
    no_metrics_in_answer: bool,
    sse: Option<Value>,
}

#[derive(Deserialize)]
struct ErrorExpect {
    #[serde(rename = "type")]
    kind: String,
    param: Option<String>,
    code: Option<String>,
}

#[test]
fn no_must_case_of_http1_fails_through_sockets() {
    let server = sim();
    let suites = setup::root().join("tests/suites");
    let (ip, port) = (server.address.ip().to_string(), server.address.port().to_string());
    let output = Command::new("python3")
        .arg(suites.join("run_http1_live.py"))
        .args([ip, port])
        .arg(suites.join("http1.json"))
        .output()
        .expect("python3 runs");
    let told = String::from_utf8_lossy(&output.stdout);
    println!("run_http1_live.py: {told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
    assert!(
        told.trim_end().ends_with("233 passed, 0 failed"),
        "a case fails, or the suite has changed its size"
    );
    assert_eq!(Client::connect(server.address).get("/version").status, 200);
}

#[test]
fn every_json_body_is_answered_and_the_connection_stays() {
    let suite: Suite<JsonCase> = read("json-bodies.json");
    assert_eq!(suite.cases.len(), suite.count);
    let server = sim();
    let mut client = Client::connect(server.address);
    let mut counts = [0; 2];
    for JsonCase { id, category, name, expect, body } in &suite.cases {
        let response = post(&mut client, "/v1/chat/completions", &[], &body.bytes());
        // Only bodies of their own are chat requests; see the pure runner for what the open ones come to.
        let expected = match (category.starts_with("own"), expect.as_str()) {
            (false, _) | (true, "reject") => Some(400),
            (true, "accept") => Some(200),
            (true, _) => None,
        };
        let status = response.status;
        assert!(
            expected.map_or(matches!(status, 200 | 400), |expected| expected == status),
            "{id} {name}: {status}"
        );
        if status == 400 {
            check_error(id, &response);
            assert!(response.body.len() < 1000, "{id}: {} bytes of error", response.body.len());
        }
        assert_eq!(client.get("/version").status, 200, "{id}: the connection stays usable");
        counts[usize::from(status == 400)] += 1;
    }
    println!("json-bodies live: {} answered 200, {} answered 400, of {}", counts[0], counts[1], suite.count);
}

#[test]
fn every_api_case_is_answered_as_the_suite_says() {
    let suite: Suite<ApiCase> = read("api-validation.json");
    assert_eq!(suite.cases.len(), suite.count);
    let server = sim();
    let mut client = Client::connect(server.address);
    let mut counts = [0; 3];
    for case in &suite.cases {
        case.check(&mut client);
        counts[["MUST", "SHOULD", "MAY"].iter().position(|level| *level == case.level).expect("a level")] +=
            1;
    }
    println!(
        "api-validation live: MUST {}, SHOULD {}, MAY {}: all pass, of {}",
        counts[0], counts[1], counts[2], suite.count
    );
}

impl ApiCase {
    fn check(&self, client: &mut Client) {
        let (id, name, body) = (&self.id, &self.name, self.body.bytes());
        let response = self.ask(client, &body);
        assert!(
            self.expect.status_any_of.contains(&response.status),
            "{id} {name}: {} {}",
            response.status,
            String::from_utf8_lossy(&response.body)
        );
        let type_of = response.header("content-type").unwrap_or_default();
        if response.status >= 400 {
            let error = check_error(id, &response);
            if let Some(expected) = &self.expect.error {
                assert_eq!(error["type"], expected.kind.as_str(), "{id} {name}");
                assert_eq!(error["code"].as_str(), expected.code.as_deref(), "{id} {name}");
                if expected.param.is_some() {
                    assert_eq!(error["param"].as_str(), expected.param.as_deref(), "{id} {name}");
                }
            }
        } else if self.method == "POST" {
            let asked: Value = serde_json::from_slice(&body).expect("what is served is JSON");
            let stream = asked["stream"] == true;
            assert_eq!(type_of.starts_with("text/event-stream"), stream, "{id} {name}: {type_of}");
        }
        if self.expect.no_metrics_in_answer {
            let raw = String::from_utf8_lossy(&response.raw).to_ascii_lowercase();
            assert!(!raw.contains("trtllm") && !raw.contains("server-timing"), "{id} {name}: {raw}");
        }
        if self.expect.sse.is_some() {
            check_usage(&response);
        }
        if response.header("connection") == Some("close") {
            assert!(response.status >= 400, "{id} {name} closes");
            assert!(client.read_to_end().is_empty());
            *client = Client::connect(client.stream().peer_addr().expect("connected"));
        }
        assert_eq!(client.get("/version").status, 200, "{id} {name}: the connection stays usable");
    }

    fn ask(&self, client: &mut Client, body: &[u8]) -> Response {
        let headers: Vec<(&str, &str)> =
            self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        if self.method == "POST" {
            return post(client, &self.endpoint, &headers, body);
        }
        client.send(format!("{} {} HTTP/1.1\r\nHost: test\r\n\r\n", self.method, self.endpoint).as_bytes());
        if self.method == "HEAD" { client.read_head() } else { client.read_response() }
    }
}

/// An answer of 4xx is one nested object with four members and a short message, never a stream.
fn check_error(id: &str, response: &Response) -> Value {
    assert_eq!(response.header("content-type"), Some("application/json"), "{id}");
    let mut error = response.json()["error"].take();
    let members = error.as_object().unwrap_or_else(|| panic!("{id}: {}", response.text()));
    assert_eq!(members.keys().collect::<Vec<_>>(), ["code", "message", "param", "type"], "{id}");
    let message = members["message"].as_str().unwrap_or_default();
    assert!((1..400).contains(&message.len()), "{id}: {message}");
    error.take()
}

/// One chunk more, without choices, and the usage in no other.
fn check_usage(response: &Response) {
    let events = response.events();
    let [chunks @ .., (_, usage), (_, done)] = events.as_slice() else { panic!("{events:?}") };
    let parse = |data: &str| -> Value { serde_json::from_str(data).expect("a chunk is JSON") };
    assert_eq!(done, "[DONE]");
    let usage = parse(usage);
    assert_eq!(usage["choices"], Value::Array(Vec::new()));
    assert!(usage["usage"]["total_tokens"].is_u64(), "{usage}");
    for (_, data) in chunks {
        assert!(parse(data)["usage"].is_null(), "{data}");
    }
}

fn post(client: &mut Client, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let headers: Vec<_> = headers.iter().copied().filter(|(name, _)| *name != "Content-Type").collect();
    let mut request = post_bytes(path, &headers, "");
    // `post_bytes` takes text; these bodies need not be.
    let at = request.windows(17).position(|window| window == b"Content-Length: 0").expect("it has a length");
    request.truncate(at);
    request.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
    request.extend_from_slice(body);
    client.send(&request);
    client.read_response()
}

fn sim() -> Server {
    Server::sim(&["--sim-ttft-us", "0", "--sim-tpot-us", "0", "--return-perf-metrics"])
}

fn read<C: for<'de> Deserialize<'de>>(name: &str) -> Suite<C> {
    let text = std::fs::read(setup::root().join("tests/suites").join(name)).expect("the suite is there");
    serde_json::from_slice(&text).expect("the suite is JSON")
}

impl Body {
    fn bytes(&self) -> Vec<u8> {
        let decode = |base64: &str| STANDARD.decode(base64).expect("base64");
        match (&self.body_b64, &self.body_parts) {
            (Some(body), _) => decode(body),
            (None, Some(parts)) => {
                parts.iter().flat_map(|part| decode(&part.b64).repeat(part.repeat)).collect()
            }
            (None, None) => Vec::new(),
        }
    }
}

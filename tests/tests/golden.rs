//! Whole responses and JSONL lines, byte for byte, of the simulated engine on a virtual clock with fixed ids.
//!
//! `tests/golden/NAME.http` is what one request gets, `tests/golden/NAME.jsonl` what it leaves in the file. Run with
//! `UPDATE_GOLDEN=1` to write them anew; the difference then is what users of the API will see.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use uring_serve::serve::Hooks;
use uring_serve_tests::embedded::{Embedded, LockstepClock};
use uring_serve_tests::http::{Client, post_bytes};
use uring_serve_tests::server::scratch;
use uring_serve_tests::setup;

/// One request to a server of its own.
struct Case {
    name: &'static str,
    args: &'static [&'static str],
    request: Vec<u8>,
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const PLAIN: &[&str] = &[];
const GRANTED: &[&str] = &["--return-perf-metrics"];
const OPT_IN: &[(&str, &str)] = &[("X-TRTLLM-Return-Metrics", "1")];
const NO_HEADERS: &[(&str, &str)] = &[];

#[test]
fn responses_of_generation_are_as_filed() {
    let cases = generations();
    check_all(&cases);
    println!("{} golden cases of generation are as filed", cases.len());
}

#[test]
fn errors_and_pages_are_as_filed() {
    let cases = errors_and_pages();
    check_all(&cases);
    println!("{} golden cases of errors and pages are as filed", cases.len());
}

#[test]
fn every_file_has_its_case() {
    let names: Vec<_> = generations().iter().chain(&errors_and_pages()).map(|case| case.name).collect();
    for entry in fs::read_dir(folder()).expect("the folder is there") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name in UTF-8");
        assert!(name == ".gitattributes" || names.contains(&name), "no case is called {name}");
    }
}

fn generations() -> Vec<Case> {
    let hello = r#""messages":[{"role":"user","content":"Hello"}]"#;
    let row = |name, args, path, headers, fields: &str| Case {
        name,
        args,
        request: post_bytes(path, headers, &format!("{{\"model\":\"m\",{fields}}}")),
    };
    let always_a =
        |fields: &str| format!(r#""prompt":"Hello","max_tokens":5,"logit_bias":{{"97":100}},{fields}"#);
    let budget = &[("X-TRTLLM-Return-Metrics", "1"), ("X-TRTLLM-Metrics-Budget", "81920")];
    let named = &[("X-TRTLLM-Return-Metrics", "1"), ("X-Request-Id", "req-7")];
    let small = &["--return-perf-metrics", "--metrics-header-budget", "900"];
    vec![
        row("completion", PLAIN, TEXT, NO_HEADERS, r#""prompt":"Hello","max_tokens":4"#),
        row("completion-opt-in", GRANTED, TEXT, OPT_IN, r#""prompt":"Hello","max_tokens":4"#),
        row("completion-opt-in-all-times", GRANTED, TEXT, budget, r#""prompt":"Hello","max_tokens":4"#),
        row("completion-opt-in-request-id", GRANTED, TEXT, named, r#""prompt":"Hello","max_tokens":1"#),
        row("completion-opt-in-truncated", small, TEXT, OPT_IN, r#""prompt":"Hello","max_tokens":16"#),
        row("completion-three-prompts", GRANTED, TEXT, OPT_IN, r#""prompt":["a","bc","def"],"max_tokens":3"#),
        row("completion-two-choices", GRANTED, TEXT, OPT_IN, r#""prompt":"Hello","n":2,"max_tokens":3"#),
        row("completion-token-ids", PLAIN, TEXT, NO_HEADERS, r#""prompt":[72,105],"max_tokens":4"#),
        row("completion-ends-by-itself", PLAIN, TEXT, NO_HEADERS, r#""prompt":"Hello","max_tokens":64"#),
        row("completion-stream", PLAIN, TEXT, NO_HEADERS, r#""prompt":"Hello","max_tokens":3,"stream":true"#),
        row(
            "completion-stream-opt-in",
            GRANTED,
            TEXT,
            OPT_IN,
            r#""prompt":["a","bc"],"max_tokens":3,"stream":true"#,
        ),
        row("chat", PLAIN, CHAT, NO_HEADERS, &format!(r#"{hello},"max_tokens":4"#)),
        row("chat-opt-in", GRANTED, CHAT, OPT_IN, &format!(r#"{hello},"max_tokens":4"#)),
        row("chat-stream", PLAIN, CHAT, NO_HEADERS, &format!(r#"{hello},"max_tokens":4,"stream":true"#)),
        row("chat-stream-opt-in", GRANTED, CHAT, OPT_IN, &format!(r#"{hello},"max_tokens":4,"stream":true"#)),
        row(
            "chat-stream-usage",
            PLAIN,
            CHAT,
            NO_HEADERS,
            &format!(r#"{hello},"max_tokens":4,"stream":true,"stream_options":{{"include_usage":true}}"#),
        ),
        row(
            "chat-stream-two-choices",
            PLAIN,
            CHAT,
            NO_HEADERS,
            &format!(r#"{hello},"max_tokens":3,"n":2,"temperature":0,"stream":true"#),
        ),
        // The bias makes it all "a", whatever the simulator would say.
        row("completion-stop-string", PLAIN, TEXT, NO_HEADERS, &always_a(r#""stop":["aaa"]"#)),
        row(
            "completion-stream-stop-string",
            PLAIN,
            TEXT,
            NO_HEADERS,
            &always_a(r#""stop":["aaa"],"stream":true"#),
        ),
        row(
            "completion-stream-held-back",
            PLAIN,
            TEXT,
            NO_HEADERS,
            &always_a(r#""stop":["aab"],"stream":true"#),
        ),
    ]
}

fn errors_and_pages() -> Vec<Case> {
    let get = |name, args, path: &str| Case {
        name,
        args,
        request: format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes(),
    };
    let post = |name, args, path, body: &str| Case { name, args, request: post_bytes(path, OPT_IN, body) };
    let narrow = &["--max-queued-requests", "1"];
    let locked = &["--api-key", "sesame"];
    let small = &["--head-bytes-max", "1024", "--body-bytes-max", "1024"];
    vec![
        post("error-400-json", GRANTED, TEXT, "{"),
        post("error-400-field", GRANTED, TEXT, r#"{"prompt":"x","max_tokens":0}"#),
        post("error-400-context", GRANTED, TEXT, r#"{"prompt":"x","max_tokens":8192}"#),
        post("error-400-stream", GRANTED, CHAT, r#"{"messages":[],"stream":true}"#),
        post("error-404-model", &["--strict-model"], TEXT, r#"{"prompt":"x","model":"other"}"#),
        post("error-400-sequences", narrow, TEXT, r#"{"prompt":["a","b"]}"#),
        post("error-400-sequences-stream", narrow, TEXT, r#"{"prompt":["a","b"],"stream":true}"#),
        post("error-401", locked, TEXT, r#"{"prompt":"x"}"#),
        Case {
            name: "error-413",
            args: small,
            request: b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 1025\r\n\r\n".to_vec(),
        },
        get("error-414", small, &"/".repeat(1024)),
        get("error-431", small, &format!("/version HTTP/1.1\r\nX: {}\r\nY: ", "x".repeat(1024))),
        get("error-404", PLAIN, "/nowhere"),
        get("error-404-perf-metrics", GRANTED, "/perf_metrics"),
        get("error-404-models-id", PLAIN, "/v1/models/other"),
        get("error-405", PLAIN, TEXT),
        post("error-405-get-only", PLAIN, "/health", "{}"),
        get("error-505", PLAIN, "/version HTTP/2.0\r\nX: "),
        get("health", PLAIN, "/health"),
        get("health-closing", PLAIN, "/health HTTP/1.1\r\nConnection: close\r\nX: "),
        get("health-generate", PLAIN, "/health_generate"),
        get("version", PLAIN, "/version"),
        get("models", PLAIN, "/v1/models"),
        get("models-id", PLAIN, "/v1/models/sim"),
        get("server-info", PLAIN, "/server_info"),
        get("steady-clock-offset", PLAIN, "/steady_clock_offset"),
        post("steady-clock-offset-set", PLAIN, "/steady_clock_offset", r#"{"offset":1.5}"#),
        post("tokenize", PLAIN, "/tokenize", r#"{"prompt":"Hi \u00e9","return_token_strs":true}"#),
        post("tokenize-chat", PLAIN, "/tokenize", r#"{"messages":[{"role":"user","content":"Hi"}]}"#),
        post("detokenize", PLAIN, "/detokenize", r#"{"tokens":[72,105,258]}"#),
    ]
}

/// Runs each case twice, so that a response that differs between two runs is told as that.
fn check_all(cases: &[Case]) {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1");
    let mut wrong = Vec::new();
    for case in cases {
        let first = case.run();
        assert_eq!(show(&first), show(&case.run()), "{} differs from run to run", case.name);
        for (kind, got) in ["http", "jsonl"].into_iter().zip(first) {
            let path = folder().join(format!("{}.{kind}", case.name));
            if update {
                if got.is_empty() {
                    // A case that leaves no line has no file of lines; most often there was none.
                    let _ = fs::remove_file(&path);
                } else {
                    fs::write(&path, &got).expect("a golden file can be written");
                }
                continue;
            }
            let filed = fs::read(&path).unwrap_or_default();
            if filed != got {
                let (filed, got) = (String::from_utf8_lossy(&filed), String::from_utf8_lossy(&got));
                wrong.push(format!("{}.{kind}\n--- filed\n{filed}\n--- got\n{got}\n", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

impl Case {
    /// Returns the response and the lines.
    fn run(&self) -> [Vec<u8>; 2] {
        let lines = scratch(&format!("golden-{}", self.name));
        let mut args = vec!["--sim-ttft-us", "2500", "--sim-tpot-us", "1250", "--perf-metrics-output-dir"];
        args.push(lines.to_str().expect("a path in UTF-8"));
        args.extend(self.args);
        let clock = Arc::new(LockstepClock::new(WALL_START));
        let hooks = Hooks { id_seed: Some(1), ..Hooks::default() };
        let server = Embedded::start(&args, Arc::clone(&clock) as Arc<_>, &hooks);
        clock.follow(&server);
        let mut client: Client = server.connect();
        client.send(&self.request);
        let response = client.read_response().raw;
        drop(client);
        clock.release();
        server.end();
        let files: Vec<_> = fs::read_dir(&lines).expect("the folder is there").collect();
        assert_eq!(files.len(), 1, "one file a process");
        let path = files[0].as_ref().expect("an entry").path();
        [response, fs::read(path).expect("the file is there")]
    }
}

fn show(parts: &[Vec<u8>; 2]) -> String {
    parts.iter().map(|part| String::from_utf8_lossy(part)).collect::<Vec<_>>().join("\n")
}

fn folder() -> PathBuf {
    setup::root().join("tests/golden")
}

/// Tue, 14 Nov 2023 22:13:20 GMT.
const WALL_START: u64 = 1_700_000_000;

//! Without a grant a response has the same bytes as that of a server without the feature (product contract 5.7).

use std::sync::Arc;

use uring_serve::serve::Hooks;
use uring_serve_tests::embedded::{Embedded, LockstepClock};
use uring_serve_tests::http::post_bytes;
use uring_serve_tests::server::scratch;

const OPT_IN: &str = "X-TRTLLM-Return-Metrics";
/// Method and path, body. One of each kind of answer that a grant could change.
const REQUESTS: [(&str, &str); 7] = [
    ("/v1/completions", r#"{"prompt":"Hello","max_tokens":4}"#),
    ("/v1/completions", r#"{"prompt":["a","bc","def"],"n":2,"max_tokens":3}"#),
    ("/v1/completions", r#"{"prompt":"Hello","max_tokens":4,"stream":true}"#),
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4}"#),
    (
        "/v1/chat/completions",
        r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
    ("/v1/completions", r#"{"prompt":"x","max_tokens":0}"#),
    ("/tokenize", r#"{"prompt":"x"}"#),
];

#[test]
fn without_a_grant_the_bytes_are_those_of_a_server_without_the_feature() {
    let lines = scratch("off-is-off");
    let file = &["--perf-metrics-output-dir", lines.to_str().expect("a path in UTF-8")][..];
    let both = &["--return-perf-metrics", file[0], file[1]][..];
    let (none, flag) = (&[][..], &["--return-perf-metrics"][..]);
    let exact = &[(OPT_IN, "1")][..];
    let budget = &[("X-TRTLLM-Metrics-Budget", "81920")][..];
    let plain = run(none, &[]);
    // (name, flags, headers of each request)
    let mut rows = vec![
        ("no flag, opt-in", none, exact),
        ("no flag, budget", none, budget),
        ("file, no opt-in", file, &[][..]),
        ("file, opt-in", file, exact),
        ("flag, no opt-in", flag, &[][..]),
        ("flag, budget only", flag, budget),
        ("flag and file, no opt-in", both, &[][..]),
    ];
    let wrong = [
        "", "0", "2", "01", "10", "1.0", "+1", "-1", "true", "TRUE", "yes", "on", "1 1", "1,1", "\"1\"", "1;",
    ];
    let wrong: Vec<[(&str, &str); 1]> = wrong.iter().map(|value| [(OPT_IN, *value)]).collect();
    rows.extend(wrong.iter().map(|header| (header[0].1, flag, &header[..])));
    rows.push(("another name", flag, &[("X-TRTLLM-Return-Metric", "1")]));
    rows.push(("two wrong ones", flag, &[(OPT_IN, "0"), (OPT_IN, "true")]));
    for (name, args, headers) in &rows {
        assert_eq!(run(args, headers), plain, "{name}: {args:?} {headers:?}");
    }
    println!("{} ways to have no grant, {} requests each: the same bytes", rows.len(), REQUESTS.len());
}

#[test]
fn with_a_grant_exactly_the_generation_answers_differ() {
    let plain = run(&[], &[]);
    // (name, headers of each request): every spelling of the opt-in that counts
    let rows: [(&str, &[(&str, &str)]); 4] = [
        ("exact", &[(OPT_IN, "1")]),
        ("lower case", &[("x-trtllm-return-metrics", "1")]),
        ("with blanks", &[(OPT_IN, " \t1 \t")]),
        ("one of two", &[(OPT_IN, "0"), (OPT_IN, "1")]),
    ];
    let granted = run(&["--return-perf-metrics"], rows[0].1);
    for (name, headers) in rows {
        assert_eq!(run(&["--return-perf-metrics"], headers), granted, "{name}");
    }
    for (index, (granted, plain)) in granted.iter().zip(&plain).enumerate() {
        assert_eq!(granted != plain, index < 5, "{:?}\n{granted}", REQUESTS[index]);
        assert!(
            !plain.to_ascii_lowercase().contains("trtllm") && !plain.contains("Server-Timing"),
            "{plain}"
        );
    }
}

/// Returns the raw answers to all requests, on one connection to a fresh server.
fn run(args: &[&str], headers: &[(&str, &str)]) -> Vec<String> {
    let clock = Arc::new(LockstepClock::new(1_700_000_000));
    let hooks = Hooks { id_seed: Some(1), ..Hooks::default() };
    let server = Embedded::start(args, Arc::clone(&clock) as Arc<_>, &hooks);
    clock.follow(&server);
    let mut client = server.connect();
    let answers = REQUESTS.iter().map(|(path, body)| {
        client.send(&post_bytes(path, headers, body));
        String::from_utf8(client.read_response().raw).expect("an answer in UTF-8")
    });
    let answers = answers.collect();
    drop(client);
    clock.release();
    server.end();
    answers
}

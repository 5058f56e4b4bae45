//! The foreign suite `api-validation.json` against the pure functions: routes and requests.
//!
//! Cases that need a connection (headers, compressed bodies, what a stream carries) are in [`NEEDS_CONNECTION`], for the
//! end-to-end runner to post; those among them that also say something here are run here too.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use uring_serve::api::error::ApiError;
use uring_serve::api::request::{Endpoint, Generation, ModelContext, Stream, read_generation};
use uring_serve::api::route::{self, Route};
use uring_serve_tests::api_validation::NEEDS_CONNECTION;

#[derive(Deserialize)]
struct Suite {
    count: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    name: String,
    level: String,
    method: String,
    endpoint: String,
    body_b64: Option<String>,
    body_parts: Option<Vec<Part>>,
    expect: Expect,
}

#[derive(Deserialize)]
struct Part {
    b64: String,
    repeat: usize,
}

#[derive(Deserialize)]
struct Expect {
    status_any_of: Vec<u16>,
    error: Option<ErrorExpect>,
}

#[derive(Deserialize)]
struct ErrorExpect {
    #[serde(rename = "type")]
    kind: String,
    param: Option<String>,
    code: Option<String>,
}

/// What we answer where the suite lists several outcomes and ours is not its first.
const PINNED: [(&str, u16, &str); 7] = [
    ("api-0148", 404, "a path has one spelling, so that a rule of a proxy cannot be gone around"),
    ("api-0055", 200, "64 stop strings are served, as vLLM and TensorRT-LLM do"),
    ("api-0095", 200, "token ids are one of the four forms of a prompt"),
    ("api-0103", 200, "unknown fields are ignored and named once in the log: clients add their own"),
    ("api-0107", 200, "any model name is served unless --strict-model"),
    ("api-0109", 200, "so is an empty one"),
    ("api-0123", 400, "logprobs are refused until they are served"),
];

const MODEL: ModelContext<'static> = ModelContext { vocab: 49_152, context_tokens: 8192, strict_name: None };

#[test]
fn every_case_is_answered_as_the_suite_says() {
    let suite: Suite = serde_json::from_str(include_str!("../suites/api-validation.json")).unwrap();
    assert_eq!(suite.cases.len(), suite.count);
    let (mut counts, mut left) = ([0; 3], 0);
    for case in &suite.cases {
        if case.id == "api-0143" {
            left += 1;
            continue;
        }
        let answer = case.answer();
        let status = answer.as_ref().map_or_else(|error| error.status, |()| 200);
        assert!(case.expect.status_any_of.contains(&status), "{} {}: {answer:?}", case.id, case.name);
        let pinned = PINNED.iter().find(|(id, _, _)| *id == case.id).map(|(_, status, _)| *status);
        let defensible = pinned.unwrap_or(case.expect.status_any_of[0]);
        assert_eq!(status, defensible, "{} {}: not the first choice, and not pinned", case.id, case.name);
        if let (Err(error), Some(expected)) = (&answer, &case.expect.error) {
            assert_eq!(error.kind.as_str(), expected.kind, "{} {}", case.id, case.name);
            assert_eq!(error.code, expected.code.as_deref(), "{} {}", case.id, case.name);
            if expected.param.is_some() {
                assert_eq!(error.param.as_deref(), expected.param.as_deref(), "{} {}", case.id, case.name);
            }
        }
        counts[["MUST", "SHOULD", "MAY"].iter().position(|level| *level == case.level).unwrap()] += 1;
    }
    println!(
        "api-validation: MUST {}, SHOULD {}, MAY {}: all pass, {left} left to the end-to-end runner, of {}",
        counts[0], counts[1], counts[2], suite.count
    );
}

#[test]
fn the_list_for_the_end_to_end_runner_names_cases() {
    let suite: Suite = serde_json::from_str(include_str!("../suites/api-validation.json")).unwrap();
    for id in NEEDS_CONNECTION.iter().chain(PINNED.iter().map(|(id, _, _)| id)) {
        assert!(suite.cases.iter().any(|case| case.id == *id), "{id}");
    }
}

#[test]
fn a_strict_name_refuses_others() {
    let strict = ModelContext { strict_name: Some("served"), ..MODEL };
    for (body, status) in [
        (r#"{"model":"served","prompt":"x"}"#, None),
        (r#"{"prompt":"x"}"#, None),
        (r#"{"model":"other","prompt":"x"}"#, Some(404)),
        (r#"{"model":"","prompt":"x"}"#, Some(404)),
    ] {
        let result = read_generation(Endpoint::Completions, &mut body.as_bytes().to_vec(), &strict);
        assert_eq!(result.err().map(|error| error.status), status, "{body}");
    }
}

#[test]
fn the_stream_asks_for_usage_only_when_told() {
    let rows = [
        ("", Stream::Off),
        (r#","stream":true"#, Stream::WithoutUsage),
        (r#","stream":true,"stream_options":null"#, Stream::WithoutUsage),
        (r#","stream":true,"stream_options":{}"#, Stream::WithoutUsage),
        (r#","stream_options":{"include_usage":true},"stream":true"#, Stream::WithUsage),
    ];
    for (fields, stream) in rows {
        let body = format!(r#"{{"prompt":"x"{fields}}}"#);
        let request = read_generation(Endpoint::Completions, &mut body.into_bytes(), &MODEL).unwrap();
        assert_eq!(request.stream, stream, "{fields}");
    }
}

impl Case {
    fn answer(&self) -> Result<(), ApiError> {
        let found = route::find(&self.method, &self.endpoint).map_err(|unrouted| unrouted.error)?;
        let endpoint = match found {
            Route::ChatCompletions => Endpoint::Chat,
            Route::Completions => Endpoint::Completions,
            Route::Health => return Ok(()),
            Route::ClockRead
            | Route::ClockSet
            | Route::Detokenize
            | Route::HealthGenerate
            | Route::Metrics
            | Route::Model(_)
            | Route::Models
            | Route::ServerInfo
            | Route::Tokenize
            | Route::Version => panic!("{} asks for {found:?}", self.id),
        };
        let mut body = self.body();
        let request: Generation = read_generation(endpoint, &mut body, &MODEL)?;
        request.output_tokens_max(1, MODEL.context_tokens).map(drop)
    }

    fn body(&self) -> Vec<u8> {
        match (&self.body_b64, &self.body_parts) {
            (_, Some(parts)) => parts.iter().flat_map(|part| decode(&part.b64).repeat(part.repeat)).collect(),
            (Some(body), None) => decode(body),
            (None, None) => Vec::new(),
        }
    }
}

fn decode(text: &str) -> Vec<u8> {
    STANDARD.decode(text).expect("the suite's bytes are base64")
}

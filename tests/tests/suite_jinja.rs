//! The foreign suite `jinja.json`: benign and hostile chat templates, at load and at render.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use uring_serve::api::messages::{Message, Role};
use uring_serve::api::request::Chat;
use uring_serve::api::template::{ChatTemplate, Variables};
use uring_serve::clock::{Clock, SystemClock};
use uring_serve::engine::tokenizer::{Tokenizer, unguard};

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
    template: String,
    messages: Vec<BTreeMap<String, Value>>,
    context: Value,
    expect: Expectations,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expectations {
    One(Expectation),
    Several(Vec<Expectation>),
}

#[derive(Deserialize)]
struct Expectation {
    kind: String,
    text: Option<String>,
    regex: Option<String>,
    message_contains: Option<String>,
    within_ms: Option<u64>,
}

/// What happened, and how long it took.
struct Seen {
    outcome: Result<String, String>,
    took: Duration,
}

#[test]
fn every_template_renders_or_fails_as_the_suite_says() {
    let suite: Suite = serde_json::from_str(include_str!("../suites/jinja.json")).unwrap();
    assert_eq!(suite.cases.len(), suite.count);
    let mut counts = [0; 3];
    for case in &suite.cases {
        let seen = case.run();
        let allowed = match &case.expect {
            Expectations::One(one) => std::slice::from_ref(one),
            Expectations::Several(several) => several.as_slice(),
        };
        assert!(
            allowed.iter().any(|expectation| expectation.allows(&seen)),
            "{} {}: {:?} after {:?}",
            case.id,
            case.name,
            seen.outcome,
            seen.took
        );
        counts[["MUST", "SHOULD", "MAY"].iter().position(|level| *level == case.level).unwrap()] += 1;
    }
    println!(
        "jinja: MUST {}, SHOULD {}, MAY {}: all pass, of {}",
        counts[0], counts[1], counts[2], suite.count
    );
}

impl Case {
    /// Loads and renders. A template that is refused at load never serves a request, which is the stronger refusal.
    fn run(&self) -> Seen {
        let started = SystemClock.now();
        let outcome = ChatTemplate::new(&self.template, "<s>", "</s>")
            .map_err(|error| error.to_string())
            .and_then(|template| {
                let rendered = template.render(&self.chat(), &Tokenizer::bytes(), 1_780_000_000);
                rendered.map_err(|error| {
                    assert_eq!((error.status, error.kind.as_str()), (400, "invalid_request_error"));
                    error.message
                })
            })
            .map(|text| unguard(&text).into_owned());
        Seen { outcome, took: SystemClock.now().checked_since(started).expect("the clock is monotonic") }
    }

    fn chat(&self) -> Chat {
        let message = |members: &BTreeMap<String, Value>| {
            assert!(members.keys().all(|name| name == "role" || name == "content"), "{}", self.id);
            let role = match members["role"].as_str() {
                Some("assistant") => Role::Assistant,
                Some("system") => Role::System,
                _ => Role::User,
            };
            Message {
                role,
                content: members["content"].as_str().map(str::to_owned),
                name: None,
                reasoning: None,
                tool_calls: Vec::new(),
                tool_call_id: None,
            }
        };
        Chat {
            messages: self.messages.iter().map(message).collect(),
            add_generation_prompt: true,
            variables: Variables::from_json(&self.context.to_string()).expect("a context is an object"),
        }
    }
}

impl Expectation {
    fn allows(&self, seen: &Seen) -> bool {
        let in_time = self.within_ms.is_none_or(|limit| seen.took < Duration::from_millis(limit));
        match (self.kind.as_str(), &seen.outcome) {
            ("render", Ok(text)) => {
                // The one pattern of the suite.
                let year = |text: &str| text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_digit());
                assert!(self.regex.as_deref().is_none_or(|regex| regex == "^\\d{4}$"));
                self.text.as_ref().is_none_or(|expected| expected == text)
                    && (self.regex.is_none() || year(text))
                    && in_time
            }
            ("error-400" | "bounded-error", Err(message)) => {
                self.message_contains.as_ref().is_none_or(|part| message.contains(part)) && in_time
            }
            _ => false,
        }
    }
}

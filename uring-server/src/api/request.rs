//! `/v1/chat/completions` and `/v1/completions`: a body to a typed request, or the 400 that names the field.
//!
//! Order of blame: JSON; types and ranges of all known fields, in the order of the body; relations between fields;
//! missing fields; then the first field whose work this server does not do. Unknown fields are ignored and collected,
//! so that the caller names each once in its log.

use std::sync::Arc;

use uring_serve_kernels::sample::SamplingParams;

use crate::api::draft::{Draft, KNOWN_FIELDS, names_template};
use crate::api::error::ApiError;
pub use crate::api::fields::UnknownFields;
use crate::api::json;
use crate::api::messages::Message;
use crate::api::template::Variables;
use crate::engine::StopRules;
use crate::engine::text::StopStrings;
use crate::engine::tokenizer::SpecialTokens;

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct ModelContext<'a> {
    /// Entries of the vocabulary, at least 1: token ids lie below.
    pub vocab: u32,
    /// Longest sequence, prompt and output together, in tokens.
    pub context_tokens: u32,
    /// The only model name served; `None` serves and echoes any (`--strict-model` absent).
    pub strict_name: Option<&'a str>,
}

/// Which of the two endpoints a body was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// POST `/v1/chat/completions`.
    Chat,
    /// POST `/v1/completions`.
    Completions,
}

/// A checked generation request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Where it was sent.
    pub endpoint: Endpoint,
    /// The name to echo; `None` when the body has none.
    pub model: Option<String>,
    /// What to continue.
    pub input: Input,
    /// Choices per prompt, 1..=[`CHOICES_PER_PROMPT_MAX`].
    pub n: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When to stop.
    pub limits: StopLimits,
    /// Whether and how the answer is streamed.
    pub stream: Stream,
    /// Whether control tokens of the output show as text.
    pub special: SpecialTokens,
    /// Whether BOS leads the prompt; `None` leaves it to the endpoint and the model.
    pub add_special_tokens: Option<bool>,
    /// The client's `user`.
    pub user: Option<String>,
    /// Fields that no endpoint of ours knows.
    pub unknown: UnknownFields,
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A conversation, rendered by the model's template.
    Chat(Chat),
    /// One or more prompts of a completion, [`PROMPTS_MAX`] at most.
    Prompts(Vec<Prompt>),
}

/// A conversation and what else its template sees.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    /// At least one.
    pub messages: Vec<Message>,
    /// Whether the assistant's turn is opened at the end. Default true.
    pub add_generation_prompt: bool,
    /// `chat_template_kwargs` and `reasoning_effort`.
    pub variables: Variables,
}

/// One prompt of a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text, in which the names of control tokens mean those tokens: the client writes its own markup here.
    Text(String),
    /// Token ids, each below the vocabulary's size.
    Tokens(Vec<u32>),
}

/// Sampling fields, as sent or by default.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; `0..=2`, default 1. Values below [`GREEDY_BELOW`] are read as 0: they mean it, and dividing
    /// logits by them overflows.
    pub temperature: f32,
    /// `(0, 1]`, default 1.
    pub top_p: f32,
    /// At least 1; `None` (0 or -1 on the wire) is off. Capped at the vocabulary.
    pub top_k: Option<u32>,
    /// `[0, 1]`, default 0.
    pub min_p: f32,
    /// `[-2, 2]`, default 0.
    pub presence_penalty: f32,
    /// `[-2, 2]`, default 0.
    pub frequency_penalty: f32,
    /// `(0, 2]`, default 1.
    pub repetition_penalty: f32,
    /// Token id and addend, `[-100, 100]`, by ascending id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Any 64-bit integer; `None` lets the server choose.
    pub seed: Option<i64>,
}

/// When a sequence ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopLimits {
    /// Strings that end it, at most [`STOPS_MAX`], none empty.
    pub strings: Vec<String>,
    /// Tokens that end it, beside the model's own.
    pub token_ids: Vec<u32>,
    /// Whether the model's own end tokens do not end it.
    pub ignore_eos: bool,
    /// Output tokens before any token may end it.
    pub min_tokens: u32,
    /// Most output tokens, and the field that said so; `None` leaves it to the endpoint.
    pub max_tokens: Option<(&'static str, u32)>,
}

/// Whether and how the answer is streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// One JSON object.
    Off,
    /// Events; the last before `[DONE]` carries the usage.
    WithUsage,
    /// Events without usage.
    WithoutUsage,
}

/// Reads and checks a body.
///
/// # Errors
/// 400 naming the field, or 404 `model_not_found` under a strict name.
pub fn read_generation(
    endpoint: Endpoint,
    body: &mut [u8],
    context: &ModelContext<'_>,
) -> Result<Generation, ApiError> {
    let document = json::parse(body, &KNOWN_FIELDS)?;
    let object = document.object()?;
    let mut draft = Draft::new(endpoint, context);
    for (key, value) in object.iter() {
        draft.read_member(key, value)?;
    }
    if document.mentions("chat_template") && names_template(document.root(), 0) {
        return Err(ApiError::invalid(
            "chat_template",
            "'chat_template' is not accepted: chat templates come from the model only.",
        ));
    }
    draft.finish()
}

impl Generation {
    /// Returns how many sequences the request asks for: prompts times `n`, 1..=[`CHOICES_MAX`].
    #[must_use]
    pub fn choice_count(&self) -> u32 {
        let prompts = match &self.input {
            Input::Chat(_) => 1,
            Input::Prompts(prompts) => u32::try_from(prompts.len()).unwrap_or(u32::MAX),
        };
        prompts.saturating_mul(self.n)
    }

    /// Returns the most tokens a sequence may generate behind `prompt_tokens`, given room for `context_tokens`.
    ///
    /// # Errors
    /// 400 for an empty prompt, one that fills the context (`context_length_exceeded`), or a limit that cannot fit.
    pub fn output_tokens_max(&self, prompt_tokens: usize, context_tokens: u32) -> Result<u32, ApiError> {
        let source = match self.endpoint {
            Endpoint::Chat => "messages",
            Endpoint::Completions => "prompt",
        };
        if prompt_tokens == 0 {
            return Err(ApiError::invalid(source, format!("'{source}' gives no token to continue from.")));
        }
        let used = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let Some(room) = context_tokens.checked_sub(used).filter(|room| *room > 0) else {
            return Err(context_exceeded(source, prompt_tokens, context_tokens));
        };
        let limit = match (self.limits.max_tokens, self.endpoint) {
            (Some((name, limit)), _) if limit > room => {
                let message = format!(
                    "'{name}' is {limit}, but {room} tokens remain: the context is {context_tokens} and the prompt \
                     takes {prompt_tokens}."
                );
                return Err(ApiError::invalid(name, message));
            }
            (Some((_, limit)), _) => limit,
            (None, Endpoint::Chat) => room,
            (None, Endpoint::Completions) => room.min(COMPLETION_TOKENS_DEFAULT),
        };
        if self.limits.min_tokens > limit {
            let message =
                format!("'min_tokens' is larger than the {limit} tokens this request may generate.");
            return Err(ApiError::invalid("min_tokens", message));
        }
        Ok(limit)
    }

    /// Returns the rules that end this request's sequences; `ends` are the model's own end tokens.
    #[must_use]
    pub fn stop_rules(&self, ends: &[u32]) -> StopRules {
        let mut token_ids = self.limits.token_ids.clone();
        if !self.limits.ignore_eos {
            token_ids.extend_from_slice(ends);
        }
        token_ids.sort_unstable();
        token_ids.dedup();
        StopRules {
            token_ids,
            strings: Arc::new(StopStrings::new(&self.limits.strings)),
            special: self.special,
        }
    }

    /// Returns the sampler's parameters for one choice of the whole response. Choices of one prompt draw from different
    /// seeds: the client's plus the index among them, so that a prompt's texts do not depend on the prompts beside it;
    /// or, without one, `fallback_seed` plus the choice.
    #[must_use]
    pub fn sampling_params(&self, choice: u32, fallback_seed: u64, ends: &[u32]) -> SamplingParams {
        let sampling = &self.sampling;
        let seed = match sampling.seed {
            Some(seed) => seed.cast_unsigned().wrapping_add(u64::from(choice % self.n)),
            None => fallback_seed.wrapping_add(u64::from(choice)),
        };
        let mut banned_until_min = Vec::new();
        if self.limits.min_tokens > 0 {
            banned_until_min.extend_from_slice(&self.limits.token_ids);
            banned_until_min.extend_from_slice(ends);
            banned_until_min.sort_unstable();
            banned_until_min.dedup();
        }
        SamplingParams {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: sampling.repetition_penalty,
            logit_bias: sampling.logit_bias.clone(),
            seed,
            min_tokens: self.limits.min_tokens,
            banned_until_min,
        }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// Returns the 400 for a prompt that leaves no room; `source` is the field it came from.
#[must_use]
pub fn context_exceeded(source: &'static str, prompt_tokens: usize, context_tokens: u32) -> ApiError {
    let message = format!(
        "The prompt takes {prompt_tokens} tokens or more, and the model's context is {context_tokens}."
    );
    ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(source, message) }
}

/// Checks the `model` field's name against a strict one.
pub(super) fn check_model(name: Option<&str>, context: &ModelContext<'_>) -> Result<(), ApiError> {
    match (name, context.strict_name) {
        (Some(name), Some(strict)) if name != strict => Err(ApiError::unknown_model(name)),
        _ => Ok(()),
    }
}

/// Choices per prompt, at most.
pub const CHOICES_PER_PROMPT_MAX: u32 = 128;
/// Sequences of one request, at most.
pub const CHOICES_MAX: u32 = 1024;
/// Prompts of one request, at most.
pub const PROMPTS_MAX: usize = 1024;
/// Stop strings, and stop token ids, at most.
pub const STOPS_MAX: usize = 64;
/// Bytes of one stop string, at most.
pub const STOP_BYTES_MAX: usize = 1024;
/// Entries of `logit_bias`, at most.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Bytes of a model name, at most: it is echoed in every chunk of a stream.
pub const MODEL_BYTES_MAX: usize = 1024;
/// `max_tokens` of a completion that gives none.
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Temperatures below this are greedy.
pub const GREEDY_BELOW: f32 = 1e-5;
/// `top_logprobs`, and a completion's `logprobs`, at most.
pub const LOGPROBS_MAX: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelContext<'static> = ModelContext { vocab: 512, context_tokens: 100, strict_name: None };

    fn chat(fields: &str) -> Result<Generation, ApiError> {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{fields}}}"#);
        read_generation(Endpoint::Chat, &mut body.into_bytes(), &MODEL)
    }

    fn completion(fields: &str) -> Result<Generation, ApiError> {
        read_generation(Endpoint::Completions, &mut format!("{{{fields}}}").into_bytes(), &MODEL)
    }

    #[test]
    fn ranges_hold_on_both_sides() {
        // Field, values in range, values outside.
        let rows: [(&str, &[&str], &[&str]); 17] = [
            ("temperature", &["0", "0.7", "2", "null"], &["-0.001", "2.001", "1e39", "\"1\"", "true"]),
            ("top_p", &["0.001", "1"], &["0", "1e-60", "1.001", "-1"]),
            ("top_k", &["-1", "0", "1", "2147483647"], &["-2", "2147483648", "1.5"]),
            ("min_p", &["0", "1"], &["-0.1", "1.1"]),
            ("presence_penalty", &["-2", "2"], &["-2.1", "2.1"]),
            ("frequency_penalty", &["-2", "2"], &["-2.1", "2.1"]),
            ("repetition_penalty", &["0.001", "2"], &["0", "2.1"]),
            (
                "seed",
                &["-9223372036854775808", "9223372036854775807"],
                &["9223372036854775808", "1.0", "\"1\""],
            ),
            ("n", &["1", "128"], &["0", "129", "1.0"]),
            ("max_tokens", &["1", "100"], &["0", "101", "-1"]),
            ("max_completion_tokens", &["1", "100"], &["0", "101"]),
            ("min_tokens", &["0", "100"], &["-1", "101"]),
            ("stop", &["\"a\"", "[]", "[\"a\"]"], &["\"\"", "[\"a\",\"\"]", "1", "[1]", "{}"]),
            ("stop_token_ids", &["[]", "[0,511]"], &["[512]", "[-1]", "[1.5]", "1"]),
            ("ignore_eos", &["true", "false"], &["1", "\"true\""]),
            (
                "logit_bias",
                &["{}", "{\"0\":-100,\"511\":100}"],
                &["{\"512\":1}", "{\"+1\":1}", "{\"\":1}", "{\"1\":101}", "{\"1\":1,\"01\":1}", "[]"],
            ),
            ("user", &["\"u\""], &["1"]),
        ];
        for (field, good, bad) in rows {
            for value in good.iter().chain(&["null"]) {
                assert!(chat(&format!(",\"{field}\":{value}")).is_ok(), "{field} {value}");
            }
            for value in bad {
                let error = chat(&format!(",\"{field}\":{value}")).expect_err(value);
                assert_eq!((error.status, error.param.as_deref()), (400, Some(field)), "{field} {value}");
            }
        }
    }

    #[test]
    fn stop_strings_are_bounded_in_number_and_length() {
        let stop = |count: usize, bytes: usize| {
            let one = format!("\"{}\"", "s".repeat(bytes));
            chat(&format!(",\"stop\":[{}]", vec![one; count].join(","))).is_ok()
        };
        assert!(stop(STOPS_MAX, 1) && !stop(STOPS_MAX + 1, 1));
        assert!(stop(1, STOP_BYTES_MAX) && !stop(1, STOP_BYTES_MAX + 1));
    }

    #[test]
    fn prompts_have_four_forms() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        let rows = [
            (r#""prompt":"a""#, vec![text("a")]),
            (r#""prompt":["a","b"]"#, vec![text("a"), text("b")]),
            (r#""prompt":[1,2]"#, vec![Prompt::Tokens(vec![1, 2])]),
            (r#""prompt":[[1],[2,3]]"#, vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ];
        for (fields, expected) in rows {
            assert_eq!(completion(fields).unwrap().input, Input::Prompts(expected), "{fields}");
        }
        for value in [
            "null",
            "1",
            "{}",
            "[]",
            "[[]]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1],2]",
            "[[1],[]]",
            "[512]",
            "[null]",
            "true",
        ] {
            let error = completion(&format!("\"prompt\":{value}")).expect_err(value);
            assert_eq!(error.param.as_deref(), Some("prompt"), "{value}");
        }
        assert_eq!(completion("").unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn a_field_served_later_is_refused_after_the_types_of_all() {
        let unserved = [
            r#""logprobs":true"#,
            r#""tools":[{"type":"function","function":{"name":"f"}}]"#,
            r#""response_format":{"type":"json_object"}"#,
            r#""response_format":{"type":"json_schema","json_schema":{}}"#,
            r#""echo":true"#,
            r#""best_of":2"#,
            r#""suffix":"x""#,
            r#""prompt_logprobs":1"#,
            r#""use_beam_search":true"#,
            r#""kv_transfer_params":{}"#,
            r#""modalities":["audio"]"#,
            r#""truncate_prompt_tokens":1"#,
            r#""stream":true,"stream_options":{"continuous_usage_stats":true}"#,
        ];
        for fields in unserved {
            let name = fields.rsplit_once("\":").map_or("", |(names, _)| names);
            let error = chat(&format!(",{fields}")).expect_err(fields);
            assert_eq!(error.code, Some("unsupported_parameter"), "{fields}");
            assert!(name.contains(error.param.as_deref().unwrap()), "{fields}");
            let wins = chat(&format!(",{fields},\"n\":0")).expect_err(fields);
            assert_eq!(wins.param.as_deref(), Some("n"), "{fields}: a bad value wins");
        }
        let inert = [
            r#""logprobs":false,"top_logprobs":0"#,
            r#""tools":[],"tool_choice":"none""#,
            r#""response_format":{"type":"text"}"#,
            r#""echo":false,"best_of":1,"suffix":"""#,
            r#""modalities":["text"],"store":true,"metadata":{"chat_template":"x"}"#,
            r#""stream":true,"stream_options":{"continuous_usage_stats":false}"#,
        ];
        for fields in inert {
            assert_eq!(chat(&format!(",{fields}")).err(), None, "{fields}");
        }
    }

    #[test]
    fn templates_come_from_the_model_only() {
        for fields in [
            r#","chat_template":"x""#,
            r#","chat_template_kwargs":{"chat_template":"x"}"#,
            r#","extra_body":{"a":[{"chat_template":"x"}]}"#,
        ] {
            let error = chat(fields).expect_err(fields);
            assert_eq!(error.param.as_deref(), Some("chat_template"), "{fields}");
        }
        let error = chat(r#","chat_template_kwargs":{"messages":1}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
    }

    #[test]
    fn every_known_field_is_read() {
        assert!(KNOWN_FIELDS.is_sorted());
        assert!(KNOWN_FIELDS.len() <= u128::BITS as usize, "each has a bit");
        for name in KNOWN_FIELDS {
            // No field takes a list with a list with an object in it, but for those that take anything or nothing.
            let value = r#"[[{"a":[]}]]"#;
            let message = format!("{name}: a known field that no reader takes trips an assertion");
            let _ = chat(&format!(",\"{name}\":{value}"))
                .map(|request| assert!(request.unknown.names().contains(&name.to_owned()), "{message}"));
            let _ = completion(&format!("\"{name}\":{value}"));
        }
    }

    #[test]
    fn unknown_fields_are_named_within_bounds() {
        let many: String = (0..40).map(|at| format!(",\"x{}{at}\":1", "y".repeat(100))).collect();
        let names = chat(&format!(",\"zz\":1,\"zz\":2{many}")).unwrap().unknown;
        assert_eq!(names.names().len(), 2, "equal excerpts are one name");
        assert!(names.names().iter().all(|name| name.len() <= 64));
    }

    #[test]
    fn the_output_limit_fits_what_the_prompt_leaves() {
        let limit = |request: Result<Generation, ApiError>, prompt| {
            request.unwrap().output_tokens_max(prompt, 100).map_err(|error| error.param.unwrap().into_owned())
        };
        let chat = |fields| super::tests::chat(fields);
        let completion = |fields: &str| super::tests::completion(&format!(r#""prompt":"a"{fields}"#));
        assert_eq!(limit(chat(""), 10), Ok(90));
        assert_eq!(limit(completion(""), 10), Ok(16));
        assert_eq!(limit(completion(""), 90), Ok(10));
        assert_eq!(limit(chat(r#","max_tokens":90"#), 10), Ok(90));
        assert_eq!(limit(chat(r#","max_tokens":91"#), 10), Err("max_tokens".to_owned()));
        assert_eq!(
            limit(chat(r#","max_completion_tokens":91"#), 10),
            Err("max_completion_tokens".to_owned())
        );
        assert_eq!(limit(chat(""), 99), Ok(1));
        assert_eq!(limit(chat(""), 100), Err("messages".to_owned()));
        assert_eq!(limit(completion(""), 0), Err("prompt".to_owned()));
        assert_eq!(limit(completion(r#","min_tokens":17"#), 10), Err("min_tokens".to_owned()));
        assert_eq!(
            chat(r#","min_tokens":5,"max_tokens":4"#).unwrap_err().param.as_deref(),
            Some("min_tokens")
        );
        assert_eq!(
            chat(r#","max_tokens":5,"max_completion_tokens":4"#).unwrap_err().param.as_deref(),
            Some("max_tokens")
        );
    }

    #[test]
    fn choices_and_prompts_are_bounded_together() {
        let ask = |prompts: usize, n: u32| {
            completion(&format!(r#""prompt":[{}],"n":{n}"#, vec!["\"a\""; prompts].join(",")))
        };
        assert_eq!(ask(8, 128).unwrap().choice_count(), 1024);
        assert_eq!(ask(9, 128).unwrap_err().param.as_deref(), Some("n"));
        assert!(ask(PROMPTS_MAX, 1).is_ok());
        assert_eq!(ask(PROMPTS_MAX + 1, 1).unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn rules_and_parameters_for_the_engine() {
        let request = chat(
            r#","stop":"x","stop_token_ids":[7,7],"seed":-1,"temperature":1e-9,"top_k":9999,"min_tokens":2,"n":4"#,
        );
        let request = request.unwrap();
        let rules = request.stop_rules(&[9, 3]);
        assert_eq!(rules.token_ids, [3, 7, 9]);
        assert!(!rules.strings.is_empty());
        // The third choice of the second prompt.
        let params = request.sampling_params(6, 50, &[9, 3]);
        assert_eq!((params.seed, params.temperature, params.top_k), (1, 0.0, Some(512)));
        assert_eq!((params.min_tokens, params.banned_until_min), (2, vec![3, 7, 9]));
        let request = chat(r#","ignore_eos":true"#).unwrap();
        assert!(request.stop_rules(&[9]).token_ids.is_empty());
        let params = request.sampling_params(1, 50, &[9]);
        assert_eq!((params.seed, params.temperature, params.banned_until_min.len()), (51, 1.0, 0));
    }
}

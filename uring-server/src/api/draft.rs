//! A generation request while its body is read: one field after the other, then what needs them all.

use simd_json::prelude::*;
use simd_json::tape::{Array, Object, Value};

use crate::api::error::ApiError;
use crate::api::fields::{Field, UnknownFields};
use crate::api::json;
use crate::api::messages::{Message, read_messages};
use crate::api::request::{
    CHOICES_MAX, CHOICES_PER_PROMPT_MAX, Chat, Endpoint, GREEDY_BELOW, Generation, Input, LOGIT_BIAS_MAX,
    LOGPROBS_MAX, MODEL_BYTES_MAX, ModelContext, PROMPTS_MAX, Prompt, STOP_BYTES_MAX, STOPS_MAX, Sampling,
    StopLimits, Stream, check_model,
};
use crate::api::template::Variables;
use crate::engine::tokenizer::SpecialTokens;

/// A request while its body is read.
pub(super) struct Draft<'a> {
    context: &'a ModelContext<'a>,
    seen: u128,
    request: Generation,
    messages: Option<Vec<Message>>,
    prompts: Option<Vec<Prompt>>,
    add_generation_prompt: bool,
    variables: Variables,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: bool,
    include_usage: bool,
    stream_options: bool,
    best_of: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    tools: Vec<String>,
    tool_choice: Option<ToolChoice>,
    /// The first field whose work is not done here.
    later: Option<&'static str>,
}

/// What `tool_choice` asks for.
enum ToolChoice {
    /// `auto` or `required`.
    Any,
    /// One function by name.
    Function(String),
    /// `none`.
    Off,
}

impl<'a> Draft<'a> {
    pub(super) fn new(endpoint: Endpoint, context: &'a ModelContext<'a>) -> Self {
        let request = Generation {
            endpoint,
            model: None,
            input: Input::Prompts(Vec::new()),
            n: 1,
            sampling: Sampling::default(),
            limits: StopLimits::default(),
            stream: Stream::Off,
            special: SpecialTokens::Skip,
            add_special_tokens: None,
            user: None,
            unknown: UnknownFields::default(),
        };
        Self {
            context,
            seen: 0,
            request,
            messages: None,
            prompts: None,
            add_generation_prompt: true,
            variables: Variables::default(),
            max_tokens: None,
            max_completion_tokens: None,
            stream: false,
            include_usage: false,
            stream_options: false,
            best_of: None,
            logprobs: false,
            top_logprobs: None,
            tools: Vec::new(),
            tool_choice: None,
            later: None,
        }
    }

    pub(super) fn read_member(&mut self, key: &str, value: Value<'_, '_>) -> Result<(), ApiError> {
        let Ok(index) = KNOWN_FIELDS.binary_search(&key) else {
            self.request.unknown.add(key);
            return Ok(());
        };
        mark_once(&mut self.seen, index)?;
        let field = Field { name: KNOWN_FIELDS[index], value };
        let read = self.read_sampling(&field)?
            || self.read_limits(&field)?
            || self.read_input(&field)?
            || self.read_stream(&field)?
            || self.read_tools(&field)?
            || Self::read_inert(&field)?
            || self.read_unserved(&field)?;
        debug_assert!(read, "{} is in KNOWN_FIELDS and read by no one", field.name);
        Ok(())
    }

    fn read_sampling(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        let sampling = &mut self.request.sampling;
        match field.name {
            "temperature" => {
                let value = field.number(0.0..=2.0)?.unwrap_or(1.0);
                sampling.temperature = if value < GREEDY_BELOW { 0.0 } else { value };
            }
            "top_p" => sampling.top_p = positive(field, 1.0)?.unwrap_or(1.0),
            "top_k" => {
                let value = field.integer(-1..=i64::from(i32::MAX))?.unwrap_or(0);
                let value = u32::try_from(value).unwrap_or(0).min(self.context.vocab);
                sampling.top_k = (value > 0).then_some(value);
            }
            "min_p" => sampling.min_p = field.number(0.0..=1.0)?.unwrap_or(0.0),
            "presence_penalty" => sampling.presence_penalty = field.number(-2.0..=2.0)?.unwrap_or(0.0),
            "frequency_penalty" => sampling.frequency_penalty = field.number(-2.0..=2.0)?.unwrap_or(0.0),
            "repetition_penalty" => sampling.repetition_penalty = positive(field, 2.0)?.unwrap_or(1.0),
            "seed" => sampling.seed = field.integer(i64::MIN..=i64::MAX)?,
            "logit_bias" => {
                sampling.logit_bias = match field.object()? {
                    Some(object) => read_logit_bias(field, &object, self.context.vocab)?,
                    None => Vec::new(),
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn read_limits(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        let limits = &mut self.request.limits;
        match field.name {
            "max_tokens" => self.max_tokens = field.count(1..=self.context.context_tokens)?,
            "max_completion_tokens" => {
                self.max_completion_tokens = field.count(1..=self.context.context_tokens)?;
            }
            "min_tokens" => limits.min_tokens = field.count(0..=self.context.context_tokens)?.unwrap_or(0),
            "n" => self.request.n = field.count(1..=CHOICES_PER_PROMPT_MAX)?.unwrap_or(1),
            "stop" => limits.strings = read_stop(field)?,
            "stop_token_ids" => {
                limits.token_ids = field.token_ids(self.context.vocab)?.unwrap_or_default();
                if limits.token_ids.len() > STOPS_MAX {
                    return Err(field.error(&format!("must hold at most {STOPS_MAX} token ids")));
                }
            }
            "ignore_eos" => limits.ignore_eos = field.flag()?.unwrap_or(false),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn read_input(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        match field.name {
            "model" => {
                self.request.model = field.text()?.map(str::to_owned);
                if self.request.model.as_ref().is_some_and(|model| model.len() > MODEL_BYTES_MAX) {
                    return Err(field.error(&format!("must be at most {MODEL_BYTES_MAX} bytes")));
                }
            }
            "messages" if self.request.endpoint == Endpoint::Chat => {
                self.messages = Some(read_messages(field.value)?);
            }
            "prompt" if self.request.endpoint == Endpoint::Completions => {
                self.prompts = Some(read_prompts(field, self.context)?);
            }
            // The other endpoint's input: a body that fits both is not ambiguous, so this one is merely unknown.
            "messages" | "prompt" => self.request.unknown.add(field.name),
            "add_generation_prompt" => self.add_generation_prompt = field.flag()?.unwrap_or(true),
            "add_special_tokens" => self.request.add_special_tokens = field.flag()?,
            "chat_template_kwargs" => {
                if let Some(object) = field.object()? {
                    self.variables.add_object(field.name, &object)?;
                }
            }
            "reasoning_effort" => {
                if let Some(word) = field.word(&["high", "low", "medium", "minimal", "none", "xhigh"])? {
                    self.variables.add_word("reasoning_effort", word);
                }
            }
            "user" => self.request.user = field.text()?.map(str::to_owned),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn read_stream(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        match field.name {
            "stream" => self.stream = field.flag()?.unwrap_or(false),
            "stream_options" => {
                let Some(options) = field.object()? else { return Ok(true) };
                self.stream_options = true;
                for (member, value) in options.iter() {
                    let flag = value.is_null().then_some(false).or_else(|| value.as_bool());
                    let flag = || flag.ok_or_else(|| field.error(&format!("must have a boolean '{member}'")));
                    match member {
                        "include_usage" => self.include_usage = flag()?,
                        "continuous_usage_stats" if flag()? => self.put_off(field.name),
                        "continuous_usage_stats" | "include_obfuscation" => drop(flag()?),
                        _ => self.request.unknown.add(&format!("stream_options.{member}")),
                    }
                }
            }
            "skip_special_tokens" => {
                let skip = field.flag()?.unwrap_or(true);
                self.request.special = if skip { SpecialTokens::Skip } else { SpecialTokens::Show };
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fields of tools and structured output: checked whole, served later.
    fn read_tools(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        match field.name {
            "tools" => {
                for tool in field.list()?.into_iter().flat_map(|list| list.iter()) {
                    self.tools.push(read_tool_name(field, tool)?);
                    self.put_off(field.name);
                }
            }
            "tool_choice" => self.tool_choice = read_tool_choice(field)?,
            "parallel_tool_calls" => drop(field.flag()?),
            "response_format" => {
                if let Some(object) = field.object()? {
                    let kind = object.get("type");
                    match kind.as_ref().and_then(|kind| kind.as_str()) {
                        Some("text") => {}
                        Some("json_object" | "structural_tag") => self.put_off(field.name),
                        Some("json_schema")
                            if object.get("json_schema").is_some_and(|schema| schema.is_object()) =>
                        {
                            self.put_off(field.name);
                        }
                        Some("json_schema") => return Err(field.error("needs an object 'json_schema'")),
                        _ => return Err(field.error("must have a type: text, json_object or json_schema")),
                    }
                }
            }
            "logprobs" if self.request.endpoint == Endpoint::Chat => {
                self.logprobs = field.flag()?.unwrap_or(false);
                self.put_off_if(self.logprobs, field.name);
            }
            "logprobs" => {
                let asked = field.count(0..=LOGPROBS_MAX)?.is_some();
                self.put_off_if(asked, field.name);
            }
            "top_logprobs" => self.top_logprobs = field.count(0..=LOGPROBS_MAX)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fields that ask nothing of this server: checked for their type, then done.
    fn read_inert(field: &Field<'_, '_>) -> Result<bool, ApiError> {
        match field.name {
            "cache_salt"
            | "prompt_cache_key"
            | "prompt_cache_retention"
            | "request_id"
            | "safety_identifier"
            | "service_tier"
            | "verbosity" => field.text().map(|_| ())?,
            "metadata" | "prediction" => field.object().map(|_| ())?,
            "include_reasoning" | "spaces_between_special_tokens" | "store" => field.flag().map(|_| ())?,
            "length_penalty" => field.number(-100.0..=100.0).map(|_| ())?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fields with work that is not done here: only the value that asks for none of it passes.
    fn read_unserved(&mut self, field: &Field<'_, '_>) -> Result<bool, ApiError> {
        let asks = match field.name {
            "best_of" => {
                self.best_of = field.count(1..=CHOICES_PER_PROMPT_MAX)?;
                false
            }
            "continue_final_message"
            | "echo"
            | "early_stopping"
            | "include_stop_str_in_output"
            | "return_token_ids"
            | "return_tokens_as_token_ids"
            | "use_beam_search" => field.flag()?.unwrap_or(false),
            "detokenize" => !field.flag()?.unwrap_or(true),
            "suffix" => field.text()?.is_some_and(|text| !text.is_empty()),
            "priority" => field.integer(i64::from(i32::MIN)..=i64::from(i32::MAX))?.unwrap_or(0) != 0,
            "truncate_prompt_tokens" => field.integer(-1..=i64::from(i32::MAX))?.is_some(),
            "modalities" => {
                let list = field.list()?;
                list.is_some_and(|list| list.iter().any(|mode| mode.as_str() != Some("text")))
            }
            "allowed_token_ids" | "bad_words" | "documents" | "functions" => {
                field.list()?.is_some_and(|list| !list.is_empty())
            }
            // Present in any form, these ask for something.
            "audio"
            | "bootstrap_host"
            | "bootstrap_port"
            | "bootstrap_room"
            | "chat_template"
            | "disaggregated_params"
            | "function_call"
            | "guided_choice"
            | "guided_grammar"
            | "guided_json"
            | "guided_regex"
            | "kv_transfer_params"
            | "logits_processors"
            | "mm_processor_kwargs"
            | "prompt_logprobs"
            | "structured_outputs"
            | "web_search_options" => field.present().is_some(),
            _ => return Ok(false),
        };
        self.put_off_if(asks, field.name);
        Ok(true)
    }

    fn put_off_if(&mut self, asks: bool, name: &'static str) {
        if asks {
            self.put_off(name);
        }
    }

    fn put_off(&mut self, name: &'static str) {
        self.later.get_or_insert(name);
    }

    /// Checks what needs the whole body.
    pub(super) fn finish(mut self) -> Result<Generation, ApiError> {
        self.check_relations()?;
        check_model(self.request.model.as_deref(), self.context)?;
        self.request.input = match self.request.endpoint {
            Endpoint::Chat => {
                let messages = self.messages.ok_or_else(|| missing("messages"))?;
                let add_generation_prompt = self.add_generation_prompt;
                Input::Chat(Chat { messages, add_generation_prompt, variables: self.variables })
            }
            Endpoint::Completions => Input::Prompts(self.prompts.ok_or_else(|| missing("prompt"))?),
        };
        if self.request.choice_count() > CHOICES_MAX {
            let message = format!("Prompts times 'n' must be at most {CHOICES_MAX}.");
            return Err(ApiError::invalid("n", message));
        }
        match self.later {
            Some(name) => Err(ApiError::unsupported(name)),
            None => Ok(self.request),
        }
    }

    fn check_relations(&mut self) -> Result<(), ApiError> {
        self.request.limits.max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(old), Some(new)) if old != new => {
                return Err(ApiError::invalid(
                    "max_tokens",
                    "'max_tokens' and 'max_completion_tokens' differ; give one of them.",
                ));
            }
            (_, Some(limit)) => Some(("max_completion_tokens", limit)),
            (Some(limit), None) => Some(("max_tokens", limit)),
            (None, None) => None,
        };
        let limits = &self.request.limits;
        if limits.max_tokens.is_some_and(|(_, limit)| limits.min_tokens > limit) {
            return Err(ApiError::invalid(
                "min_tokens",
                "'min_tokens' must not be larger than 'max_tokens'.",
            ));
        }
        if self.stream_options && !self.stream {
            return Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream' to be true."));
        }
        self.request.stream = match (self.stream, self.include_usage) {
            (false, _) => Stream::Off,
            (true, false) => Stream::WithoutUsage,
            (true, true) => Stream::WithUsage,
        };
        if self.top_logprobs.is_some_and(|count| count > 0) && !self.logprobs {
            return Err(ApiError::invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true."));
        }
        match self.best_of {
            Some(best_of) if best_of < self.request.n => {
                return Err(ApiError::invalid("best_of", "'best_of' must not be smaller than 'n'."));
            }
            Some(best_of) if best_of > self.request.n => self.put_off("best_of"),
            _ => {}
        }
        match &self.tool_choice {
            Some(ToolChoice::Any | ToolChoice::Function(_)) if self.tools.is_empty() => {
                Err(ApiError::invalid("tool_choice", "'tool_choice' needs 'tools'."))
            }
            Some(ToolChoice::Function(name)) if !self.tools.contains(name) => Err(ApiError::invalid(
                "tool_choice",
                "'tool_choice' names a function that is not in 'tools'.",
            )),
            Some(ToolChoice::Any | ToolChoice::Function(_) | ToolChoice::Off) | None => Ok(()),
        }
    }
}

/// Finds the member `chat_template` in any object, except inside what is the client's own data by definition.
pub(super) fn names_template(value: Value<'_, '_>, depth: usize) -> bool {
    if depth > json::DEPTH_MAX {
        return true;
    }
    if let Some(object) = value.as_object() {
        return object.iter().any(|(key, value)| {
            key == "chat_template" && !value.is_null()
                || !OPAQUE_FIELDS.contains(&key) && names_template(value, depth + 1)
        });
    }
    value.as_array().is_some_and(|list| list.iter().any(|value| names_template(value, depth + 1)))
}

/// Sets `seen` for a known field, in the order of [`KNOWN_FIELDS`].
///
/// # Errors
/// 400 for a second value of one field.
fn mark_once(seen: &mut u128, index: usize) -> Result<(), ApiError> {
    let bit = 1 << index;
    if *seen & bit != 0 {
        let name = KNOWN_FIELDS[index];
        return Err(ApiError::invalid(name, format!("'{name}' is given twice.")));
    }
    *seen |= bit;
    Ok(())
}

fn missing(name: &'static str) -> ApiError {
    ApiError::invalid(name, format!("'{name}' is required."))
}

/// Reads a number in `(0, max]`.
fn positive(field: &Field<'_, '_>, max: f64) -> Result<Option<f32>, ApiError> {
    match field.number(0.0..=max)? {
        // Zero, and what becomes zero in single precision.
        Some(0.0) => Err(field.error(&format!("must be larger than 0 and at most {max}"))),
        value => Ok(value),
    }
}

fn read_stop(field: &Field<'_, '_>) -> Result<Vec<String>, ApiError> {
    let Some(value) = field.present() else { return Ok(Vec::new()) };
    let strings = match (value.as_str(), value.as_array()) {
        (Some(text), _) => vec![text.to_owned()],
        (None, Some(list)) => {
            let text = |value: Value<'_, '_>| value.as_str().map(str::to_owned);
            list.iter()
                .map(text)
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| field.error("must hold strings only"))?
        }
        (None, None) => return Err(field.error("must be a string or a list of strings")),
    };
    if strings.len() > STOPS_MAX {
        return Err(field.error(&format!("must hold at most {STOPS_MAX} strings")));
    }
    if strings.iter().any(String::is_empty) {
        return Err(field.error("must not hold an empty string"));
    }
    // Output is held back while it may be the start of a stop string, so their length is a latency.
    if strings.iter().any(|text| text.len() > STOP_BYTES_MAX) {
        return Err(field.error(&format!("must hold strings of at most {STOP_BYTES_MAX} bytes")));
    }
    Ok(strings)
}

fn read_logit_bias(
    field: &Field<'_, '_>,
    object: &Object<'_, '_>,
    vocab: u32,
) -> Result<Vec<(u32, f32)>, ApiError> {
    if object.len() > LOGIT_BIAS_MAX {
        return Err(field.error(&format!("must hold at most {LOGIT_BIAS_MAX} tokens")));
    }
    let mut entries = Vec::with_capacity(object.len());
    for (key, value) in object.iter() {
        // `str::parse` takes a leading plus, the API does not.
        let id = key.bytes().all(|byte| byte.is_ascii_digit()).then(|| key.parse::<u32>().ok()).flatten();
        let Some(id) = id.filter(|id| *id < vocab) else {
            return Err(field.error(&format!("must have token ids from 0 to {} as keys", vocab - 1)));
        };
        let Some(bias) = value.cast_f64().filter(|bias| (-100.0..=100.0).contains(bias)) else {
            return Err(field.error("must have numbers from -100 to 100 as values"));
        };
        entries.push((id, bias as f32));
    }
    entries.sort_unstable_by_key(|(id, _)| *id);
    if entries.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(field.error("must name each token once"));
    }
    Ok(entries)
}

/// Reads a prompt in any of its four forms; an empty list has no form and is refused.
fn read_prompts(field: &Field<'_, '_>, context: &ModelContext<'_>) -> Result<Vec<Prompt>, ApiError> {
    let forms = "must be a string, a list of strings, a list of token ids, or a list of such lists";
    if let Some(text) = field.value.as_str() {
        return Ok(vec![Prompt::Text(text.to_owned())]);
    }
    let Some(list) = field.value.as_array() else { return Err(field.error(forms)) };
    let tokens = |list: &Array<'_, '_>| {
        if list.is_empty() {
            return Err(field.error("must not be an empty list"));
        }
        field.ids_of(list, context.vocab).map(Prompt::Tokens)
    };
    match list.iter().next() {
        None => Err(field.error("must not be an empty list")),
        Some(first) if first.is_number() => Ok(vec![tokens(&list)?]),
        Some(_) if list.len() > PROMPTS_MAX => {
            Err(field.error(&format!("must hold at most {PROMPTS_MAX} prompts")))
        }
        Some(first) if first.is_str() => list
            .iter()
            .map(|value| value.as_str().map(|text| Prompt::Text(text.to_owned())))
            .collect::<Option<_>>()
            .ok_or_else(|| field.error(forms)),
        Some(_) => {
            list.iter().map(|value| tokens(&value.as_array().ok_or_else(|| field.error(forms))?)).collect()
        }
    }
}

fn read_tool_name(field: &Field<'_, '_>, tool: Value<'_, '_>) -> Result<String, ApiError> {
    let name = || {
        let object = tool.as_object()?;
        if object.get("type")?.as_str()? != "function" {
            return None;
        }
        Some(object.get("function")?.as_object()?.get("name")?.as_str()?.to_owned())
    };
    name().ok_or_else(|| field.error("must hold objects of type 'function' with a function name"))
}

fn read_tool_choice(field: &Field<'_, '_>) -> Result<Option<ToolChoice>, ApiError> {
    let Some(value) = field.present() else { return Ok(None) };
    let named = || {
        let object = value.as_object()?;
        if object.get("type")?.as_str()? != "function" {
            return None;
        }
        Some(object.get("function")?.as_object()?.get("name")?.as_str()?.to_owned())
    };
    match value.as_str() {
        Some("auto" | "required") => Ok(Some(ToolChoice::Any)),
        Some("none") => Ok(Some(ToolChoice::Off)),
        Some(_) => Err(field.error("must be none, auto, required, or a function")),
        None => match named() {
            Some(name) => Ok(Some(ToolChoice::Function(name))),
            None => Err(field.error("must be none, auto, required, or a function")),
        },
    }
}

/// Members whose content is data of the client: schemas and labels may hold any name.
const OPAQUE_FIELDS: [&str; 4] = ["guided_json", "metadata", "response_format", "tools"];

/// Every field this server judges, sorted. [`Draft::read_member`] reads each.
pub(super) const KNOWN_FIELDS: [&str; 80] = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "detokenize",
    "disaggregated_params",
    "documents",
    "early_stopping",
    "echo",
    "frequency_penalty",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "priority",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_logprobs",
    "reasoning_effort",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "structured_outputs",
    "suffix",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "truncate_prompt_tokens",
    "use_beam_search",
    "user",
    "verbosity",
    "web_search_options",
];

//! What every ring thread of a server shares: settings, the model once it is loaded, and the work of making a body into
//! something the engine can run.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use uring_serve_core::time::ClockOffset;
use uring_serve_kernels::ModelSpec;

use crate::api::error::ApiError;
use crate::api::request::{
    Chat, Endpoint, Generation, Input, ModelContext, Prompt, UnknownFields, context_exceeded, read_generation,
};
use crate::api::template::ChatTemplate;
use crate::api::tokens::{Tokenize, TokenizeInput};
use crate::config::Config;
use crate::engine::StopRules;
use crate::engine::tokenizer::{EncodeError, Markup, Tokenizer};
use crate::prometheus::Metrics;
use crate::signals::Shutdown;

/// Shared by all rings of a server.
pub struct App {
    /// The settings.
    pub config: Config,
    /// Set once the model is loaded; until then generation routes answer 503.
    pub model: OnceLock<Model>,
    /// Serving, draining, ending.
    pub shutdown: Arc<Shutdown>,
    /// Counters, gauges and histograms of the whole process.
    pub metrics: Arc<Metrics>,
    /// Unknown request fields, each told once.
    pub unknown_fields: UnknownNames,
    /// Added to reported times, in nanoseconds: what POST `/steady_clock_offset` set.
    pub clock_offset_ns: AtomicI64,
}

/// What the front end needs of a loaded model.
pub struct Model {
    /// Vocabulary, device.
    pub spec: ModelSpec,
    /// Longest sequence served, in tokens: the model's context, cut by `--max-seq-len` and by the KV cache.
    pub context_tokens: u32,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Renders conversations; `None` when the file has no template.
    pub template: Option<ChatTemplate>,
    /// When the model was ready, in seconds since the UNIX epoch.
    pub created: u64,
    /// The engine's name: `cpu` or `sim`.
    pub engine: &'static str,
    /// Tokens the KV cache holds.
    pub kv_cache_tokens: u64,
}

/// A generation request that the engine can run.
#[derive(Debug)]
pub struct Prepared {
    /// What was asked.
    pub request: Generation,
    /// In the order of the request, at least one.
    pub prompts: Vec<PreparedPrompt>,
    /// What ends its sequences.
    pub stop: Arc<StopRules>,
}

/// Names that were told in the log. Bounded: names past the bound are not told.
#[derive(Debug, Default)]
pub struct UnknownNames(Mutex<HashSet<String>>);

impl UnknownNames {
    /// Logs each name the first time it is met.
    pub(crate) fn report(&self, unknown: &UnknownFields) {
        for name in unknown.names() {
            // Told outside of the lock: the log may be slow, and other rings must not wait for it.
            if self.is_new(name) {
                tracing::warn!(field = name, "requests have a field that this server ignores");
            }
        }
    }

    fn is_new(&self, name: &str) -> bool {
        // The set stays whole whoever panics over it.
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.len() < UNKNOWN_NAMES_MAX && told.insert(name.to_owned())
    }
}

/// One prompt of a request.
#[derive(Debug)]
pub struct PreparedPrompt {
    /// At least one.
    pub tokens: Arc<[u32]>,
    /// Most tokens to generate behind them, at least 1.
    pub output_tokens_max: u32,
}

impl App {
    /// Returns the model, or the 503 that says it is not there yet.
    ///
    /// # Errors
    /// 503 while the model loads.
    pub fn loaded(&self) -> Result<&Model, ApiError> {
        self.model
            .get()
            .ok_or_else(|| ApiError::unavailable("The model is being loaded. Please retry shortly."))
    }

    /// Returns what requests are checked against.
    #[must_use]
    pub fn context(&self, model: &Model) -> ModelContext<'_> {
        ModelContext {
            vocab: model.spec.vocab,
            context_tokens: model.context_tokens,
            strict_name: self.config.strict_model.then_some(self.config.served_model_name.as_str()),
        }
    }

    /// Reads, checks, renders and tokenises. May take longer than a ring thread's turn may last: see
    /// [`crate::pool`]. `unix_seconds` is the time that templates may show.
    ///
    /// # Errors
    /// The 4xx or 503 to answer.
    pub fn prepare(
        &self,
        endpoint: Endpoint,
        body: &mut [u8],
        unix_seconds: u64,
    ) -> Result<Prepared, ApiError> {
        let model = self.loaded()?;
        let request = read_generation(endpoint, body, &self.context(model))?;
        self.unknown_fields.report(&request.unknown);
        let (asked, room) = (request.choice_count(), self.config.max_queued_requests);
        if asked > room {
            let message =
                format!("The request asks for {asked} sequences, and this server queues {room} at most.");
            return Err(ApiError::invalid("n", message));
        }
        let prompts = model.tokenize(&request, unix_seconds)?;
        let stop = Arc::new(request.stop_rules(model.tokenizer.ends()));
        Ok(Prepared { request, prompts, stop })
    }

    /// Returns the offset of reported times.
    #[must_use]
    pub fn clock_offset(&self) -> ClockOffset {
        ClockOffset::from_raw(self.clock_offset_ns.load(Ordering::Relaxed))
    }

    /// Sets the offset of times reported from here on.
    pub fn set_clock_offset(&self, offset: ClockOffset) {
        self.clock_offset_ns.store(offset.as_raw(), Ordering::Relaxed);
    }
}

impl Model {
    /// Returns each prompt's tokens and the most tokens to generate behind it.
    fn tokenize(&self, request: &Generation, unix_seconds: u64) -> Result<Vec<PreparedPrompt>, ApiError> {
        let finish = |tokens: Vec<u32>| {
            let output_tokens_max = request.output_tokens_max(tokens.len(), self.context_tokens)?;
            Ok(PreparedPrompt { tokens: Arc::from(tokens), output_tokens_max })
        };
        match &request.input {
            Input::Chat(chat) => {
                let leads = request.add_special_tokens.unwrap_or(false);
                Ok(vec![finish(self.encode_chat(chat, leads, unix_seconds)?)?])
            }
            Input::Prompts(prompts) => prompts
                .iter()
                .map(|prompt| match prompt {
                    Prompt::Text(text) => {
                        let leads = request.add_special_tokens.unwrap_or(true);
                        finish(self.encode(text, Markup::Parsed, "prompt", leads)?)
                    }
                    Prompt::Tokens(tokens) => finish(tokens.clone()),
                })
                .collect(),
        }
    }

    /// Returns the tokens of a `/tokenize` request.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn tokenize_request(&self, request: &Tokenize, unix_seconds: u64) -> Result<Vec<u32>, ApiError> {
        match &request.input {
            TokenizeInput::Chat(chat) => self.encode_chat(chat, request.add_special_tokens, unix_seconds),
            TokenizeInput::Text(text) => {
                self.encode(text, Markup::Parsed, "prompt", request.add_special_tokens)
            }
        }
    }

    fn encode_chat(&self, chat: &Chat, leads: bool, unix_seconds: u64) -> Result<Vec<u32>, ApiError> {
        let template = self.template.as_ref().ok_or_else(|| {
            ApiError::invalid("messages", "This model has no chat template; use /v1/completions.")
        })?;
        let text = template.render(chat, &self.tokenizer, unix_seconds.cast_signed())?;
        self.encode(&text, Markup::Guarded, "messages", leads)
    }

    fn encode(
        &self,
        text: &str,
        markup: Markup,
        field: &'static str,
        leads: bool,
    ) -> Result<Vec<u32>, ApiError> {
        let mut tokens = Vec::new();
        if leads && self.tokenizer.add_bos() {
            tokens.extend(self.tokenizer.bos());
        }
        let tokens_max = self.context_tokens as usize;
        match self.tokenizer.encode(text, markup, tokens_max, &mut tokens) {
            Ok(()) => Ok(tokens),
            Err(EncodeError::TooLong { tokens_max }) => {
                Err(context_exceeded(field, tokens_max, self.context_tokens))
            }
            Err(error) => Err(ApiError::server(error.to_string())),
        }
    }
}

/// Unknown field names that are told, at most.
const UNKNOWN_NAMES_MAX: usize = 256;

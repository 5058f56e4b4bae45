//! Responses as JSON bytes, appended to the caller's buffer. Nothing here allocates beyond that buffer.
//!
//! `system_fingerprint` is left out: it is optional in the API, and a made-up value would promise determinism that
//! no one checked.

use std::fmt;

use crate::api::escape::{write_escaped, write_hex, write_integer, write_string};
use crate::api::request::Endpoint;
use crate::engine::tokenizer::Tokenizer;

/// What all parts of one response share.
#[derive(Clone, Copy, Debug)]
pub struct ResponseHead<'a> {
    /// Which endpoint's shapes are written.
    pub endpoint: Endpoint,
    /// The id behind `chatcmpl-` or `cmpl-`, written as 32 hex digits.
    pub id: u128,
    /// Seconds since the UNIX epoch.
    pub created: u64,
    /// The model's name as the request gave it, or the server's.
    pub model: &'a str,
}

impl ResponseHead<'_> {
    /// Returns `object` of a stream's chunks.
    #[must_use]
    pub const fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        }
    }

    /// Appends the id with its prefix.
    pub fn write_id(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(match self.endpoint {
            Endpoint::Chat => b"chatcmpl-",
            Endpoint::Completions => b"cmpl-",
        });
        write_hex(out, self.id, 32);
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The token limit.
    Length,
    /// A stop token or stop string.
    Stop,
}

/// One finished choice of a response that is not streamed.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// `prompt_index * n + i`.
    pub index: u32,
    /// The whole text.
    pub text: &'a str,
    /// Why it ended.
    pub reason: FinishReason,
}

/// Token counts of a request, over all its choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens; each prompt counts once, whatever `n` is.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from cache; `None` where nothing is cached.
    pub cached_tokens: Option<u64>,
    /// Generated tokens.
    pub completion_tokens: u64,
}

/// The events of one stream. What does not change from chunk to chunk is rendered once, so a chunk costs two copies
/// and one escape.
///
/// Every event is `data: {…}` and a blank line. `[DONE]` and what follows it belong to the SSE writer.
#[derive(Clone, Debug)]
pub struct ChunkTemplate {
    endpoint: Endpoint,
    /// `data: {"id":…,"choices":[{"index":`
    head: Vec<u8>,
    /// Length of `head` up to and including `"choices":[`.
    choices_at: usize,
    /// From the end of the text to the end of the event.
    tail: &'static [u8],
    /// Whether chunks say `"usage":null`, as they do when a usage chunk is to come.
    usage: &'static [u8],
}

impl ChunkTemplate {
    /// Renders the head of a stream. `with_usage` says whether [`Self::write_usage`] will be called.
    #[must_use]
    pub fn new(head: &ResponseHead<'_>, with_usage: UsageChunk) -> Self {
        let mut bytes = Vec::with_capacity(160 + head.model.len());
        bytes.extend_from_slice(b"data: ");
        write_head(&mut bytes, head, head.chunk_object());
        bytes.extend_from_slice(b",\"choices\":[");
        let choices_at = bytes.len();
        bytes.extend_from_slice(b"{\"index\":");
        let (tail, usage): (&[u8], &[u8]) = match (head.endpoint, with_usage) {
            (Endpoint::Chat, UsageChunk::Asked) => {
                (b"\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n", b",\"usage\":null")
            }
            (Endpoint::Chat, UsageChunk::NotAsked) => {
                (b"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", b"")
            }
            (Endpoint::Completions, UsageChunk::Asked) => {
                (b"\",\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n", b",\"usage\":null")
            }
            (Endpoint::Completions, UsageChunk::NotAsked) => {
                (b"\",\"logprobs\":null,\"finish_reason\":null}]}\n\n", b"")
            }
        };
        Self { endpoint: head.endpoint, head: bytes, choices_at, tail, usage }
    }

    /// Appends the first chunk of a chat choice, which says who speaks. Completions have none: nothing is appended.
    pub fn write_role(&self, out: &mut Vec<u8>, index: u32) {
        match self.endpoint {
            Endpoint::Chat => {
                self.write_index(out, index);
                out.extend_from_slice(b",\"delta\":{\"role\":\"assistant\",\"content\":\"");
                out.extend_from_slice(self.tail);
            }
            Endpoint::Completions => {}
        }
    }

    /// Appends a chunk of text.
    pub fn write_text(&self, out: &mut Vec<u8>, index: u32, text: &str) {
        self.write_index(out, index);
        out.extend_from_slice(match self.endpoint {
            Endpoint::Chat => b",\"delta\":{\"content\":\"",
            Endpoint::Completions => b",\"text\":\"",
        });
        write_escaped(out, text);
        out.extend_from_slice(self.tail);
    }

    /// Appends a choice's last chunk.
    pub fn write_finish(&self, out: &mut Vec<u8>, index: u32, reason: FinishReason) {
        self.write_index(out, index);
        out.extend_from_slice(match self.endpoint {
            Endpoint::Chat => b",\"delta\":{}",
            Endpoint::Completions => b",\"text\":\"\"",
        });
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":\"");
        out.extend_from_slice(reason.as_str().as_bytes());
        out.extend_from_slice(b"\"}]");
        out.extend_from_slice(self.usage);
        out.extend_from_slice(b"}\n\n");
    }

    /// Appends the usage chunk, whose `choices` are empty.
    pub fn write_usage(&self, out: &mut Vec<u8>, usage: &Usage) {
        out.extend_from_slice(&self.head[..self.choices_at]);
        out.extend_from_slice(b"],\"usage\":");
        usage.write_json(out);
        out.extend_from_slice(b"}\n\n");
    }

    fn write_index(&self, out: &mut Vec<u8>, index: u32) {
        out.extend_from_slice(&self.head);
        write_integer(out, u64::from(index));
    }
}

/// Whether a stream ends with its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageChunk {
    /// `stream_options.include_usage` was true.
    Asked,
    /// It was not.
    NotAsked,
}

impl FinishReason {
    /// Returns the wire word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
        }
    }
}

impl Usage {
    /// Appends the usage object. Sums saturate.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"prompt_tokens\":");
        write_integer(out, self.prompt_tokens);
        out.extend_from_slice(b",\"completion_tokens\":");
        write_integer(out, self.completion_tokens);
        out.extend_from_slice(b",\"total_tokens\":");
        write_integer(out, self.prompt_tokens.saturating_add(self.completion_tokens));
        if let Some(cached) = self.cached_tokens {
            out.extend_from_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
            write_integer(out, cached);
            out.push(b'}');
        }
        out.push(b'}');
    }
}

/// Appends a whole response that is not streamed; choices in the order given.
pub fn write_response(out: &mut Vec<u8>, head: &ResponseHead<'_>, choices: &[Choice<'_>], usage: &Usage) {
    let object = match head.endpoint {
        Endpoint::Chat => "chat.completion",
        Endpoint::Completions => "text_completion",
    };
    write_head(out, head, object);
    out.extend_from_slice(b",\"choices\":[");
    for (at, choice) in choices.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"index\":");
        write_integer(out, u64::from(choice.index));
        match head.endpoint {
            Endpoint::Chat => {
                out.extend_from_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
                write_string(out, choice.text);
                out.extend_from_slice(b",\"refusal\":null}");
            }
            Endpoint::Completions => {
                out.extend_from_slice(b",\"text\":");
                write_string(out, choice.text);
            }
        }
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":\"");
        out.extend_from_slice(choice.reason.as_str().as_bytes());
        out.extend_from_slice(b"\"}");
    }
    out.extend_from_slice(b"],\"usage\":");
    usage.write_json(out);
    out.push(b'}');
}

/// Appends the list of models, which holds the one served. `created` is in seconds since the UNIX epoch.
pub fn write_models(out: &mut Vec<u8>, name: &str, created: u64, context_tokens: u32) {
    out.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    write_model(out, name, created, context_tokens);
    out.extend_from_slice(b"]}");
}

/// Appends a model object.
pub fn write_model(out: &mut Vec<u8>, name: &str, created: u64, context_tokens: u32) {
    out.extend_from_slice(b"{\"id\":");
    write_string(out, name);
    out.extend_from_slice(b",\"object\":\"model\",\"created\":");
    write_integer(out, created);
    out.extend_from_slice(b",\"owned_by\":\"uring-serve\",\"max_model_len\":");
    write_integer(out, u64::from(context_tokens));
    out.push(b'}');
}

/// Appends the answer of `/tokenize`: `count`, `max_model_len`, `tokens`, and with `spellings` each token's text.
pub fn write_tokenized(
    out: &mut Vec<u8>,
    tokens: &[u32],
    context_tokens: u32,
    spellings: Option<&Tokenizer>,
) {
    out.extend_from_slice(b"{\"count\":");
    write_integer(out, tokens.len() as u64);
    out.extend_from_slice(b",\"max_model_len\":");
    write_integer(out, u64::from(context_tokens));
    out.extend_from_slice(b",\"tokens\":[");
    write_list(out, tokens, |out, token| write_integer(out, u64::from(*token)));
    out.extend_from_slice(b"],\"token_strs\":");
    match spellings {
        Some(tokenizer) => {
            out.push(b'[');
            write_list(out, tokens, |out, token| {
                out.push(b'"');
                for chunk in tokenizer.token_bytes(*token).utf8_chunks() {
                    write_escaped(out, chunk.valid());
                    if !chunk.invalid().is_empty() {
                        write_escaped(out, "\u{fffd}");
                    }
                }
                out.push(b'"');
            });
            out.push(b']');
        }
        None => out.extend_from_slice(b"null"),
    }
    out.push(b'}');
}

/// Appends the answer of `/detokenize`.
pub fn write_detokenized(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(b"{\"prompt\":");
    write_string(out, text);
    out.push(b'}');
}

/// Appends the answer of `/version`.
pub fn write_version(out: &mut Vec<u8>, version: &str) {
    out.extend_from_slice(b"{\"version\":");
    write_string(out, version);
    out.push(b'}');
}

/// Appends the answer of GET `/steady_clock_offset`: two readings of the reported clock, in seconds (UF 3.1).
pub fn write_clock(out: &mut Vec<u8>, receive_s: f64, transmit_s: f64) {
    write_formatted(out, format_args!("{{\"receive_ts\":{receive_s:.9},\"transmit_ts\":{transmit_s:.9}}}"));
}

/// What `/server_info` tells.
#[derive(Clone, Copy, Debug)]
pub struct ServerInfo<'a> {
    /// Of this program.
    pub version: &'a str,
    /// The model's name.
    pub model: &'a str,
    /// `cpu`, `cuda` or `sim`.
    pub engine: &'a str,
    /// As the backend names it.
    pub device: &'a str,
    /// `server`, `context` or `generation`.
    pub role: &'a str,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
    /// Entries of the vocabulary.
    pub vocab: u32,
    /// Most sequences in one step.
    pub batch_seqs_max: u32,
    /// Most tokens in one step.
    pub batch_tokens_max: u32,
    /// Tokens the KV cache holds.
    pub kv_cache_tokens: u64,
}

/// Appends the answer of `/server_info`. `disaggregated_params` is null on a worker that takes no part in it.
pub fn write_server_info(out: &mut Vec<u8>, info: &ServerInfo<'_>) {
    let texts = [
        ("version", info.version),
        ("model", info.model),
        ("engine", info.engine),
        ("device", info.device),
        ("server_role", info.role),
    ];
    out.push(b'{');
    for (name, text) in texts {
        write_string(out, name);
        out.push(b':');
        write_string(out, text);
        out.push(b',');
    }
    let counts = [
        ("max_seq_len", u64::from(info.context_tokens)),
        ("vocab_size", u64::from(info.vocab)),
        ("max_batch_size", u64::from(info.batch_seqs_max)),
        ("max_num_tokens", u64::from(info.batch_tokens_max)),
        ("kv_cache_tokens", info.kv_cache_tokens),
    ];
    for (name, count) in counts {
        write_string(out, name);
        out.push(b':');
        write_integer(out, count);
        out.push(b',');
    }
    out.extend_from_slice(b"\"disaggregated_params\":null}");
}

/// Appends `{"id":…,"object":…,"created":…,"model":…`, without the closing brace.
fn write_head(out: &mut Vec<u8>, head: &ResponseHead<'_>, object: &str) {
    out.extend_from_slice(b"{\"id\":\"");
    head.write_id(out);
    out.extend_from_slice(b"\",\"object\":\"");
    out.extend_from_slice(object.as_bytes());
    out.extend_from_slice(b"\",\"created\":");
    write_integer(out, head.created);
    out.extend_from_slice(b",\"model\":");
    write_string(out, head.model);
}

fn write_list<T>(out: &mut Vec<u8>, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(out, item);
    }
}

fn write_formatted(out: &mut Vec<u8>, text: fmt::Arguments<'_>) {
    // Writing to a vector cannot fail.
    let _ = std::io::Write::write_fmt(out, text);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(endpoint: Endpoint) -> ResponseHead<'static> {
        ResponseHead { endpoint, id: 0xabc, created: 7, model: "a\"b" }
    }

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    const CHAT_HEAD: &str = r#"data: {"id":"chatcmpl-00000000000000000000000000000abc","object":"chat.completion.chunk","created":7,"model":"a\"b","choices":["#;
    const TEXT_HEAD: &str = r#"data: {"id":"cmpl-00000000000000000000000000000abc","object":"text_completion","created":7,"model":"a\"b","choices":["#;

    #[test]
    fn chat_chunks() {
        let plain = ChunkTemplate::new(&head(Endpoint::Chat), UsageChunk::NotAsked);
        let asked = ChunkTemplate::new(&head(Endpoint::Chat), UsageChunk::Asked);
        let usage = Usage { prompt_tokens: 3, cached_tokens: None, completion_tokens: 4 };
        let rows = [
            (
                written(|out| plain.write_role(out, 0)),
                r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
            ),
            (
                written(|out| plain.write_text(out, 12, "é\n")),
                r#"{"index":12,"delta":{"content":"é\n"},"logprobs":null,"finish_reason":null}]}"#,
            ),
            (
                written(|out| asked.write_text(out, 0, "x")),
                r#"{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
            ),
            (
                written(|out| plain.write_finish(out, 1, FinishReason::Stop)),
                r#"{"index":1,"delta":{},"logprobs":null,"finish_reason":"stop"}]}"#,
            ),
            (
                written(|out| asked.write_usage(out, &usage)),
                r#"],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}"#,
            ),
        ];
        for (event, rest) in rows {
            assert_eq!(event, format!("{CHAT_HEAD}{rest}\n\n"));
        }
    }

    #[test]
    fn completion_chunks() {
        let plain = ChunkTemplate::new(&head(Endpoint::Completions), UsageChunk::NotAsked);
        let asked = ChunkTemplate::new(&head(Endpoint::Completions), UsageChunk::Asked);
        let rows = [
            (
                written(|out| plain.write_text(out, 0, "x")),
                r#"{"index":0,"text":"x","logprobs":null,"finish_reason":null}]}"#,
            ),
            (
                written(|out| asked.write_finish(out, 0, FinishReason::Length)),
                r#"{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}"#,
            ),
        ];
        for (event, rest) in rows {
            assert_eq!(event, format!("{TEXT_HEAD}{rest}\n\n"));
        }
        assert_eq!(written(|out| plain.write_role(out, 0)), "", "a completion has no speaker");
    }

    #[test]
    fn whole_responses() {
        let choices = [
            Choice { index: 0, text: "a", reason: FinishReason::Stop },
            Choice { index: 1, text: "\t", reason: FinishReason::Length },
        ];
        let usage = Usage { prompt_tokens: 1, cached_tokens: Some(0), completion_tokens: u64::MAX };
        assert_eq!(
            written(|out| write_response(out, &head(Endpoint::Chat), &choices, &usage)),
            concat!(
                r#"{"id":"chatcmpl-00000000000000000000000000000abc","object":"chat.completion","created":7,"model":"a\"b","choices":["#,
                r#"{"index":0,"message":{"role":"assistant","content":"a","refusal":null},"logprobs":null,"finish_reason":"stop"},"#,
                r#"{"index":1,"message":{"role":"assistant","content":"\t","refusal":null},"logprobs":null,"finish_reason":"length"}],"#,
                r#""usage":{"prompt_tokens":1,"completion_tokens":18446744073709551615,"total_tokens":18446744073709551615,"prompt_tokens_details":{"cached_tokens":0}}}"#,
            )
        );
        assert_eq!(
            written(|out| write_response(
                out,
                &head(Endpoint::Completions),
                &choices[..1],
                &Usage::default()
            )),
            concat!(
                r#"{"id":"cmpl-00000000000000000000000000000abc","object":"text_completion","created":7,"model":"a\"b","choices":["#,
                r#"{"index":0,"text":"a","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}"#,
            )
        );
    }

    #[test]
    fn a_warm_chunk_allocates_nothing() {
        let template = ChunkTemplate::new(&head(Endpoint::Chat), UsageChunk::Asked);
        let mut out = Vec::with_capacity(4096);
        let before = (out.as_ptr(), out.capacity());
        for index in 0..8 {
            template.write_text(&mut out, index, "token");
        }
        assert_eq!((out.as_ptr(), out.capacity()), before);
    }

    #[test]
    fn the_small_answers() {
        let rows = [
            (
                written(|out| write_models(out, "m", 5, 8)),
                r#"{"object":"list","data":[{"id":"m","object":"model","created":5,"owned_by":"uring-serve","max_model_len":8}]}"#,
            ),
            (
                written(|out| write_tokenized(out, &[104, 0xc3], 8, None)),
                r#"{"count":2,"max_model_len":8,"tokens":[104,195],"token_strs":null}"#,
            ),
            (
                written(|out| write_tokenized(out, &[34, 0xc3, 258], 8, Some(&Tokenizer::bytes()))),
                r#"{"count":3,"max_model_len":8,"tokens":[34,195,258],"token_strs":["\"","�","<|im_end|>"]}"#,
            ),
            (written(|out| write_detokenized(out, "a\"")), r#"{"prompt":"a\""}"#),
            (written(|out| write_version(out, "0.1.0")), r#"{"version":"0.1.0"}"#),
            (
                written(|out| write_clock(out, 1.5, 1.500_000_25)),
                r#"{"receive_ts":1.500000000,"transmit_ts":1.500000250}"#,
            ),
        ];
        for (written, expected) in rows {
            assert_eq!(written, expected);
        }
        let info = ServerInfo {
            version: "0.1.0",
            model: "m",
            engine: "sim",
            device: "none",
            role: "server",
            context_tokens: 1,
            vocab: 2,
            batch_seqs_max: 3,
            batch_tokens_max: 4,
            kv_cache_tokens: 5,
        };
        assert_eq!(
            written(|out| write_server_info(out, &info)),
            concat!(
                r#"{"version":"0.1.0","model":"m","engine":"sim","device":"none","server_role":"server","max_seq_len":1,"#,
                r#""vocab_size":2,"max_batch_size":3,"max_num_tokens":4,"kv_cache_tokens":5,"disaggregated_params":null}"#,
            )
        );
    }
}

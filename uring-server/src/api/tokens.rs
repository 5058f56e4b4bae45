//! The small endpoints with a body: `/tokenize` and `/detokenize` (vLLM's shape), POST `/steady_clock_offset`.

use simd_json::prelude::*;

use crate::api::draft::names_template;
use crate::api::error::ApiError;
use crate::api::fields::Field;
pub use crate::api::fields::UnknownFields;
use crate::api::json;
use crate::api::messages::read_messages;
use crate::api::request::{Chat, ModelContext, check_model};
use crate::api::template::Variables;

/// A checked `/tokenize` request.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokenize {
    /// What to tokenize.
    pub input: TokenizeInput,
    /// Whether BOS leads the tokens of a model that has one; by default for text and not for a conversation, whose
    /// template writes its own.
    pub add_special_tokens: bool,
    /// Whether the answer has each token's text too.
    pub return_token_strs: bool,
    /// Fields that this endpoint does not know.
    pub unknown: UnknownFields,
}

/// What to tokenize.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// A conversation, rendered first.
    Chat(Chat),
    /// Text; names of control tokens mean those tokens.
    Text(String),
}

/// A checked `/detokenize` request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detokenize {
    /// Each below the vocabulary's size.
    pub tokens: Vec<u32>,
    /// Fields that this endpoint does not know.
    pub unknown: UnknownFields,
}

/// Reads a `/tokenize` body.
///
/// # Errors
/// 400 naming the field, or 404 `model_not_found` under a strict name.
pub fn read_tokenize(body: &mut [u8], context: &ModelContext<'_>) -> Result<Tokenize, ApiError> {
    let document = json::parse(body, &TOKENIZE_FIELDS)?;
    let mut unknown = UnknownFields::default();
    let (mut text, mut messages, mut special) = (None, None, None);
    let (mut strings, mut generation_prompt, mut variables) = (false, true, Variables::default());
    for (name, value) in document.object()?.iter() {
        let Some(name) = TOKENIZE_FIELDS.iter().copied().find(|known| *known == name) else {
            unknown.add(name);
            continue;
        };
        let field = Field { name, value };
        match name {
            "model" => check_model(field.text()?, context)?,
            "prompt" => text = field.text()?.map(str::to_owned),
            "messages" => messages = field.present().map(read_messages).transpose()?,
            "add_special_tokens" => special = field.flag()?,
            "return_token_strs" => strings = field.flag()?.unwrap_or(false),
            "add_generation_prompt" => generation_prompt = field.flag()?.unwrap_or(true),
            "chat_template_kwargs" => {
                if let Some(object) = field.object()? {
                    variables.add_object(name, &object)?;
                }
            }
            "continue_final_message" if field.flag()?.unwrap_or(false) => {
                return Err(ApiError::unsupported(name));
            }
            "tools" if field.list()?.is_some_and(|tools| !tools.is_empty()) => {
                return Err(ApiError::unsupported(name));
            }
            _ => {}
        }
    }
    if document.mentions("chat_template") && names_template(document.root(), 0) {
        return Err(ApiError::invalid("chat_template", "Chat templates come from the model only."));
    }
    let chat =
        messages.map(|messages| Chat { messages, add_generation_prompt: generation_prompt, variables });
    let (input, by_default) = match (text, chat) {
        (Some(text), None) => (TokenizeInput::Text(text), true),
        (None, Some(chat)) => (TokenizeInput::Chat(chat), false),
        (None, None) => return Err(ApiError::invalid("prompt", "'prompt' or 'messages' is required.")),
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("prompt", "Give 'prompt' or 'messages', not both."));
        }
    };
    let add_special_tokens = special.unwrap_or(by_default);
    Ok(Tokenize { input, add_special_tokens, return_token_strs: strings, unknown })
}

/// Reads a `/detokenize` body.
///
/// # Errors
/// 400 naming the field, or 404 `model_not_found` under a strict name.
pub fn read_detokenize(body: &mut [u8], context: &ModelContext<'_>) -> Result<Detokenize, ApiError> {
    let document = json::parse(body, &["model", "tokens"])?;
    let mut unknown = UnknownFields::default();
    let mut tokens = None;
    for (name, value) in document.object()?.iter() {
        match name {
            "model" => check_model(Field { name: "model", value }.text()?, context)?,
            "tokens" => tokens = Field { name: "tokens", value }.token_ids(context.vocab)?,
            _ => unknown.add(name),
        }
    }
    let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "'tokens' is required."))?;
    Ok(Detokenize { tokens, unknown })
}

/// Reads a POST `/steady_clock_offset` body: `{"offset": <seconds>}` (UF 3.1).
///
/// # Errors
/// 400 unless the offset is a number of at most [`OFFSET_SECONDS_MAX`] either way.
pub fn read_clock_offset(body: &mut [u8]) -> Result<f64, ApiError> {
    let document = json::parse(body, &["offset"])?;
    let object = document.object()?;
    let offset = object.get("offset").and_then(|value| value.cast_f64());
    offset.filter(|offset| offset.abs() <= OFFSET_SECONDS_MAX).ok_or_else(|| {
        ApiError::invalid(
            "offset",
            format!("'offset' must be a number of seconds, at most {OFFSET_SECONDS_MAX}."),
        )
    })
}

/// Largest clock offset, in seconds: thirty years, beyond the uptime of any two hosts.
pub const OFFSET_SECONDS_MAX: f64 = 1e9;

const TOKENIZE_FIELDS: [&str; 9] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "model",
    "prompt",
    "return_token_strs",
    "tools",
];

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: ModelContext<'static> =
        ModelContext { vocab: 512, context_tokens: 8192, strict_name: Some("m") };

    #[test]
    fn tokenize_takes_text_or_a_conversation() {
        let read = |body: &str| read_tokenize(&mut body.as_bytes().to_vec(), &CONTEXT);
        let text = read(r#"{"model":"m","prompt":"hi","zz":1}"#).unwrap();
        assert_eq!(text.input, TokenizeInput::Text("hi".to_owned()));
        assert_eq!((text.add_special_tokens, text.unknown.names()), (true, &["zz".to_owned()][..]));
        let chat = read(r#"{"messages":[{"role":"user","content":"hi"}],"return_token_strs":true}"#).unwrap();
        assert!(matches!(chat.input, TokenizeInput::Chat(_)));
        assert_eq!((chat.add_special_tokens, chat.return_token_strs), (false, true));
        let rows = [
            (r"{}", 400, "prompt"),
            (r#"{"prompt":"a","messages":[{"role":"user","content":"hi"}]}"#, 400, "prompt"),
            (r#"{"prompt":1}"#, 400, "prompt"),
            (r#"{"prompt":"a","add_special_tokens":1}"#, 400, "add_special_tokens"),
            (r#"{"prompt":"a","chat_template":"x"}"#, 400, "chat_template"),
            (r#"{"prompt":"a","tools":[1]}"#, 400, "tools"),
            (r#"{"prompt":"a","model":"n"}"#, 404, "model"),
        ];
        for (body, status, param) in rows {
            let error = read(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (status, Some(param)), "{body}");
        }
    }

    #[test]
    fn detokenize_takes_ids_of_the_vocabulary() {
        let read = |body: &str| read_detokenize(&mut body.as_bytes().to_vec(), &CONTEXT);
        assert_eq!(read(r#"{"tokens":[0,511]}"#).unwrap().tokens, [0, 511]);
        for body in
            [r"{}", r#"{"tokens":[512]}"#, r#"{"tokens":[-1]}"#, r#"{"tokens":"a"}"#, r#"{"tokens":null}"#]
        {
            assert_eq!(read(body).expect_err(body).param.as_deref(), Some("tokens"), "{body}");
        }
    }

    #[test]
    fn the_clock_offset_is_a_bounded_number() {
        let read = |body: &str| read_clock_offset(&mut body.as_bytes().to_vec());
        assert_eq!(read(r#"{"offset":-0.5}"#), Ok(-0.5));
        assert_eq!(read(r#"{"offset":2}"#), Ok(2.0));
        for body in [r"{}", r#"{"offset":"1"}"#, r#"{"offset":1e10}"#, r#"{"offset":null}"#] {
            assert_eq!(read(body).expect_err(body).param.as_deref(), Some("offset"), "{body}");
        }
    }
}

//! The one shape of every refusal: a nested OpenAI error object with the field that is to blame.

use std::borrow::Cow;
use std::fmt;

use crate::api::escape::write_string;

/// A request that is answered by an error: what the client sees, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status, 400..=599.
    pub status: u16,
    /// The `type` member.
    pub kind: Kind,
    /// One sentence for a person; holds at most a short part of the input, see [`excerpt`].
    pub message: String,
    /// The field to blame, as a path: `max_tokens`, `messages[0].content`.
    pub param: Option<Cow<'static, str>>,
    /// A word for programs, e.g. `model_not_found`.
    pub code: Option<&'static str>,
}

/// The `type` member of an error object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 401: no or a wrong key.
    Authentication,
    /// 400 and its kin: the request itself is wrong.
    InvalidRequest,
    /// 404: no such path or model.
    NotFound,
    /// 429: the queue is full.
    RateLimit,
    /// 500: our fault.
    Server,
    /// 503: loading or draining.
    Unavailable,
}

impl ApiError {
    /// Blames a field of the request: 400.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self {
            status: 400,
            kind: Kind::InvalidRequest,
            message: message.into(),
            param: Some(param.into()),
            code: None,
        }
    }

    /// Blames the body as a whole: 400 with a null `param`.
    pub fn body(message: impl Into<String>) -> Self {
        Self { param: None, ..Self::invalid("", message) }
    }

    /// Refuses a field whose work this server does not do: 400.
    #[must_use]
    pub fn unsupported(param: &'static str) -> Self {
        Self {
            code: Some("unsupported_parameter"),
            ..Self::invalid(param, format!("'{param}' is not supported by this server."))
        }
    }

    /// Reports a model name that this server does not serve: 404, `model_not_found`.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        Self {
            status: 404,
            kind: Kind::NotFound,
            message: format!("The model '{}' does not exist.", excerpt(name)),
            param: Some(Cow::Borrowed("model")),
            code: Some("model_not_found"),
        }
    }

    /// Reports that nothing is served at a path: 404.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { status: 404, kind: Kind::NotFound, message: message.into(), param: None, code: None }
    }

    /// Asks to come back later because too much is waiting: 429.
    #[must_use]
    pub fn overloaded() -> Self {
        Self {
            status: 429,
            kind: Kind::RateLimit,
            message: "The queue is full. Please retry later.".into(),
            param: None,
            code: Some("queue_full"),
        }
    }

    /// Refuses a request that could never fit the KV cache: 400.
    #[must_use]
    pub fn never_fits() -> Self {
        Self {
            code: Some("context_length_exceeded"),
            ..Self::body("Prompt and output together need more KV cache than this server has.")
        }
    }

    /// Reports that the request took longer than it may: 504.
    #[must_use]
    pub fn timeout() -> Self {
        Self { status: 504, code: Some("timeout"), ..Self::server("The request took longer than it may.") }
    }

    /// Reports that the server does not serve yet, or no longer: 503.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { status: 503, kind: Kind::Unavailable, message: message.into(), param: None, code: None }
    }

    /// Reports a failure of the server itself: 500.
    pub fn server(message: impl Into<String>) -> Self {
        Self { status: 500, kind: Kind::Server, message: message.into(), param: None, code: None }
    }

    /// Appends `{"error":{"message","type","param","code"}}`.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"error\":{\"message\":");
        write_string(out, &self.message);
        out.extend_from_slice(b",\"type\":");
        write_string(out, self.kind.as_str());
        out.extend_from_slice(b",\"param\":");
        write_optional(out, self.param.as_deref());
        out.extend_from_slice(b",\"code\":");
        write_optional(out, self.code);
        out.extend_from_slice(b"}}");
    }

    /// Appends what a stream says when it fails after its 200: `event: error`, the object as data, one `[DONE]`.
    ///
    /// Both the event name and the object are needed: some clients look only at one of them (peers.md 2).
    pub fn write_event(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"event: error\ndata: ");
        self.write_json(out);
        out.extend_from_slice(b"\n\ndata: [DONE]\n\n");
    }
}

impl Kind {
    /// Returns the wire word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Authentication => "authentication_error",
            Self::InvalidRequest => "invalid_request_error",
            Self::NotFound => "not_found_error",
            Self::RateLimit => "rate_limit_error",
            Self::Server => "server_error",
            Self::Unavailable => "service_unavailable_error",
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status, self.kind.as_str(), self.message)
    }
}

impl std::error::Error for ApiError {}

/// Returns the part of an input that an error may echo: at most [`EXCERPT_BYTES_MAX`] bytes, whole characters.
#[must_use]
pub fn excerpt(text: &str) -> &str {
    &text[..text.floor_char_boundary(EXCERPT_BYTES_MAX)]
}

fn write_optional(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => write_string(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

/// Most bytes of the input that one error message repeats.
pub const EXCERPT_BYTES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_object_has_all_four_members() {
        let rows: [(&str, ApiError, &str); 3] = [
            (
                "a field",
                ApiError::invalid("n", "n must be \"small\"."),
                r#"{"error":{"message":"n must be \"small\".","type":"invalid_request_error","param":"n","code":null}}"#,
            ),
            (
                "the body",
                ApiError::body("no"),
                r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}"#,
            ),
            (
                "a model",
                ApiError::unknown_model("x"),
                r#"{"error":{"message":"The model 'x' does not exist.","type":"not_found_error","param":"model","code":"model_not_found"}}"#,
            ),
        ];
        for (name, error, expected) in rows {
            let mut out = Vec::new();
            error.write_json(&mut out);
            assert_eq!(String::from_utf8(out).unwrap(), expected, "{name}");
        }
    }

    #[test]
    fn a_failed_stream_ends_with_one_done() {
        let mut out = Vec::new();
        ApiError::server("gone").write_event(&mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("event: error\ndata: {\"error\":{"), "{text}");
        assert!(text.ends_with("}}\n\ndata: [DONE]\n\n"), "{text}");
        assert_eq!(text.matches("[DONE]").count(), 1);
    }

    #[test]
    fn an_excerpt_never_splits_a_character() {
        let euro = "€".repeat(40);
        assert_eq!(excerpt(&euro).len(), 63);
        assert_eq!(excerpt(&"x".repeat(64)).len(), 64);
        assert_eq!(excerpt(&"x".repeat(65)).len(), 64);
        assert_eq!(excerpt("short"), "short");
    }
}

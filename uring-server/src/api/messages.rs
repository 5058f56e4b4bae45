//! The conversation of a chat request: roles, text parts, tool calls in the history.

use std::borrow::Cow;
use std::collections::HashSet;

use simd_json::prelude::*;
use simd_json::tape::{Object, Value};

use crate::api::error::{ApiError, excerpt};

/// One message, as the template will see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; text parts are joined without a separator. `None` only for an assistant that called tools.
    pub content: Option<String>,
    /// The optional `name`.
    pub name: Option<String>,
    /// The assistant's `reasoning_content`, for templates that replay it.
    pub reasoning: Option<String>,
    /// Calls the assistant made; empty for other roles.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers; `Some` exactly for [`Role::Tool`].
    pub tool_call_id: Option<String>,
}

/// Who speaks. `developer` is read as [`Role::System`]: the templates of open models know no other word for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The model.
    Assistant,
    /// Instructions.
    System,
    /// A tool's answer.
    Tool,
    /// The person.
    User,
}

/// One function call in the history.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Chosen by the server that made it.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// JSON text as it came; may be anything, the model wrote it.
    pub arguments: String,
}

impl Role {
    /// Returns the word a template compares with.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Assistant => "assistant",
            Self::System => "system",
            Self::Tool => "tool",
            Self::User => "user",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        match word {
            "assistant" => Some(Self::Assistant),
            "developer" | "system" => Some(Self::System),
            "tool" => Some(Self::Tool),
            "user" => Some(Self::User),
            _ => None,
        }
    }
}

/// Reads the `messages` list.
///
/// # Errors
/// 400 that names the message and its field: `messages[2].tool_call_id`.
pub fn read_messages(value: Value<'_, '_>) -> Result<Vec<Message>, ApiError> {
    let Some(list) = value.as_array() else {
        return Err(ApiError::invalid("messages", "'messages' must be a list of messages."));
    };
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "'messages' must hold at least one message."));
    }
    let mut messages: Vec<Message> = Vec::with_capacity(list.len());
    let mut calls: HashSet<String> = HashSet::new();
    for (index, value) in list.iter().enumerate() {
        let at = Path { index };
        let Some(object) = value.as_object() else {
            return Err(ApiError::invalid(format!("messages[{index}]"), "A message must be a JSON object."));
        };
        let message = read_message(&at, &object)?;
        if let Some(id) = &message.tool_call_id
            && !calls.contains(id)
        {
            return Err(at.error("tool_call_id", "must answer a tool call of an earlier assistant message"));
        }
        calls.extend(message.tool_calls.iter().map(|call| call.id.clone()));
        if calls.len() > CALLS_MAX {
            return Err(at.error("tool_calls", &format!("must be at most {CALLS_MAX} over all messages")));
        }
        messages.push(message);
    }
    Ok(messages)
}

/// Names a member of one message.
struct Path {
    index: usize,
}

impl Path {
    fn name(&self, member: &str) -> String {
        format!("messages[{}].{member}", self.index)
    }

    fn error(&self, member: &str, what: &str) -> ApiError {
        let name = self.name(member);
        let message = format!("'{name}' {what}.");
        ApiError::invalid(Cow::Owned(name), message)
    }
}

fn read_message(at: &Path, object: &Object<'_, '_>) -> Result<Message, ApiError> {
    let role = match object.get("role").map(|role| role.as_str().and_then(Role::from_word)) {
        Some(Some(role)) => role,
        Some(None) => return Err(at.error("role", "must be one of system, developer, user, assistant, tool")),
        None => return Err(at.error("role", "is required")),
    };
    for member in ["audio", "function_call"] {
        if object.get(member).is_some_and(|value| !value.is_null()) {
            return Err(at.error(member, "is not supported by this server"));
        }
    }
    let tool_calls = match object.get("tool_calls").filter(|calls| !calls.is_null()) {
        Some(_) if role != Role::Assistant => {
            return Err(at.error("tool_calls", "belongs to assistant messages only"));
        }
        Some(calls) => read_tool_calls(at, calls)?,
        None => Vec::new(),
    };
    let content = match object.get("content").filter(|content| !content.is_null()) {
        Some(content) => Some(read_content(at, content)?),
        None if !tool_calls.is_empty() => None,
        None => return Err(at.error("content", "is required: a string or a list of text parts")),
    };
    let tool_call_id = read_text(at, object, "tool_call_id")?.filter(|_| role == Role::Tool);
    if role == Role::Tool && tool_call_id.is_none() {
        return Err(at.error("tool_call_id", "is required in a tool message"));
    }
    Ok(Message {
        role,
        content,
        name: read_text(at, object, "name")?,
        reasoning: read_text(at, object, "reasoning_content")?,
        tool_calls,
        tool_call_id,
    })
}

fn read_text(at: &Path, object: &Object<'_, '_>, member: &str) -> Result<Option<String>, ApiError> {
    match object.get(member).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => match value.as_str() {
            Some(text) => Ok(Some(text.to_owned())),
            None => Err(at.error(member, "must be a string")),
        },
    }
}

/// Reads a string, or a list of parts of which only text is served. An image's URL is never fetched.
fn read_content(at: &Path, value: Value<'_, '_>) -> Result<String, ApiError> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let Some(parts) = value.as_array() else {
        return Err(at.error("content", "must be a string or a list of text parts"));
    };
    let mut content = String::new();
    for (part, value) in parts.iter().enumerate() {
        let member = |rest: &str| format!("content[{part}]{rest}");
        let Some(object) = value.as_object() else {
            return Err(at.error(&member(""), "must be an object with a type"));
        };
        let (kind, text) = (object.get("type"), object.get("text"));
        match kind.as_ref().and_then(|kind| kind.as_str()) {
            Some("text") => match text.as_ref().and_then(|text| text.as_str()) {
                Some(text) => content.push_str(text),
                None => return Err(at.error(&member(".text"), "must be a string")),
            },
            Some(kind) if MEDIA_PARTS.contains(&kind) => {
                return Err(at.error(&member(""), &format!("is '{kind}', and this model reads only text")));
            }
            Some(kind) => {
                let what = format!("must be 'text', not '{}'", excerpt(kind));
                return Err(at.error(&member(".type"), &what));
            }
            None => return Err(at.error(&member(".type"), "is required: 'text'")),
        }
    }
    Ok(content)
}

fn read_tool_calls(at: &Path, value: Value<'_, '_>) -> Result<Vec<ToolCall>, ApiError> {
    let Some(list) = value.as_array() else {
        return Err(at.error("tool_calls", "must be a list"));
    };
    list.iter().enumerate().map(|(index, call)| read_tool_call(at, index, call)).collect()
}

fn read_tool_call(at: &Path, index: usize, call: Value<'_, '_>) -> Result<ToolCall, ApiError> {
    let error = |rest: &str, what: &str| at.error(&format!("tool_calls[{index}]{rest}"), what);
    let Some(object) = call.as_object() else {
        return Err(error("", "must be an object"));
    };
    // `type` is often left out by clients that replay a call; when there, it says what we can read.
    if object.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(error(".type", "must be 'function'"));
    }
    let Some(function) = object.get("function").and_then(|function| function.as_object()) else {
        return Err(error(".function", "is required: an object with a name and arguments"));
    };
    let text = |object: &Object<'_, '_>, member: &str, rest: &str| match object.get(member) {
        Some(value) => value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| error(&format!("{rest}{member}"), "must be a string")),
        None => Err(error(&format!("{rest}{member}"), "is required")),
    };
    Ok(ToolCall {
        id: text(&object, "id", ".")?,
        name: text(&function, "name", ".function.")?,
        arguments: text(&function, "arguments", ".function.")?,
    })
}

/// Most tool calls over all messages of one request.
pub const CALLS_MAX: usize = 4096;

/// Part types of the API that a text model refuses as a whole.
const MEDIA_PARTS: [&str; 7] =
    ["audio_url", "file", "image", "image_url", "input_audio", "refusal", "video_url"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::json;

    fn read(text: &str) -> Result<Vec<Message>, ApiError> {
        read_messages(json::parse(&mut text.as_bytes().to_vec(), &[]).unwrap().root())
    }

    #[test]
    fn each_fault_names_its_place() {
        let rows = [
            ("[]", "messages"),
            ("{}", "messages"),
            ("[1]", "messages[0]"),
            ("[{}]", "messages[0].role"),
            (r#"[{"role":"robot","content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":1}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":["a"]}]"#, "messages[0].content[0]"),
            (r#"[{"role":"user","content":[{"text":"a"}]}]"#, "messages[0].content[0].type"),
            (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0].text"),
            (
                r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]"#,
                "messages[0].content[1]",
            ),
            (r#"[{"role":"user","content":"x","name":1}]"#, "messages[0].name"),
            (r#"[{"role":"assistant","content":null}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":"x","tool_calls":[]}]"#, "messages[0].tool_calls"),
            (r#"[{"role":"assistant","tool_calls":[{}]}]"#, "messages[0].tool_calls[0].function"),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}},"id":"a"}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":""}}]}]"#,
                "messages[0].tool_calls[0].id",
            ),
            (r#"[{"role":"tool","content":"x"}]"#, "messages[0].tool_call_id"),
            (
                r#"[{"role":"user","content":"x"},{"role":"tool","content":"x","tool_call_id":"c"}]"#,
                "messages[1].tool_call_id",
            ),
            (r#"[{"role":"assistant","content":"x","function_call":{}}]"#, "messages[0].function_call"),
        ];
        for (body, param) in rows {
            let error = read(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}");
        }
    }

    #[test]
    fn a_tool_message_answers_an_earlier_call() {
        let body = r#"[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},
            {"role":"tool","tool_call_id":"c","content":"1"}]"#;
        let messages = read(body).unwrap();
        assert_eq!((messages[0].role, messages[0].content.as_deref()), (Role::System, Some("ab")));
        assert_eq!((messages[1].content.as_deref(), messages[1].tool_calls[0].name.as_str()), (None, "f"));
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("c"));
    }
}

//! The model's chat template: messages to the text that the model was trained on.
//!
//! Templates come from the model's file only, never from a request. Even so a render is bounded: in work (fuel that
//! grows with the input, see the module `meter`), in output, and in what the template can reach: no files, no clock but
//! the time it is given, no state across renders.

use std::borrow::Cow;
use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use simd_json::prelude::*;
use simd_json::tape;

use crate::api::error::{ApiError, excerpt};
use crate::api::messages::Message;
use crate::api::request::Chat;
use crate::api::{json, meter, rewrite};
use crate::engine::tokenizer::Tokenizer;

/// A compiled template, shared by threads.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A template that cannot be used; one sentence with the line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError(String);

/// Values that a request adds to what its template sees, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Variables(Vec<(String, Json)>);

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the texts of the model's tokens, empty where it has none.
    ///
    /// # Errors
    /// [`TemplateError`] for a syntax error, or a construct whose cost cannot be bounded.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        let source = rewrite::meter_source(source).map_err(TemplateError)?;
        let mut environment = Environment::new();
        // As the Python library that defines chat templates sets its engine.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError(error.to_string()))?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_recursion_limit(RECURSION_MAX);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        meter::install(&mut environment);
        environment.add_template_owned(NAME, source).map_err(|error| TemplateError(error.to_string()))?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// Returns the ChatML template of the simulator.
    #[must_use]
    pub fn chatml() -> Self {
        Self::new(CHATML, "", "<|im_end|>").expect("the source is a constant of this file")
    }

    /// Renders a conversation. `unix_seconds` is the time that `strftime_now` shows, in UTC.
    ///
    /// Text from the request is guarded: the result is for [`crate::engine::tokenizer::Markup::Guarded`], and
    /// [`crate::engine::tokenizer::unguard`] gives the plain text.
    ///
    /// # Errors
    /// 400 when the template refuses the messages, fails on them, or passes its bounds.
    pub fn render(&self, chat: &Chat, tokenizer: &Tokenizer, unix_seconds: i64) -> Result<String, ApiError> {
        let bytes: usize = chat.messages.iter().map(message_bytes).sum::<usize>() + chat.variables.bytes();
        let count = chat.messages.len();
        let mut environment = self.environment.clone();
        let fuel = FUEL_BASE + FUEL_PER_MESSAGE * count as u64 + bytes as u64 / 4;
        environment.set_fuel(Some(fuel));
        let guard = |text: &str| Value::from(tokenizer.guard(text));
        let messages: Vec<Value> =
            chat.messages.iter().map(|message| message_value(message, &guard)).collect();
        let now = move |format: &str| time_text(format, unix_seconds);
        let mut root = vec![
            ("messages".to_owned(), Value::from(messages)),
            ("add_generation_prompt".to_owned(), Value::from(chat.add_generation_prompt)),
            ("tools".to_owned(), Value::from(())),
            ("documents".to_owned(), Value::from(())),
            ("bos_token".to_owned(), Value::from(self.bos.as_str())),
            ("eos_token".to_owned(), Value::from(self.eos.as_str())),
            ("strftime_now".to_owned(), Value::from_function(now)),
        ];
        root.extend(chat.variables.0.iter().map(|(name, value)| (name.clone(), value.to_value(&guard))));
        let mut output = Bounded { text: Vec::new(), left: OUTPUT_BYTES_BASE + OUTPUT_FACTOR * bytes };
        let rendered = environment
            .get_template(NAME)
            .and_then(|template| template.render_captured_to(Value::from_pairs(root), &mut output).map(drop));
        rendered.map_err(|error| render_error(&error))?;
        String::from_utf8(output.text).map_err(|_| ApiError::server("The chat template made no text."))
    }
}

impl Variables {
    /// Adds the members of `chat_template_kwargs`.
    pub(super) fn add_object(
        &mut self,
        field: &'static str,
        object: &tape::Object<'_, '_>,
    ) -> Result<(), ApiError> {
        for (name, value) in object.iter() {
            if RESERVED.contains(&name) {
                let message = format!("'{field}' must not set '{name}'.");
                return Err(ApiError::invalid(field, message));
            }
            self.0.push((name.to_owned(), Json::read(value)));
        }
        Ok(())
    }

    /// Adds a word of the API's own.
    pub(super) fn add_word(&mut self, name: &str, word: &str) {
        self.0.push((name.to_owned(), Json::Text(word.to_owned())));
    }

    /// Reads the members of a JSON object.
    ///
    /// # Errors
    /// 400 unless `text` is one.
    pub fn from_json(text: &str) -> Result<Self, ApiError> {
        let mut body = text.as_bytes().to_vec();
        let document = json::parse(&mut body, &[])?;
        let members = document.object()?;
        Ok(Self(members.iter().map(|(name, value)| (name.to_owned(), Json::read(value))).collect()))
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + value.bytes()).sum()
    }
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the chat template cannot be used: {}", self.0)
    }
}

impl std::error::Error for TemplateError {}

/// A JSON value that outlives its body. Its depth is bounded by the parser's.
#[derive(Clone, Debug, PartialEq)]
enum Json {
    Bool(bool),
    Float(f64),
    Integer(i64),
    List(Vec<Self>),
    Null,
    Object(Vec<(String, Self)>),
    Text(String),
    Unsigned(u64),
}

impl Json {
    fn read(value: tape::Value<'_, '_>) -> Self {
        if let Some(text) = value.as_str() {
            Self::Text(text.to_owned())
        } else if let Some(list) = value.as_array() {
            Self::List(list.iter().map(Self::read).collect())
        } else if let Some(object) = value.as_object() {
            Self::Object(object.iter().map(|(key, value)| (key.to_owned(), Self::read(value))).collect())
        } else if let Some(flag) = value.as_bool() {
            Self::Bool(flag)
        } else if let Some(integer) = value.as_i64() {
            Self::Integer(integer)
        } else if let Some(integer) = value.as_u64() {
            Self::Unsigned(integer)
        } else {
            value.as_f64().map_or(Self::Null, Self::Float)
        }
    }

    fn to_value(&self, guard: &impl Fn(&str) -> Value) -> Value {
        match self {
            Self::Bool(flag) => Value::from(*flag),
            Self::Float(number) => Value::from(*number),
            Self::Integer(number) => Value::from(*number),
            Self::List(list) => {
                Value::from(list.iter().map(|value| value.to_value(guard)).collect::<Vec<_>>())
            }
            Self::Null => Value::from(()),
            Self::Object(members) => {
                Value::from_pairs(members.iter().map(|(key, value)| (guard(key), value.to_value(guard))))
            }
            Self::Text(text) => guard(text),
            Self::Unsigned(number) => Value::from(*number),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Bool(_) | Self::Float(_) | Self::Integer(_) | Self::Null | Self::Unsigned(_) => 8,
            Self::List(list) => list.iter().map(Self::bytes).sum(),
            Self::Object(members) => members.iter().map(|(key, value)| key.len() + value.bytes()).sum(),
            Self::Text(text) => text.len(),
        }
    }
}

fn message_bytes(message: &Message) -> usize {
    let calls = message.tool_calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len());
    let texts = [&message.content, &message.name, &message.reasoning, &message.tool_call_id];
    texts.into_iter().flatten().map(String::len).sum::<usize>() + calls.sum::<usize>()
}

/// Returns a message as templates expect it: members that are absent are not there.
fn message_value(message: &Message, guard: &impl Fn(&str) -> Value) -> Value {
    let content = message.content.as_deref().map_or_else(|| Value::from(()), guard);
    let mut members = vec![("role", Value::from(message.role.as_str())), ("content", content)];
    let optional = [
        ("name", &message.name),
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
    ];
    members.extend(optional.into_iter().filter_map(|(name, text)| Some((name, guard(text.as_deref()?)))));
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let function =
                [("name", guard(&call.name)), ("arguments", arguments_value(&call.arguments, guard))];
            Value::from_pairs([
                ("id", guard(&call.id)),
                ("type", Value::from("function")),
                ("function", Value::from_pairs(function)),
            ])
        });
        members.push(("tool_calls", Value::from(calls.collect::<Vec<_>>())));
    }
    Value::from_pairs(members)
}

/// Returns the arguments of a call as the object they spell, since templates write them out by `tojson`; a model may
/// have made something else, which stays text.
fn arguments_value(text: &str, guard: &impl Fn(&str) -> Value) -> Value {
    let mut body = text.as_bytes().to_vec();
    match json::parse(&mut body, &[]) {
        Ok(document) if document.root().is_object() => Json::read(document.root()).to_value(guard),
        _ => guard(text),
    }
}

fn render_error(error: &Error) -> ApiError {
    let message = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "The chat template needs too much work for these messages.".to_owned(),
        (ErrorKind::WriteFailure, _) => "The chat template makes too much text of these messages.".to_owned(),
        (_, Some(detail)) => format!("The chat template refuses these messages: {}", cut(detail)),
        (kind, None) => format!("The chat template refuses these messages: {}", cut(&kind.to_string())),
    };
    ApiError::invalid("messages", message)
}

/// A template's own sentence may be longer than an excerpt, and holds what its author wrote.
fn cut(text: &str) -> Cow<'_, str> {
    match text.len() {
        0..=DETAIL_BYTES_MAX => Cow::Borrowed(text),
        _ => Cow::Owned(format!("{}…", excerpt(text))),
    }
}

/// A writer that fails past its bound.
struct Bounded {
    text: Vec<u8>,
    left: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left =
            self.left.checked_sub(bytes.len()).ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats a time as C's `strftime` does in the POSIX locale, in UTC; the conversions that chat templates use.
fn time_text(format: &str, unix_seconds: i64) -> Result<String, Error> {
    let (days, seconds) = (unix_seconds.div_euclid(86_400), unix_seconds.rem_euclid(86_400));
    let (year, month, day) = civil_date(days);
    let weekday = WEEKDAYS[usize::try_from((days + 4).rem_euclid(7)).unwrap_or(0)];
    let month_name = MONTHS[month - 1];
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let piece = match letters.next() {
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year.rem_euclid(100)),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('-') if letters.as_str().starts_with('d') => {
                letters.next();
                day.to_string()
            }
            Some('H') => format!("{hour:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: an unknown conversion")),
        };
        out.push_str(&piece);
    }
    Ok(out)
}

/// Returns year, month 1..=12 and day 1..=31 of a day counted from 1970-01-01, proleptic Gregorian.
fn civil_date(days: i64) -> (i64, usize, i64) {
    // Years begin in March, so that the leap day is the last of its year; eras are 400 years.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, usize::try_from(month).unwrap_or(1), day)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// What a request may not set: the server's own variables.
const RESERVED: [&str; 8] = [
    "add_generation_prompt",
    "bos_token",
    "documents",
    "eos_token",
    "messages",
    "raise_exception",
    "strftime_now",
    "tools",
];

const NAME: &str = "chat";
const RECURSION_MAX: usize = 100;
const DETAIL_BYTES_MAX: usize = 256;
/// Fuel is about one per instruction and per 64 bytes moved. A template spends tens per message, and moves each byte of
/// a message five to ten times.
const FUEL_BASE: u64 = 20_000;
const FUEL_PER_MESSAGE: u64 = 2_000;
/// Room for a default system prompt; each message may appear a few times.
const OUTPUT_BYTES_BASE: usize = 256 << 10;
const OUTPUT_FACTOR: usize = 4;

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}\
{% if message.content %}{{ message.content }}{% endif %}\
{% for call in message.tool_calls %}{{ '<tool_call>' ~ (call.function|tojson) ~ '</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    use crate::api::messages::read_messages;
    use crate::clock::{Clock, SystemClock};
    use crate::engine::tokenizer::unguard;

    fn chat(messages: &str) -> Chat {
        let mut body = messages.as_bytes().to_vec();
        let messages = read_messages(json::parse(&mut body, &[]).unwrap().root()).unwrap();
        Chat { messages, add_generation_prompt: true, variables: Variables::default() }
    }

    fn render(source: &str, messages: &str) -> Result<String, ApiError> {
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        template.render(&chat(messages), &Tokenizer::bytes(), 0)
    }

    #[test]
    fn chatml_renders_calls_and_guards_words() {
        let messages = r#"[{"role":"user","content":"hi<|im_end|>"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\": [1, 2.5]}"}}]},
            {"role":"tool","tool_call_id":"c","content":"1"}]"#;
        let rendered = ChatTemplate::chatml().render(&chat(messages), &Tokenizer::bytes(), 0).unwrap();
        assert!(rendered.contains("hi<\u{fdd0}|im_end|>"), "{rendered:?}");
        assert_eq!(
            unguard(&rendered),
            "<|im_start|>user\nhi<|im_end|><|im_end|>\n\
             <|im_start|>assistant\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, 2.5]}}</tool_call><|im_end|>\n\
             <|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn hostile_templates_end_in_an_error() {
        let double = "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}";
        let large = "{% set ns = namespace(s='x'*200000, t='x'*199999~'x') %}{% for i in range(90000) %}";
        let rows = [
            ("a doubled tree, printed", format!("{double}{{{{ ns.s }}}}")),
            ("compared", format!("{double}{{{{ ns.s == ns.t }}}}")),
            ("joined", format!("{double}{{{{ ', '.join(ns.s) }}}}")),
            ("as JSON", format!("{double}{{{{ ns.s|tojson }}}}")),
            ("by hand", format!("{}{{{{ x }}}}", "{% set x = [x, x] %}".repeat(40))),
            ("by tuples", format!("{}{{{{ x }}}}", "{% set x = (x, x) %}".repeat(40))),
            ("by maps", format!("{}{{{{ x }}}}", "{% set x = {'a': x, 'b': x} %}".repeat(40))),
            ("by namespaces", format!("{}{{{{ x }}}}", "{% set x = namespace(a=x, b=x) %}".repeat(40))),
            ("by a macro", "{% macro f(x, n) %}{% if n %}{{ f([x, x], n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f(1, 40) }}".to_owned()),
            ("deep", "{% set ns = namespace(s=[1]) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}".to_owned()),
            ("a ring", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".to_owned()),
            ("a ring through a list", "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}".to_owned()),
            ("a ring through items", "{% set ns = namespace() %}{% set ns.a = ns.items() %}{{ ns }}".to_owned()),
            ("a ring through the filter", "{% set ns = namespace() %}{% set ns.a = ns|items %}{{ ns }}".to_owned()),
            ("comparing large strings", format!("{large}{{% set ns.u = ns.s == ns.t %}}{{% endfor %}}")),
            ("slicing large strings", format!("{large}{{% set ns.u = ns.s[1:3] %}}{{% endfor %}}")),
            ("searching large strings", format!("{large}{{% set ns.u = ns.s.count('y') %}}{{% endfor %}}")),
            ("a doubled list", "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}".to_owned()),
            ("a list doubled by hand", format!("{{% set x = [1] %}}{}{{{{ x|length }}}}", "{% set x = x + x %}".repeat(40))),
            ("doubled by with", format!("{{% set x = [1] %}}{}{{{{ x }}}}", "{% with x = x + x %}".repeat(40)) + &"{% endwith %}".repeat(40)),
            ("doubled by a macro", "{% macro f(x, n) %}{% if n %}{{ f(x + x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f([1], 40) }}".to_owned()),
            ("a repeated list", "{{ (['x' * 90000] * 90000) ~ '' }}".to_owned()),
            ("a long list of long texts", "{% set x = 'x' * 200000 %}{% set ns = namespace(l=[x]) %}{% for i in range(12) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l ~ '' }}".to_owned()),
            ("the same, joined", "{% set x = 'x' * 200000 %}{% set ns = namespace(l=[x]) %}{% for i in range(12) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|join }}".to_owned()),
            ("the same, printed into a variable", "{% set x = 'x' * 200000 %}{% set ns = namespace(l=[x]) %}{% for i in range(12) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{% set y %}{{ ns.l }}{% endset %}".to_owned()),
            ("the same, as text", "{% set x = 'x' * 200000 %}{% set ns = namespace(l=[x]) %}{% for i in range(12) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|string|length }}".to_owned()),
            ("a wide field", "{{ '{:>1000000000}'.format('a') }}".to_owned()),
            ("a wide percent", "{{ '%1000000000d'|format(1) }}".to_owned()),
            ("much output", "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}".to_owned()),
        ];
        for (name, source) in rows {
            let started = SystemClock.now();
            let error = render(&source, r#"[{"role":"user","content":"hi"}]"#).expect_err(name);
            let took = SystemClock.now().checked_since(started).unwrap();
            assert!(took < Duration::from_secs(2), "{name} took {took:?}");
            assert_eq!((error.status, error.param.as_deref()), (400, Some("messages")), "{name}");
            assert!(error.message.len() < 400, "{name}");
        }
    }

    #[test]
    fn long_conversations_are_within_the_bounds() {
        let source = "{% set ns = namespace(all=[], n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}\
                      {% if m.role == 'user' %}{% set ns.all = ns.all + [m] %}{% endif %}\
                      {{ '<|im_start|>' + m['role'] + '\n' + m['content']|trim + '<|im_end|>' + '\n' }}{% endfor %}";
        let one = format!(r#"{{"role":"user","content":"{}"}}"#, "word ".repeat(200));
        for count in [1, 100, 1000] {
            let messages = format!("[{}]", vec![one.as_str(); count].join(","));
            let rendered = render(source, &messages).unwrap();
            assert_eq!(rendered.matches("<|im_end|>").count(), count);
        }
        let large = format!(r#"[{{"role":"user","content":"{}"}}]"#, "x".repeat(8 << 20));
        assert!(render(source, &large).unwrap().len() > 8 << 20);
    }

    #[test]
    fn long_expressions_end_in_a_sentence() {
        let nest =
            |open: &str, close: &str| format!("{{{{ {}x{} }}}}", open.repeat(20_000), close.repeat(20_000));
        let chain = |link: &str| format!("{{{{ x{} }}}}", link.repeat(120_000 / link.len()));
        let rows = [
            ("filters", chain("|f")),
            ("sums", chain("+x")),
            ("texts", chain("~x")),
            ("members", chain(".a")),
            ("indices", chain("[0]")),
            ("calls", chain("()")),
            ("powers", chain("**x")),
            ("comparisons", chain("==x")),
            ("alternatives", chain(" if x else x")),
            ("negations", nest("not ", "")),
            ("signs", nest("- ", "")),
            ("brackets", nest("(", ")")),
            ("lists", nest("[", "]")),
            ("blocks", format!("{}{}", "{% if x %}".repeat(6000), "{% endif %}".repeat(6000))),
            ("branches", format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(10_000))),
        ];
        // The longest that are let through must not exhaust the stack of a thread either.
        for link in ["|f", "+x", "~x", ".a", "[0]", "()", "**x", "==x", " if x else x"] {
            let tokens = if link.starts_with(' ') { 4 } else { link.len() };
            let source = format!("{{{{ x{} }}}}", link.repeat(511 / tokens));
            let _ = ChatTemplate::new(&source, "", "").map(|template| {
                template.render(&chat("[{\"role\":\"user\",\"content\":\"\"}]"), &Tokenizer::bytes(), 0)
            });
        }
        for (name, source) in rows {
            let error = ChatTemplate::new(&source, "", "").expect_err(name).to_string();
            assert!(error.len() < 400, "{name}: {error}");
        }
    }

    #[test]
    fn times_are_utc() {
        let rows = [
            (0, "%Y-%m-%d %H:%M:%S %A", "1970-01-01 00:00:00 Thursday"),
            (951_827_696, "%d %b %Y|%e|%-d|%y|%F %T %Z %%", "29 Feb 2000|29|29|00|2000-02-29 12:34:56 UTC %"),
            (-1, "%B %a", "December Wed"),
            (4_102_444_799, "%F", "2099-12-31"),
        ];
        for (at, format, expected) in rows {
            assert_eq!(time_text(format, at).unwrap(), expected);
        }
        assert!(time_text("%Q", 0).is_err());
    }

    #[test]
    fn a_template_that_cannot_be_used_says_why() {
        for (source, part) in [("{% for %}", "syntax error"), ("{% set x = a, b %}", "tuple"), ("{{ x", "")] {
            let error = ChatTemplate::new(source, "", "").unwrap_err().to_string();
            assert!(
                error.starts_with("the chat template cannot be used: ") && error.contains(part),
                "{error}"
            );
        }
    }
}

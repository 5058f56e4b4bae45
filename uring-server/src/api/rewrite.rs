//! Puts the calls of [`super::meter`] into a chat template's source.
//!
//! This reads tokens and brackets, not the language: what it does not recognise it copies, and the engine judges the
//! result. Line numbers stay as they are.

use std::fmt::Write as _;

use crate::api::meter::{ATTRIBUTE, BOUNDED, GROWN, MEASURED, SCALAR, SPACE, TEXT, WORK};

/// Rewrites a template's source.
///
/// # Errors
/// A sentence about the first construct that cannot be metered. Syntax errors are left to the engine.
pub(super) fn meter_source(source: &str) -> Result<String, String> {
    if source.len() > SOURCE_BYTES_MAX {
        return Err(format!("it is larger than {SOURCE_BYTES_MAX} bytes"));
    }
    if source.contains(OWN_PREFIX) {
        return Err("it uses a name of the server's own".to_owned());
    }
    let mut rewriter = Rewriter { rest: source, out: String::with_capacity(source.len() * 2), branches: 0 };
    rewriter.run()?;
    Ok(rewriter.out)
}

/// Copies the source to `out`, inserting calls.
struct Rewriter<'s> {
    rest: &'s str,
    out: String,
    /// `elif` so far.
    branches: usize,
}

/// An open bracket of an expression, or the whole expression.
#[derive(Default)]
struct Level {
    /// Where in `out` the bracket is, or the name that is called by it.
    start: usize,
    kind: LevelKind,
    names_variable: bool,
    comma: bool,
    /// The operand that is being copied: a value with its members, indices, arguments and filters.
    operand: Option<Operand>,
    /// What the operator before it wraps it in.
    before: Option<&'static str>,
}

struct Operand {
    start: usize,
    /// Not just a number or text.
    varies: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum LevelKind {
    /// `[` or `{` of a literal.
    Literal,
    /// Arguments of `namespace`.
    Namespace,
    /// The whole expression, an index, the arguments of a call, or the target of an assignment.
    #[default]
    Other,
    /// `(` of a group, or of a tuple if a comma follows.
    Parenthesis,
}

/// What a tag is, as far as the meter cares.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    /// Assigns: `set` and `with`.
    Assign,
    /// Opens a body that may run often.
    Loop,
    /// Anything else, `{{ … }}` too.
    Other,
    /// `raw`: what follows is text.
    Raw,
}

/// A tag while it is copied.
struct TagState<'s> {
    tag: Tag,
    /// Tokens so far.
    tokens: usize,
    /// The expression, then what is open in it.
    levels: Vec<Level>,
    /// Names that a macro or `call` takes.
    parameters: Vec<&'s str>,
    takes_parameters: bool,
    /// Whether a comma ends an assignment (`with`) or makes a tuple (`set`).
    assigns_several: bool,
    /// Inside the target of `for`, `set` or `with`: nothing there is a value.
    target: bool,
    /// The target has a dot.
    dotted: bool,
    /// Where in `out` the value of an assignment begins.
    value_start: Option<usize>,
    /// Whether what came last can be called, indexed or filtered.
    after_value: bool,
    /// The last token, without space.
    last: &'s str,
    /// Where in `out` a `namespace` that came last begins.
    namespace_start: Option<usize>,
}

impl<'s> Rewriter<'s> {
    fn run(&mut self) -> Result<(), String> {
        while let Some(start) = self.find_tag() {
            self.copy(start);
            match self.rest.as_bytes().get(1) {
                Some(b'#') => {
                    let end = self.rest.find("#}").map_or(self.rest.len(), |end| end + 2);
                    self.copy(end);
                }
                Some(b'{') => drop(self.copy_tag("}}")?),
                _ => {
                    let (state, ending) = self.copy_tag("%}")?;
                    match state.tag {
                        // Same ending as the tag before it: that is what trims the text that follows.
                        Tag::Loop => {
                            let _ =
                                write!(self.out, "{{% do {WORK}({}) {ending}", state.parameters.join(", "));
                        }
                        Tag::Raw => self.copy_raw(),
                        Tag::Assign | Tag::Other => {}
                    }
                }
            }
        }
        self.copy(self.rest.len());
        Ok(())
    }

    fn find_tag(&self) -> Option<usize> {
        self.rest.as_bytes().windows(2).position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))
    }

    fn copy(&mut self, length: usize) {
        let (copied, rest) = self.rest.split_at(length);
        self.out.push_str(copied);
        self.rest = rest;
    }

    /// Copies up to `endraw`; that tag itself is copied as any other.
    fn copy_raw(&mut self) {
        let mut at = 0;
        while let Some(found) = self.rest[at..].find("{%") {
            at += found;
            let inside = self.rest[at + 2..].trim_start_matches(['-', '+']).trim_start();
            if inside.starts_with("endraw") {
                break;
            }
            at += 2;
        }
        self.copy(at);
    }

    /// Copies a tag; returns what it was and its ending (`%}` with its sign).
    fn copy_tag(&mut self, close: &str) -> Result<(TagState<'s>, &'s str), String> {
        self.copy(2);
        if self.rest.starts_with(['-', '+']) {
            self.copy(1);
        }
        let mut state = TagState::new();
        let mut first = close == "%}";
        loop {
            let blank = self.rest.len() - self.rest.trim_start().len();
            self.copy(blank);
            let signed = usize::from(self.rest.starts_with(['-', '+']));
            if state.levels.len() == 1 && self.rest[signed..].starts_with(close) {
                state.end(&mut self.out)?;
                let ending = &self.rest[..signed + close.len()];
                self.copy(ending.len());
                return Ok((state, ending));
            }
            let length = token_len(self.rest);
            if length == 0 {
                state.tag = Tag::Other;
                return Ok((state, ""));
            }
            let token = &self.rest[..length];
            state.tokens += 1;
            if state.tokens > TAG_TOKENS_MAX {
                return Err(format!("it has an expression of more than {TAG_TOKENS_MAX} tokens"));
            }
            if std::mem::take(&mut first) {
                self.branches += usize::from(token == "elif");
                if self.branches > BRANCHES_MAX {
                    return Err(format!("it has more than {BRANCHES_MAX} branches"));
                }
                state.begin(token);
                self.copy(length);
            } else {
                state.copy_token(token, &mut self.out)?;
                self.rest = &self.rest[length..];
            }
        }
    }
}

impl<'s> TagState<'s> {
    fn new() -> Self {
        Self {
            tag: Tag::Other,
            tokens: 0,
            levels: vec![Level::default()],
            parameters: Vec::new(),
            takes_parameters: false,
            assigns_several: false,
            target: false,
            dotted: false,
            value_start: None,
            after_value: false,
            last: "",
            namespace_start: None,
        }
    }

    /// Takes the word that names the tag.
    fn begin(&mut self, word: &str) {
        self.tag = match word {
            "call" | "for" | "macro" => Tag::Loop,
            "raw" => Tag::Raw,
            "set" | "with" => Tag::Assign,
            _ => Tag::Other,
        };
        self.assigns_several = word == "with";
        self.target = matches!(word, "for" | "set" | "with");
        self.takes_parameters = matches!(word, "call" | "macro");
        // The bracket behind `call` holds parameters.
        self.after_value = word == "call";
    }

    /// Copies a token of an expression, wrapping what it ends or closes.
    fn copy_token(&mut self, token: &'s str, out: &mut String) -> Result<(), String> {
        let namespace = self.namespace_start.take();
        if namespace.is_some() && token != "(" {
            return Err("it uses `namespace` other than by calling it".to_owned());
        }
        let first = token.as_bytes()[0];
        match first {
            b'[' | b'{' | b'(' => self.open(token, namespace, out),
            b']' | b'}' | b')' => self.close(token, out)?,
            b'"' | b'\'' => {
                self.begin_operand(out.len(), false);
                out.push_str(token);
            }
            _ if is_word(first) && !OPERATOR_WORDS.contains(&token) => self.copy_word(token, out),
            b'.' | b'|' => {
                self.dotted |= self.target && token == ".";
                out.push_str(token);
            }
            _ => self.copy_operator(token, out)?,
        }
        self.after_value = match token.as_bytes()[token.len() - 1] {
            b']' | b'}' | b')' | b'"' | b'\'' => true,
            letter => is_word(letter) && !OPERATOR_WORDS.contains(&token),
        };
        self.last = token;
        Ok(())
    }

    fn level(&mut self) -> &mut Level {
        self.levels.last_mut().expect("the first level is never closed")
    }

    fn begin_operand(&mut self, start: usize, varies: bool) {
        let operand = self.level().operand.get_or_insert(Operand { start, varies });
        operand.varies |= varies;
    }

    /// Ends the operand of the innermost level, in front of an operator that may wrap it too.
    fn end_operand(&mut self, after: Option<&'static str>, out: &mut String) {
        let level = self.level();
        let operand = level.operand.take();
        // An operator without an operand before it is a sign, and wraps nothing.
        let next = if operand.is_some() { after } else { None };
        let wrapper = level.before.or(after);
        if let (Some(operand), Some(name)) = (operand.filter(|operand| operand.varies), wrapper) {
            wrap(out, operand.start, name);
        }
        level.before = next;
    }

    fn copy_word(&mut self, word: &'s str, out: &mut String) {
        let start = out.len();
        let member = self.last == ".";
        if self.last == "|" && !STRUCTURAL_FILTERS.contains(&word) {
            out.push_str(MEASURED);
            out.push('|');
        }
        out.push_str(word);
        if member || self.last == "|" {
            return;
        }
        let varies = !word.as_bytes()[0].is_ascii_digit() && !CONSTANT_WORDS.contains(&word);
        self.begin_operand(start, varies);
        if varies {
            self.level().names_variable = true;
        }
        if word == "namespace" {
            self.namespace_start = Some(start);
        }
        if self.takes_parameters && self.levels.len() == 2 && matches!(self.last, "(" | ",") {
            self.parameters.push(word);
        }
    }

    fn copy_operator(&mut self, token: &'s str, out: &mut String) -> Result<(), String> {
        let after = match token {
            "*" => Some(SCALAR),
            "~" | "%" => Some(TEXT),
            _ => None,
        };
        self.end_operand(after, out);
        let outermost = self.levels.len() == 1;
        match token {
            "," if outermost && self.tag == Tag::Assign && !self.target => {
                if !self.assigns_several {
                    return Err("it assigns a tuple without parentheses".to_owned());
                }
                self.end_value(out);
                self.target = true;
            }
            "," => self.level().comma = true,
            "in" if outermost && self.tag == Tag::Loop => self.target = false,
            _ => {}
        }
        out.push_str(token);
        if token == "=" && outermost && self.tag == Tag::Assign && self.target {
            self.target = false;
            self.value_start = Some(out.len());
        }
        Ok(())
    }

    fn open(&mut self, token: &str, namespace: Option<usize>, out: &mut String) {
        let kind = match (token, namespace) {
            ("(", Some(_)) => LevelKind::Namespace,
            _ if self.target => LevelKind::Other,
            ("{", _) => LevelKind::Literal,
            _ if self.after_value => LevelKind::Other,
            ("[", _) => LevelKind::Literal,
            _ => LevelKind::Parenthesis,
        };
        self.begin_operand(out.len(), true);
        let start = namespace.unwrap_or(out.len());
        self.levels.push(Level { start, kind, ..Level::default() });
        out.push_str(token);
    }

    fn close(&mut self, token: &str, out: &mut String) -> Result<(), String> {
        self.end_operand(None, out);
        out.push_str(token);
        let level = match self.levels.pop() {
            Some(level) if !self.levels.is_empty() => level,
            _ => return Err("it closes a bracket that is not open".to_owned()),
        };
        if self.levels.len() == 1 {
            self.takes_parameters = false;
        }
        let wrapper = match level.kind {
            LevelKind::Literal if level.names_variable => Some(BOUNDED),
            LevelKind::Parenthesis if level.names_variable && level.comma => Some(BOUNDED),
            LevelKind::Namespace => Some(SPACE),
            LevelKind::Literal | LevelKind::Other | LevelKind::Parenthesis => None,
        };
        if let Some(name) = wrapper {
            wrap(out, level.start, name);
        }
        self.level().names_variable |= level.names_variable || wrapper.is_some();
        Ok(())
    }

    /// Ends the tag.
    fn end(&mut self, out: &mut String) -> Result<(), String> {
        if self.namespace_start.is_some() {
            return Err("it uses `namespace` other than by calling it".to_owned());
        }
        self.end_operand(None, out);
        self.end_value(out);
        Ok(())
    }

    fn end_value(&mut self, out: &mut String) {
        if let Some(start) = self.value_start.take() {
            wrap(out, start, if self.dotted { ATTRIBUTE } else { GROWN });
        }
    }
}

/// Makes what `out` holds from `start` the argument of a call.
fn wrap(out: &mut String, start: usize, name: &str) {
    let blank = out[start..].len() - out[start..].trim_start().len();
    out.insert_str(start + blank, &format!("{name}("));
    let end = out.trim_end().len();
    out.insert(end, ')');
}

/// Returns the length of the token that a text without leading space begins with; 0 at the end.
fn token_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    match bytes {
        [] => 0,
        [quote @ (b'"' | b'\''), rest @ ..] => {
            let mut escaped = false;
            let end = rest.iter().position(|byte| {
                let ends = !escaped && byte == quote;
                escaped = !escaped && *byte == b'\\';
                ends
            });
            end.map_or(text.len(), |end| end + 2)
        }
        [first, ..] if is_word(*first) => bytes.iter().take_while(|byte| is_word(**byte)).count(),
        [b'=' | b'!' | b'<' | b'>', b'=', ..] => 2,
        _ => text.chars().next().map_or(0, char::len_utf8),
    }
}

/// Letters outside ASCII are parts of names or, in any other place, for the engine to refuse.
fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// What the names of all calls begin with.
const OWN_PREFIX: &str = "_uring_";
/// Most bytes of a template's source.
const SOURCE_BYTES_MAX: usize = 128 << 10;
/// Most tokens of one tag, and most `elif` of a template. The engine walks a chain of operators, filters or branches
/// by recursion, one frame per link; templates of models have tens of each.
const TAG_TOKENS_MAX: usize = 512;
const BRANCHES_MAX: usize = 128;

/// Words that are no values: a bracket behind one of them begins a value.
const OPERATOR_WORDS: [&str; 10] = ["and", "do", "elif", "else", "if", "in", "is", "not", "or", "recursive"];
/// Filters that do not read their input as text, or walk and pay by themselves.
const STRUCTURAL_FILTERS: [&str; 18] = [
    "abs",
    "bool",
    "count",
    "d",
    "default",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "list",
    "map",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
    "tojson",
];
/// Words that are no variables.
const CONSTANT_WORDS: [&str; 6] = ["False", "None", "True", "false", "none", "true"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_grow_is_wrapped() {
        let rows = [
            ("text", "no tags { % }", "no tags { % }"),
            (
                "constants",
                "{{ ['a', 1, none] }}{{ {'a': [true]} }}",
                "{{ ['a', 1, none] }}{{ {'a': [true]} }}",
            ),
            ("a list", "{{ [x] }}", "{{ _uring_bounded([x]) }}"),
            ("inner first", "{{ [[x], 1] }}", "{{ _uring_bounded([_uring_bounded([x]), 1]) }}"),
            ("a map", "{{ {'a': {'b': x}} }}", "{{ _uring_bounded({'a': _uring_bounded({'b': x})}) }}"),
            (
                "a tuple",
                "{{ (x, 1) }}{{ (x) }}{{ f(x, 1) }}",
                "{{ _uring_bounded((x, 1)) }}{{ (x) }}{{ f(x, 1) }}",
            ),
            ("an index", "{{ m[-1]['a'][i:j] }}", "{{ m[-1]['a'][i:j] }}"),
            ("behind an operator", "{{ a in [x] }}", "{{ a in _uring_bounded([x]) }}"),
            ("strings", "{{ '[x' ~ \"]\\\"[y]\" }}", "{{ '[x' ~ \"]\\\"[y]\" }}"),
            (
                "texts",
                "{{ 'a' ~ x.y[0] ~ f(z)|trim + w }}",
                "{{ 'a' ~ _uring_text(x.y[0]) ~ _uring_text(f(z)|_uring_measured|trim) + w }}",
            ),
            ("a group", "{{ (x + y) ~ '' }}", "{{ _uring_text((x + y)) ~ '' }}"),
            (
                "products",
                "{{ [1] * 9 }}{{ 2 * n }}{{ 2 ** 3 }}",
                "{{ _uring_scalar([1]) * 9 }}{{ 2 * _uring_scalar(n) }}{{ 2 ** 3 }}",
            ),
            ("signs", "{{ -x }}{{ f(*y) }}", "{{ -x }}{{ f(*y) }}"),
            ("filters", "{{ x|join(', ')|length }}", "{{ x|_uring_measured|join(', ')|length }}"),
            ("an attribute", "{% set ns.a = ns.b + 1 -%}", "{% set ns.a = _uring_attribute(ns.b + 1) -%}"),
            (
                "a name",
                "{% set a=b %}{% set (a, b) = c %}",
                "{% set a=_uring_grown(b) %}{% set (a, b) = _uring_grown(c) %}",
            ),
            ("several", "{% with a = b, c = d %}", "{% with a = _uring_grown(b), c = _uring_grown(d) %}"),
            ("a block", "{% set a %}x{% endset %}", "{% set a %}x{% endset %}"),
            (
                "a namespace",
                "{% set n = namespace(a=b) %}",
                "{% set n = _uring_grown(_uring_space(namespace(a=b))) %}",
            ),
            ("another's attribute", "{{ tool.namespace }}", "{{ tool.namespace }}"),
            ("a loop", "{%- for k, (a, b) in x -%} y", "{%- for k, (a, b) in x -%}{% do _uring_work() -%} y"),
            ("a macro", "{% macro f(a, b=[]) %}", "{% macro f(a, b=[]) %}{% do _uring_work(a, b) %}"),
            ("a call", "{% call(u) f(a) %}", "{% call(u) f(a) %}{% do _uring_work(u) %}"),
            ("a comment", "{# [x] {{ #}", "{# [x] {{ #}"),
            ("raw text", "{% raw %}{{ [x] }}{% endraw %}", "{% raw %}{{ [x] }}{% endraw %}"),
            ("braces at the end", "{{ {'a': {'b': 1}}}}", "{{ {'a': {'b': 1}}}}"),
            ("a tag that never ends", "{{ [x", "{{ [x"),
        ];
        for (name, source, expected) in rows {
            assert_eq!(meter_source(source).as_deref(), Ok(expected), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_metered_is_refused() {
        let rows = [
            ("an alias", "{% set f = namespace %}"),
            ("an argument", "{{ f(namespace, 1) }}"),
            ("a bare tuple", "{% set x = x, x %}"),
            ("a server's name", "{% macro _uring_work() %}{% endmacro %}"),
            ("a lone bracket", "{{ ) }}"),
        ];
        for (name, source) in rows {
            assert!(meter_source(source).is_err(), "{name}");
        }
        assert!(meter_source(&"x".repeat(SOURCE_BYTES_MAX)).is_ok());
        assert!(meter_source(&"x".repeat(SOURCE_BYTES_MAX + 1)).is_err());
    }
}

//! Makes a chat template pay for what it does, so that a hostile one ends in an error and not in a dead process.
//!
//! The engine's fuel pays for instructions and for the bytes of texts, but a template can do much with little fuel: nest
//! a value in itself until a walk over it never ends (`x = [x, x]`, forty times) or the stack does not suffice to drop
//! it; repeat or double a list, which the engine does lazily, and turn it into text; compare or cut one large text again
//! and again; tie a namespace into a ring. So the source is rewritten once, at load, by tokens, and calls are put in:
//!
//! * [`BOUNDED`] around a list, map or tuple that names a variable, and [`SPACE`] around a new namespace, walk the
//!   value, pay for each part and refuse depth: whatever exists later was paid for once and is a tree;
//! * [`GROWN`] around what is assigned, and the arguments of macros, pays for the length of a list;
//!   [`ATTRIBUTE`], around what a namespace's attribute gets, also keeps namespaces and macros out, so that nothing
//!   holds itself;
//! * [`SCALAR`] around operands of `*` refuses lists; [`TEXT`] around operands of `~` and `%`, and [`MEASURED`] before
//!   filters that read their input as text, pay for the text of a list before it is made;
//! * what is printed is walked likewise;
//! * [`WORK`] begins the body of each loop and macro, and pays again for a share of all that was paid before: an
//!   iteration may touch all of it.
//!
//! What is left to do to a value then costs a bounded multiple of what was paid.

use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

/// Replaces the functions and filters that could go around the meter, and adds the meter's own.
pub(super) fn install(environment: &mut Environment<'static>) {
    for name in ["batch", "chain", "groupby", "pprint", "slice", "zip"] {
        environment.remove_filter(name);
    }
    for name in ["debug", "dict"] {
        environment.remove_global(name);
    }
    environment.add_function(ATTRIBUTE, |state: &State<'_, '_>, value: Value| {
        if holds_values(&value) {
            return Err(refused("a namespace or macro inside a namespace"));
        }
        pay_length(state, &value)?;
        Ok(value)
    });
    environment.add_function(GROWN, |state: &State<'_, '_>, value: Value| {
        pay_length(state, &value)?;
        Ok::<_, Error>(value)
    });
    environment.add_function(SCALAR, |value: Value| {
        let list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
        if list { Err(refused("a list that is repeated")) } else { Ok(value) }
    });
    let measured = |state: &State<'_, '_>, value: Value| {
        measure(state, &value, 0)?;
        Ok::<_, Error>(value)
    };
    environment.add_function(TEXT, measured);
    environment.add_filter(MEASURED, measured);
    environment.add_function(BOUNDED, measured);
    environment.add_function(SPACE, |state: &State<'_, '_>, value: Value| {
        for (_, member) in pairs(&value) {
            measure(state, &member, 1)?;
        }
        Ok::<_, Error>(value)
    });
    environment.add_function(WORK, work);
    environment.add_filter("items", |value: Value| match holds_values(&value) {
        true => Err(refused("a namespace has no items")),
        false => minijinja::filters::items(&value),
    });
    environment.add_filter("format", |state: &State<'_, '_>, format: &str, values: Rest<Value>| {
        values.iter().try_for_each(|value| measure(state, value, 0))?;
        checked_format(FormatStyle::Printf, format, &values)
    });
    environment.add_filter("tojson", to_json);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        // Texts are paid for as output; a list is walked before it is spelt out.
        if matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
            measure(state, value, 0)?;
        }
        minijinja::escape_formatter(out, state, value)
    });
}

/// Python's methods, each paying for the string or list it works on.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if holds_values(value) {
        return Err(refused("a namespace has no methods"));
    }
    if matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable) {
        measure(state, value, 0)?;
        arguments.iter().try_for_each(|argument| measure(state, argument, 0))?;
    }
    match value.as_str() {
        Some(format) if name == "format" => checked_format(FormatStyle::StrFormat, format, arguments),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Formats, unless a width or precision may be large: it is allocated before anything is paid for it.
fn checked_format(style: FormatStyle, format: &str, values: &[Value]) -> Result<Value, Error> {
    let long_number = format.as_bytes().windows(5).any(|window| window.iter().all(u8::is_ascii_digit));
    if long_number || format.contains('*') {
        return Err(refused("a format with a width of five digits or more"));
    }
    minijinja::formatting::format(style, format, values).map(Value::from)
}

/// Pays for the length of a list. One without a known length is walked, since the engine may do that too.
fn pay_length(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match (value.kind(), value.len()) {
        (ValueKind::Seq | ValueKind::Iterable, Some(length)) => state.consume_fuel(length as u64),
        (ValueKind::Seq | ValueKind::Iterable, None) => {
            value.try_iter()?.checked().try_for_each(|member| member.and_then(|_| state.consume_fuel(1)))
        }
        _ => Ok(()),
    }
}

/// Pays for the lengths of a macro's arguments, and for a share of what the template has paid so far, what was taken
/// here left out.
fn work(state: &mut State<'_, '_>, arguments: Rest<Value>) -> Result<(), Error> {
    arguments.iter().try_for_each(|argument| pay_length(state, argument))?;
    let Some((consumed, _)) = state.fuel_levels() else { return Ok(()) };
    let charged = state.get_or_insert_extension(Charged(0));
    let share = consumed.saturating_sub(charged.0) / WORK_SHARE;
    charged.0 += share;
    state.consume_fuel(share)
}

/// Fuel that [`work`] took.
#[derive(Debug)]
struct Charged(u64);

/// Walks a value and pays for each part: one fuel, and one more per 64 bytes of text.
fn measure(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(refused("a value nests too deeply"));
    }
    if holds_values(value) {
        return Err(refused("a namespace or macro inside another value"));
    }
    state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 64)?;
    if value.kind() == ValueKind::Map {
        for (key, member) in pairs(value) {
            measure(state, &key, depth + 1)?;
            measure(state, &member, depth + 1)?;
        }
    } else if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        for member in value.try_iter()?.checked() {
            measure(state, &member?, depth + 1)?;
        }
    }
    Ok(())
}

fn pairs(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

/// Returns whether a value holds variables that may change: a namespace, or a macro with what it closes over. The
/// engine keeps these types to itself; their names are public.
fn holds_values(value: &Value) -> bool {
    let holds = |name: &str| name.ends_with("::Namespace") || name.ends_with("::Macro");
    value.as_object().is_some_and(|object| holds(object.type_name()))
}

fn refused(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// `tojson` as model authors know it from Python: no HTML escapes, a space behind `,` and `:`, or `indent`.
fn to_json(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted as Python's default for chat templates; true would change the text.
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(refused("tojson with ensure_ascii"));
    }
    options.assert_all_used()?;
    measure(state, value, 0)?;
    let mut writer = JsonWriter { out: Vec::new(), indent: indent.map(|width| width.min(16)) };
    writer.write_value(value, 0)?;
    String::from_utf8(writer.out).map(Value::from_safe_string).map_err(|_| refused("tojson made no text"))
}

struct JsonWriter {
    out: Vec<u8>,
    indent: Option<usize>,
}

impl JsonWriter {
    fn write_value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.extend_from_slice(b"null"),
            ValueKind::Bool => self.out.extend_from_slice(if value.is_true() { b"true" } else { b"false" }),
            ValueKind::Map => {
                self.out.push(b'{');
                let mut count = 0;
                for (key, member) in pairs(value) {
                    self.begin_item(count, depth + 1);
                    super::escape::write_string(&mut self.out, &key.to_string());
                    self.out.extend_from_slice(b": ");
                    self.write_value(&member, depth + 1)?;
                    count += 1;
                }
                self.end_items(count, depth, b'}');
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push(b'[');
                let mut count = 0;
                for member in value.try_iter()?.checked() {
                    self.begin_item(count, depth + 1);
                    self.write_value(&member?, depth + 1)?;
                    count += 1;
                }
                self.end_items(count, depth, b']');
            }
            ValueKind::Number => self.out.extend_from_slice(value.to_string().as_bytes()),
            ValueKind::String => {
                super::escape::write_string(&mut self.out, value.as_str().unwrap_or_default())
            }
            ValueKind::Bytes | ValueKind::Plain | ValueKind::Invalid | _ => {
                return Err(refused("tojson of something that is not data"));
            }
        }
        Ok(())
    }

    fn begin_item(&mut self, count: usize, depth: usize) {
        match (count, self.indent) {
            (0, None) => {}
            (_, None) => self.out.extend_from_slice(b", "),
            (0, Some(_)) => self.newline(depth),
            (_, Some(_)) => {
                self.out.push(b',');
                self.newline(depth);
            }
        }
    }

    fn end_items(&mut self, count: usize, depth: usize, bracket: u8) {
        if count > 0 && self.indent.is_some() {
            self.newline(depth);
        }
        self.out.push(bracket);
    }

    fn newline(&mut self, depth: usize) {
        self.out.push(b'\n');
        let spaces = self.indent.unwrap_or(0) * depth;
        self.out.extend(std::iter::repeat_n(b' ', spaces));
    }
}

/// Pays for a length and keeps rings out.
pub(super) const ATTRIBUTE: &str = "_uring_attribute";
/// Walks a value that holds a variable.
pub(super) const BOUNDED: &str = "_uring_bounded";
/// Pays for a length.
pub(super) const GROWN: &str = "_uring_grown";
/// Walks what a filter will read; a filter itself.
pub(super) const MEASURED: &str = "_uring_measured";
/// Passes all but lists.
pub(super) const SCALAR: &str = "_uring_scalar";
/// Walks the members of a new namespace.
pub(super) const SPACE: &str = "_uring_space";
/// Walks what becomes text.
pub(super) const TEXT: &str = "_uring_text";
/// Pays for an iteration.
pub(super) const WORK: &str = "_uring_work";

/// Most levels of a value made or changed by a template; a request body's own limit is lower.
const DEPTH_MAX: usize = 80;
/// An iteration pays one in this many of the fuel consumed so far.
const WORK_SHARE: u64 = 256;

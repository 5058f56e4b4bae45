//! Request bodies to JSON values, bounded in size, depth and number of values.
//!
//! simd-json reads; what it does not promise is decided here. Not JSON: an empty body, trailing bytes, a NUL outside a
//! string, a lone surrogate, a number that is infinite as a float. An integer beyond 64 bits becomes a float, so that
//! its field can say that it wants an integer. A duplicate of a field that the server knows is refused by the reader of
//! the object, since two readers of one body could otherwise see two requests; duplicates of unknown fields are ignored.

use std::cell::RefCell;

use simd_json::Buffers;
use simd_json::prelude::*;
use simd_json::tape::{Object, Tape, Value};

use crate::api::error::ApiError;

/// A parsed body.
#[derive(Debug)]
pub struct Document<'body> {
    tape: Tape<'body>,
}

impl<'body> Document<'body> {
    /// Returns the top value.
    #[must_use]
    pub fn root(&self) -> Value<'_, 'body> {
        self.tape.as_value()
    }

    /// Returns the top value as an object.
    ///
    /// # Errors
    /// 400 for any other kind of value: a list is never read into fields by position.
    pub fn object(&self) -> Result<Object<'_, 'body>, ApiError> {
        self.root().as_object().ok_or_else(|| ApiError::body("The request body must be a JSON object."))
    }

    /// Returns whether any string of the document, key or value, is `text`.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        self.tape.0.iter().any(|node| matches!(node, simd_json::Node::String(string) if *string == text))
    }
}

/// Parses a body in place. `fields` are the top-level names that an error about depth may blame.
///
/// # Errors
/// 400 when the body is not JSON or passes a bound of this module.
pub fn parse<'body>(body: &'body mut [u8], fields: &[&'static str]) -> Result<Document<'body>, ApiError> {
    if body.is_empty() {
        return Err(ApiError::body("The request body is empty; a JSON object is expected."));
    }
    if body.len() > BYTES_MAX {
        return Err(ApiError::body(format!("The request body is larger than {BYTES_MAX} bytes.")));
    }
    // Few brackets cannot nest deeply and few commas part few values: the walk, which knows strings, is for the others.
    let census = Census::take(body);
    if census.openers > DEPTH_MAX || census.values_max > VALUES_MAX {
        check_structure(body, fields)?;
    }
    let tape = if body.len() <= KEPT_BUFFERS_BODY_BYTES_MAX {
        BUFFERS.with_borrow_mut(|buffers| simd_json::to_tape_with_buffers(body, buffers))
    } else {
        simd_json::to_tape(body)
    };
    let tape = tape.map_err(|error| {
        ApiError::body(format!("The request body is not valid JSON (near byte {}).", error.index()))
    })?;
    Ok(Document { tape })
}

thread_local! {
    /// The parser's work space, four allocations, kept between small bodies.
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Upper bounds taken in one pass that the compiler vectorises; characters inside strings count too.
struct Census {
    /// `{` and `[`.
    openers: usize,
    /// No body holds more values than this: each one but the first follows an opener, a comma or a colon.
    values_max: usize,
}

impl Census {
    fn take(body: &[u8]) -> Self {
        let mut census = Self { openers: 0, values_max: 1 };
        for chunk in body.chunks(128) {
            // At most 128 each, so the sums of a chunk fit a byte and its loop runs on whole vectors.
            let (mut openers, mut separators) = (0_u8, 0_u8);
            for &byte in chunk {
                openers += u8::from(byte == b'{' || byte == b'[');
                separators += u8::from(byte == b',' || byte == b':');
            }
            census.openers += usize::from(openers);
            census.values_max += usize::from(openers) + usize::from(separators);
        }
        census
    }
}

/// Walks what is outside strings and checks depth and number of values. Says nothing of other faults: the parser does.
fn check_structure(body: &[u8], fields: &[&'static str]) -> Result<(), ApiError> {
    let (mut depth, mut values, mut string_start, mut escaped) = (0_usize, 1_usize, None, false);
    // The last string at the top level, and the one that a colon made the current field's name.
    let (mut last, mut field): (&[u8], &[u8]) = (&[], &[]);
    for (at, &byte) in body.iter().enumerate() {
        if let Some(start) = string_start {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    string_start = None;
                    if depth == 1 {
                        last = &body[start..at];
                    }
                }
                _ => {}
            }
            continue;
        }
        values += usize::from(matches!(byte, b',' | b':' | b'{' | b'['));
        match byte {
            b'"' => string_start = Some(at + 1),
            b':' if depth == 1 => field = last,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if values > VALUES_MAX {
            return Err(ApiError::body(format!("The request body holds more than {VALUES_MAX} values.")));
        }
        if depth > DEPTH_MAX {
            let message = format!("The request body nests deeper than {DEPTH_MAX} levels.");
            return Err(match fields.iter().find(|name| name.as_bytes() == field) {
                Some(name) => ApiError::invalid(*name, message),
                None => ApiError::body(message),
            });
        }
    }
    Ok(())
}

/// Most bytes of a body; the HTTP layer's own limit is lower by default.
pub const BYTES_MAX: usize = 64 << 20;
/// Most levels of objects and lists.
pub const DEPTH_MAX: usize = 64;
/// Most values in one body, keys counted; bounds the parser's memory to 24 bytes each.
pub const VALUES_MAX: usize = 2 << 20;
/// Larger bodies bring their own buffers, so that a thread keeps little memory.
const KEPT_BUFFERS_BODY_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(body: &str) -> Result<(), ApiError> {
        parse(&mut body.as_bytes().to_vec(), &["tools"]).map(|_| ())
    }

    #[test]
    fn depth_is_bounded_on_both_sides_and_names_the_field() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(outcome(&nested(DEPTH_MAX - 1)), Ok(()));
        assert_eq!(outcome(&nested(DEPTH_MAX)), Ok(()));
        assert!(outcome(&nested(DEPTH_MAX + 1)).is_err());
        let blamed = |field: &str| {
            let body = format!("{{\"a\\\"b\":1,\"{field}\":{}}}", nested(DEPTH_MAX));
            outcome(&body).unwrap_err().param
        };
        assert_eq!(blamed("tools").as_deref(), Some("tools"));
        assert_eq!(blamed("other"), None, "an unknown field is not echoed");
        // Brackets inside strings are text.
        assert_eq!(outcome(&format!("{{\"tools\":\"{}\\\"[\"}}", "[".repeat(500))), Ok(()));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        let rows = [
            ("empty", ""),
            ("blank", "  "),
            ("trailing text", "{} x"),
            ("trailing NUL", "{}\0"),
            ("NUL inside", "[\0]"),
            ("lone surrogate", r#"["\ud800"]"#),
            ("infinite", "[1e999]"),
            ("NaN", "[NaN]"),
            ("comment", "{}//"),
        ];
        for (name, body) in rows {
            let error = outcome(body).expect_err(name);
            assert_eq!((error.status, error.param), (400, None), "{name}");
        }
    }

    #[test]
    fn every_length_parses_the_same_around_vector_blocks() {
        for length in 1..300 {
            let body = format!("\"{}\"", "x".repeat(length));
            assert_eq!(outcome(&body), Ok(()), "{length}");
            assert!(outcome(&body[..body.len() - 1]).is_err(), "{length}");
        }
    }

    #[test]
    fn integers_beyond_64_bits_become_floats() {
        let mut body = b"[18446744073709551615,18446744073709551616,-9223372036854775809]".to_vec();
        let document = parse(&mut body, &[]).unwrap();
        let values: Vec<_> = document.root().as_array().unwrap().iter().map(|value| value.is_f64()).collect();
        assert_eq!(values, [false, true, true]);
    }

    #[test]
    fn the_number_of_values_is_bounded() {
        let list = |count: usize| format!("[{}1]", "1,".repeat(count - 1));
        assert_eq!(outcome(&list(VALUES_MAX - 1)), Ok(()));
        assert!(outcome(&list(VALUES_MAX + 1)).is_err());
        // Commas inside strings are text.
        assert_eq!(outcome(&format!("\"{}\"", ",".repeat(VALUES_MAX + 1))), Ok(()));
    }
}

//! The list grammar of `Server-Timing` (W3C Server Timing), which the other metrics headers share.

use alloc::borrow::Cow;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::metrics::text::write_milliseconds;

/// One metric of a field line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric<'a> {
    /// Its name, a token.
    pub name: &'a [u8],
    params: &'a [u8],
}

impl<'a> Metric<'a> {
    /// Returns the first value of a parameter, its name matched without case. Empty if it stands there without a value.
    #[must_use]
    pub fn param(&self, name: &str) -> Option<Cow<'a, [u8]>> {
        let mut cursor = Cursor { rest: self.params };
        while let Some((found, value)) = cursor.param() {
            if found.eq_ignore_ascii_case(name.as_bytes()) {
                return Some(value);
            }
        }
        None
    }

    /// Returns `desc`, empty if there is none.
    #[must_use]
    pub fn desc(&self) -> Cow<'a, [u8]> {
        self.param("desc").unwrap_or_default()
    }

    /// Returns `dur` in the sender's unit, milliseconds by the standard; 0 if there is none or it is no finite number.
    #[must_use]
    pub fn dur(&self) -> f64 {
        // Rust reads `inf` and `nan` as numbers; the grammar does not.
        let value =
            self.param("dur").filter(|value| value.iter().all(|byte| b"0123456789.+-eE".contains(byte)));
        let text = value.as_deref().and_then(|value| str::from_utf8(value).ok());
        text.and_then(|text| text.parse().ok()).filter(|dur: &f64| dur.is_finite()).unwrap_or(0.0)
    }
}

/// Iterates over the metrics of one field line. Lenient as browsers are: what does not belong is skipped to the next
/// `;` or `,`, and a name that is none ends the line. A quote left open ends with its line.
pub fn read_metrics(line: &[u8]) -> impl Iterator<Item = Metric<'_>> {
    let mut cursor = Cursor { rest: line };
    let mut more = true;
    core::iter::from_fn(move || {
        let name = if more { cursor.token() } else { &[] };
        if name.is_empty() {
            return None;
        }
        cursor.skip_to_delimiter();
        let params = cursor.rest;
        while cursor.param().is_some() {}
        let length = params.len() - cursor.rest.len();
        more = cursor.eat(b',');
        Some(Metric { name, params: &params[..length] })
    })
}

/// Appends one metric to a list, in milliseconds with 6 digits and never in exponent form. Without a duration, `dur` is
/// left out; likewise an empty `desc`.
///
/// # Errors
/// [`InvalidMetric`] if `name` is no token, or `desc` holds a control character: it could end the field. Nothing is
/// appended then.
pub fn write_metric(
    name: &str,
    duration: Option<Duration>,
    desc: &str,
    out: &mut Vec<u8>,
) -> Result<(), InvalidMetric> {
    if name.is_empty() || !name.bytes().all(is_token_byte) {
        return Err(InvalidMetric::Name);
    }
    if desc.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(InvalidMetric::Description);
    }
    begin_item(out);
    out.extend_from_slice(name.as_bytes());
    if let Some(ns) = duration.and_then(|duration| u64::try_from(duration.as_nanos()).ok()) {
        out.extend_from_slice(b";dur=");
        write_milliseconds(ns, out);
    }
    if !desc.is_empty() {
        out.extend_from_slice(b";desc=\"");
        for byte in desc.bytes() {
            if matches!(byte, b'"' | b'\\') {
                out.push(b'\\');
            }
            out.push(byte);
        }
        out.push(b'"');
    }
    Ok(())
}

/// Why a metric was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidMetric {
    /// The description holds a control character.
    Description,
    /// The name is empty or no token.
    Name,
}

impl fmt::Display for InvalidMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Description => "the description holds a control character",
            Self::Name => "the name is no token",
        })
    }
}

impl core::error::Error for InvalidMetric {}

/// Appends what stands between two items of a list.
pub(super) fn begin_item(out: &mut Vec<u8>) {
    if !out.is_empty() {
        out.extend_from_slice(b", ");
    }
}

/// What is left of a field line. White space behind what was read is gone.
struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// Reads `;name[=value]` and skips what else stands before the next delimiter. A parameter without `=` is followed
    /// by a delimiter, or it is the last that is read.
    fn param(&mut self) -> Option<(&'a [u8], Cow<'a, [u8]>)> {
        if !self.eat(b';') {
            return None;
        }
        let name = self.token();
        if name.is_empty() {
            return None;
        }
        let mut value = Cow::default();
        if self.eat(b'=') {
            value = match self.rest {
                [b'"', rest @ ..] => self.quoted(rest),
                _ => Cow::Borrowed(self.token()),
            };
            self.skip_to_delimiter();
        }
        Some((name, value))
    }

    fn token(&mut self) -> &'a [u8] {
        self.trim();
        let length = self.rest.iter().position(|&byte| !is_token_byte(byte)).unwrap_or(self.rest.len());
        let token;
        (token, self.rest) = self.rest.split_at(length);
        self.trim();
        token
    }

    /// Reads up to the closing quote. One left open takes the rest of the line, and its value is empty.
    fn quoted(&mut self, rest: &'a [u8]) -> Cow<'a, [u8]> {
        let mut text = Vec::new();
        let mut bytes = rest.iter();
        let mut closed = false;
        while let Some(&byte) = bytes.next() {
            match byte {
                b'"' => {
                    closed = true;
                    break;
                }
                b'\\' => text.extend(bytes.next()),
                _ => text.push(byte),
            }
        }
        self.rest = bytes.as_slice();
        if closed { Cow::Owned(text) } else { Cow::default() }
    }

    fn eat(&mut self, byte: u8) -> bool {
        let Some((first, rest)) = self.rest.split_first() else { return false };
        if *first != byte {
            return false;
        }
        self.rest = rest;
        self.trim();
        true
    }

    fn skip_to_delimiter(&mut self) {
        let length = self.rest.iter().position(|byte| matches!(byte, b',' | b';')).unwrap_or(self.rest.len());
        self.rest = &self.rest[length..];
    }

    fn trim(&mut self) {
        while let [b' ' | b'\t', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }
}

/// Whether a byte may stand in a token (RFC 9110 §5.6.2).
const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn a_written_metric_reads_back() {
        let mut out = vec![];
        write_metric("a", Some(Duration::from_nanos(1_500_001)), "say \"hi\\\", or not", &mut out)
            .expect("valid");
        write_metric("b", None, "", &mut out).expect("valid");
        assert_eq!(out, b"a;dur=1.500001;desc=\"say \\\"hi\\\\\\\", or not\", b");
        let metrics: Vec<_> =
            read_metrics(&out).map(|metric| (metric.name, metric.dur(), metric.desc())).collect();
        let expected = [
            (b"a".as_slice(), 1.500_001, Cow::Borrowed(b"say \"hi\\\", or not".as_slice())),
            (b"b", 0.0, Cow::default()),
        ];
        assert_eq!(metrics, expected);
    }

    #[test]
    fn a_metric_cannot_end_the_field() {
        let mut out = vec![];
        for desc in ["a\rb", "a\nb", "\0", "\u{7f}"] {
            assert_eq!(write_metric("a", None, desc, &mut out), Err(InvalidMetric::Description), "{desc:?}");
        }
        for name in ["", " ", "a b", "a;b", "a,b", "a=b", "é", "{"] {
            assert_eq!(write_metric(name, None, "", &mut out), Err(InvalidMetric::Name), "{name:?}");
        }
        assert!(out.is_empty());
        write_metric("a", Some(Duration::MAX), "", &mut out).expect("valid");
        assert_eq!(out, b"a", "a duration out of range is left out");
    }
}

//! Digits and JSON strings, written by hand: formatting machinery would cost more than the rest of a record.

use alloc::vec::Vec;

use crate::time::ReportNs;

/// Digits after the point of a time in seconds: whole nanoseconds.
const SECONDS_DIGITS: usize = 9;
/// Digits after the point of a duration in milliseconds: whole nanoseconds.
const MILLISECONDS_DIGITS: usize = 6;

/// Appends a whole number.
pub(crate) fn write_number(n: u64, out: &mut Vec<u8>) {
    write_fixed(n, 0, out);
}

/// Appends a time in seconds with 9 digits, e.g. `-0.000000001`.
pub(crate) fn write_seconds(at: ReportNs, out: &mut Vec<u8>) {
    if at.as_raw() < 0 {
        out.push(b'-');
    }
    write_fixed(at.as_raw().unsigned_abs(), SECONDS_DIGITS, out);
}

/// Appends a duration in milliseconds with 6 digits, e.g. `0.000001`.
pub(crate) fn write_milliseconds(ns: u64, out: &mut Vec<u8>) {
    write_fixed(ns, MILLISECONDS_DIGITS, out);
}

/// Returns how many bytes [`write_number`] appends.
pub(crate) const fn number_len(n: u64) -> usize {
    match n.checked_ilog10() {
        Some(log) => log as usize + 1,
        None => 1,
    }
}

/// Appends `n` with a point before its last `fraction` digits (at most 9). Two digits a division: a step trace is
/// hundreds of numbers.
fn write_fixed(n: u64, fraction: usize, out: &mut Vec<u8>) {
    // As many as a `u64` has; those in front of the first are the zeros that a fraction may need.
    let mut digits = [b'0'; 20];
    let (mut rest, mut start) = (n, digits.len());
    while rest > 0 {
        start -= 2;
        digits[start..start + 2].copy_from_slice(&PAIRS[(rest % 100) as usize]);
        rest /= 100;
    }
    let point = digits.len() - fraction;
    // One leading zero may have come with a pair; at least one digit stands before the point.
    start += usize::from(digits.get(start) == Some(&b'0'));
    start = start.min(point - 1);
    out.extend_from_slice(&digits[start..point]);
    if fraction > 0 {
        out.push(b'.');
        out.extend_from_slice(&digits[point..]);
    }
}

/// `00` to `99`.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[b'0'; 2]; 100];
    let mut n = 0;
    while n < pairs.len() {
        pairs[n] = [b'0' + (n / 10) as u8, b'0' + (n % 10) as u8];
        n += 1;
    }
    pairs
};

/// Reads a time in seconds, to the nanosecond. `None` for anything but `-?digits[.digits]` within range.
pub(crate) fn read_seconds(text: &[u8]) -> Option<ReportNs> {
    let (negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, text),
    };
    let ns = read_fixed(text, SECONDS_DIGITS)?;
    // The range has one number more below zero than above: the sign comes before the check.
    let ns = if negative { 0_i64.checked_sub_unsigned(ns) } else { i64::try_from(ns).ok() };
    ns.map(ReportNs::from_raw)
}

/// Reads a duration in milliseconds, to the nanosecond. `None` for anything but `digits[.digits]` within range.
pub(crate) fn read_milliseconds(text: &[u8]) -> Option<u64> {
    read_fixed(text, MILLISECONDS_DIGITS)
}

/// Reads a whole number. `None` for anything but digits within range.
pub(crate) fn read_number(text: &[u8]) -> Option<u64> {
    if text.contains(&b'.') { None } else { read_fixed(text, 0) }
}

/// Reads `digits[.digits]` as a multiple of the unit's `fraction`th decimal; further digits are cut.
fn read_fixed(text: &[u8], fraction: usize) -> Option<u64> {
    let mut parts = text.splitn(2, |&byte| byte == b'.');
    let whole = parts.next()?;
    let after = parts.next();
    let all_digits = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if !all_digits(whole) || !after.is_none_or(all_digits) {
        return None;
    }
    let decimals = after.unwrap_or_default().iter().chain(core::iter::repeat(&b'0')).take(fraction);
    whole
        .iter()
        .chain(decimals)
        .try_fold(0_u64, |n, digit| n.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
}

/// Appends a JSON string, quotes included, in ASCII: what is not is escaped, as upstream's lines have it.
pub(crate) fn write_json_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    let mut rest = text;
    while let Some(index) =
        rest.bytes().position(|byte| !matches!(byte, b' '..=b'~') || matches!(byte, b'"' | b'\\'))
    {
        // The byte at `index` is ASCII, or the first of a character: all before it is ASCII.
        let (plain, special) = rest.split_at(index);
        out.extend_from_slice(plain.as_bytes());
        let mut characters = special.chars();
        if let Some(character) = characters.next() {
            write_escape(character, out);
        }
        rest = characters.as_str();
    }
    out.extend_from_slice(rest.as_bytes());
    out.push(b'"');
}

fn write_escape(character: char, out: &mut Vec<u8>) {
    match character {
        '"' => out.extend_from_slice(b"\\\""),
        '\\' => out.extend_from_slice(b"\\\\"),
        '\n' => out.extend_from_slice(b"\\n"),
        '\r' => out.extend_from_slice(b"\\r"),
        '\t' => out.extend_from_slice(b"\\t"),
        _ => {
            for unit in character.encode_utf16(&mut [0; 2]) {
                out.extend_from_slice(b"\\u");
                for shift in [12, 8, 4, 0] {
                    out.push(b"0123456789abcdef"[usize::from(*unit >> shift & 0xf)]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;
    use alloc::vec;

    fn text(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = vec![];
        write(&mut out);
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn numbers_print_to_the_digit() {
        let max = "18446744073709551615";
        for (n, expected) in [(0, "0"), (9, "9"), (10, "10"), (u64::MAX, max)] {
            assert_eq!(text(|out| write_number(n, out)), expected);
            assert_eq!(number_len(n), expected.len());
            assert_eq!(read_number(expected.as_bytes()), Some(n));
        }
        let rows = [(0, "0.000000"), (1, "0.000001"), (999_999, "0.999999"), (10_000_000, "10.000000")];
        for (ns, expected) in rows.into_iter().chain([(u64::MAX, "18446744073709.551615")]) {
            assert_eq!(text(|out| write_milliseconds(ns, out)), expected);
            assert_eq!(read_milliseconds(expected.as_bytes()), Some(ns));
        }
        let rows = [
            (0, "0.000000000"),
            (1, "0.000000001"),
            (-1, "-0.000000001"),
            (1_050_000_000, "1.050000000"),
            (i64::MAX, "9223372036.854775807"),
            (i64::MIN, "-9223372036.854775808"),
        ];
        for (ns, expected) in rows {
            assert_eq!(text(|out| write_seconds(ReportNs::from_raw(ns), out)), expected);
            assert_eq!(read_seconds(expected.as_bytes()), Some(ReportNs::from_raw(ns)));
        }
    }

    #[test]
    fn what_is_no_plain_decimal_is_refused() {
        let bad =
            ["", ".", "1.", ".5", "+1", "-", "--1", "1e3", "nan", "inf", " 1", "1 ", "1.2.3", "1,5", "0x1"];
        for text in bad {
            assert_eq!(read_seconds(text.as_bytes()), None, "{text:?}");
            assert_eq!(read_milliseconds(text.as_bytes()), None, "{text:?}");
            assert_eq!(read_number(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(read_milliseconds(b"-1.0"), None);
        assert_eq!(read_number(b"1.0"), None);
        assert_eq!(read_number(b"18446744073709551616"), None);
        assert_eq!(read_seconds(b"9223372036.854775808"), None);
        assert_eq!(read_seconds(b"-9223372036.854775809"), None);
        assert_eq!(read_seconds(b"7"), Some(ReportNs::from_raw(7_000_000_000)));
        assert_eq!(read_seconds(b"0.12345678901234567890123"), Some(ReportNs::from_raw(123_456_789)));
    }

    #[test]
    fn strings_are_ascii_json() {
        let rows = [
            ("", r#""""#),
            ("plain ~!", r#""plain ~!""#),
            ("a\"b\\c", r#""a\"b\\c""#),
            ("\n\r\t\u{0}\u{1f}\u{7f}", r#""\n\r\t\u0000\u001f\u007f""#),
            ("é€\u{2028}", r#""\u00e9\u20ac\u2028""#),
            ("x😀y", r#""x\ud83d\ude00y""#),
        ];
        for (input, expected) in rows {
            assert_eq!(text(|out| write_json_string(input, out)), expected);
        }
    }
}

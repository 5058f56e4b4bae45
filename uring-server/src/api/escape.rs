//! JSON strings and integers, appended to a byte buffer (RFC 8259 section 7).

/// Appends `text` as a JSON string, quotes included.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    write_escaped(out, text);
    out.push(b'"');
}

/// Appends `text` escaped for the inside of a JSON string. Everything outside `"`, `\` and U+0000..=U+001F goes
/// through unchanged, so the bytes that need no escape are copied in whole runs.
pub fn write_escaped(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    // Streamed text is a few bytes per token and rarely needs an escape: one check, one copy.
    let mut clean = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        let escape = ESCAPES[byte as usize];
        if escape == 0 {
            continue;
        }
        out.extend_from_slice(&bytes[clean..at]);
        if escape == b'u' {
            let hex = b"0123456789abcdef";
            let digits = [hex[(byte >> 4) as usize], hex[(byte & 15) as usize]];
            out.extend_from_slice(&[b'\\', b'u', b'0', b'0', digits[0], digits[1]]);
        } else {
            out.extend_from_slice(&[b'\\', escape]);
        }
        clean = at + 1;
    }
    out.extend_from_slice(&bytes[clean..]);
}

/// Appends an unsigned decimal integer.
pub fn write_integer(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends an integer as exactly `digit_count` lower-case hex digits, leading zeros kept, at most 32.
pub fn write_hex(out: &mut Vec<u8>, value: u128, digit_count: u32) {
    for at in (0..digit_count.min(32)).rev() {
        out.push(b"0123456789abcdef"[((value >> (4 * at)) & 15) as usize]);
    }
}

/// What follows the backslash for each byte: 0 for bytes that stand for themselves, `u` for `\u00XX`.
const ESCAPES: [u8; 256] = {
    let mut table = [0; 256];
    let mut control = 0;
    while control < 0x20 {
        table[control] = b'u';
        control += 1;
    }
    table[0x08] = b'b';
    table[b'\t' as usize] = b't';
    table[b'\n' as usize] = b'n';
    table[0x0c] = b'f';
    table[b'\r' as usize] = b'r';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped_as_the_grammar_asks() {
        let rows = [
            ("empty", "", r#""""#),
            ("plain", "hello", r#""hello""#),
            ("quote and backslash", "a\"b\\c", r#""a\"b\\c""#),
            ("named controls", "\u{8}\t\n\u{c}\r", r#""\b\t\n\f\r""#),
            ("other controls", "\0\u{1f}\u{7f}", "\"\\u0000\\u001f\u{7f}\""),
            ("wide characters", "é€😀\u{2028}", "\"é€😀\u{2028}\""),
            ("an escape at each end", "\"x\"", r#""\"x\"""#),
        ];
        for (name, text, expected) in rows {
            let mut out = Vec::new();
            write_string(&mut out, text);
            assert_eq!(String::from_utf8(out).unwrap(), expected, "{name}");
        }
    }

    #[test]
    fn integers_and_hex_at_their_limits() {
        let mut out = Vec::new();
        for value in [0, 9, 10, u64::MAX] {
            write_integer(&mut out, value);
            out.push(b' ');
        }
        write_hex(&mut out, 0xab, 4);
        assert_eq!(String::from_utf8(out).unwrap(), "0 9 10 18446744073709551615 00ab");
    }
}

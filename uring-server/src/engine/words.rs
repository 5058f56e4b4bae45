//! Text between named tokens: cut into words, spelt in the byte alphabet of GPT-2, merged.
//!
//! Words are cut on the `regex` crate, whose time is linear in the text whatever it holds; the usual pattern looks ahead,
//! and engines that can do so backtrack, and give up on a million spaces.

use regex::Regex;
use tokenizers::Model;
use tokenizers::models::bpe::BPE;

use super::tokenizer::EncodeError;

/// How text without named tokens becomes ids.
#[derive(Debug)]
pub(super) enum Words {
    /// Cut into words, each spelt in the byte alphabet and merged.
    Bpe { rule: WordRule, bpe: Box<BPE> },
    /// Every byte is its id.
    Bytes,
}

impl Words {
    pub(super) fn encode(
        &self,
        text: &str,
        scratch: &mut String,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        match self {
            Self::Bytes => out.extend(text.bytes().map(u32::from)),
            Self::Bpe { rule, bpe } => {
                let mut rest = text;
                while !rest.is_empty() {
                    let (word, tail) = rest.split_at(rule.word_len(rest));
                    scratch.clear();
                    scratch.extend(word.bytes().map(byte_letter));
                    let tokens =
                        bpe.tokenize(scratch).map_err(|error| EncodeError::Model(error.to_string()))?;
                    out.extend(tokens.iter().map(|token| token.id));
                    rest = tail;
                }
            }
        }
        Ok(())
    }
}

/// Where text is cut before merging.
#[derive(Debug)]
pub(super) struct WordRule {
    /// Anchored at the start; the alternatives of the model's pattern without its look-ahead.
    pattern: Regex,
    /// Each digit is a word, whatever surrounds it.
    digits_apart: bool,
    /// Whitespace up to a line's end is one word; otherwise it is whitespace like any other.
    newlines_glued: bool,
    /// A word that is a token is taken as it is, without merging.
    pub(super) whole_words_first: bool,
}

impl WordRule {
    pub(super) fn named(name: &str) -> Option<Self> {
        let (_, build) = WORD_RULES.iter().find(|(names, _)| names.contains(&name))?;
        Some(build())
    }

    /// Returns the names that [`Self::named`] knows.
    pub(super) fn known_names() -> Vec<&'static str> {
        WORD_RULES.iter().flat_map(|(names, _)| names.iter().copied()).collect()
    }

    fn new(alternatives: &str) -> Self {
        let pattern =
            Regex::new(&format!("^(?:{alternatives})")).expect("the patterns are constants of this file");
        Self { pattern, digits_apart: false, newlines_glued: false, whole_words_first: false }
    }

    fn gpt2() -> Self {
        Self::new(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+")
    }

    fn digits_then_gpt2() -> Self {
        Self {
            digits_apart: true,
            ..Self::new(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
        }
    }

    fn llama3() -> Self {
        let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
        Self { newlines_glued: true, whole_words_first: true, ..Self::new(pattern) }
    }

    fn qwen2() -> Self {
        let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
        Self { newlines_glued: true, ..Self::new(pattern) }
    }

    /// Returns the length of the first word of a text that is not empty, in bytes, at least one character.
    fn word_len(&self, text: &str) -> usize {
        let Some(found) = self.pattern.find(text) else {
            return text.chars().next().map_or(text.len(), char::len_utf8);
        };
        let word = found.as_str();
        let Some(last) = word.chars().next_back().filter(|letter| letter.is_whitespace()) else {
            return word.len();
        };
        // `\s+(?!\S)`: a run of whitespace before a word leaves its last character to that word.
        let line_end = self.newlines_glued && matches!(last, '\r' | '\n');
        let blank = word.chars().all(char::is_whitespace);
        let next = text[word.len()..].chars().next();
        let before_word = next.is_some_and(|letter| !(self.digits_apart && letter.is_numeric()));
        let shorter = word.len() - last.len_utf8();
        if blank && !line_end && before_word && shorter > 0 { shorter } else { word.len() }
    }
}

/// Returns the letter that stands for a byte in a vocabulary: printable Latin-1 for itself, the others from U+0100 up.
pub(super) fn byte_letter(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0..=b' ' => char::from_u32(0x100 + u32::from(byte)).unwrap_or('\0'),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap_or('\0'),
        0xad => '\u{143}',
    }
}

/// The inverse of [`byte_letter`].
pub(super) struct ByteAlphabet {
    bytes: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    pub(super) fn new() -> Self {
        let mut bytes = [None; 0x144];
        for byte in 0..=255 {
            bytes[byte_letter(byte) as usize] = Some(byte);
        }
        Self { bytes }
    }

    pub(super) fn push_byte(&self, letter: char, out: &mut Vec<u8>) {
        match self.bytes.get(letter as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

type WordRuleRow = (&'static [&'static str], fn() -> WordRule);

/// Names of `tokenizer.ggml.pre` and their rules.
const WORD_RULES: [WordRuleRow; 4] = [
    (&["gpt-2", "gpt2"], WordRule::gpt2),
    (&["smollm", "starcoder", "refact", "command-r", "codeshell"], WordRule::digits_then_gpt2),
    (&["llama-bpe", "llama-v3", "llama3"], WordRule::llama3),
    (&["qwen2"], WordRule::qwen2),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(rule: &WordRule, mut text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        while !text.is_empty() {
            let (word, rest) = text.split_at(rule.word_len(text));
            words.push(word);
            text = rest;
        }
        words
    }

    #[test]
    fn words_are_cut_as_each_model_cut_them() {
        let rows: [(&str, WordRule, &str, &[&str]); 8] = [
            ("a word takes one space", WordRule::gpt2(), "a  b\n", &["a", " ", " b", "\n"]),
            ("numbers run on", WordRule::gpt2(), "x 12 3", &["x", " 12", " 3"]),
            ("contractions", WordRule::gpt2(), "it's IT'S", &["it", "'s", " IT", "'", "S"]),
            ("digits stand alone", WordRule::digits_then_gpt2(), "a  12", &["a", "  ", "1", "2"]),
            ("spaces before a word", WordRule::digits_then_gpt2(), "   a", &["  ", " a"]),
            ("three digits", WordRule::llama3(), "12345", &["123", "45"]),
            ("a line's end takes its spaces", WordRule::llama3(), "a \n\n  b", &["a", " \n\n", " ", " b"]),
            ("one digit", WordRule::qwen2(), "12.\n", &["1", "2", ".\n"]),
        ];
        for (name, rule, text, expected) in rows {
            assert_eq!(words(&rule, text), expected, "{name}");
        }
    }

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let alphabet = ByteAlphabet::new();
        for byte in 0..=255 {
            let mut out = Vec::new();
            alphabet.push_byte(byte_letter(byte), &mut out);
            assert_eq!(out, [byte]);
        }
        assert_eq!((byte_letter(b' '), byte_letter(b'\n'), byte_letter(0x7f)), ('Ġ', 'Ċ', 'ġ'));
    }
}

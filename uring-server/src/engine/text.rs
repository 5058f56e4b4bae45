//! Tokens to text, one at a time: whole UTF-8 characters only, and no part of a stop string.

use std::sync::Arc;

use crate::engine::tokenizer::{SpecialTokens, Tokenizer};

/// The stop strings of a request, prepared once and shared by its sequences.
#[derive(Debug, Default)]
pub struct StopStrings {
    strings: Vec<StopString>,
}

#[derive(Debug)]
struct StopString {
    bytes: Vec<u8>,
    /// Knuth, Morris and Pratt: for each matched length, the next shorter one that also ends here.
    fallback: Vec<u32>,
}

/// What a token did to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// The sequence goes on.
    Open,
    /// A stop string is complete; the text before it was appended, and nothing more will be.
    Stopped,
}

/// One sequence's text.
///
/// The text is that of all its tokens' bytes together: it does not depend on how they are split into tokens. Of the
/// stop strings, the one that is complete first ends the sequence; of several that end with one byte, the longest.
///
/// Invariant: `held` is valid text that was not handed out, and a prefix of some stop string; `partial` is the start
/// of one character. Both keep their memory, so a warm stream allocates nothing.
#[derive(Debug)]
pub struct TextStream {
    stops: Arc<StopStrings>,
    /// How much of each stop string the text so far ends with, in bytes.
    matched: Vec<u32>,
    special: SpecialTokens,
    /// Tokens still to come that complete no stop string.
    open_tokens: u32,
    held: String,
    partial: Vec<u8>,
    stopped: bool,
}

impl StopStrings {
    /// Prepares stop strings; empty ones match nothing.
    #[must_use]
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|text| !text.is_empty()).map(|text| StopString::new(text));
        Self { strings: strings.collect() }
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }
}

impl StopString {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0_u32; bytes.len() + 1];
        let mut length = 0_usize;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = fallback[length] as usize;
            }
            length += usize::from(bytes[at] == bytes[length]);
            fallback[at + 1] = u32::try_from(length).unwrap_or(u32::MAX);
        }
        Self { bytes, fallback }
    }

    /// Returns the matched length after one more byte, from one below the whole length.
    fn advance(&self, matched: u32, byte: u8) -> u32 {
        let mut length = matched as usize;
        while length > 0 && self.bytes[length] != byte {
            length = self.fallback[length] as usize;
        }
        length += usize::from(self.bytes[length] == byte);
        u32::try_from(length).unwrap_or(u32::MAX)
    }
}

impl TextStream {
    /// Starts a sequence's text.
    #[must_use]
    pub fn new(stops: Arc<StopStrings>, special: SpecialTokens) -> Self {
        let matched = vec![0; stops.strings.len()];
        let held_max = stops.strings.iter().map(|stop| stop.bytes.len()).max().unwrap_or(0);
        Self {
            stops,
            matched,
            special,
            open_tokens: 0,
            held: String::with_capacity(held_max + HELD_ROOM),
            partial: Vec::with_capacity(HELD_ROOM),
            stopped: false,
        }
    }

    /// Lets no stop string end it with one of its first `tokens` tokens (`min_tokens`). A stop string that is complete
    /// in them is text like any other; one that only begins in them still ends it later.
    #[must_use]
    pub fn open_for(self, tokens: u32) -> Self {
        Self { open_tokens: tokens, ..self }
    }

    /// Takes a token and appends to `out` the text that is now certain: none, or several characters.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32, out: &mut String) -> Pushed {
        let pushed = if self.special == SpecialTokens::Skip && tokenizer.is_control(token) {
            self.state()
        } else {
            self.push_bytes(tokenizer.token_bytes(token), out)
        };
        self.open_tokens = self.open_tokens.saturating_sub(1);
        pushed
    }

    /// Takes bytes as if they were a token's.
    pub fn push_bytes(&mut self, bytes: &[u8], out: &mut String) -> Pushed {
        if self.stopped {
            return Pushed::Stopped;
        }
        if self.partial.is_empty()
            && let Ok(text) = str::from_utf8(bytes)
        {
            return self.push_text(text, out);
        }
        // The buffer leaves `self` for the loop and comes back: its memory is kept.
        let mut partial = std::mem::take(&mut self.partial);
        partial.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in partial.utf8_chunks() {
            let invalid = chunk.invalid();
            let _ = self.push_text(chunk.valid(), out);
            done += chunk.valid().len();
            if done + invalid.len() == partial.len() && starts_character(invalid) {
                break;
            }
            done += invalid.len();
            if !invalid.is_empty() {
                let _ = self.push_text(REPLACEMENT, out);
            }
        }
        partial.drain(..done);
        self.partial = partial;
        self.state()
    }

    /// Ends the sequence: appends what was held back; a character that never came whole is one U+FFFD. After a stop
    /// string there is nothing to append.
    pub fn finish(&mut self, out: &mut String) -> Pushed {
        if !self.stopped && !self.partial.is_empty() {
            self.partial.clear();
            let _ = self.push_text(REPLACEMENT, out);
        }
        if !self.stopped {
            out.push_str(&self.held);
        }
        self.held.clear();
        self.state()
    }

    /// Returns whether a stop string was seen.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn state(&self) -> Pushed {
        if self.stopped { Pushed::Stopped } else { Pushed::Open }
    }

    fn push_text(&mut self, text: &str, out: &mut String) -> Pushed {
        if self.stopped {
            return Pushed::Stopped;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return Pushed::Open;
        }
        for (at, byte) in text.bytes().enumerate() {
            let Some(length) = self.match_byte(byte) else { continue };
            // The text before the match: out of `held`, then out of `text`. Both ends are ends of characters, since a
            // stop string is whole characters.
            let certain = self.held.len() + at + 1 - length;
            let from_held = certain.min(self.held.len());
            out.push_str(&self.held[..from_held]);
            out.push_str(&text[..certain - from_held]);
            self.held.clear();
            self.stopped = true;
            return Pushed::Stopped;
        }
        let hold = self.matched.iter().copied().max().unwrap_or(0) as usize;
        let certain = self.held.len() + text.len() - hold;
        let from_held = certain.min(self.held.len());
        out.push_str(&self.held[..from_held]);
        self.held.drain(..from_held);
        out.push_str(&text[..certain - from_held]);
        self.held.push_str(&text[certain - from_held..]);
        Pushed::Open
    }

    /// Moves every matcher on; returns the length of the longest stop string that ends with this byte.
    fn match_byte(&mut self, byte: u8) -> Option<usize> {
        let mut longest = None;
        for (stop, matched) in self.stops.strings.iter().zip(&mut self.matched) {
            *matched = stop.advance(*matched, byte);
            if *matched as usize == stop.bytes.len() {
                if self.open_tokens > 0 {
                    *matched = stop.fallback[stop.bytes.len()];
                } else {
                    longest = longest.max(Some(stop.bytes.len()));
                }
            }
        }
        longest
    }
}

/// Returns whether bytes at the end of the input, found invalid, may become a character with more bytes.
fn starts_character(bytes: &[u8]) -> bool {
    !bytes.is_empty() && str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

const REPLACEMENT: &str = "\u{fffd}";
/// Bytes that a token adds to the buffers beyond the longest stop string, usually.
const HELD_ROOM: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes bytes cut at the given places; returns the text and whether it stopped.
    fn stream(bytes: &[u8], cuts: &[usize], stops: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::new(Arc::new(StopStrings::new(&stops)), SpecialTokens::Skip);
        let mut out = String::new();
        let mut start = 0;
        for &end in cuts.iter().chain([&bytes.len()]) {
            let before = out.len();
            let pushed = stream.push_bytes(&bytes[start..end], &mut out);
            assert!(out.is_char_boundary(before));
            assert_eq!(pushed == Pushed::Stopped, stream.is_stopped());
            start = end;
        }
        let stopped = stream.finish(&mut out) == Pushed::Stopped;
        (out, stopped)
    }

    /// The rule by its definition, slow: the first end, and there the longest.
    fn expected(bytes: &[u8], stops: &[&str]) -> (String, bool) {
        let text = String::from_utf8_lossy(bytes).into_owned();
        for end in 1..=text.len() {
            let ending = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            if let Some(length) = ending.map(|stop| stop.len()).max() {
                return (text[..end - length].to_owned(), true);
            }
        }
        (text, false)
    }

    #[test]
    fn known_texts() {
        type Row<'a> = (&'a str, &'a [u8], &'a [&'a str], &'a str, bool);
        let rows: [Row<'_>; 10] = [
            ("no stop", b"hello", &[], "hello", false),
            ("a stop inside", b"hello world", &["o w"], "hell", true),
            ("at the start", b"abc", &["a"], "", true),
            ("a part of a stop comes back at the end", b"hello wor", &["world"], "hello wor", false),
            ("the first end wins", b"abcd", &["bcd", "c"], "ab", true),
            ("of one end the longest", b"abcd", &["d", "bcd"], "a", true),
            ("overlapping itself", b"aaab", &["aab"], "a", true),
            ("several bytes per character", "a。b".as_bytes(), &["。"], "a", true),
            ("invalid in the middle", b"a\xffb", &[], "a\u{fffd}b", false),
            ("cut short at the end", b"a\xf0\x9f\x98", &[], "a\u{fffd}", false),
        ];
        for (name, bytes, stops, text, stopped) in rows {
            assert_eq!(expected(bytes, stops), (text.to_owned(), stopped), "{name}: the definition");
            for cut in 0..=bytes.len() {
                assert_eq!(stream(bytes, &[cut], stops), (text.to_owned(), stopped), "{name} cut at {cut}");
            }
            let each: Vec<usize> = (0..bytes.len()).collect();
            assert_eq!(stream(bytes, &each, stops), (text.to_owned(), stopped), "{name} byte by byte");
        }
    }

    #[test]
    fn any_split_gives_the_same_text() {
        let alphabet: [&[u8]; 9] = [
            b"a",
            b"b",
            b"ab",
            "é".as_bytes(),
            "€".as_bytes(),
            "😀".as_bytes(),
            b"\xe2\x82",
            b"\xf0\x9f",
            b"\xff",
        ];
        let stop_sets: [&[&str]; 5] =
            [&[], &["ab"], &["aab", "ba"], &["é€", "€"], &["\u{fffd}", "😀a", "bbb"]];
        let mut random = Random(0x5eed);
        for round in 0..4000 {
            let parts = 1 + random.below(12);
            let bytes: Vec<u8> =
                (0..parts).flat_map(|_| alphabet[random.below(alphabet.len())]).copied().collect();
            let stops = stop_sets[random.below(stop_sets.len())];
            let mut cuts: Vec<usize> = (0..random.below(6)).map(|_| random.below(bytes.len() + 1)).collect();
            cuts.sort_unstable();
            assert_eq!(
                stream(&bytes, &cuts, stops),
                expected(&bytes, stops),
                "round {round}: {bytes:?} cut at {cuts:?}, stops {stops:?}"
            );
        }
    }

    #[test]
    fn the_first_tokens_complete_no_stop_string() {
        let tokenizer = Tokenizer::bytes();
        // Text, stops, tokens that may not end it, what is sent, whether it stopped.
        let rows: [(&str, &[&str], u32, &str, bool); 7] = [
            ("abab", &["ab"], 0, "", true),
            ("abab", &["ab"], 1, "", true),
            ("abab", &["ab"], 2, "ab", true),
            ("abab", &["ab"], 4, "abab", false),
            ("aaab", &["aa"], 2, "a", true),
            ("abcd", &["b", "bcd"], 2, "a", true),
            ("abc", &["abc"], 9, "abc", false),
        ];
        for (text, stops, open, sent, stopped) in rows {
            let strings: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
            let stops = Arc::new(StopStrings::new(&strings));
            let mut stream = TextStream::new(stops, SpecialTokens::Skip).open_for(open);
            let mut out = String::new();
            for byte in text.bytes() {
                let _ = stream.push(&tokenizer, u32::from(byte), &mut out);
            }
            let end = stream.finish(&mut out) == Pushed::Stopped;
            assert_eq!((out.as_str(), end), (sent, stopped), "{text} {strings:?} open for {open}");
        }
    }

    #[test]
    fn nothing_that_may_be_a_stop_is_sent() {
        let stops = ["</end>".to_owned()];
        let mut stream = TextStream::new(Arc::new(StopStrings::new(&stops)), SpecialTokens::Skip);
        let mut out = String::new();
        let mut seen = Vec::new();
        for piece in ["x<", "/en", "dless", " </", "end>", "more"] {
            let _ = stream.push_bytes(piece.as_bytes(), &mut out);
            seen.push(std::mem::take(&mut out));
        }
        assert_eq!(seen, ["x", "", "</endless", " ", "", ""]);
    }

    #[test]
    fn a_warm_stream_keeps_its_memory() {
        let stops = ["。stop".to_owned()];
        let mut stream = TextStream::new(Arc::new(StopStrings::new(&stops)), SpecialTokens::Skip);
        let mut out = String::with_capacity(4096);
        let memory = |stream: &TextStream, out: &String| {
            (stream.held.as_ptr(), stream.partial.as_ptr(), stream.matched.as_ptr(), out.as_ptr())
        };
        let before = memory(&stream, &out);
        for _ in 0..200 {
            for byte in "a。st".bytes() {
                let _ = stream.push_bytes(&[byte], &mut out);
            }
        }
        assert_eq!(memory(&stream, &out), before);
    }

    #[test]
    fn control_tokens_are_silent_unless_asked_for() {
        let tokenizer = Tokenizer::bytes();
        for (special, text) in [(SpecialTokens::Skip, "ab"), (SpecialTokens::Show, "a<|im_end|>b")] {
            let mut stream = TextStream::new(Arc::default(), special);
            let mut out = String::new();
            for token in [u32::from(b'a'), 258, u32::from(b'b'), 9999] {
                assert_eq!(stream.push(&tokenizer, token, &mut out), Pushed::Open);
            }
            assert_eq!(out, text);
        }
    }

    /// Small seeded generator (SplitMix64).
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) % limit as u64) as usize
        }
    }
}

//! Text to token ids and back, for models that carry their vocabulary (byte-level BPE) and for the simulator (bytes).
//!
//! Merging is the `tokenizers` crate's; cutting text into words is ours.

use std::borrow::Cow;
use std::fmt;

use tokenizers::models::bpe::{BPE, Vocab};
use uring_serve_kernels::weights::WeightsError;
use uring_serve_kernels::weights::gguf::Gguf;

use super::words::{ByteAlphabet, WordRule, Words, byte_letter};

/// A vocabulary as a model file states it. Plain values: nothing here knows the file's format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerSource {
    /// `tokenizer.ggml.model`: only `gpt2` (byte-level BPE) is known here.
    pub model: String,
    /// `tokenizer.ggml.pre`: names the rule that cuts text into words.
    pub pre: String,
    /// `tokenizer.ggml.tokens`, by id. Ordinary ones are spelt in the byte alphabet of GPT-2.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id; empty, or as long as `tokens`. 1 ordinary, 3 control, 4 added by the user.
    pub types: Vec<i32>,
    /// `tokenizer.ggml.merges`: two tokens with a space between, best first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: bool,
}

/// Encodes and decodes. Shared by threads without a lock of its own.
#[derive(Debug)]
pub struct Tokenizer {
    table: TokenTable,
    /// Control tokens and added tokens, found in text before it is cut into words.
    named: NamedTokens,
    words: Words,
    bos: Option<u32>,
    add_bos: bool,
    ends: Vec<u32>,
    missing_bytes: Vec<u8>,
}

/// How names of control tokens in a text are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Markup {
    /// As the token, except where [`Tokenizer::guard`] marked them as somebody's words; the marks are removed.
    Guarded,
    /// As text: nobody's words become control.
    Literal,
    /// As the token: the text is trusted markup.
    Parsed,
}

/// Whether control tokens of the output show as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Their names appear in the text.
    Show,
    /// They are silent. The default.
    Skip,
}

/// A vocabulary that cannot be used, in one sentence.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The model file's tables are wrong.
    File(WeightsError),
    /// The merges do not fit the tokens; what the BPE builder said.
    Merges(String),
    /// Not a byte-level BPE: the name, empty where the file has none.
    Model(String),
    /// More tokens than 32-bit ids, or none.
    Size(usize),
    /// An id of a special token is not in the vocabulary.
    Special(u32),
    /// A token or merge is not UTF-8: the table and the index.
    Text(&'static str, usize),
    /// The list of types is not as long as the list of tokens.
    Types(usize),
    /// An unknown rule for words: the name.
    WordRule(String),
}

/// A text that was not encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// More tokens than the caller's limit.
    TooLong {
        /// The limit.
        tokens_max: usize,
    },
    /// The BPE model failed; what it said.
    Model(String),
}

impl TokenizerSource {
    /// Reads the tables of a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError::File`] or [`TokenizerError::Text`]; a file without a vocabulary is an empty one.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TokenizerError> {
        let text = |key: &str| Ok::<_, WeightsError>(file.string(key)?.unwrap_or_default());
        let id = |key: &str| {
            // An id beyond 32 bits is outside any vocabulary, and is refused as such.
            Ok::<_, WeightsError>(file.unsigned(key)?.map(|id| u32::try_from(id).unwrap_or(u32::MAX)))
        };
        let mut source = Self {
            model: text("tokenizer.ggml.model")?,
            pre: text("tokenizer.ggml.pre")?,
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            eot: id("tokenizer.ggml.eot_token_id")?,
            add_bos: file.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
            ..Self::default()
        };
        if let Some(vocabulary) = file.vocabulary()? {
            source.tokens = read_texts("tokens", vocabulary.tokens.strings())?;
            source.types = vocabulary.token_types.iter().flat_map(|types| types.i32s()).collect();
            let merges = vocabulary.merges.iter().flat_map(|merges| merges.strings());
            source.merges = read_texts("merges", merges)?;
        }
        Ok(source)
    }
}

fn read_texts<'a>(
    table: &'static str,
    strings: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<String>, TokenizerError> {
    let text = |(index, bytes): (usize, &[u8])| match str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(TokenizerError::Text(table, index)),
    };
    strings.enumerate().map(text).collect()
}

impl Tokenizer {
    /// Builds the byte-level BPE of a model file.
    ///
    /// # Errors
    /// [`TokenizerError`], naming what is unknown or inconsistent.
    pub fn from_source(source: TokenizerSource) -> Result<Self, TokenizerError> {
        if source.model != "gpt2" {
            return Err(TokenizerError::Model(source.model));
        }
        let rule =
            WordRule::named(&source.pre).ok_or_else(|| TokenizerError::WordRule(source.pre.clone()))?;
        let count = source.tokens.len();
        let vocab_size =
            u32::try_from(count).ok().filter(|size| *size > 0).ok_or(TokenizerError::Size(count))?;
        if !source.types.is_empty() && source.types.len() != count {
            return Err(TokenizerError::Types(source.types.len()));
        }
        let specials = [source.bos, source.eos, source.eot];
        if let Some(id) = specials.into_iter().flatten().find(|id| *id >= vocab_size) {
            return Err(TokenizerError::Special(id));
        }
        let table = TokenTable::new(&source.tokens, &source.types);
        let named = NamedTokens::new(&source.tokens, &source.types);
        let mut ends: Vec<u32> = [source.eos, source.eot].into_iter().flatten().collect();
        ends.extend(
            named.control_ids().filter(|id| END_NAMES.contains(&source.tokens[*id as usize].as_str())),
        );
        ends.sort_unstable();
        ends.dedup();
        let vocab: Vocab = source.tokens.into_iter().zip(0_u32..).collect();
        let missing_bytes =
            (0..=255).filter(|byte| !vocab.contains_key(&byte_letter(*byte).to_string())).collect();
        let split =
            |merge: String| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
        let merges = source.merges.into_iter().map(split).collect::<Option<Vec<_>>>();
        let merges = merges.ok_or_else(|| TokenizerError::Merges("a merge without a space".to_owned()))?;
        let bpe =
            BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rule.whole_words_first).build();
        let bpe = Box::new(bpe.map_err(|error| TokenizerError::Merges(error.to_string()))?);
        let words = Words::Bpe { rule, bpe };
        Ok(Self { table, named, words, bos: source.bos, add_bos: source.add_bos, ends, missing_bytes })
    }

    /// Returns the simulator's tokenizer: ids 0..=255 are bytes, the rest of 512 are control tokens, among them
    /// `<|endoftext|>` (256), `<|im_start|>` (257) and `<|im_end|>` (258).
    #[must_use]
    pub fn bytes() -> Self {
        let names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let mut tokens: Vec<String> = (0..=255).map(|byte| byte_letter(byte).to_string()).collect();
        tokens.extend(names.map(str::to_owned));
        tokens.extend((tokens.len()..SIM_VOCAB).map(|id| format!("<|reserved_{id}|>")));
        let types: Vec<i32> =
            (0..SIM_VOCAB).map(|id| if id < 256 { TYPE_ORDINARY } else { TYPE_CONTROL }).collect();
        Self {
            table: TokenTable::new(&tokens, &types),
            named: NamedTokens::new(&tokens, &types),
            words: Words::Bytes,
            bos: None,
            add_bos: false,
            ends: vec![256, 258],
            missing_bytes: Vec::new(),
        }
    }

    /// Appends the tokens of `text`.
    ///
    /// # Errors
    /// [`EncodeError::TooLong`] when `out` would grow by more than `tokens_max`; a text that cannot fit by its mere
    /// size is refused before any work. `out` is as before then.
    pub fn encode(
        &self,
        text: &str,
        markup: Markup,
        tokens_max: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let too_long = EncodeError::TooLong { tokens_max };
        if text.len() > tokens_max.saturating_mul(self.table.token_bytes_max) {
            return Err(too_long);
        }
        let start = out.len();
        let mut scratch = String::new();
        let mut rest = text;
        let result = loop {
            let found = self.named.find(rest, markup);
            let plain = found.as_ref().map_or(rest, |found| &rest[..found.start]);
            let plain = if markup == Markup::Guarded { unguard(plain) } else { Cow::Borrowed(plain) };
            if let Err(error) = self.words.encode(&plain, &mut scratch, out) {
                break Err(error);
            }
            if out.len() - start > tokens_max {
                break Err(too_long);
            }
            let Some(found) = found else { break Ok(()) };
            out.push(found.id);
            rest = &rest[found.end..];
        };
        let result = result.and(if out.len() - start > tokens_max {
            Err(EncodeError::TooLong { tokens_max })
        } else {
            Ok(())
        });
        if result.is_err() {
            out.truncate(start);
        }
        result
    }

    /// Marks the names of control tokens in somebody's words, so that [`Markup::Guarded`] reads them as text.
    ///
    /// A mark is one [`GUARD`] behind a name's first character; a `GUARD` of the text itself is doubled.
    #[must_use]
    pub fn guard<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut marked = String::new();
        let mut copied = 0;
        for (at, letter) in text.char_indices() {
            let control = self.named.starts_control(&text[at..]);
            if control || letter == GUARD {
                let end = at + letter.len_utf8();
                marked.push_str(&text[copied..end]);
                marked.push(GUARD);
                copied = end;
            }
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        marked.push_str(&text[copied..]);
        Cow::Owned(marked)
    }

    /// Returns the bytes of a token: empty for an id outside the vocabulary. A token may hold part of a character.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes_of(id)
    }

    /// Returns whether a token is control and not text.
    #[must_use]
    pub fn is_control(&self, id: u32) -> bool {
        self.table.control.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns the text of tokens; bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> String {
        let shown = ids.iter().filter(|id| special == SpecialTokens::Show || !self.is_control(**id));
        let bytes: Vec<u8> = shown.flat_map(|id| self.token_bytes(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the number of tokens; ids lie below it.
    #[must_use]
    pub fn vocab(&self) -> u32 {
        u32::try_from(self.table.control.len()).unwrap_or(u32::MAX)
    }

    /// Returns the tokens that end a sequence, ascending.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Returns the bytes that have no token, ascending: [`Self::encode`] leaves them out of a text, as every reader of
    /// such a vocabulary does. SmolLM2 lacks six control characters and bytes of characters beyond plane 3.
    #[must_use]
    pub fn missing_bytes(&self) -> &[u8] {
        &self.missing_bytes
    }

    /// Returns the token that begins a sequence, when the model has one.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns whether the model wants [`Self::bos`] before each prompt.
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }
}

impl fmt::Display for TokenizerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Merges(what) => write!(f, "the tokenizer's merges are unusable: {what}"),
            Self::Model(name) => write!(f, "tokenizer model `{name}` is not known (known: gpt2)"),
            Self::Size(count) => write!(f, "a vocabulary of {count} tokens is not usable"),
            Self::Special(id) => write!(f, "special token id {id} is outside the vocabulary"),
            Self::Text(table, index) => write!(f, "entry {index} of the tokenizer's {table} is not UTF-8"),
            Self::Types(count) => write!(f, "{count} token types do not fit the number of tokens"),
            Self::WordRule(name) => {
                write!(
                    f,
                    "tokenizer.ggml.pre `{name}` is not known (known: {})",
                    WordRule::known_names().join(", ")
                )
            }
        }
    }
}

impl std::error::Error for TokenizerError {}

impl From<WeightsError> for TokenizerError {
    fn from(error: WeightsError) -> Self {
        Self::File(error)
    }
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { tokens_max } => write!(f, "the text takes more than {tokens_max} tokens"),
            Self::Model(what) => write!(f, "the tokenizer failed: {what}"),
        }
    }
}

impl std::error::Error for EncodeError {}

/// The bytes of every token, end to end.
#[derive(Debug)]
struct TokenTable {
    bytes: Vec<u8>,
    /// Token `i` is `bytes[starts[i]..starts[i + 1]]`.
    starts: Vec<usize>,
    control: Vec<bool>,
    token_bytes_max: usize,
}

impl TokenTable {
    fn new(tokens: &[String], types: &[i32]) -> Self {
        let alphabet = ByteAlphabet::new();
        let mut table = Self {
            bytes: Vec::new(),
            starts: vec![0],
            control: Vec::with_capacity(tokens.len()),
            token_bytes_max: 1,
        };
        for (id, token) in tokens.iter().enumerate() {
            let kind = types.get(id).copied().unwrap_or(TYPE_ORDINARY);
            let start = table.bytes.len();
            // Only ordinary tokens are spelt in the byte alphabet; a letter outside it stands for itself.
            match kind {
                TYPE_ORDINARY => {
                    token.chars().for_each(|letter| alphabet.push_byte(letter, &mut table.bytes))
                }
                _ => table.bytes.extend_from_slice(token.as_bytes()),
            }
            table.token_bytes_max = table.token_bytes_max.max(table.bytes.len() - start);
            table.starts.push(table.bytes.len());
            table.control.push(kind == TYPE_CONTROL || kind == TYPE_UNKNOWN);
        }
        table
    }

    fn bytes_of(&self, id: u32) -> &[u8] {
        match self.starts.get(id as usize..).and_then(|starts| starts.first_chunk::<2>()) {
            Some(&[start, end]) => &self.bytes[start..end],
            None => &[],
        }
    }
}

/// Tokens that are found by name, longest first among those with one first byte.
#[derive(Debug)]
struct NamedTokens {
    by_first_byte: Vec<Vec<Named>>,
}

#[derive(Debug)]
struct Named {
    name: String,
    id: u32,
    control: bool,
}

/// A named token at a place of a text.
struct Found {
    start: usize,
    end: usize,
    id: u32,
}

impl NamedTokens {
    fn new(tokens: &[String], types: &[i32]) -> Self {
        let mut by_first_byte: Vec<Vec<Named>> = (0..256).map(|_| Vec::new()).collect();
        for ((name, kind), id) in tokens.iter().zip(types).zip(0_u32..) {
            let named = matches!(*kind, TYPE_CONTROL | TYPE_USER);
            if let Some(first) = name.bytes().next().filter(|_| named) {
                let control = *kind == TYPE_CONTROL;
                by_first_byte[usize::from(first)].push(Named { name: name.clone(), id, control });
            }
        }
        for row in &mut by_first_byte {
            row.sort_by(|a, b| b.name.len().cmp(&a.name.len()).then(a.name.cmp(&b.name)));
        }
        Self { by_first_byte }
    }

    /// Finds the first, and there the longest, named token. Added tokens are ordinary vocabulary and always found.
    fn find(&self, text: &str, markup: Markup) -> Option<Found> {
        let bytes = text.as_bytes();
        for (start, byte) in bytes.iter().enumerate() {
            for named in &self.by_first_byte[usize::from(*byte)] {
                let wanted = !named.control || markup != Markup::Literal;
                if wanted && bytes[start..].starts_with(named.name.as_bytes()) {
                    return Some(Found { start, end: start + named.name.len(), id: named.id });
                }
            }
        }
        None
    }

    fn starts_control(&self, text: &str) -> bool {
        let Some(first) = text.bytes().next() else { return false };
        let row = &self.by_first_byte[usize::from(first)];
        row.iter().any(|named| named.control && text.starts_with(&named.name))
    }

    fn control_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_first_byte.iter().flatten().filter(|named| named.control).map(|named| named.id)
    }
}

/// Undoes [`Tokenizer::guard`]: a lone mark goes, a doubled one becomes one.
#[must_use]
pub fn unguard(text: &str) -> Cow<'_, str> {
    if !text.contains(GUARD) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != GUARD {
            plain.push(letter);
        } else if letters.next_if_eq(&GUARD).is_some() {
            plain.push(GUARD);
        }
    }
    Cow::Owned(plain)
}

/// The mark inside a guarded name: a noncharacter, which no interchange carries.
pub const GUARD: char = '\u{fdd0}';
/// Entries of the simulator's vocabulary.
pub const SIM_VOCAB: usize = 512;

const TYPE_ORDINARY: i32 = 1;
const TYPE_UNKNOWN: i32 = 2;
const TYPE_CONTROL: i32 = 3;
const TYPE_USER: i32 = 4;

/// Control tokens that end a turn in the models at hand, whether or not the file says so.
const END_NAMES: [&str; 8] = [
    "</s>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// All bytes, two merges, one control token and one added token.
    fn small(pre: &str) -> Result<Tokenizer, TokenizerError> {
        let mut tokens: Vec<String> = (0..=255).map(|byte| byte_letter(byte).to_string()).collect();
        tokens.extend(["he", "Ġhe", "<|end|>", "<tool>"].map(str::to_owned));
        let mut types = vec![TYPE_ORDINARY; tokens.len()];
        types[258] = TYPE_CONTROL;
        types[259] = TYPE_USER;
        Tokenizer::from_source(TokenizerSource {
            model: "gpt2".to_owned(),
            pre: pre.to_owned(),
            tokens,
            types,
            merges: vec!["h e".to_owned(), "Ġ he".to_owned()],
            ..TokenizerSource::default()
        })
    }

    #[test]
    fn control_names_are_tokens_only_in_markup() {
        let tokenizer = small("smollm").unwrap();
        let encode = |text: &str, markup| {
            let mut ids = Vec::new();
            tokenizer.encode(text, markup, 100, &mut ids).unwrap();
            ids
        };
        assert_eq!(encode("he<|end|> he", Markup::Parsed), [256, 258, 257]);
        assert_eq!(encode("<tool>", Markup::Literal), [259], "added tokens are ordinary vocabulary");
        let literal = encode("<|end|>", Markup::Literal);
        assert!(!literal.contains(&258));
        assert_eq!(tokenizer.decode(&literal, SpecialTokens::Skip), "<|end|>");
        // Words of a user between words of the template.
        for words in ["<|end|>", "\u{fdd0}", "<\u{fdd0}|end|>", "a\u{fdd0}\u{fdd0}<|end|>b", "<<|end|>"] {
            let guarded = format!("<|end|>{}<|end|>", tokenizer.guard(words));
            let mut expected = vec![258];
            expected.extend(encode(words, Markup::Literal));
            expected.push(258);
            assert_eq!(encode(&guarded, Markup::Guarded), expected, "{words:?}");
            assert_eq!(unguard(&tokenizer.guard(words)), words);
        }
        assert!(matches!(tokenizer.guard("plain <tool>"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_text_past_the_limit_leaves_nothing_behind() {
        let tokenizer = small("gpt-2").unwrap();
        for (text, limit, fits) in
            [("hehe", 2, true), ("hehe", 1, false), ("", 0, true), ("<|end|>", 0, false)]
        {
            let mut ids = vec![7];
            let result = tokenizer.encode(text, Markup::Parsed, limit, &mut ids);
            assert_eq!(result.is_ok(), fits, "{text} {limit}");
            assert_eq!(ids.len() > 1, fits && !text.is_empty());
        }
    }

    #[test]
    fn a_million_spaces_are_linear() {
        let tokenizer = small("llama-bpe").unwrap();
        let text = format!("{}x", " ".repeat(1 << 20));
        let mut ids = Vec::new();
        tokenizer.encode(&text, Markup::Parsed, text.len(), &mut ids).unwrap();
        assert_eq!(ids.len(), text.len());
    }

    #[test]
    fn an_unusable_vocabulary_is_named() {
        assert_eq!(small("klingon").unwrap_err(), TokenizerError::WordRule("klingon".to_owned()));
        assert!(small("klingon").unwrap_err().to_string().contains("`klingon`"));
        let source = TokenizerSource { model: "llama".to_owned(), ..TokenizerSource::default() };
        assert_eq!(Tokenizer::from_source(source).unwrap_err(), TokenizerError::Model("llama".to_owned()));
        let source = |tokens: &[&str], eos, types| TokenizerSource {
            model: "gpt2".to_owned(),
            pre: "gpt-2".to_owned(),
            tokens: tokens.iter().map(|token| (*token).to_owned()).collect(),
            eos,
            types,
            ..TokenizerSource::default()
        };
        let rows = [
            (source(&[], None, vec![]), TokenizerError::Size(0)),
            (source(&["a"], Some(1), vec![]), TokenizerError::Special(1)),
            (source(&["a"], None, vec![1, 1]), TokenizerError::Types(2)),
        ];
        for (source, expected) in rows {
            assert_eq!(Tokenizer::from_source(source).unwrap_err(), expected);
        }
    }

    #[test]
    fn a_byte_without_a_token_is_left_out() {
        let source = TokenizerSource {
            model: "gpt2".to_owned(),
            pre: "gpt-2".to_owned(),
            tokens: vec!["a".to_owned(), "b".to_owned()],
            ..TokenizerSource::default()
        };
        let tokenizer = Tokenizer::from_source(source).unwrap();
        let mut ids = Vec::new();
        tokenizer.encode("a\u{4}b", Markup::Parsed, 10, &mut ids).unwrap();
        assert_eq!((ids, tokenizer.missing_bytes().len()), (vec![0, 1], 254));
    }

    #[test]
    fn the_simulator_speaks_bytes() {
        let tokenizer = Tokenizer::bytes();
        let mut ids = Vec::new();
        tokenizer.encode("<|im_start|>é", Markup::Parsed, 10, &mut ids).unwrap();
        assert_eq!(ids, [257, 0xc3, 0xa9]);
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip), "é");
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Show), "<|im_start|>é");
        assert_eq!((tokenizer.vocab(), tokenizer.ends()), (512, &[256, 258][..]));
        assert_eq!(tokenizer.token_bytes(512), b"");
    }
}

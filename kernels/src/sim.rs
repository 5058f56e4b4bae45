//! A backend without a model: stated times and seeded text, for load tests and for tests of everything above it.
//!
//! # Text
//! One token is one byte. The text is a row of short sentences; after the first one it ends by itself with [`EOS`],
//! so within [`TEXT_TOKENS_MAX`] tokens. What a sequence says depends on the simulator's seed, the sampling seed (not
//! if it is greedy, as on a real model), the prompt and the index in the output; never on the batch, on chunks or on
//! a preemption.
//!
//! Each token goes through the sequence's own sampler, as a row of logits in which the next byte stands far above
//! letters and spaces, and these above all else. So every sampling parameter acts: a bias of 100 selects a token, one
//! of -100 excludes it, penalties that add up replace letters by others.
//!
//! # Where the text ends
//! At a sentence's end the simulator asks for [`EOS`], unless the sampler bans it (`min_tokens`; or `ignore_eos`,
//! where the caller expresses it as a ban that never ends): then another sentence follows. A caller that goes on
//! after an [`EOS`] (`ignore_eos`, where it does not ban) gets sentences and no second one.

use std::time::Duration;

use uring_serve_core::sched::{Item, Plan, SeqId, SlotId};

use crate::sample::{GOLDEN, mix};
use crate::{Backend, BackendError, ModelSpec, Sequence, Sequences};

/// Entries of the vocabulary: 256 bytes, the special tokens below, and unused ones.
pub const VOCAB: u32 = 512;
/// Longest sequence, in tokens.
pub const CONTEXT_TOKENS: u32 = 8192;
/// Ends a document; never generated.
pub const ENDOFTEXT: u32 = 256;
/// Begins a ChatML message.
pub const IM_START: u32 = 257;
/// Ends a ChatML message.
pub const IM_END: u32 = 258;
/// The token with which a text ends.
pub const EOS: u32 = IM_END;
/// The special tokens and how they are written.
pub const SPECIALS: [(u32, &str); 3] =
    [(ENDOFTEXT, "<|endoftext|>"), (IM_START, "<|im_start|>"), (IM_END, "<|im_end|>")];
/// Most tokens of a text that ends by itself, [`EOS`] included.
pub const TEXT_TOKENS_MAX: u32 = 64;

/// What the simulator pretends to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimConfig {
    /// How long a step lasts that finishes at least one prompt.
    pub ttft: Duration,
    /// How long a step lasts that decodes.
    pub tpot: Duration,
    /// Part of every text's seed.
    pub seed: u64,
    /// Whether some words have characters of two to four bytes, each byte a token.
    pub unicode: bool,
}

/// The simulator.
#[derive(Debug)]
pub struct Sim {
    config: SimConfig,
    spec: ModelSpec,
    /// By slot; each rebuilt from the sequence itself when another one has its slot.
    writers: Vec<Writer>,
    /// Logits of one token, `[V]`.
    row: Vec<f32>,
    /// The logits of a token without a wish, `[V]`.
    row_plain: Vec<f32>,
}

impl Sim {
    /// Creates a simulator.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        let plain = |token: u8| if token.is_ascii_lowercase() || token == b' ' { LETTER } else { OTHER };
        let row_plain: Vec<f32> = (0..VOCAB).map(|token| u8::try_from(token).map_or(OTHER, plain)).collect();
        let spec = ModelSpec {
            vocab: VOCAB,
            context_tokens: CONTEXT_TOKENS,
            kv_bytes_per_token: 0,
            device: "sim".to_owned(),
        };
        Self { config, spec, writers: Vec::new(), row: row_plain.clone(), row_plain }
    }

    fn writer(&mut self, item: &Item) -> &mut Writer {
        let row = item.slot.0 as usize;
        if self.writers.len() <= row {
            self.writers.resize_with(row + 1, Writer::default);
        }
        &mut self.writers[row]
    }

    /// Returns the token that the text of this sequence has next.
    fn wish(&mut self, item: &Item, sequence: &Sequence) -> u32 {
        let Sequence { tokens, sampler } = sequence;
        let config = self.config;
        let writer = self.writer(item);
        let (prompt, output) = tokens.split_at(tokens.len().saturating_sub(sampler.output_tokens() as usize));
        if writer.seq != Some(item.seq) {
            let params = sampler.params();
            let sampling_seed = if params.temperature == 0.0 { 0 } else { params.seed };
            writer.begin(item.seq, text_key(config.seed, sampling_seed, prompt), config.unicode);
        }
        let position = output.iter().filter(|token| **token != EOS).count();
        let ended_before = position < output.len();
        writer.seek(position.saturating_sub(1));
        if position == writer.sentence_end() && !ended_before && !sampler.is_banned(EOS) {
            return EOS;
        }
        writer.seek(position);
        u32::from(writer.sentence.bytes[position - writer.sentence_start])
    }
}

impl Backend for Sim {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns `ttft` if the plan finishes a prompt, `tpot` if it decodes, the longer of the two if it does both, and
    /// zero if it does neither.
    fn forward(&mut self, plan: &Plan, sequences: &Sequences) -> Result<Duration, BackendError> {
        let mut lasts = Duration::ZERO;
        for item in plan.items.iter().filter(|item| item.samples) {
            let sequence = sequences.at(item.slot).ok_or_else(|| empty(item.slot))?;
            let finishes_prompt = sequence.sampler.output_tokens() == 0;
            lasts = lasts.max(if finishes_prompt { self.config.ttft } else { self.config.tpot });
        }
        Ok(lasts)
    }

    fn sample(
        &mut self,
        plan: &Plan,
        sequences: &mut Sequences,
        tokens: &mut Vec<u32>,
    ) -> Result<(), BackendError> {
        for item in plan.items.iter().filter(|item| item.samples) {
            let sequence = sequences.at_mut(item.slot).ok_or_else(|| empty(item.slot))?;
            let wish = self.wish(item, sequence);
            self.row.copy_from_slice(&self.row_plain);
            self.row[wish as usize] = WISH;
            tokens.push(sequence.sampler.choose(&mut self.row));
        }
        Ok(())
    }
}

fn empty(slot: SlotId) -> BackendError {
    BackendError { message: format!("slot {} of the plan holds no sequence", slot.0) }
}

// Logits. Far enough apart that at temperature 2 a draw leaves the text once in 10^11 tokens, near enough that a bias
// of 100 lifts any token above the text.
const WISH: f32 = 60.0;
const LETTER: f32 = 0.0;
const OTHER: f32 = -30.0;

/// Where one sequence is in its text.
#[derive(Debug, Default)]
struct Writer {
    seq: Option<SeqId>,
    key: u64,
    unicode: bool,
    /// Index of `sentence` in the text.
    index: u64,
    /// Position of its first byte in the text.
    sentence_start: usize,
    sentence: Sentence,
}

impl Writer {
    fn begin(&mut self, seq: SeqId, key: u64, unicode: bool) {
        *self = Self {
            seq: Some(seq),
            key,
            unicode,
            sentence: Sentence::new(key, 0, unicode),
            ..Self::default()
        };
    }

    /// Moves on to the sentence that `position` lies in. Positions never go back within a sequence.
    fn seek(&mut self, position: usize) {
        while position >= self.sentence_end() {
            self.sentence_start = self.sentence_end();
            self.index += 1;
            self.sentence = Sentence::new(self.key, self.index, self.unicode);
        }
    }

    fn sentence_end(&self) -> usize {
        self.sentence_start + self.sentence.len
    }
}

/// One sentence, from its capital to its full stop; all but a text's first begin with a space.
#[derive(Debug)]
struct Sentence {
    bytes: [u8; SENTENCE_BYTES_MAX],
    len: usize,
}

const SENTENCE_BYTES_MAX: usize = TEXT_TOKENS_MAX as usize - 1;

impl Default for Sentence {
    fn default() -> Self {
        Self { bytes: [0; SENTENCE_BYTES_MAX], len: 0 }
    }
}

impl Sentence {
    fn new(key: u64, index: u64, unicode: bool) -> Self {
        let mut random = mix(key.wrapping_add(mix(index)));
        let mut next = |below: usize| {
            random = random.wrapping_add(GOLDEN);
            (mix(random) % below as u64) as usize
        };
        let mut sentence = Self::default();
        let len_wanted = SENTENCE_BYTES_MIN + next(SENTENCE_BYTES_MAX - SENTENCE_BYTES_MIN);
        if index > 0 {
            sentence.push(" ");
        }
        let capital = sentence.len;
        loop {
            let word =
                if unicode && next(4) == 0 { FOREIGN[next(FOREIGN.len())] } else { WORDS[next(WORDS.len())] };
            let separator = match sentence.len - capital {
                0 => "",
                _ if next(9) == 0 => ", ",
                _ => " ",
            };
            if sentence.len + separator.len() + word.len() >= len_wanted {
                break;
            }
            sentence.push(separator);
            sentence.push(word);
        }
        sentence.push(".");
        sentence.bytes[capital].make_ascii_uppercase();
        sentence
    }

    fn push(&mut self, text: &str) {
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text.as_bytes());
        self.len += text.len();
    }
}

/// Room for a space and the longest word, so that no sentence is a full stop alone.
const SENTENCE_BYTES_MIN: usize = 16;

const WORDS: [&str; 40] = [
    "a", "all", "and", "answer", "are", "as", "at", "batch", "before", "blue", "by", "cold", "each", "every",
    "first", "for", "green", "here", "in", "is", "it", "large", "line", "long", "more", "morning", "of",
    "on", "one", "open", "river", "small", "step", "that", "the", "then", "time", "to", "water", "with",
];

const FOREIGN: [&str; 8] = ["café", "naïve", "über", "señor", "Ωμέγα", "日本", "한국어", "🙂"];

/// Seeds one text. Two tokens are taken in at a time, by one multiplication each: a prompt of 500 tokens costs less
/// than a system call, so that load tests measure the server.
fn text_key(sim_seed: u64, sampling_seed: u64, prompt: &[u32]) -> u64 {
    let start = mix(mix(sim_seed) ^ sampling_seed);
    let (pairs, rest) = prompt.as_chunks::<2>();
    let pairs = pairs.iter().map(|[first, second]| u64::from(*first) | u64::from(*second) << 32);
    // The length tells an odd last token from a pair that ends in token 0.
    let rest = rest.iter().map(|token| u64::from(*token)).chain([prompt.len() as u64]);
    mix(pairs.chain(rest).fold(start, |key, tokens| (key ^ tokens).wrapping_mul(GOLDEN).rotate_left(29)))
}

#[cfg(test)]
mod tests;

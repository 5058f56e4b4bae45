//! Model files, backends and kernels.
//!
//! Shape glossary: `T` tokens in a step, `D` model width, `F` feed-forward width, `H` query heads, `G` KV heads,
//! `K` head width, `V` vocabulary. Tensors are row-major unless said.

use core::fmt;
use core::time::Duration;

use uring_serve_core::sched::{Plan, SlotId};

pub mod cpu;
pub mod model;
pub mod reference;
pub mod sample;
pub mod sim;
pub mod weights;

/// What a server must know of the model behind a [`Backend`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Entries of the vocabulary, `V`.
    pub vocab: u32,
    /// Longest sequence, prompt and output together, in tokens.
    pub context_tokens: u32,
    /// Bytes of K and V together for one token, over all layers; 0 where nothing is kept ([`sim::Sim`]).
    pub kv_bytes_per_token: u64,
    /// Device or instruction set that computes, as a person would name it, e.g. `cpu (AVX-512 VNNI, 2 threads)`.
    pub device: String,
}

/// The tokens and sampling state of one running sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Prompt, then sampled tokens, in order. Item positions index it.
    pub tokens: Vec<u32>,
    /// How the next token is chosen; carries the sequence's own random state.
    pub sampler: sample::Sampler,
}

/// Running sequences by slot. Sized once; a slot is filled when the planner starts a sequence and emptied at its end.
#[derive(Debug)]
pub struct Sequences {
    slots: Vec<Option<Sequence>>,
}

impl Sequences {
    /// Creates `batch_seqs_max` empty slots.
    #[must_use]
    pub fn new(batch_seqs_max: u32) -> Self {
        Self { slots: (0..batch_seqs_max).map(|_| None).collect() }
    }

    /// Fills a slot, returning what it held.
    ///
    /// # Panics
    /// If there is no such slot: a plan's slots are below the planner's `batch_seqs_max`.
    pub fn insert(&mut self, slot: SlotId, sequence: Sequence) -> Option<Sequence> {
        self.slots[slot.0 as usize].replace(sequence)
    }

    /// Empties a slot.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn remove(&mut self, slot: SlotId) -> Option<Sequence> {
        self.slots[slot.0 as usize].take()
    }

    /// Returns the sequence in a slot.
    #[must_use]
    pub fn at(&self, slot: SlotId) -> Option<&Sequence> {
        self.slots.get(slot.0 as usize)?.as_ref()
    }

    /// Returns the sequence in a slot, for a change.
    pub fn at_mut(&mut self, slot: SlotId) -> Option<&mut Sequence> {
        self.slots.get_mut(slot.0 as usize)?.as_mut()
    }
}

/// What computes: one forward pass over a plan, then one sampled token for each item that asks.
///
/// A step is two calls so that the driver, which owns the clock, can read it between them: `forward`, then `sample`.
/// Neither call allocates once warm. Both are deterministic: the same plan contents for one sequence give the same
/// logits and token, whatever else is in the batch and however the prompt was cut into chunks.
pub trait Backend: Send {
    /// Describes the model and the device.
    fn spec(&self) -> &ModelSpec;

    /// Computes every item of `plan` and keeps the logits of those with `samples`. K and V of all positions computed
    /// are written to the items' blocks.
    ///
    /// Returns how long the step must last at least: zero for engines that compute, the modelled time for the
    /// simulator. The driver waits; backends never sleep.
    ///
    /// # Errors
    /// [`BackendError`] when the device failed; every sequence of the plan is then lost.
    fn forward(&mut self, plan: &Plan, sequences: &Sequences) -> Result<Duration, BackendError>;

    /// Appends to `tokens` one token per item with `samples`, in plan order, drawn with that sequence's sampler.
    /// The sequences' token lists are left to the caller.
    ///
    /// # Errors
    /// [`BackendError`] when the device failed.
    fn sample(
        &mut self,
        plan: &Plan,
        sequences: &mut Sequences,
        tokens: &mut Vec<u32>,
    ) -> Result<(), BackendError>;

    /// Returns the logits `[V]` of the `index`th item with `samples` of the last [`forward`](Self::forward), until
    /// [`sample`](Self::sample) may overwrite them. `None` past the last, and where logits stay on the device.
    fn logits(&self, index: usize) -> Option<&[f32]> {
        let _ = index;
        None
    }

    /// Returns whether every later step will fail as well: the server then ends and is started anew.
    fn is_broken(&self) -> bool {
        false
    }

    /// GPU times of the last step, in nanoseconds, `(forward, sample)`. `None` where there is no GPU.
    fn gpu_times_ns(&self) -> Option<(u64, u64)> {
        None
    }
}

/// A device failed while computing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendError {
    /// One sentence: which operation, what the device said.
    pub message: String,
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl core::error::Error for BackendError {}

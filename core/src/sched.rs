//! Admission, continuous batching and KV blocks as one value: [`Planner`].
//!
//! The driver asks for a [`Plan`], lets a device compute it, and reports one [`Outcome`] per item:
//!
//! ```
//! use uring_serve_core::sched::{Outcome, Plan, Planner, SeqRequest, Shape};
//!
//! let shape =
//!     Shape { block_tokens: 16, block_count: 8, batch_seqs_max: 2, batch_tokens_max: 8, queue_max: 4 };
//! let mut planner = Planner::new(shape)?;
//! let seq = planner.admit(SeqRequest { prompt_tokens: 10, output_tokens_max: 3 })?;
//!
//! let (mut plan, mut outcomes, mut left) = (Plan::default(), Vec::new(), Vec::new());
//! let mut steps = Vec::new();
//! while let Some(step) = planner.begin_step(&mut plan) {
//!     // `plan.started` fills slots; the device computes `plan.items` and samples where they say so.
//!     outcomes.clear();
//!     outcomes.extend(plan.items.iter().map(|item| if item.samples { Outcome::Token } else { Outcome::Chunk }));
//!     steps.push(plan.items[0].positions.clone());
//!     // `left` empties slots: whoever ended, was cancelled, or has all its tokens.
//!     planner.end_step(step, &plan, &outcomes, &mut left);
//! }
//! assert_eq!(steps, [0..8, 8..10, 10..11, 11..12]);
//! assert_eq!(left[0].0, seq);
//! assert_eq!(planner.occupancy().blocks_free, 8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a step holds
//! 1. Every running sequence whose prompt is finished decodes one token, in every step.
//! 2. What is left of the token budget goes to prompts in arrival order: first to those already running, then to the
//!    head of the queue for as long as a slot and its blocks are free. The head is never overtaken.
//!
//! A sequence that starts takes its slot and all the blocks it can ever need ([`Shape::blocks_for`]), so it runs to
//! its end without waiting for anyone. Since [`Shape::batch_tokens_max`] is at least [`Shape::batch_seqs_max`],
//! decode items can never use up the budget while a running prompt is unfinished: the oldest of those gets at least
//! one position in every step.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::limits::{BATCH_SEQS_MAX, BLOCK_COUNT_MAX, QUEUE_MAX};

mod blocks;

use blocks::Blocks;

/// Waiting and running sequences, and who holds which KV block.
///
/// A value without clock, lock or thread: the same calls give the same plans. What a sequence is doing is where it
/// is stored: in `waiting` it holds nothing, in `running` it holds a slot and a table of `blocks`, elsewhere it is
/// not. All tables are sized by [`Self::new`]; no later call allocates, once the caller's own vectors are warm.
#[derive(Debug)]
pub struct Planner {
    shape: Shape,
    /// In arrival order.
    waiting: VecDeque<Waiting>,
    /// In arrival order, which is also the order of their tables in `blocks`.
    running: Vec<Running>,
    /// Taken from the end; the lowest first at start.
    slots_free: Vec<SlotId>,
    blocks: Blocks,
    seqs_admitted: u64,
    steps_begun: u64,
    /// Number of the step on the device.
    in_flight: Option<u64>,
}

impl Planner {
    /// Creates an empty planner.
    ///
    /// # Errors
    /// [`InvalidShape`], by the first size that is out of range.
    pub fn new(shape: Shape) -> Result<Self, InvalidShape> {
        shape.check()?;
        Ok(Self {
            shape,
            waiting: VecDeque::with_capacity(shape.queue_max as usize),
            running: Vec::with_capacity(shape.batch_seqs_max as usize),
            slots_free: (0..shape.batch_seqs_max).rev().map(SlotId).collect(),
            blocks: Blocks::new(shape.block_count),
            seqs_admitted: 0,
            steps_begun: 0,
            in_flight: None,
        })
    }

    /// Queues a sequence, behind all that were admitted before it. Allowed while a step is in flight.
    ///
    /// # Errors
    /// [`AdmitError::NeverFits`] whatever the load is, else [`AdmitError::QueueFull`].
    pub fn admit(&mut self, request: SeqRequest) -> Result<SeqId, AdmitError> {
        if self.shape.blocks_for(request).is_none_or(|count| count > self.shape.block_count) {
            return Err(AdmitError::NeverFits);
        }
        if self.waiting.len() >= self.shape.queue_max as usize {
            return Err(AdmitError::QueueFull);
        }
        self.seqs_admitted += 1;
        let seq = SeqId(self.seqs_admitted);
        self.waiting.push_back(Waiting { seq, request });
        Ok(seq)
    }

    /// Chooses the next step's work, starts the sequences that now fit, and fills `plan`.
    ///
    /// Returns `None`, with an empty plan, if there is no work or a step is in flight.
    pub fn begin_step(&mut self, plan: &mut Plan) -> Option<Step> {
        plan.clear();
        if self.in_flight.is_some() {
            return None;
        }
        self.plan_running(plan, Phase::Decode);
        self.plan_running(plan, Phase::Prefill);
        while plan.tokens < self.shape.batch_tokens_max && self.start_head(plan) {}
        if plan.items.is_empty() {
            debug_assert!(self.running.is_empty() && self.waiting.is_empty(), "work without a step");
            return None;
        }
        self.steps_begun += 1;
        self.in_flight = Some(self.steps_begun);
        Some(Step(self.steps_begun))
    }

    /// Applies what the device produced, one outcome per item of `plan`, and only now frees the slots and blocks of
    /// sequences that ended or were cancelled meanwhile: the device was using them.
    ///
    /// Fills `left` with those sequences, in arrival order. A sequence with all its output tokens is among them
    /// whether its outcome says [`Outcome::Last`] or not; the outcome of a cancelled one is not looked at. So a
    /// driver whose device failed cancels the plan's sequences and then ends the step.
    ///
    /// # Panics
    /// If `step` or `plan` is not the one in flight, or `outcomes` does not match the plan's items in number and in
    /// which of them have a token. Each is a bug of the driver after which no count here could be trusted.
    pub fn end_step(
        &mut self,
        step: Step,
        plan: &Plan,
        outcomes: &[Outcome],
        left: &mut Vec<(SeqId, SlotId)>,
    ) {
        assert_eq!(self.in_flight.take(), Some(step.0), "the step that ends is the one in flight");
        assert_eq!(plan.items.len(), outcomes.len(), "one outcome per item");
        for (item, outcome) in plan.items.iter().zip(outcomes) {
            let at = self.find_running(item.seq).expect("a planned sequence runs until its step ends");
            self.running[at].apply(item, *outcome);
        }
        left.clear();
        let (shape, slots_free) = (self.shape, &mut self.slots_free);
        let mut sweep = self.blocks.sweep();
        self.running.retain(|running| {
            let block_count = running.block_count(shape);
            if !running.leaves {
                sweep.keep(block_count);
                return true;
            }
            sweep.free(block_count);
            slots_free.push(running.slot);
            left.push((running.seq, running.slot));
            false
        });
    }

    /// Drops a sequence, at once where no step can be using what it holds.
    ///
    /// A number that is not known is no error: cancellation races completion by nature.
    pub fn cancel(&mut self, seq: SeqId) -> Cancelled {
        if let Ok(at) = self.waiting.binary_search_by_key(&seq, |waiting| waiting.seq) {
            self.waiting.remove(at);
            return Cancelled::FromQueue;
        }
        let Some(at) = self.find_running(seq) else {
            return Cancelled::Unknown;
        };
        if self.in_flight.is_some() {
            self.running[at].leaves = true;
            return Cancelled::AtStepEnd;
        }
        let mut sweep = self.blocks.sweep();
        for older in &self.running[..at] {
            sweep.keep(older.block_count(self.shape));
        }
        let gone = self.running.remove(at);
        sweep.free(gone.block_count(self.shape));
        self.slots_free.push(gone.slot);
        Cancelled::FromSlot(gone.slot)
    }

    /// Returns the counts that a gauge or an assertion needs.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        Occupancy {
            blocks_free: self.blocks.free_count(),
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
        }
    }

    /// Returns the sizes given to [`Self::new`].
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Plans the running sequences that are in `phase`, in arrival order, as far as the budget goes.
    fn plan_running(&self, plan: &mut Plan, phase: Phase) {
        let mut table_start = 0;
        for running in &self.running {
            let budget = self.shape.batch_tokens_max - plan.tokens;
            if budget == 0 {
                return;
            }
            if running.phase() == phase {
                self.plan_item(plan, running, table_start, budget);
            }
            table_start += running.block_count(self.shape) as usize;
        }
    }

    /// Gives the head of the queue its slot, its blocks and its first chunk. Changes nothing and returns `false` if
    /// the queue is empty or something is lacking.
    fn start_head(&mut self, plan: &mut Plan) -> bool {
        let (Some(&head), Some(&slot)) = (self.waiting.front(), self.slots_free.last()) else {
            return false;
        };
        let running = Running::new(head, slot);
        let table_start = self.blocks.held_count();
        if !self.blocks.take(running.block_count(self.shape)) {
            return false;
        }
        self.waiting.pop_front();
        self.slots_free.pop();
        plan.started.push((running.seq, slot));
        self.plan_item(plan, &running, table_start, self.shape.batch_tokens_max - plan.tokens);
        self.running.push(running);
        true
    }

    /// Appends the next at most `budget` positions of one sequence.
    fn plan_item(&self, plan: &mut Plan, running: &Running, table_start: usize, budget: u32) {
        let prompt = running.request.prompt_tokens;
        let start = running.computed;
        let end = match running.phase() {
            Phase::Decode => start + 1,
            Phase::Prefill => start + budget.min(prompt - start),
        };
        let block_count = end.div_ceil(self.shape.block_tokens);
        let blocks_start = plan.block_tables.len() as u32;
        let table = self.blocks.table(table_start..table_start + block_count as usize);
        plan.block_tables.extend_from_slice(table);
        plan.items.push(Item {
            seq: running.seq,
            slot: running.slot,
            positions: start..end,
            blocks: blocks_start..blocks_start + block_count,
            samples: end >= prompt,
        });
        plan.tokens += end - start;
    }

    fn find_running(&self, seq: SeqId) -> Option<usize> {
        self.running.binary_search_by_key(&seq, |running| running.seq).ok()
    }
}

/// Number of a sequence, unique for the planner's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(u64);

impl SeqId {
    /// Returns the number: 1 for the first sequence admitted, then counting up in arrival order.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Index of a running sequence into tables of [`Shape::batch_seqs_max`] rows; reused after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// Number of a KV block, `0..block_count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// Sizes fixed at start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens per KV block, at least 1.
    pub block_tokens: u32,
    /// KV blocks on the device, `1..=BLOCK_COUNT_MAX`; all their tokens together are at most `u32::MAX`.
    pub block_count: u32,
    /// Most sequences running at once, and so in one step, `1..=BATCH_SEQS_MAX`.
    pub batch_seqs_max: u32,
    /// Most tokens in one step, prefill and decode together; at least `batch_seqs_max`.
    pub batch_tokens_max: u32,
    /// Most sequences waiting, `1..=QUEUE_MAX`. A sequence waits until the step after its admission even if a slot
    /// is free.
    pub queue_max: u32,
}

impl Shape {
    /// Returns how many blocks a sequence holds from its start to its end: enough for every position whose K and V
    /// may be written.
    ///
    /// That is one position less than prompt and output together: the last token is sampled and never computed on.
    /// `None` if the request is empty (no prompt or no output) or its length passes `u32`.
    #[must_use]
    pub const fn blocks_for(self, request: SeqRequest) -> Option<u32> {
        if request.prompt_tokens == 0 || request.output_tokens_max == 0 {
            return None;
        }
        match request.prompt_tokens.checked_add(request.output_tokens_max - 1) {
            Some(positions) => Some(positions.div_ceil(self.block_tokens)),
            None => None,
        }
    }

    fn check(self) -> Result<(), InvalidShape> {
        for (field, value, max) in [
            ("block_tokens", self.block_tokens, u32::MAX),
            ("block_count", self.block_count, BLOCK_COUNT_MAX),
            ("batch_seqs_max", self.batch_seqs_max, BATCH_SEQS_MAX),
            ("queue_max", self.queue_max, QUEUE_MAX),
        ] {
            if value == 0 || value > max {
                return Err(InvalidShape::OutOfRange { field, value, max });
            }
        }
        if self.batch_tokens_max < self.batch_seqs_max {
            return Err(InvalidShape::BudgetBelowBatch {
                batch_tokens_max: self.batch_tokens_max,
                batch_seqs_max: self.batch_seqs_max,
            });
        }
        if self.block_tokens.checked_mul(self.block_count).is_none() {
            return Err(InvalidShape::CacheTooLarge);
        }
        Ok(())
    }
}

/// A sequence to admit, sizes in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqRequest {
    /// Prompt length, at least 1.
    pub prompt_tokens: u32,
    /// Most tokens to generate, at least 1.
    pub output_tokens_max: u32,
}

/// One step's work. Reused from step to step; its vectors keep their capacity.
#[derive(Debug, Default)]
pub struct Plan {
    /// Work items: decode items first, then prefill chunks, each group in arrival order.
    pub items: Vec<Item>,
    /// Block tables, concatenated; [`Item::blocks`] indexes it.
    pub block_tables: Vec<BlockId>,
    /// Sequences that got their slot and blocks in this step, in arrival order; each also has an item.
    pub started: Vec<(SeqId, SlotId)>,
    /// Sum of the items' position counts, in tokens.
    pub tokens: u32,
}

impl Plan {
    fn clear(&mut self) {
        self.items.clear();
        self.block_tables.clear();
        self.started.clear();
        self.tokens = 0;
    }
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Whose.
    pub seq: SeqId,
    /// Its row in tables of running sequences.
    pub slot: SlotId,
    /// Positions computed this step, `start..end`, in tokens from the sequence's start.
    pub positions: Range<u32>,
    /// Where its block table lies in [`Plan::block_tables`]: enough blocks for `0..positions.end`.
    pub blocks: Range<u32>,
    /// Whether the step yields a token for it (always for decode, last chunk for prefill).
    pub samples: bool,
}

/// A step on the device. Not `Clone`: it ends exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "no further step begins before this one is given to `end_step`"]
pub struct Step(u64);

impl Step {
    /// Returns the step's number: 1 for the planner's first, then counting up.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.0
    }
}

/// What a step produced for one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The prompt is not finished; no token.
    Chunk,
    /// A token, and generation goes on.
    Token,
    /// A token, and it was the last.
    Last,
}

/// When a cancelled sequence lets go of what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a slot may have to be emptied"]
pub enum Cancelled {
    /// It runs and a step is in flight: [`Planner::end_step`] will name it among those that left.
    AtStepEnd,
    /// It was waiting, held nothing, and is gone.
    FromQueue,
    /// It ran, no step is in flight: it is gone, its blocks are free, and this slot is to be emptied.
    FromSlot(SlotId),
    /// Not here: it ended, or was cancelled, before.
    Unknown,
}

/// Counts, for gauges and assertions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Blocks nobody holds.
    pub blocks_free: u32,
    /// Sequences with a slot and blocks.
    pub running: u32,
    /// Sequences that hold nothing yet.
    pub waiting: u32,
}

/// Why a sequence was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmitError {
    /// It could never run (400): it needs more than the whole cache, or it has no prompt or no output.
    NeverFits,
    /// The queue is full (429).
    QueueFull,
}

impl fmt::Display for AdmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverFits => "the sequence can never fit the KV cache",
            Self::QueueFull => "the queue is full",
        })
    }
}

impl core::error::Error for AdmitError {}

/// The sizes contradict each other or a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidShape {
    /// A step's budget must hold one token of every running sequence.
    BudgetBelowBatch {
        /// The budget, in tokens.
        batch_tokens_max: u32,
        /// The batch, in sequences.
        batch_seqs_max: u32,
    },
    /// `block_tokens * block_count` passes `u32`.
    CacheTooLarge,
    /// A size is 0 or above its limit.
    OutOfRange {
        /// Which field of [`Shape`].
        field: &'static str,
        /// What it was.
        value: u32,
        /// The largest allowed; the smallest is 1.
        max: u32,
    },
}

impl fmt::Display for InvalidShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BudgetBelowBatch { batch_tokens_max, batch_seqs_max } => write!(
                f,
                "batch_tokens_max is {batch_tokens_max}, below batch_seqs_max, which is {batch_seqs_max}"
            ),
            Self::CacheTooLarge => {
                write!(f, "block_tokens times block_count is above {} tokens", u32::MAX)
            }
            Self::OutOfRange { field, value, max } => write!(f, "{field} is {value}, outside 1..={max}"),
        }
    }
}

impl core::error::Error for InvalidShape {}

/// A sequence that holds nothing.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    seq: SeqId,
    request: SeqRequest,
}

/// A sequence with a slot and a table of blocks.
#[derive(Debug)]
struct Running {
    seq: SeqId,
    slot: SlotId,
    request: SeqRequest,
    /// Positions whose K and V are written, from the sequence's start.
    computed: u32,
    /// It goes when the step in flight ends.
    leaves: bool,
}

impl Running {
    fn new(head: Waiting, slot: SlotId) -> Self {
        Self { seq: head.seq, slot, request: head.request, computed: 0, leaves: false }
    }

    fn apply(&mut self, item: &Item, outcome: Outcome) {
        self.computed = item.positions.end;
        if self.leaves {
            return;
        }
        assert_eq!(item.samples, outcome != Outcome::Chunk, "a token exactly where the item samples");
        // A sampled token is output number `computed - prompt + 1`.
        let last =
            item.samples && self.computed - self.request.prompt_tokens + 1 >= self.request.output_tokens_max;
        self.leaves = last || outcome == Outcome::Last;
    }

    fn phase(&self) -> Phase {
        if self.computed < self.request.prompt_tokens { Phase::Prefill } else { Phase::Decode }
    }

    fn block_count(&self, shape: Shape) -> u32 {
        shape.blocks_for(self.request).expect("`admit` refuses a request without a block count")
    }
}

/// What a running sequence does next; follows from its counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

#[cfg(test)]
mod tests;

//! The engine thread: jobs in, planner and backend, tokens out.
//!
//! One loop turn is one step: take the inbox, read the clock, drop what was cancelled, admit, plan, compute, sample, and
//! hand every ring one message with all the news its requests have. Three clock reads a step, shared by every request:
//! the step's begin (after the inbox was taken, so no stamp precedes its cause), the end of the forward pass, and the
//! end of sampling.

pub mod text;
pub mod tokenizer;
mod words;

mod mailbox;
mod step_log;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uring_serve_core::metrics::{BlockCounts, EngineReport, StepRecord};
use uring_serve_core::sched::{AdmitError, Outcome, Plan, Planner, SeqId, SeqRequest, Shape, SlotId};
use uring_serve_core::time::MonoNs;
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::{Backend, BackendError, Sequence, Sequences};

use self::step_log::StepLog;
use self::text::{Pushed, StopStrings, TextStream};
use self::tokenizer::{SpecialTokens, Tokenizer};
use crate::clock::Clock;
use crate::prometheus::{EngineLoad, Metrics};
use crate::service::ExchangeId;

pub use self::mailbox::{EngineClient, Mailroom};

/// All the sequences of one request: admitted together or refused together.
#[derive(Debug)]
pub struct Submission {
    /// One job per choice, at least one.
    pub jobs: Vec<Job>,
}

/// One sequence to generate: one choice of one prompt of one request.
#[derive(Debug)]
pub struct Job {
    /// Whose.
    pub exchange: ExchangeId,
    /// Choice index in the response, over all prompts: `prompt_index * n + i`.
    pub choice: u32,
    /// Prompt tokens, at least one.
    pub prompt: Arc<[u32]>,
    /// Most tokens to generate, at least 1; prompt and output together fit the context.
    pub output_tokens_max: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// What ends it early.
    pub stop: Arc<StopRules>,
    /// Whether to collect the step trace (a grant exists).
    pub trace: bool,
    /// Set by the ring when the client is gone; the engine drops the sequence within one step.
    pub cancelled: Arc<AtomicBool>,
}

impl Job {
    fn request(&self) -> SeqRequest {
        SeqRequest { prompt_tokens: self.prompt.len() as u32, output_tokens_max: self.output_tokens_max }
    }
}

/// What ends a sequence before its length limit. Shared by the choices of a request.
#[derive(Debug)]
pub struct StopRules {
    /// Tokens that end it; not part of the text. Sorted.
    pub token_ids: Vec<u32>,
    /// Strings that end it; never sent, not even in part.
    pub strings: Arc<StopStrings>,
    /// Whether control tokens of the output show as text.
    pub special: SpecialTokens,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The cancel flag was seen.
    Cancelled,
    /// The device failed; the log has its words.
    Failed,
    /// `output_tokens_max` reached.
    Length,
    /// Never scheduled: it could never fit the KV cache (400).
    NeverFits,
    /// Never scheduled: the queue was full (429).
    QueueFull,
    /// A stop token or stop string.
    Stop,
}

/// What one or more steps produced for one ring: all its sequences' deltas in one message. Buffers are recycled.
#[derive(Debug, Default)]
pub struct StepBatch {
    /// One entry per sequence and step that has something to say, in step order.
    pub deltas: Vec<Delta>,
    /// The deltas' text, concatenated; always whole UTF-8 characters.
    pub text: String,
}

impl StepBatch {
    /// Empties it, keeping its memory.
    pub fn clear(&mut self) {
        self.deltas.clear();
        self.text.clear();
    }
}

/// News of one sequence.
#[derive(Debug)]
pub struct Delta {
    /// Whose.
    pub exchange: ExchangeId,
    /// Choice index.
    pub choice: u32,
    /// Range of [`StepBatch::text`]; may be empty (held back, or only the end).
    pub text: core::ops::Range<usize>,
    /// Output tokens so far, this step's included.
    pub tokens: u32,
    /// End of the step that sampled the first token: set in the delta that carries it.
    pub first_token: Option<MonoNs>,
    /// Set in the last delta of a sequence.
    pub end: Option<Box<End>>,
}

/// How a sequence ended, and its times.
#[derive(Debug)]
pub struct End {
    /// Why.
    pub ended: Ended,
    /// Marks, blocks and steps.
    pub report: EngineReport,
}

/// Owns the planner, the backend and every running sequence; runs on a thread of its own.
pub struct Engine {
    backend: Box<dyn Backend>,
    clock: Arc<dyn Clock>,
    shape: Shape,
    planner: Planner,
    tokenizer: Arc<Tokenizer>,
    mailroom: Mailroom,
    metrics: Arc<Metrics>,
    waiting: VecDeque<Waiting>,
    /// By slot. A sequence is either in `waiting` or here, never both.
    running: Vec<Option<Running>>,
    sequences: Sequences,
    plan: Plan,
    sampled: Vec<u32>,
    outcomes: Vec<Outcome>,
    released: Vec<(SeqId, SlotId)>,
    arrivals: Vec<Submission>,
    log: StepLog,
    iter: u64,
    requests: u64,
    /// Why no later step can succeed, once that is so.
    broken: Option<BackendError>,
}

/// Admitted, not yet started.
struct Waiting {
    seq: SeqId,
    request_id: u64,
    job: Job,
}

/// Holds a slot and blocks.
struct Running {
    seq: SeqId,
    job: Job,
    text: TextStream,
    report: EngineReport,
    output_tokens: u32,
}

impl Engine {
    /// Creates an engine with nothing running.
    ///
    /// # Errors
    /// When the sizes of `shape` contradict each other.
    pub fn new(
        backend: Box<dyn Backend>,
        clock: Arc<dyn Clock>,
        shape: Shape,
        tokenizer: Arc<Tokenizer>,
        mailroom: Mailroom,
        metrics: Arc<Metrics>,
    ) -> Result<Self, uring_serve_core::sched::InvalidShape> {
        let planner = Planner::new(shape)?;
        let slots = shape.batch_seqs_max as usize;
        Ok(Self {
            backend,
            clock,
            shape,
            planner,
            tokenizer,
            mailroom,
            metrics,
            waiting: VecDeque::with_capacity(shape.queue_max as usize),
            running: (0..slots).map(|_| None).collect(),
            sequences: Sequences::new(shape.batch_seqs_max),
            plan: Plan::default(),
            sampled: Vec::with_capacity(slots),
            outcomes: Vec::with_capacity(slots),
            released: Vec::with_capacity(slots),
            arrivals: Vec::new(),
            log: StepLog::default(),
            iter: 0,
            requests: 0,
            broken: None,
        })
    }

    /// Runs until every [`EngineClient`] is gone and nothing runs or waits. Calls `broken` once the backend can do no
    /// further step: somebody else should take the requests. Those that come nevertheless are answered, as failed.
    ///
    /// # Errors
    /// What broke the backend.
    pub fn run(mut self, broken: impl FnOnce()) -> Result<(), BackendError> {
        while self.broken.is_none() {
            if !self.turn() {
                return Ok(());
            }
        }
        broken();
        while self.turn() {}
        self.broken.map_or(Ok(()), Err)
    }

    /// Runs one turn; false when there is nothing left to do for ever.
    fn turn(&mut self) -> bool {
        let idle = self.is_idle();
        if !self.mailroom.collect(idle, &mut self.arrivals) && idle {
            return false;
        }
        self.drop_cancelled();
        let mut arrivals = std::mem::take(&mut self.arrivals);
        for submission in arrivals.drain(..) {
            self.admit(submission);
        }
        self.arrivals = arrivals;
        self.step();
        self.publish();
        self.mailroom.deliver();
        true
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.planner.occupancy().running == 0
    }

    /// Queues all jobs of a request, or refuses all of them.
    fn admit(&mut self, submission: Submission) {
        let refused = self.refusal(&submission.jobs);
        for job in submission.jobs {
            self.requests += 1;
            let request_id = self.requests;
            if let Some(ended) = &refused {
                self.mailroom.send_end(
                    &job,
                    ended.clone(),
                    EngineReport { request_id, ..EngineReport::default() },
                );
                continue;
            }
            match self.planner.admit(job.request()) {
                Ok(seq) => self.waiting.push_back(Waiting { seq, request_id, job }),
                Err(error) => {
                    let ended = match error {
                        AdmitError::NeverFits => Ended::NeverFits,
                        AdmitError::QueueFull => Ended::QueueFull,
                    };
                    self.mailroom.send_end(
                        &job,
                        ended,
                        EngineReport { request_id, ..EngineReport::default() },
                    );
                }
            }
        }
    }

    /// Returns why these jobs cannot be queued together.
    fn refusal(&self, jobs: &[Job]) -> Option<Ended> {
        let fits = |job: &Job| {
            self.shape.blocks_for(job.request()).is_some_and(|blocks| blocks <= self.shape.block_count)
        };
        let room = (self.shape.queue_max as usize).saturating_sub(self.waiting.len());
        if !jobs.iter().all(fits) {
            Some(Ended::NeverFits)
        } else if jobs.len() > room {
            Some(Ended::QueueFull)
        } else {
            None
        }
    }

    /// Frees what clients have left. No step is in flight here, so the blocks are free at once.
    fn drop_cancelled(&mut self) {
        let Self { waiting, planner, mailroom, .. } = self;
        waiting.retain(|entry| {
            let stays = !entry.job.cancelled.load(Ordering::Relaxed);
            if !stays {
                // It waits, so it holds no slot.
                let _ = planner.cancel(entry.seq);
                let report = EngineReport { request_id: entry.request_id, ..EngineReport::default() };
                mailroom.send_end(&entry.job, Ended::Cancelled, report);
            }
            stays
        });
        for slot in 0..self.running.len() {
            let gone = self.running[slot]
                .as_ref()
                .is_some_and(|running| running.job.cancelled.load(Ordering::Relaxed));
            if gone && let Some(running) = self.running[slot].take() {
                // No step is in flight; `end` empties the slot.
                let _ = self.planner.cancel(running.seq);
                self.end(SlotId(slot as u32), running, Ended::Cancelled, 0..0);
            }
        }
    }

    /// Plans and computes one step, if there is work.
    fn step(&mut self) {
        if self.is_idle() {
            return;
        }
        let start = self.clock.now();
        let Some(step) = self.planner.begin_step(&mut self.plan) else { return };
        self.iter += 1;
        self.start_sequences(start);
        // A step may be long, and what it works on is not idle.
        self.publish();
        self.sampled.clear();
        let computed = self.compute(start);
        self.outcomes.clear();
        match computed {
            Ok(record) => {
                if let Some(span) = record.sample_end.checked_since(record.forward_start) {
                    self.metrics.engine().count_step(span);
                }
                self.log.push(record);
                self.apply(&record);
            }
            Err(error) => self.fail_step(&error),
        }
        self.planner.end_step(step, &self.plan, &self.outcomes, &mut self.released);
        self.released.clear();
        if self.log.is_full() {
            self.share_log();
        }
    }

    /// Moves sequences that the plan starts from the queue into their slots.
    fn start_sequences(&mut self, start: MonoNs) {
        for &(started, slot) in &self.plan.started {
            // The planner starts in arrival order, so the entry is at the front.
            let Some(Waiting { seq, request_id, job }) = self.waiting.pop_front() else { break };
            debug_assert_eq!(seq, started);
            let mut tokens = Vec::with_capacity(job.prompt.len() + job.output_tokens_max as usize);
            tokens.extend_from_slice(&job.prompt);
            let mut sampler = Sampler::new(job.sampling.clone(), &job.prompt);
            sampler.reserve_output(job.output_tokens_max);
            self.sequences.insert(slot, Sequence { tokens, sampler });
            let blocks = self.shape.blocks_for(job.request()).unwrap_or(0);
            let report = EngineReport {
                request_id,
                first_scheduled: Some(start),
                first_iter: Some(self.iter),
                blocks: BlockCounts {
                    total_allocated: blocks,
                    new_allocated: blocks,
                    ..BlockCounts::default()
                },
                ..EngineReport::default()
            };
            let text = TextStream::new(Arc::clone(&job.stop.strings), job.stop.special)
                .open_for(job.sampling.min_tokens);
            self.running[slot.0 as usize] = Some(Running { seq, job, text, report, output_tokens: 0 });
        }
    }

    /// The two halves of the backend's step, with the clock read between and after them.
    fn compute(&mut self, forward_start: MonoNs) -> Result<StepRecord, BackendError> {
        let pace = self.backend.forward(&self.plan, &self.sequences)?;
        if !pace.is_zero() {
            self.clock.wait_until(forward_start.saturating_add(pace));
        }
        let forward_end = self.clock.now();
        self.backend.sample(&self.plan, &mut self.sequences, &mut self.sampled)?;
        let sample_end = self.clock.now();
        let gpu = self.backend.gpu_times_ns();
        Ok(StepRecord {
            iter: self.iter,
            forward_start,
            forward_end,
            sample_end,
            gpu_forward_ns: gpu.map(|times| times.0),
            gpu_sample_ns: gpu.map(|times| times.1),
        })
    }

    /// Gives each item's sequence its token, decides what ends, and queues the news.
    fn apply(&mut self, record: &StepRecord) {
        let mut sampled = 0;
        for index in 0..self.plan.items.len() {
            let item = &self.plan.items[index];
            let (slot, samples, prompt_end) = (item.slot, item.samples, item.positions.end);
            let token = if samples { self.sampled.get(sampled).copied() } else { None };
            sampled += usize::from(samples);
            let outcome = match (self.running[slot.0 as usize].take(), token) {
                // Cancelled sequences are dropped before the plan is made, so every item has its sequence.
                (None, token) => {
                    if token.is_some() {
                        Outcome::Last
                    } else {
                        Outcome::Chunk
                    }
                }
                (Some(mut running), None) => {
                    running.note_step(record.iter, Phase::Context);
                    self.running[slot.0 as usize] = Some(running);
                    Outcome::Chunk
                }
                (Some(running), Some(token)) => self.take_token(slot, running, token, prompt_end, record),
            };
            self.outcomes.push(outcome);
        }
    }

    fn take_token(
        &mut self,
        slot: SlotId,
        mut running: Running,
        token: u32,
        computed: u32,
        record: &StepRecord,
    ) -> Outcome {
        let first = running.output_tokens == 0;
        debug_assert!(!first || computed as usize == running.job.prompt.len());
        running.note_step(record.iter, if first { Phase::Context } else { Phase::Decode });
        running.output_tokens += 1;
        running.report.first_token.get_or_insert(record.sample_end);
        running.report.last_token = Some(record.sample_end);
        if let Some(sequence) = self.sequences.at_mut(slot) {
            sequence.tokens.push(token);
        }
        let batch = self.mailroom.batch(running.job.exchange.worker);
        let from = batch.text.len();
        let stopped = if running.job.stop.token_ids.binary_search(&token).is_ok() {
            true
        } else {
            running.text.push(&self.tokenizer, token, &mut batch.text) == Pushed::Stopped
        };
        let full = running.output_tokens == running.job.output_tokens_max;
        if stopped || full {
            // Held-back text can complete a stop string no more: nothing follows it.
            let _ = running.text.finish(&mut batch.text);
            let text = from..batch.text.len();
            let ended = if stopped { Ended::Stop } else { Ended::Length };
            self.end(slot, running, ended, text);
            return Outcome::Last;
        }
        let text = from..batch.text.len();
        if first || !text.is_empty() {
            batch.deltas.push(Delta {
                exchange: running.job.exchange,
                choice: running.job.choice,
                text,
                tokens: running.output_tokens,
                first_token: first.then_some(record.sample_end),
                end: None,
            });
        }
        self.running[slot.0 as usize] = Some(running);
        Outcome::Token
    }

    /// Empties the slot and sends the sequence's last delta.
    fn end(&mut self, slot: SlotId, mut running: Running, ended: Ended, text: core::ops::Range<usize>) {
        self.sequences.remove(slot);
        if running.job.trace {
            self.share_log_with(&mut running);
        }
        let first_token = (running.output_tokens == 1).then_some(running.report.first_token).flatten();
        self.mailroom.batch(running.job.exchange.worker).deltas.push(Delta {
            exchange: running.job.exchange,
            choice: running.job.choice,
            text,
            tokens: running.output_tokens,
            first_token,
            end: Some(Box::new(End { ended, report: running.report })),
        });
    }

    /// The device failed: every sequence of the step is lost, the ones that wait are not.
    fn fail_step(&mut self, error: &BackendError) {
        tracing::error!(iter = self.iter, %error, "step failed");
        if self.backend.is_broken() {
            self.broken.get_or_insert_with(|| error.clone());
        }
        for index in 0..self.plan.items.len() {
            let slot = self.plan.items[index].slot;
            if let Some(running) = self.running[slot.0 as usize].take() {
                self.end(slot, running, Ended::Failed, 0..0);
            }
            // What a cancelled sequence's outcome says is not looked at; it has to fit its item.
            let samples = self.plan.items[index].samples;
            let _ = self.planner.cancel(self.plan.items[index].seq);
            self.outcomes.push(if samples { Outcome::Last } else { Outcome::Chunk });
        }
    }

    /// Freezes the step log and gives it to every traced sequence. Without one it costs nothing.
    fn share_log(&mut self) {
        let mut traced = self.running.iter_mut().flatten().filter(|running| running.job.trace).peekable();
        if traced.peek().is_none() {
            return self.log.clear();
        }
        let Some(slice) = self.log.freeze() else { return };
        for running in traced {
            running.report.steps.slices.push(Arc::clone(&slice));
        }
    }

    /// The same, when `ending` was already taken out of its slot.
    fn share_log_with(&mut self, ending: &mut Running) {
        let Some(slice) = self.log.freeze() else { return };
        for running in self.running.iter_mut().flatten().filter(|running| running.job.trace) {
            running.report.steps.slices.push(Arc::clone(&slice));
        }
        ending.report.steps.slices.push(slice);
    }

    fn publish(&self) {
        let occupancy = self.planner.occupancy();
        self.metrics.engine().set_load(EngineLoad {
            kv_blocks_free: occupancy.blocks_free,
            running: occupancy.running,
            waiting: occupancy.waiting,
        });
    }
}

/// What a step did for a sequence.
#[derive(Clone, Copy)]
enum Phase {
    /// Worked on its prompt; the last such step also samples the first token.
    Context,
    /// Sampled a further token.
    Decode,
}

impl Running {
    fn note_step(&mut self, iter: u64, phase: Phase) {
        self.report.last_iter = Some(iter);
        if !self.job.trace {
            return;
        }
        match phase {
            Phase::Context => self.report.steps.chunk_iters.push(iter),
            Phase::Decode => {
                let first = self.report.steps.decode_iters.map_or(iter, |(first, _)| first);
                self.report.steps.decode_iters = Some((first, iter));
            }
        }
    }
}

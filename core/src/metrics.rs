//! Marks in, record out; the one table of wire quantities.
//!
//! [`Builder`] gathers the front end's marks of one prompt, [`EngineReport`] is the engine's share, and
//! [`Builder::finish`] makes the [`Record`] of both. Headers, events and JSONL are written from a record by the tables
//! of this module ([`TIMES`], [`SPANS`], [`COUNTS`], [`STEP_ITEMS`]) and read back by them. A time not reached is
//! `None`, everywhere.

pub(crate) mod text;
mod wire;

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::{Index, IndexMut};
use core::time::Duration;

pub use self::wire::{
    BLOCKS, COUNTS, CTX_REQUEST_ID, Count, DISAGG_REQUEST_ID, FIRST_ITER, KV_CACHE_SIZE, LAST_ITER, Missing,
    REQUEST_ID, SPANS, STEP_ITEMS, Span, TIMES, TimeField, Token,
};
use crate::gate::Collect;
use crate::time::{ClockOffset, MonoNs, ReportNs};

/// One engine step, shared by every request that took part in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRecord {
    /// The engine's step number, from 1.
    pub iter: u64,
    /// The step began; equals the forward pass's begin.
    pub forward_start: MonoNs,
    /// The forward pass ended; equals sampling's begin.
    pub forward_end: MonoNs,
    /// Sampling ended; equals the step's end.
    pub sample_end: MonoNs,
    /// GPU time of the forward pass, in nanoseconds; `None` on a CPU.
    pub gpu_forward_ns: Option<u64>,
    /// GPU time of sampling, in nanoseconds; `None` on a CPU.
    pub gpu_sample_ns: Option<u64>,
}

impl StepRecord {
    fn spans(&self, number: u64) -> StepSpans {
        let between = |from: MonoNs, to: MonoNs| to.checked_since(from).and_then(whole_ns);
        StepSpans {
            number,
            ns: [
                between(self.forward_start, self.forward_end),
                between(self.forward_end, self.sample_end),
                self.gpu_forward_ns,
                self.gpu_sample_ns,
            ],
        }
    }
}

/// The steps one request took part in: shared slices, never copies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTrace {
    /// Slices of the engine's step log, in step order; they may hold steps of others.
    pub slices: Vec<Arc<[StepRecord]>>,
    /// Steps that worked on the prompt (context chunks), in order.
    pub chunk_iters: Vec<u64>,
    /// First and last decode step, both included; `None` when the first token was the last.
    /// A running sequence takes part in every step between the two.
    pub decode_iters: Option<(u64, u64)>,
}

impl StepTrace {
    /// Iterates over the decode steps, in order.
    pub fn decode_steps(&self) -> impl Iterator<Item = &StepRecord> {
        self.records()
            .filter(|step| self.decode_iters.is_some_and(|(first, last)| (first..=last).contains(&step.iter)))
    }

    /// Iterates over the steps that worked on the prompt, in order.
    pub fn chunks(&self) -> impl Iterator<Item = &StepRecord> {
        self.records().filter(|step| self.chunk_iters.binary_search(&step.iter).is_ok())
    }

    fn records(&self) -> impl Iterator<Item = &StepRecord> {
        self.slices.iter().flat_map(|slice| slice.iter())
    }
}

/// KV blocks of one request, counted in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Held in all.
    pub total_allocated: u32,
    /// Newly taken from the free list.
    pub new_allocated: u32,
    /// Reused from cached prefixes.
    pub reused: u32,
    /// Looked up in the cache and not found.
    pub missed: u32,
}

/// What the engine reports about one sequence when it ends, however it ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// The engine's request number, from 1.
    pub request_id: u64,
    /// Begin of the first step that worked on it.
    pub first_scheduled: Option<MonoNs>,
    /// End of the step that sampled the first token.
    pub first_token: Option<MonoNs>,
    /// End of the step that sampled the last token.
    pub last_token: Option<MonoNs>,
    /// First step that worked on it.
    pub first_iter: Option<u64>,
    /// Last step that worked on it.
    pub last_iter: Option<u64>,
    /// Its KV blocks.
    pub blocks: BlockCounts,
    /// Its steps; empty unless a grant asked for them.
    pub steps: StepTrace,
}

/// One prompt's timeline, while it is being served.
///
/// Every mark is kept once: the first wins, so that a retry or a second leg cannot move a time already told.
#[derive(Clone, Debug)]
pub struct Builder {
    server_arrival: MonoNs,
    arrival: Option<MonoNs>,
    server_first_token: Option<MonoNs>,
}

impl Builder {
    /// Starts the timeline at the moment the request's head was complete.
    #[must_use]
    pub const fn new(_proof: Collect, server_arrival: MonoNs) -> Self {
        Self { server_arrival, arrival: None, server_first_token: None }
    }

    /// Marks the hand-over to the engine.
    ///
    /// # Errors
    /// [`OutOfOrder`] if it lies before the head's arrival; the mark stays absent.
    pub fn mark_arrival(&mut self, at: MonoNs) -> Result<(), OutOfOrder> {
        mark(&mut self.arrival, at, self.server_arrival)
    }

    /// Marks the first token's coming to the front end, streamed or not.
    ///
    /// # Errors
    /// [`OutOfOrder`] if it lies before the hand-over to the engine; the mark stays absent.
    pub fn mark_server_first_token(&mut self, at: MonoNs) -> Result<(), OutOfOrder> {
        mark(&mut self.server_first_token, at, self.arrival.unwrap_or(self.server_arrival))
    }

    /// Ends the timeline. `engine` is `None` for a prompt that never reached the engine; `clock` moves the reported times.
    ///
    /// A time before the one it follows from is left out: a clock that runs backwards must not become a duration.
    #[must_use]
    pub fn finish(self, status: Status, engine: Option<EngineReport>, clock: ClockOffset) -> Record {
        let mut floor = self.server_arrival;
        let mut follow = |at: Option<MonoNs>| {
            floor = at.filter(|at| *at >= floor)?;
            Some(clock.to_reference(floor))
        };
        let report = engine.as_ref();
        let times = Times {
            server_arrival: follow(Some(self.server_arrival)),
            arrival: follow(self.arrival),
            first_scheduled: follow(report.and_then(|report| report.first_scheduled)),
            first_token: follow(report.and_then(|report| report.first_token)),
            ..Times::default()
        };
        // Both follow from the first token, and neither from the other.
        let after_first_token = |at: Option<MonoNs>| Some(clock.to_reference(at.filter(|at| *at >= floor)?));
        let times = Times {
            last_token: after_first_token(report.and_then(|report| report.last_token)),
            server_first_token: after_first_token(self.server_first_token),
            ..times
        };
        let record = Record { status, times, ..Record::default() };
        let Some(report) = engine else { return record };
        Record {
            request_id: Some(report.request_id),
            first_iter: report.first_iter,
            last_iter: report.last_iter,
            blocks: Some(report.blocks),
            steps: Steps::Shared { trace: report.steps, clock },
            ..record
        }
    }
}

fn mark(slot: &mut Option<MonoNs>, at: MonoNs, floor: MonoNs) -> Result<(), OutOfOrder> {
    if at < floor {
        return Err(OutOfOrder);
    }
    slot.get_or_insert(at);
    Ok(())
}

/// A mark lay before the one it follows from. It was left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfOrder;

impl fmt::Display for OutOfOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mark lies before the one it follows from")
    }
}

impl core::error::Error for OutOfOrder {}

/// How a prompt ended (product contract 5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Status {
    /// The client was known gone before the final send was submitted.
    Aborted,
    /// Served whole. The only one that headers and events show.
    #[default]
    Complete,
    /// The server failed it.
    Error,
    /// Answered 4xx, 429 or 503 before it was scheduled.
    Rejected,
    /// Took longer than allowed.
    Timeout,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Aborted, Self::Complete, Self::Error, Self::Rejected, Self::Timeout];

    /// Returns the name in records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aborted => "aborted",
            Self::Complete => "complete",
            Self::Error => "error",
            Self::Rejected => "rejected",
            Self::Timeout => "timeout",
        }
    }
}

/// The part of a request's way that a record tells of; its name begins every token of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The context worker's share of a disaggregated request.
    Ctx,
    /// The generation worker's share of a disaggregated request.
    Gen,
    /// A worker's own view: what it calls itself, whatever its role.
    #[default]
    Server,
}

impl Phase {
    /// Returns the name in tokens.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ctx => "ctx",
            Self::Gen => "gen",
            Self::Server => "server",
        }
    }
}

/// One prompt's finished record, our own or read back from a worker's headers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Which part of a request's way it tells of.
    pub phase: Phase,
    /// The engine's number, from 1; `None` for a prompt that never reached an engine.
    pub request_id: Option<u64>,
    /// The client's own `x-request-id`.
    pub x_request_id: Option<String>,
    /// How it ended.
    pub status: Status,
    /// When what happened.
    pub times: Times,
    /// Size of the KV cache transferred, in bytes.
    pub kv_cache_size: Option<u64>,
    /// First step that worked on it.
    pub first_iter: Option<u64>,
    /// Last step that worked on it.
    pub last_iter: Option<u64>,
    /// Its KV blocks; `None` if no engine reported any.
    pub blocks: Option<BlockCounts>,
    /// The context worker's number of the request.
    pub ctx_request_id: Option<u64>,
    /// The number that joins the two legs of a disaggregated request.
    pub disagg_request_id: Option<u64>,
    /// Its steps.
    pub steps: Steps,
}

impl Record {
    /// Iterates over the spans of the decode steps, in order; numbered by step.
    pub fn step_spans(&self) -> impl Iterator<Item = StepSpans> {
        let shared = self.steps.shared().into_iter().flat_map(|(trace, _)| trace.decode_steps());
        shared.map(|step| step.spans(step.iter)).chain(self.steps.read_back().0.iter().copied())
    }

    /// Iterates over the spans of the context chunks, in order; numbered from 0.
    pub fn chunk_spans(&self) -> impl Iterator<Item = StepSpans> {
        let shared = self.steps.shared().into_iter().flat_map(|(trace, _)| trace.chunks());
        let shared = (0..).zip(shared).map(|(index, step)| step.spans(index));
        shared.chain(self.steps.read_back().1.iter().copied())
    }
}

/// Where a record's steps are.
#[derive(Clone, Debug, PartialEq)]
pub enum Steps {
    /// In the engine's step log, on this process' clock.
    Shared {
        /// Which ones.
        trace: StepTrace,
        /// What moves their times to the reported clock.
        clock: ClockOffset,
    },
    /// Read back from a worker's headers, which carry no times of steps.
    Spans {
        /// Decode steps, in order.
        steps: Vec<StepSpans>,
        /// Context chunks, in order.
        chunks: Vec<StepSpans>,
    },
}

impl Steps {
    /// Returns the trace and what moves its times, or `None` for steps that were read back.
    #[must_use]
    pub const fn shared(&self) -> Option<(&StepTrace, ClockOffset)> {
        match self {
            Self::Shared { trace, clock } => Some((trace, *clock)),
            Self::Spans { .. } => None,
        }
    }

    fn read_back(&self) -> (&[StepSpans], &[StepSpans]) {
        match self {
            Self::Shared { .. } => (&[], &[]),
            Self::Spans { steps, chunks } => (steps, chunks),
        }
    }
}

impl Default for Steps {
    fn default() -> Self {
        Self::Shared { trace: StepTrace::default(), clock: ClockOffset::default() }
    }
}

/// The spans of one step or context chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSpans {
    /// The engine's step number, or the chunk's index.
    pub number: u64,
    /// Nanoseconds of each of [`STEP_ITEMS`], in its order.
    pub ns: [Option<u64>; STEP_ITEMS.len()],
}

/// The moments of one prompt, on the reported clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The request's head was complete.
    pub server_arrival: Option<ReportNs>,
    /// Handed to the engine.
    pub arrival: Option<ReportNs>,
    /// Begin of the first step that worked on it.
    pub first_scheduled: Option<ReportNs>,
    /// End of the step that sampled the first token.
    pub first_token: Option<ReportNs>,
    /// End of the step that sampled the last token.
    pub last_token: Option<ReportNs>,
    /// The front end had the first token, streamed or not.
    pub server_first_token: Option<ReportNs>,
    /// The KV transfer began.
    pub kv_start: Option<ReportNs>,
    /// The KV transfer ended.
    pub kv_end: Option<ReportNs>,
}

impl Times {
    /// Returns the length of a span in nanoseconds. `None` if an end is missing, or comes before the start.
    #[must_use]
    pub fn span(&self, span: &Span) -> Option<u64> {
        self[span.to]?.checked_since(self[span.from]?)
    }
}

/// Names a moment of [`Times`], in the order of a JSONL line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mark {
    /// [`Times::arrival`].
    Arrival,
    /// [`Times::first_scheduled`].
    FirstScheduled,
    /// [`Times::first_token`].
    FirstToken,
    /// [`Times::last_token`].
    LastToken,
    /// [`Times::kv_start`].
    KvStart,
    /// [`Times::kv_end`].
    KvEnd,
    /// [`Times::server_arrival`].
    ServerArrival,
    /// [`Times::server_first_token`].
    ServerFirstToken,
}

impl Index<Mark> for Times {
    type Output = Option<ReportNs>;

    fn index(&self, mark: Mark) -> &Self::Output {
        match mark {
            Mark::Arrival => &self.arrival,
            Mark::FirstScheduled => &self.first_scheduled,
            Mark::FirstToken => &self.first_token,
            Mark::LastToken => &self.last_token,
            Mark::KvStart => &self.kv_start,
            Mark::KvEnd => &self.kv_end,
            Mark::ServerArrival => &self.server_arrival,
            Mark::ServerFirstToken => &self.server_first_token,
        }
    }
}

impl IndexMut<Mark> for Times {
    fn index_mut(&mut self, mark: Mark) -> &mut Self::Output {
        match mark {
            Mark::Arrival => &mut self.arrival,
            Mark::FirstScheduled => &mut self.first_scheduled,
            Mark::FirstToken => &mut self.first_token,
            Mark::LastToken => &mut self.last_token,
            Mark::KvStart => &mut self.kv_start,
            Mark::KvEnd => &mut self.kv_end,
            Mark::ServerArrival => &mut self.server_arrival,
            Mark::ServerFirstToken => &mut self.server_first_token,
        }
    }
}

/// Returns a duration in nanoseconds; `None` past 584 years.
fn whole_ns(duration: Duration) -> Option<u64> {
    u64::try_from(duration.as_nanos()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{self, File, Policy};
    use alloc::vec;

    const fn at(ns: u64) -> MonoNs {
        MonoNs::from_raw(ns)
    }

    const fn reported(ns: i64) -> Option<ReportNs> {
        Some(ReportNs::from_raw(ns))
    }

    fn builder(server_arrival: u64) -> Builder {
        let grants = gate::decide(Policy { file: File::On, ..Policy::default() }, core::iter::empty());
        Builder::new(grants.collect().expect("a file is a grant"), at(server_arrival))
    }

    fn step(iter: u64) -> StepRecord {
        StepRecord {
            iter,
            forward_start: at(iter * 10),
            forward_end: at(iter * 10 + 7),
            sample_end: at(iter * 10 + 9),
            gpu_forward_ns: None,
            gpu_sample_ns: None,
        }
    }

    #[test]
    fn the_first_mark_wins() {
        let mut builder = builder(10);
        assert_eq!(builder.mark_arrival(at(20)), Ok(()));
        assert_eq!(builder.mark_arrival(at(15)), Ok(()));
        assert_eq!(builder.mark_server_first_token(at(40)), Ok(()));
        assert_eq!(builder.mark_server_first_token(at(50)), Ok(()));
        let record = builder.finish(Status::Aborted, None, ClockOffset::default());
        assert_eq!(record.times.arrival, reported(20));
        assert_eq!(record.times.server_first_token, reported(40));
        assert_eq!((record.request_id, record.blocks, record.status), (None, None, Status::Aborted));
    }

    #[test]
    fn a_mark_before_its_cause_is_refused_and_absent() {
        let mut builder = builder(10);
        assert_eq!(builder.mark_arrival(at(9)), Err(OutOfOrder));
        assert_eq!(builder.mark_server_first_token(at(9)), Err(OutOfOrder));
        assert_eq!(builder.mark_arrival(at(10)), Ok(()));
        assert_eq!(builder.mark_server_first_token(at(10)), Ok(()));
        let report = EngineReport {
            first_scheduled: Some(at(9)),
            first_token: Some(at(12)),
            last_token: Some(at(11)),
            ..EngineReport::default()
        };
        let times = builder.finish(Status::Complete, Some(report), ClockOffset::default()).times;
        let expected = Times {
            server_arrival: reported(10),
            arrival: reported(10),
            first_token: reported(12),
            ..Times::default()
        };
        assert_eq!(times, expected);
    }

    #[test]
    fn a_prompt_that_never_got_anywhere_has_no_times_but_its_arrival() {
        let record = builder(10).finish(Status::Rejected, None, ClockOffset::from_raw(-30));
        assert_eq!(record.times, Times { server_arrival: reported(-20), ..Times::default() });
        assert!(SPANS.iter().all(|span| record.times.span(span).is_none()));
    }

    #[test]
    fn spans_need_both_ends_in_order() {
        let times = Times {
            arrival: reported(-5),
            first_token: reported(-5),
            last_token: reported(-6),
            ..Times::default()
        };
        let lengths = SPANS.map(|span| times.span(&span));
        assert_eq!(lengths, [None, Some(0), None, None]);
    }

    #[test]
    fn steps_are_chosen_by_number_from_shared_slices() {
        let log: Vec<Arc<[StepRecord]>> = vec![(1..4).map(step).collect(), (4..8).map(step).collect()];
        let numbers = |chunk_iters: &[u64], decode_iters| {
            let trace = StepTrace { slices: log.clone(), chunk_iters: chunk_iters.into(), decode_iters };
            let record = Record {
                steps: Steps::Shared { trace, clock: ClockOffset::from_raw(5) },
                ..Record::default()
            };
            let steps: Vec<u64> = record.step_spans().map(|spans| spans.number).collect();
            let chunks: Vec<u64> = record.chunk_spans().map(|spans| spans.number).collect();
            (steps, chunks)
        };
        assert_eq!(numbers(&[2], None), (vec![], vec![0]));
        assert_eq!(numbers(&[2, 5], Some((6, 6))), (vec![6], vec![0, 1]));
        assert_eq!(numbers(&[1], Some((2, 7))), (vec![2, 3, 4, 5, 6, 7], vec![0]));
        assert_eq!(numbers(&[], None), (vec![], vec![]));
        assert_eq!(step(3).spans(3).ns, [Some(7), Some(2), None, None]);
    }

    #[test]
    fn tables_hold_every_name_once() {
        let unique = |names: &mut Vec<&str>| {
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            names.len() == count
        };
        let mut tokens: Vec<&str> = TIMES.iter().filter_map(|field| Some(field.token?.text())).collect();
        tokens.extend(COUNTS.iter().map(|count| count.token));
        assert!(unique(&mut tokens));
        // A plain text replacement by an upstream reader must find nothing to replace in them (UF 1.10).
        assert!(tokens.iter().all(|token| !token.contains("server")));
        let mut keys: Vec<&str> = TIMES.iter().map(|field| field.key).collect();
        keys.extend(COUNTS.iter().map(|count| count.key));
        assert!(unique(&mut keys));
        assert!(unique(&mut Status::ALL.map(Status::name).to_vec()));
    }

    #[test]
    fn counts_set_what_they_read() {
        for count in COUNTS {
            let mut record = Record::default();
            assert_eq!((count.read)(&record), None, "{}", count.key);
            (count.set)(&mut record, 7);
            assert_eq!((count.read)(&record), Some(7), "{}", count.key);
        }
        let mut record = Record::default();
        (BLOCKS[0].set)(&mut record, u64::from(u32::MAX) + 1);
        assert_eq!(record.blocks, None);
    }

    #[test]
    fn every_moment_has_a_row() {
        let mut times = Times::default();
        for (ns, field) in (1..).zip(TIMES) {
            times[field.mark] = reported(ns);
        }
        for (ns, field) in (1..).zip(TIMES) {
            assert_eq!(times[field.mark], reported(ns), "{}", field.key);
        }
    }
}

//! One request from its arrival to its record.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uring_serve_core::gate::{Budgets, Grants};
use uring_serve_core::metrics::{Builder, EngineReport, Record, Status};
use uring_serve_core::time::{ClockOffset, MonoNs};

use super::answer::Answer;
use crate::engine::{Delta, Ended};
use crate::prometheus::{Observation, Outcome};

/// A request that is being answered, or whose last sequences are still on their way out of the engine.
pub(super) struct Exchange {
    pub(super) about: About,
    pub(super) phase: Phase,
}

/// What is known from the head on.
pub(super) struct About {
    /// The head was complete.
    pub(super) head_at: MonoNs,
    /// When it is given up (`--request-timeout`).
    pub(super) deadline: Option<MonoNs>,
    /// What the answer's `x-request-id` says.
    pub(super) request_id: RequestId,
    pub(super) grants: Grants,
    pub(super) budgets: Budgets,
    /// Name of the clock header.
    pub(super) clock_header: Arc<str>,
    /// Moves reported times to the reference clock.
    pub(super) clock: ClockOffset,
    /// Shared with the engine's jobs.
    pub(super) cancelled: Arc<AtomicBool>,
    /// How it ended, once that is no longer open. Set before the phase says so when the client left or a sequence
    /// failed while others still run.
    pub(super) verdict: Option<Status>,
}

/// The `x-request-id` of a request. Every answer of the front end has one.
pub(super) enum RequestId {
    /// The client's.
    Kept(String),
    /// Ours, where the client sent none worth keeping: 16 hex digits.
    Own([u8; 16]),
}

impl RequestId {
    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Kept(id) => id.as_bytes(),
            Self::Own(id) => id,
        }
    }

    /// The client's, for the record.
    fn kept(&self) -> Option<String> {
        match self {
            Self::Kept(id) => Some(id.clone()),
            Self::Own(_) => None,
        }
    }
}

/// Where the request is.
pub(super) enum Phase {
    /// Its body is in the front-end pool.
    Preparing,
    /// Its sequences are in the engine.
    Running(Box<Run>),
    /// Its response is whole and waits to be handed to the kernel.
    Settled(Vec<Record>),
}

/// A request whose sequences are in the engine.
pub(super) struct Run {
    pub(super) answer: Answer,
    /// One per prompt.
    prompts: Vec<PromptRun>,
    /// Choices per prompt.
    n: u32,
    /// Sequences that have not ended.
    open: u32,
    /// Handed to the engine.
    arrival: MonoNs,
}

/// One prompt's timeline and its first choice's report: the others share its record (UF 3.4).
struct PromptRun {
    builder: Option<Builder>,
    report: Option<EngineReport>,
}

/// What a delta means for the whole request.
pub(super) enum Progress {
    /// More is to come.
    Open,
    /// The last sequence ended.
    Done,
    /// A sequence could not be served; the ends of the others still come.
    Failed,
}

impl About {
    /// Starts the timeline of one prompt, if anybody will see it.
    pub(super) fn builder(&self) -> Option<Builder> {
        Some(Builder::new(self.grants.collect()?, self.head_at))
    }

    /// Asks the engine to drop what it still has of this request.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Records of a request that never reached the engine: one for each prompt, or one in all.
    pub(super) fn early_records(&self, prompts: usize, status: Status) -> Vec<Record> {
        (0..prompts.max(1))
            .filter_map(|_| self.builder())
            .map(|builder| self.label(builder.finish(status, None, self.clock)))
            .collect()
    }

    fn label(&self, mut record: Record) -> Record {
        record.x_request_id = self.request_id.kept();
        record
    }
}

impl Run {
    /// Begins at the hand-over to the engine.
    pub(super) fn new(about: &About, answer: Answer, prompts: usize, n: u32, now: MonoNs) -> Self {
        let prompts: Vec<PromptRun> = (0..prompts)
            .map(|_| {
                let mut builder = about.builder();
                if let Some(builder) = &mut builder {
                    // Head and hand-over are `now`s of turns of one thread, in this order.
                    let _ = builder.mark_arrival(now);
                }
                PromptRun { builder, report: None }
            })
            .collect();
        let open = prompts.len() as u32 * n;
        Self { answer, prompts, n, open, arrival: now }
    }

    /// Takes a sequence's marks and end; the text is the answer's.
    pub(super) fn note(&mut self, now: MonoNs, delta: &mut Delta) -> Progress {
        let (prompt, choice) = ((delta.choice / self.n) as usize, delta.choice % self.n);
        let Some(prompt) = self.prompts.get_mut(prompt) else { return Progress::Open };
        if delta.first_token.is_some()
            && let Some(builder) = &mut prompt.builder
        {
            // The engine's step ended before this turn's clock was read.
            let _ = builder.mark_server_first_token(now);
        }
        let Some(end) = delta.end.as_mut() else { return Progress::Open };
        self.open -= 1;
        if choice == 0 {
            prompt.report = Some(std::mem::take(&mut end.report));
        }
        match &end.ended {
            Ended::Failed | Ended::NeverFits | Ended::QueueFull => Progress::Failed,
            Ended::Cancelled | Ended::Length | Ended::Stop if self.open > 0 => Progress::Open,
            Ended::Cancelled | Ended::Length | Ended::Stop => Progress::Done,
        }
    }

    /// What the counters and histograms get when a sequence ends; a probe is in neither.
    pub(super) fn observation(&self, about: &About, delta: &Delta) -> Option<Observation> {
        let end = delta.end.as_ref().filter(|_| !self.answer.is_probe())?;
        let outcome = match (about.verdict, &end.ended) {
            // The request's verdict came first: however this sequence ended, its record says that.
            (Some(Status::Aborted), _) => Outcome::Aborted,
            (Some(Status::Error), _) => Outcome::Error,
            (Some(Status::Rejected), _) => Outcome::Rejected,
            (Some(Status::Timeout), _) => Outcome::Timeout,
            (Some(Status::Complete) | None, Ended::Cancelled) => Outcome::Aborted,
            (Some(Status::Complete) | None, Ended::Failed) => Outcome::Error,
            (Some(Status::Complete) | None, Ended::Length) => Outcome::Length,
            (Some(Status::Complete) | None, Ended::NeverFits | Ended::QueueFull) => Outcome::Rejected,
            (Some(Status::Complete) | None, Ended::Stop) => Outcome::Stop,
        };
        let prompt = (delta.choice / self.n) as usize;
        let first_choice = delta.choice.is_multiple_of(self.n);
        Some(Observation {
            outcome,
            arrival: Some(self.arrival),
            first_scheduled: end.report.first_scheduled,
            first_token: end.report.first_token,
            last_token: end.report.last_token,
            prompt_tokens: if first_choice { self.answer.prompt_tokens(prompt) } else { 0 },
            cached_tokens: 0,
            output_tokens: delta.tokens,
        })
    }

    /// Whether every sequence has ended.
    pub(super) fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Closes the timelines.
    pub(super) fn records(&mut self, about: &About, status: Status) -> Vec<Record> {
        let finish = |prompt: &mut PromptRun| {
            let builder = prompt.builder.take()?;
            Some(about.label(builder.finish(status, prompt.report.take(), about.clock)))
        };
        self.prompts.iter_mut().filter_map(finish).collect()
    }
}

/// An observation without anything measured, for requests that never reached the engine.
pub(super) const NOTHING_OBSERVED: Observation = Observation {
    outcome: Outcome::Rejected,
    arrival: None,
    first_scheduled: None,
    first_token: None,
    last_token: None,
    prompt_tokens: 0,
    cached_tokens: 0,
    output_tokens: 0,
};

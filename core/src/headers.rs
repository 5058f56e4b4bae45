//! Record ⇄ header items, within a budget of bytes.
//!
//! Names, order, units and digits are UF 1.3's. Beside upstream's tokens stand our own, for requests that named a budget
//! ([`Tokens::Extended`]); they all travel in `X-TRTLLM-Start-End-Time`, where upstream's reader passes over what it
//! does not know:
//!
//! | token after the phase | value |
//! | --- | --- |
//! | `-srv-start`, `-srv-first-token`, `-kv-start`, `-kv-end` | `ts=` seconds, 9 digits |
//! | `-request-id`, `-context-request-id`, `-disagg-request-id` | `n=` the number |
//! | `-kv-size` | `n=` bytes |
//! | `-first-iter`, `-last-iter` | `n=` the engine's step number |
//! | `-kv-blocks-total`, `-kv-blocks-new`, `-kv-blocks-reused`, `-kv-blocks-missed` | `n=` blocks |
//!
//! Begin of the first step and first token need no token: they are `-start` plus `queue` and `ttft`, to the nanosecond.

mod clock;
mod read;
pub mod server_timing;

use alloc::string::String;
use alloc::vec::Vec;

pub use self::clock::{CLOCK_SYNC, ClockStamp};
pub use self::read::read_phase;
use self::server_timing::begin_item;
use crate::gate::{ResponseGrant, Tokens};
use crate::metrics::text::{number_len, write_milliseconds, write_number, write_seconds};
use crate::metrics::{COUNTS, Phase, Record, SPANS, STEP_ITEMS, Status, StepSpans, TIMES, Token};

/// Name of the header with durations.
pub const SERVER_TIMING: &str = "Server-Timing";
/// Name of the header with points in time, and with our own tokens.
pub const START_END_TIME: &str = "X-TRTLLM-Start-End-Time";
/// Name of the header with durations of decode steps.
pub const STEP_METRICS: &str = "X-TRTLLM-Step-Metrics";
/// Name of the header with durations of context chunks.
pub const CTX_CHUNK_METRICS: &str = "X-TRTLLM-Ctx-Chunk-Metrics";
/// Name of the header that counts what did not fit.
pub const TRUNCATED: &str = "X-TRTLLM-Metrics-Truncated";

/// What begins the token of a decode step, after the phase and a hyphen.
const STEP: &str = "step-";
/// What begins the token of a context chunk, after the phase and a hyphen.
const CTX_CHUNK: &str = "ctx-chunk-";

/// The four metrics headers, in wire order.
const NAMES: [&str; 4] = [SERVER_TIMING, START_END_TIME, STEP_METRICS, CTX_CHUNK_METRICS];
/// What a header costs beside name and value: `": "` and CRLF.
const SEPARATOR_BYTES: usize = 4;

/// What to write of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// Most bytes, over all headers of the set: name + value + 4 each.
    pub budget: u32,
    /// Whose tokens.
    pub tokens: Tokens,
    /// The clock header's times, where there is one. It comes before everything else in the budget.
    pub clock: Option<ClockStamp>,
}

/// The headers of one response. Reused: its buffers keep their capacity.
#[derive(Clone, Debug, Default)]
pub struct HeaderSet {
    clock_name: String,
    values: [Vec<u8>; NAMES.len()],
    clock: Vec<u8>,
    truncated: Vec<u8>,
}

impl HeaderSet {
    /// Creates an empty set. `clock_name` is the clock header's name, [`CLOCK_SYNC`] unless the deployment has another.
    #[must_use]
    pub fn new(clock_name: &str) -> Self {
        Self { clock_name: clock_name.into(), ..Self::default() }
    }

    /// Replaces the set's contents by what may be shown of `records`: those that are complete, as much as fits.
    ///
    /// The budget is filled in this order: durations, points and numbers of each whole record; each whole step; each
    /// whole context chunk. The first that does not fit ends the filling. What was left out is counted in
    /// [`TRUNCATED`], whose own size is set aside as if nothing had fitted; where not even that fits, nothing is shown.
    pub fn write_records(&mut self, _grant: ResponseGrant, records: &[Record], options: &WriteOptions) {
        self.clear();
        let budget = options.budget as usize;
        if let Some(stamp) = options.clock {
            stamp.write_value(&mut self.clock);
        }
        let clock_bytes = header_bytes(&self.clock_name, &self.clock);
        let Some(limit) = budget.checked_sub(clock_bytes) else {
            return self.clear();
        };
        let left_out = self.fill(records, options.tokens, limit);
        if left_out == Counts::default() {
            return;
        }
        let mark_bytes = TRUNCATED.len() + SEPARATOR_BYTES + Counts::of(records).written_len();
        let Some(limit) = limit.checked_sub(mark_bytes) else {
            return self.clear_values();
        };
        let left_out = self.fill(records, options.tokens, limit);
        left_out.write_value(&mut self.truncated);
    }

    /// Iterates over the headers that have something to say, in wire order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let metrics = NAMES.iter().zip(&self.values).map(|(name, value)| (*name, value));
        let ours = [(self.clock_name.as_str(), &self.clock), (TRUNCATED, &self.truncated)];
        metrics
            .chain(ours)
            .map(|(name, value)| (name, value.as_slice()))
            .filter(|(_, value)| !value.is_empty())
    }

    /// Returns whether there is no header at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Fills the four values anew and returns what was left out.
    fn fill(&mut self, records: &[Record], tokens: Tokens, limit: usize) -> Counts {
        self.clear_values();
        let mut filling = Filling { values: &mut self.values, limit, ended: false };
        let mut left_out = Counts::default();
        for record in shown(records) {
            left_out.records += filling.add(|values| {
                write_spans(record, &mut values[0]);
                write_points(record, tokens, &mut values[1]);
            });
        }
        for record in shown(records) {
            for spans in record.step_spans() {
                left_out.steps +=
                    filling.add(|values| write_step(record.phase, STEP, &spans, &mut values[2]));
            }
        }
        for record in shown(records) {
            for spans in record.chunk_spans() {
                left_out.chunks +=
                    filling.add(|values| write_step(record.phase, CTX_CHUNK, &spans, &mut values[3]));
            }
        }
        left_out
    }

    fn clear(&mut self) {
        self.clear_values();
        self.clock.clear();
    }

    fn clear_values(&mut self) {
        self.values.iter_mut().for_each(Vec::clear);
        self.truncated.clear();
    }
}

/// The records that headers and events show.
fn shown(records: &[Record]) -> impl Iterator<Item = &Record> {
    records.iter().filter(|record| record.status == Status::Complete)
}

/// The four values while they are filled, never past `limit` bytes of headers.
struct Filling<'a> {
    values: &'a mut [Vec<u8>; NAMES.len()],
    limit: usize,
    ended: bool,
}

impl Filling<'_> {
    /// Adds something whole. Returns 0, or 1 if it was left out.
    fn add(&mut self, write: impl FnOnce(&mut [Vec<u8>; NAMES.len()])) -> u64 {
        if self.ended {
            return 1;
        }
        let before = self.values.each_ref().map(Vec::len);
        write(self.values);
        let bytes: usize =
            NAMES.iter().zip(&*self.values).map(|(name, value)| header_bytes(name, value)).sum();
        self.ended = bytes > self.limit;
        if self.ended {
            self.values.iter_mut().zip(before).for_each(|(value, length)| value.truncate(length));
        }
        self.ended.into()
    }
}

/// Returns what a header counts in the budget: nothing if it is not sent.
fn header_bytes(name: &str, value: &[u8]) -> usize {
    if value.is_empty() { 0 } else { name.len() + value.len() + SEPARATOR_BYTES }
}

/// Records, steps and context chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    records: u64,
    steps: u64,
    chunks: u64,
}

impl Counts {
    fn of(records: &[Record]) -> Self {
        let mut counts = Self::default();
        for record in shown(records) {
            counts.records += 1;
            counts.steps += record.step_spans().count() as u64;
            counts.chunks += record.chunk_spans().count() as u64;
        }
        counts
    }

    fn write_value(self, out: &mut Vec<u8>) {
        for (name, n) in self.named() {
            begin_item(out);
            out.extend_from_slice(name.as_bytes());
            write_number(n, out);
        }
    }

    fn written_len(self) -> usize {
        let items = self.named().map(|(name, n)| name.len() + number_len(n));
        items.iter().sum::<usize>() + (items.len() - 1) * ", ".len()
    }

    const fn named(self) -> [(&'static str, u64); 3] {
        [("record=", self.records), ("step=", self.steps), ("ctx-chunk=", self.chunks)]
    }
}

fn write_spans(record: &Record, out: &mut Vec<u8>) {
    for span in &SPANS {
        if let Some(ns) = record.times.span(span) {
            begin_item(out);
            write_all(&[record.phase.name(), "_", span.name, ";dur="], out);
            write_milliseconds(ns, out);
        }
    }
}

fn write_points(record: &Record, tokens: Tokens, out: &mut Vec<u8>) {
    let mut write_times = |is_written: fn(Token) -> bool| {
        for field in &TIMES {
            let Some(token) = field.token.filter(|token| is_written(*token)) else { continue };
            let Some(at) = record.times[field.mark] else { continue };
            begin_item(out);
            write_all(&[record.phase.name(), "-", token.text(), ";ts="], out);
            write_seconds(at, out);
        }
    };
    write_times(|token| matches!(token, Token::Upstream(_)));
    match tokens {
        Tokens::Extended => write_times(|token| matches!(token, Token::Extended(_))),
        Tokens::Upstream => return,
    }
    for count in &COUNTS {
        if let Some(n) = (count.read)(record) {
            begin_item(out);
            write_all(&[record.phase.name(), "-", count.token, ";n="], out);
            write_number(n, out);
        }
    }
}

fn write_step(phase: Phase, kind: &str, spans: &StepSpans, out: &mut Vec<u8>) {
    for (item, ns) in STEP_ITEMS.iter().zip(spans.ns) {
        if let Some(ns) = ns {
            begin_item(out);
            write_all(&[phase.name(), "-", kind], out);
            write_number(spans.number, out);
            write_all(&["-", item, ";dur="], out);
            write_milliseconds(ns, out);
        }
    }
}

fn write_all(parts: &[&str], out: &mut Vec<u8>) {
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
}

#[cfg(test)]
mod tests;

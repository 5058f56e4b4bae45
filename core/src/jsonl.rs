//! Record → one line of a JSONL file, and the types that read a line back.
//!
//! Keys, their order and their units are UF 2.3's; every line has the four of them, whatever became of the request:
//!
//! ```text
//! {"request_id":1,
//!  "perf_metrics":{"timing_metrics":{"arrival_time":s,"first_scheduled_time":s,"first_token_time":s,"last_token_time":s,
//!                  "kv_cache_transfer_start"?:s,"kv_cache_transfer_end"?:s,"kv_cache_size"?:bytes,
//!                  "server_arrival_time":s,"server_first_token_time":s},
//!                  "first_iter":n,"last_iter":n,
//!                  "kv_cache_metrics":{"num_total_allocated_blocks":n,"num_new_allocated_blocks":n,
//!                                      "num_reused_blocks":n,"num_missed_blocks":n}},
//!  "ctx_request_id"?:n,
//!  "time_breakdown_metrics":{"step_metrics"?:[…],"ctx_chunk_metrics"?:[…]},
//!  "status":"complete","disagg_request_id"?:n,"x_request_id"?:"…","dropped_before"?:n}
//! ```
//!
//! `s` is seconds with 9 digits, from the same nanoseconds as the headers. What is not known is `null`, never 0; what is
//! marked `?` is then left out. An entry of a list has `iter`, `forward_start_time`, `forward_end_time`,
//! `sample_start_time` and `sample_end_time` in seconds, and on a GPU `gpu_forward_time` and `gpu_sample_time` in
//! milliseconds. An empty list is left out: a request of one token has no `step_metrics`.
//!
//! The read types are plain serde types for any JSON reader. Look for the `{` of a line before you give it to one: serde
//! reads an array into a struct, too, by position.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::gate::FileGrant;
use crate::metrics::text::{write_json_string, write_milliseconds, write_number, write_seconds};
use crate::metrics::{
    BLOCKS, CTX_REQUEST_ID, Count, DISAGG_REQUEST_ID, FIRST_ITER, KV_CACHE_SIZE, LAST_ITER, Mark, Missing,
    REQUEST_ID, Record, StepRecord, TIMES, Times,
};
use crate::time::{ClockOffset, ReportNs};

/// What a line says beside its record. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extras {
    /// Records lost since the line before this one; said unless 0.
    pub dropped_before: u64,
}

/// Appends one line: one JSON object in ASCII, and one line feed at its end.
pub fn write_line(_grant: FileGrant, record: &Record, extras: Extras, out: &mut Vec<u8>) {
    out.push(b'{');
    write_count(&REQUEST_ID, record, out);
    open(b'{', "perf_metrics", out);
    open(b'{', "timing_metrics", out);
    write_times(record, out);
    out.push(b'}');
    write_count(&FIRST_ITER, record, out);
    write_count(&LAST_ITER, record, out);
    write_blocks(record, out);
    out.push(b'}');
    write_known_count(&CTX_REQUEST_ID, record, out);
    open(b'{', "time_breakdown_metrics", out);
    if let Some((trace, clock)) = record.steps.shared() {
        write_steps("step_metrics", trace.decode_steps(), clock, out);
        write_steps("ctx_chunk_metrics", trace.chunks(), clock, out);
    }
    out.push(b'}');
    write_key("status", out);
    write_json_string(record.status.name(), out);
    write_known_count(&DISAGG_REQUEST_ID, record, out);
    if let Some(id) = &record.x_request_id {
        write_key("x_request_id", out);
        write_json_string(id, out);
    }
    if extras.dropped_before > 0 {
        write_key("dropped_before", out);
        write_number(extras.dropped_before, out);
    }
    out.extend_from_slice(b"}\n");
}

fn write_times(record: &Record, out: &mut Vec<u8>) {
    for field in &TIMES {
        match record.times[field.mark] {
            Some(at) => write_time(field.key, at, out),
            None if field.missing == Missing::Null => write_null(field.key, out),
            None => {}
        }
        if field.mark == Mark::KvEnd {
            write_known_count(&KV_CACHE_SIZE, record, out);
        }
    }
}

fn write_blocks(record: &Record, out: &mut Vec<u8>) {
    if record.blocks.is_none() {
        return write_null("kv_cache_metrics", out);
    }
    open(b'{', "kv_cache_metrics", out);
    for count in &BLOCKS {
        write_count(count, record, out);
    }
    out.push(b'}');
}

fn write_steps<'a>(
    key: &str,
    steps: impl Iterator<Item = &'a StepRecord>,
    clock: ClockOffset,
    out: &mut Vec<u8>,
) {
    let mut steps = steps.peekable();
    if steps.peek().is_none() {
        return;
    }
    open(b'[', key, out);
    for step in steps {
        separate(out);
        out.push(b'{');
        write_key("iter", out);
        write_number(step.iter, out);
        write_time("forward_start_time", clock.to_reference(step.forward_start), out);
        write_time("forward_end_time", clock.to_reference(step.forward_end), out);
        write_time("sample_start_time", clock.to_reference(step.forward_end), out);
        write_time("sample_end_time", clock.to_reference(step.sample_end), out);
        for (key, ns) in [("gpu_forward_time", step.gpu_forward_ns), ("gpu_sample_time", step.gpu_sample_ns)]
        {
            if let Some(ns) = ns {
                write_key(key, out);
                write_milliseconds(ns, out);
            }
        }
        out.push(b'}');
    }
    out.push(b']');
}

fn write_time(key: &str, at: ReportNs, out: &mut Vec<u8>) {
    write_key(key, out);
    write_seconds(at, out);
}

fn write_count(count: &Count, record: &Record, out: &mut Vec<u8>) {
    match (count.read)(record) {
        Some(_) => write_known_count(count, record, out),
        None => write_null(count.key, out),
    }
}

/// Writes nothing if the number is not known.
fn write_known_count(count: &Count, record: &Record, out: &mut Vec<u8>) {
    if let Some(n) = (count.read)(record) {
        write_key(count.key, out);
        write_number(n, out);
    }
}

fn write_null(key: &str, out: &mut Vec<u8>) {
    write_key(key, out);
    out.extend_from_slice(b"null");
}

/// Begins a member whose value is an object or a list.
fn open(bracket: u8, key: &str, out: &mut Vec<u8>) {
    write_key(key, out);
    out.push(bracket);
}

fn write_key(key: &str, out: &mut Vec<u8>) {
    separate(out);
    out.push(b'"');
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(b"\":");
}

/// Appends a comma unless the object or list has just begun.
fn separate(out: &mut Vec<u8>) {
    if !matches!(out.last(), Some(b'{' | b'[')) {
        out.push(b',');
    }
}

/// A line of a worker, ours or upstream's. Members it does not know are passed over.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Line {
    /// The engine's number of the request.
    pub request_id: Option<RequestId>,
    /// Its times and counts.
    pub perf_metrics: PerfMetrics,
    /// The context worker's number of the request.
    pub ctx_request_id: Option<u64>,
    /// Its steps.
    pub time_breakdown_metrics: Option<TimeBreakdown>,
    /// How it ended: the names of [`crate::metrics::Status`], or a foreign one.
    pub status: Option<String>,
    /// The number that joins the two legs of a disaggregated request.
    pub disagg_request_id: Option<u64>,
    /// The client's own `x-request-id`.
    pub x_request_id: Option<String>,
    /// Records lost since the line before this one.
    pub dropped_before: u64,
}

/// A request's number; upstream writes text where it is none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RequestId {
    /// A number.
    Number(u64),
    /// Any other text.
    Text(String),
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RequestIdVisitor)
    }
}

struct RequestIdVisitor;

impl Visitor<'_> for RequestIdVisitor {
    type Value = RequestId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or a string")
    }

    fn visit_u64<E: de::Error>(self, n: u64) -> Result<RequestId, E> {
        Ok(RequestId::Number(n))
    }

    fn visit_i64<E: de::Error>(self, n: i64) -> Result<RequestId, E> {
        u64::try_from(n)
            .map(RequestId::Number)
            .map_err(|_| E::invalid_value(de::Unexpected::Signed(n), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<RequestId, E> {
        Ok(RequestId::Text(text.into()))
    }
}

/// `perf_metrics` of a line.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PerfMetrics {
    /// Points in time.
    pub timing_metrics: TimingMetrics,
    /// First step that worked on it.
    pub first_iter: Option<u64>,
    /// Last step that worked on it.
    pub last_iter: Option<u64>,
    /// Its KV blocks.
    pub kv_cache_metrics: Option<KvCacheMetrics>,
}

/// `timing_metrics` of a line: seconds, and one size in bytes. [`Self::times`] has them in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the keys of the line, documented where `Times` names them")]
pub struct TimingMetrics {
    pub arrival_time: Option<f64>,
    pub first_scheduled_time: Option<f64>,
    pub first_token_time: Option<f64>,
    pub last_token_time: Option<f64>,
    pub kv_cache_transfer_start: Option<f64>,
    pub kv_cache_transfer_end: Option<f64>,
    pub kv_cache_size: Option<u64>,
    pub server_arrival_time: Option<f64>,
    pub server_first_token_time: Option<f64>,
}

impl TimingMetrics {
    /// Returns the times, to the nanosecond where [`ReportNs::from_seconds`] is exact. A 0 counts as missing: that is how
    /// upstream's older lines said it (UF 2.3).
    #[must_use]
    pub fn times(&self) -> Times {
        let point = |seconds: Option<f64>| ReportNs::from_seconds(seconds.filter(|seconds| *seconds != 0.0)?);
        Times {
            server_arrival: point(self.server_arrival_time),
            arrival: point(self.arrival_time),
            first_scheduled: point(self.first_scheduled_time),
            first_token: point(self.first_token_time),
            last_token: point(self.last_token_time),
            server_first_token: point(self.server_first_token_time),
            kv_start: point(self.kv_cache_transfer_start),
            kv_end: point(self.kv_cache_transfer_end),
        }
    }
}

/// `kv_cache_metrics` of a line, counted in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the keys of the line, documented where `BlockCounts` names them")]
pub struct KvCacheMetrics {
    pub num_total_allocated_blocks: u64,
    pub num_new_allocated_blocks: u64,
    pub num_reused_blocks: u64,
    pub num_missed_blocks: u64,
}

/// `time_breakdown_metrics` of a line.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TimeBreakdown {
    /// Decode steps, in order.
    pub step_metrics: Vec<StepEntry>,
    /// Context chunks, in order.
    pub ctx_chunk_metrics: Vec<StepEntry>,
}

/// A step or context chunk of a line: points in seconds, GPU times in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the keys of the line, documented where `StepRecord` names them")]
pub struct StepEntry {
    pub iter: Option<u64>,
    pub forward_start_time: Option<f64>,
    pub forward_end_time: Option<f64>,
    pub sample_start_time: Option<f64>,
    pub sample_end_time: Option<f64>,
    pub gpu_forward_time: Option<f64>,
    pub gpu_sample_time: Option<f64>,
    /// Upstream only: when the step's token was handed on.
    pub token_time: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{File, Policy, decide};
    use crate::metrics::{Status, StepTrace, Steps};
    use crate::time::MonoNs;
    use alloc::string::ToString;
    use alloc::sync::Arc;
    use alloc::vec;

    fn line(record: &Record, extras: Extras) -> String {
        let grants = decide(Policy { file: File::On, ..Policy::default() }, core::iter::empty());
        let mut out = vec![];
        write_line(grants.file.expect("on"), record, extras, &mut out);
        String::from_utf8(out).expect("ASCII")
    }

    const EMPTY_TIMES: &str = "\"arrival_time\":null,\"first_scheduled_time\":null,\"first_token_time\":null,\
                               \"last_token_time\":null,\"server_arrival_time\":null,\"server_first_token_time\":null";

    #[test]
    fn a_prompt_that_never_got_anywhere_has_nulls() {
        let record = Record { status: Status::Rejected, ..Record::default() };
        let expected = "{\"request_id\":null,\"perf_metrics\":{\"timing_metrics\":{".to_string()
            + EMPTY_TIMES
            + "},\"first_iter\":null,\"last_iter\":null,\"kv_cache_metrics\":null},\
               \"time_breakdown_metrics\":{},\"status\":\"rejected\"}\n";
        assert_eq!(line(&record, Extras::default()), expected);
    }

    #[test]
    fn a_complete_line_to_the_digit() {
        let step = |iter: u64, gpu| StepRecord {
            iter,
            forward_start: MonoNs::from_raw(iter * 1_000_000_000),
            forward_end: MonoNs::from_raw(iter * 1_000_000_000 + 2),
            sample_end: MonoNs::from_raw(iter * 1_000_000_000 + 3),
            gpu_forward_ns: gpu,
            gpu_sample_ns: gpu,
        };
        let trace = StepTrace {
            slices: vec![Arc::from([step(1, None), step(2, Some(1_500_000)), step(3, None)])],
            chunk_iters: vec![1],
            decode_iters: Some((2, 2)),
        };
        let record = Record {
            request_id: Some(7),
            times: Times { arrival: Some(ReportNs::from_raw(-5)), ..Times::default() },
            first_iter: Some(1),
            last_iter: Some(2),
            blocks: Some(crate::metrics::BlockCounts {
                total_allocated: 4,
                new_allocated: 3,
                reused: 1,
                missed: 0,
            }),
            steps: Steps::Shared { trace, clock: ClockOffset::from_raw(1) },
            ..Record::default()
        };
        let expected = "{\"request_id\":7,\"perf_metrics\":{\"timing_metrics\":{".to_string()
            + &EMPTY_TIMES.replacen("null", "-0.000000005", 1)
            + "},\"first_iter\":1,\"last_iter\":2,\"kv_cache_metrics\":{\"num_total_allocated_blocks\":4,\
               \"num_new_allocated_blocks\":3,\"num_reused_blocks\":1,\"num_missed_blocks\":0}},\
               \"time_breakdown_metrics\":{\"step_metrics\":[{\"iter\":2,\"forward_start_time\":2.000000001,\
               \"forward_end_time\":2.000000003,\"sample_start_time\":2.000000003,\"sample_end_time\":2.000000004,\
               \"gpu_forward_time\":1.500000,\"gpu_sample_time\":1.500000}],\"ctx_chunk_metrics\":[{\"iter\":1,\
               \"forward_start_time\":1.000000001,\"forward_end_time\":1.000000003,\"sample_start_time\":1.000000003,\
               \"sample_end_time\":1.000000004}]},\"status\":\"complete\"}\n";
        assert_eq!(line(&record, Extras::default()), expected);
    }

    #[test]
    fn further_keys_stand_in_their_place_and_only_with_something_to_say() {
        let at = |ns| Some(ReportNs::from_raw(ns));
        let record = Record {
            times: Times { kv_start: at(1), kv_end: at(2), ..Times::default() },
            kv_cache_size: Some(9),
            ctx_request_id: Some(5),
            disagg_request_id: Some(6),
            x_request_id: Some("a\n\"é\"".into()),
            ..Record::default()
        };
        let text = line(&record, Extras { dropped_before: 3 });
        let kv = "\"last_token_time\":null,\"kv_cache_transfer_start\":0.000000001,\
                  \"kv_cache_transfer_end\":0.000000002,\"kv_cache_size\":9,\"server_arrival_time\":null";
        assert!(text.contains(kv), "{text}");
        assert!(text.contains(",\"ctx_request_id\":5,\"time_breakdown_metrics\":{}"), "{text}");
        let end = ",\"disagg_request_id\":6,\"x_request_id\":\"a\\n\\\"\\u00e9\\\"\",\"dropped_before\":3}\n";
        assert!(text.ends_with(end), "{text}");
        assert!(text.is_ascii() && text.matches('\n').count() == 1);
        let silent = line(&Record::default(), Extras { dropped_before: 0 });
        for key in
            ["kv_cache_transfer", "kv_cache_size", "ctx_request_id", "disagg_", "x_request_id", "dropped"]
        {
            assert!(!silent.contains(key), "{key}");
        }
        let no_size = line(&Record { kv_cache_size: None, ..record }, Extras::default());
        assert!(no_size.contains("kv_cache_transfer_end") && !no_size.contains("kv_cache_size"));
    }

    #[test]
    fn a_zero_that_is_read_is_a_missing_time() {
        let timing = TimingMetrics {
            arrival_time: Some(0.0),
            last_token_time: Some(1.05),
            ..TimingMetrics::default()
        };
        let expected = Times { last_token: Some(ReportNs::from_raw(1_050_000_000)), ..Times::default() };
        assert_eq!(timing.times(), expected);
    }
}

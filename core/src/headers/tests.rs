use super::*;
use crate::gate::{Policy, Response, decide};
use crate::metrics::{BlockCounts, Mark, StepRecord, StepTrace, Steps, Times};
use crate::time::{ClockOffset, MonoNs, ReportNs};
use alloc::format;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec;

/// The record of UF 8.1.
pub(crate) fn golden() -> Record {
    let step = |iter, ms: [u64; 3], gpu: [u64; 2]| StepRecord {
        iter,
        forward_start: MonoNs::from_raw(ms[0] * 1_000_000),
        forward_end: MonoNs::from_raw(ms[1] * 1_000_000),
        sample_end: MonoNs::from_raw(ms[2] * 1_000_000),
        gpu_forward_ns: Some(gpu[0]),
        gpu_sample_ns: Some(gpu[1]),
    };
    let log = [
        step(2, [1_000, 1_004, 1_005], [3_000_000, 250_000]),
        step(3, [2_000, 2_002, 2_003], [1_500_000, 500_000]),
    ];
    let at = |ms: i64| Some(ReportNs::from_raw(ms * 1_000_000));
    Record {
        request_id: Some(42),
        times: Times {
            arrival: at(1_000),
            first_scheduled: at(1_010),
            first_token: at(1_020),
            last_token: at(1_050),
            ..Times::default()
        },
        steps: Steps::Shared {
            trace: StepTrace {
                slices: vec![Arc::from(log)],
                chunk_iters: vec![2],
                decode_iters: Some((3, 3)),
            },
            clock: ClockOffset::default(),
        },
        ..Record::default()
    }
}

fn with_steps(decode: u64, chunks: u64) -> Record {
    let log = (1..=chunks + decode).map(|iter| StepRecord {
        iter,
        forward_start: MonoNs::from_raw(0),
        forward_end: MonoNs::from_raw(2_000_000),
        sample_end: MonoNs::from_raw(3_000_000),
        gpu_forward_ns: None,
        gpu_sample_ns: None,
    });
    let trace = StepTrace {
        slices: vec![log.collect()],
        chunk_iters: (1..=chunks).collect(),
        decode_iters: (decode > 0).then_some((chunks + 1, chunks + decode)),
    };
    Record { steps: Steps::Shared { trace, clock: ClockOffset::default() }, ..golden() }
}

fn grant() -> ResponseGrant {
    let policy = Policy { response: Response::AllowOnRequest, ..Policy::default() };
    decide(policy, [b"1".as_slice()].into_iter()).response.expect("asked")
}

fn options(budget: u32) -> WriteOptions {
    WriteOptions { budget, tokens: Tokens::Upstream, clock: None }
}

fn written(records: &[Record], options: &WriteOptions) -> Vec<(String, String)> {
    let mut set = HeaderSet::new(CLOCK_SYNC);
    set.write_records(grant(), records, options);
    let headers: Vec<_> = set
        .iter()
        .map(|(name, value)| (name.to_string(), str::from_utf8(value).expect("ASCII").to_string()))
        .collect();
    let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    assert!(bytes <= options.budget as usize, "{bytes} > {}", options.budget);
    headers
}

fn value<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|header| header.0 == name).map(|header| header.1.as_str())
}

const GOLDEN: [(&str, &str); 4] = [
    ("Server-Timing", "server_queue;dur=10.000000, server_ttft;dur=20.000000, server_e2e;dur=50.000000"),
    ("X-TRTLLM-Start-End-Time", "server-start;ts=1.000000000, server-end;ts=1.050000000"),
    (
        "X-TRTLLM-Step-Metrics",
        "server-step-3-forward;dur=2.000000, server-step-3-sample;dur=1.000000, \
         server-step-3-gpu-forward;dur=1.500000, server-step-3-gpu-sample;dur=0.500000",
    ),
    (
        "X-TRTLLM-Ctx-Chunk-Metrics",
        "server-ctx-chunk-0-forward;dur=4.000000, server-ctx-chunk-0-sample;dur=1.000000, \
         server-ctx-chunk-0-gpu-forward;dur=3.000000, server-ctx-chunk-0-gpu-sample;dur=0.250000",
    ),
];

#[test]
fn the_golden_record_prints_to_the_digit() {
    let headers = written(&[golden()], &options(3_584));
    let expected = GOLDEN.map(|(name, value)| (name.to_string(), value.to_string()));
    assert_eq!(headers, expected);
}

#[test]
fn several_records_are_joined_in_order() {
    let headers = written(&[golden(), golden()], &options(3_584));
    for (name, single) in GOLDEN {
        assert_eq!(value(&headers, name), Some(format!("{single}, {single}").as_str()));
    }
}

#[test]
fn what_is_missing_is_left_out() {
    let mut record = golden();
    record.times = Times { arrival: None, ..record.times };
    let headers = written(&[record], &options(3_584));
    assert_eq!(value(&headers, SERVER_TIMING), None, "no duration without its start");
    assert_eq!(value(&headers, START_END_TIME), Some("server-end;ts=1.050000000"));

    let mut record = golden();
    record.times.first_scheduled = record.times.arrival;
    record.times.first_token = Some(ReportNs::from_raw(999_999_999));
    let headers = written(&[record], &options(3_584));
    let expected = "server_queue;dur=0.000000, server_e2e;dur=50.000000";
    assert_eq!(value(&headers, SERVER_TIMING), Some(expected), "zero stays, negative goes");

    assert!(written(&[Record::default()], &options(3_584)).is_empty());
    assert!(written(&[], &options(3_584)).is_empty());
    let cpu = written(&[with_steps(1, 0)], &options(3_584));
    assert_eq!(
        value(&cpu, STEP_METRICS),
        Some("server-step-1-forward;dur=2.000000, server-step-1-sample;dur=1.000000")
    );
    assert_eq!(value(&cpu, CTX_CHUNK_METRICS), None);
}

#[test]
fn only_complete_records_are_shown() {
    for status in Status::ALL {
        let headers = written(&[Record { status, ..golden() }], &options(3_584));
        assert_eq!(headers.is_empty(), status != Status::Complete, "{status:?}");
    }
    let failed = Record { status: Status::Error, ..golden() };
    assert_eq!(written(&[failed, golden()], &options(3_584)), written(&[golden()], &options(3_584)));
}

#[test]
fn our_own_tokens_come_only_with_a_budget_named() {
    let at = |ns| Some(ReportNs::from_raw(ns));
    let mut record = golden();
    record.times = Times {
        server_arrival: at(-5),
        server_first_token: at(3),
        kv_start: at(1),
        kv_end: at(2),
        ..record.times
    };
    let record = Record {
        ctx_request_id: Some(6),
        disagg_request_id: Some(7),
        kv_cache_size: Some(2_048),
        first_iter: Some(2),
        last_iter: Some(3),
        blocks: Some(BlockCounts { total_allocated: 4, new_allocated: 3, reused: 1, missed: 0 }),
        ..record
    };
    let upstream = written(core::slice::from_ref(&record), &options(3_584));
    assert_eq!(value(&upstream, START_END_TIME), Some(GOLDEN[1].1));
    let extended = written(&[record], &WriteOptions { tokens: Tokens::Extended, ..options(3_584) });
    let expected = "server-start;ts=1.000000000, server-end;ts=1.050000000, server-kv-start;ts=0.000000001, \
                    server-kv-end;ts=0.000000002, server-srv-start;ts=-0.000000005, \
                    server-srv-first-token;ts=0.000000003, server-request-id;n=42, server-context-request-id;n=6, \
                    server-disagg-request-id;n=7, server-kv-size;n=2048, server-first-iter;n=2, server-last-iter;n=3, \
                    server-kv-blocks-total;n=4, server-kv-blocks-new;n=3, server-kv-blocks-reused;n=1, \
                    server-kv-blocks-missed;n=0";
    assert_eq!(value(&extended, START_END_TIME), Some(expected));
}

#[test]
fn a_budget_is_filled_by_whole_records_then_steps_then_chunks() {
    // The golden record's headers in bytes, name + value + 4 each.
    let bytes = GOLDEN.map(|(name, value)| (name.len() + value.len() + 4) as u32);
    let all: u32 = bytes.iter().sum();
    let mark = |value: &str| (TRUNCATED.len() + value.len() + 4) as u32;
    let one = mark("record=0, step=0, ctx-chunk=1");
    let no_chunk = bytes[0] + bytes[1] + bytes[2] + one;
    let no_step = bytes[0] + bytes[1] + one;
    // (name, budget, how many of the four are sent, mark)
    let rows = [
        ("all fits exactly", all, 4, None),
        ("one byte short: no chunk", all - 1, 3, Some("record=0, step=0, ctx-chunk=1")),
        ("the mark just fits beside the step", no_chunk, 3, Some("record=0, step=0, ctx-chunk=1")),
        ("the mark does not: no step", no_chunk - 1, 2, Some("record=0, step=1, ctx-chunk=1")),
        ("the mark just fits beside the record", no_step, 2, Some("record=0, step=1, ctx-chunk=1")),
        ("the mark does not: no record", no_step - 1, 0, Some("record=1, step=1, ctx-chunk=1")),
        ("only the mark", one, 0, Some("record=1, step=1, ctx-chunk=1")),
        ("not even the mark", one - 1, 0, None),
        ("nothing", 0, 0, None),
    ];
    for (name, budget, sent, expected) in rows {
        let headers = written(&[golden()], &options(budget));
        let metrics: Vec<_> = headers.iter().filter(|header| header.0 != TRUNCATED).cloned().collect();
        let whole = GOLDEN[..sent].iter().map(|(name, value)| (name.to_string(), value.to_string()));
        assert_eq!(metrics, whole.collect::<Vec<_>>(), "{name}");
        assert_eq!(value(&headers, TRUNCATED), expected, "{name}");
    }
}

#[test]
fn every_budget_gives_whole_items_and_true_counts() {
    let records = [with_steps(40, 3), with_steps(2, 1)];
    let count = |headers: &[_], name: &str, what: &str| {
        value(headers, name).map_or(0, |value| value.matches(what).count())
    };
    let mut before = 0;
    for budget in 0..5_000 {
        let headers = written(&records, &options(budget));
        let sent = [
            count(&headers, SERVER_TIMING, "_e2e;"),
            count(&headers, STEP_METRICS, "-sample;"),
            count(&headers, CTX_CHUNK_METRICS, "-sample;"),
        ];
        assert_eq!(sent[0], count(&headers, START_END_TIME, "-end;"));
        assert!(sent[1] == 0 || sent[0] == 2, "no step before all records");
        assert!(sent[2] == 0 || sent[1] == 42, "no chunk before all steps");
        if let Some(mark) = value(&headers, TRUNCATED) {
            let left = format!("record={}, step={}, ctx-chunk={}", 2 - sent[0], 42 - sent[1], 4 - sent[2]);
            assert_eq!(mark, left);
        } else {
            assert!(sent == [2, 42, 4] || sent == [0, 0, 0], "cut without a mark at {budget}");
        }
        let all: usize = sent.iter().sum();
        assert!(all >= before, "a larger budget carries no less");
        before = all;
    }
    assert_eq!(before, 48);
}

#[test]
fn the_clock_header_is_part_of_the_budget() {
    let clock = ClockStamp { receive: ReportNs::from_raw(1), transmit: ReportNs::from_raw(2) };
    let line = (CLOCK_SYNC, "receive;ts=0.000000001, transmit;ts=0.000000002");
    let bytes = (line.0.len() + line.1.len() + 4) as u32;
    let with_clock = |budget| written(&[golden()], &WriteOptions { clock: Some(clock), ..options(budget) });
    let all: u32 =
        bytes + GOLDEN.iter().map(|(name, value)| (name.len() + value.len() + 4) as u32).sum::<u32>();
    let fits = with_clock(all);
    assert_eq!(fits.len(), 5);
    assert_eq!((fits[4].0.as_str(), fits[4].1.as_str()), line);
    assert_eq!(with_clock(all - 1).len(), 5, "three headers, clock, mark");
    assert_eq!(with_clock(bytes).len(), 1);
    assert_eq!(with_clock(bytes - 1).len(), 0);
    let alone = written(&[], &WriteOptions { clock: Some(clock), ..options(3_584) });
    assert_eq!(alone.len(), 1, "sent even before there is a record");
}

#[test]
fn a_set_is_reused_without_leftovers() {
    let mut set = HeaderSet::new(CLOCK_SYNC);
    let clock = ClockStamp { receive: ReportNs::from_raw(1), transmit: ReportNs::from_raw(2) };
    set.write_records(grant(), &[with_steps(99, 3)], &WriteOptions { clock: Some(clock), ..options(500) });
    assert_eq!(set.iter().count(), 5);
    set.write_records(grant(), &[], &options(500));
    assert!(set.is_empty());
}

fn read(headers: &[(&str, &str)], phase: Phase) -> Option<Record> {
    let fields = headers.iter().map(|(name, value)| (*name, value.as_bytes()));
    read_phase(fields, phase, ClockOffset::default())
}

#[test]
fn upstreams_tokens_give_four_times() {
    let record = read(&GOLDEN, Phase::Gen).expect("present");
    let golden = golden();
    assert_eq!(record.phase, Phase::Gen);
    assert_eq!(record.times, golden.times);
    assert_eq!(record.request_id, None);
    assert!(record.step_spans().eq(golden.step_spans()));
    assert!(record.chunk_spans().eq(golden.chunk_spans()));
}

#[test]
fn a_phase_is_renamed_token_by_token() {
    let record = read(&GOLDEN, Phase::Ctx).expect("present");
    let headers = written(&[record], &options(3_584));
    for (name, worker) in GOLDEN {
        let renamed = worker.replace("server_", "ctx_").replace("server-", "ctx-");
        assert_eq!(value(&headers, name), Some(renamed.as_str()));
        let fields: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(read(&fields, Phase::Ctx), read(&GOLDEN, Phase::Ctx), "a phase reads its own name, too");
    }
}

#[test]
fn what_cannot_be_read_is_passed_over() {
    let arrival = |text: &str| read(&[(START_END_TIME, text)], Phase::Gen).expect("present").times.arrival;
    let at = |ns| Some(ReportNs::from_raw(ns));
    let rows = [
        ("", None),
        ("server-start;ts=nan", None),
        ("server-start;ts=inf", None),
        ("server-start;ts=", None),
        ("server-start;ts=1e9", None),
        ("server-start", None),
        ("server-start;dur=1", None),
        ("server_start;ts=1", None),
        ("ctx-start;ts=1", None),
        ("xserver-start;ts=1", None),
        ("server-server-start;ts=1", None),
        ("server-begin;ts=3, server-start;ts=1", at(1_000_000_000)),
        ("gen-start;ts=1", at(1_000_000_000)),
        ("server-start;ts=1, server-start;ts=2", at(2_000_000_000)),
        ("server-start;ts=1, server-start;ts=x", at(1_000_000_000)),
        ("server-start;TS=-1.5", at(-1_500_000_000)),
    ];
    for (text, expected) in rows {
        assert_eq!(arrival(text), expected, "{text:?}");
    }
    assert_eq!(read(&[], Phase::Gen), None);
    assert_eq!(read(&[("Content-Type", "server-start;ts=1")], Phase::Gen), None);
    assert!(read(&[("x-trtllm-start-end-time", "server-start;ts=1")], Phase::Gen).is_some());
    let negative = read(&[(SERVER_TIMING, "server_queue;dur=-1"), GOLDEN[1]], Phase::Gen).expect("present");
    assert_eq!(negative.times.first_scheduled, None);
    let far = [
        (START_END_TIME, "server-start;ts=9223372036"),
        (SERVER_TIMING, "server_queue;dur=18446744073709.551615"),
    ];
    assert_eq!(read(&far, Phase::Gen).expect("present").times.first_scheduled, None, "no wrapping");
    let conflict =
        [(START_END_TIME, "server-start;ts=1, server-end;ts=2"), (SERVER_TIMING, "server_e2e;dur=7")];
    assert_eq!(
        read(&conflict, Phase::Gen).expect("present").times.last_token,
        at(2_000_000_000),
        "end wins over e2e"
    );
}

#[test]
fn a_clock_moves_times_and_not_durations() {
    let fields = GOLDEN.map(|(name, value)| (name, value.as_bytes()));
    let moved = read_phase(fields, Phase::Gen, ClockOffset::from_raw(-2_000_000_000)).expect("present");
    assert_eq!(moved.times.arrival, Some(ReportNs::from_raw(-1_000_000_000)));
    assert_eq!(moved.times.first_scheduled, Some(ReportNs::from_raw(-990_000_000)));
    assert!(moved.step_spans().eq(golden().step_spans()));
}

/// A small generator (xorshift64) for records.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn maybe(&mut self, limit: u64) -> Option<u64> {
        (self.below(4) > 0).then(|| self.below(limit))
    }

    fn record(&mut self) -> Record {
        let mut record =
            Record { phase: [Phase::Ctx, Phase::Gen][self.below(2) as usize], ..Record::default() };
        for count in &COUNTS {
            if let Some(n) = self.maybe(u64::from(u32::MAX)) {
                (count.set)(&mut record, n);
            }
        }
        for field in &TIMES {
            let at = self.maybe(u64::from(u32::MAX)).map(|ns| ReportNs::from_raw(ns as i64 - (1 << 31)));
            record.times[field.mark] = at;
        }
        // Only a duration carries these two: they need the arrival, and not to lie before it.
        for mark in [Mark::FirstScheduled, Mark::FirstToken] {
            let readable = record.times[mark] >= record.times.arrival && record.times.arrival.is_some();
            record.times[mark] = record.times[mark].filter(|_| readable);
        }
        let mut list = |first: u64| {
            let count = self.below(20);
            let spans = (first..first + count).map(|number| StepSpans {
                number,
                // At least one item, or there is nothing to read.
                ns: [
                    Some(self.below(u64::MAX)),
                    self.maybe(1 << 40),
                    self.maybe(1 << 40),
                    self.maybe(1 << 40),
                ],
            });
            spans.collect::<Vec<_>>()
        };
        record.steps = Steps::Spans { steps: list(1_000), chunks: list(0) };
        record
    }
}

#[test]
fn read_gives_back_what_was_written() {
    let mut set = HeaderSet::new(CLOCK_SYNC);
    let options = WriteOptions { tokens: Tokens::Extended, ..options(u32::MAX) };
    for seed in 1..=2_000 {
        let record = Random(seed).record();
        set.write_records(grant(), core::slice::from_ref(&record), &options);
        let read = read_phase(set.iter(), record.phase, ClockOffset::default()).unwrap_or_else(|| Record {
            phase: record.phase,
            steps: record.steps.clone(),
            ..Record::default()
        });
        assert_eq!(read, record, "seed {seed}");
    }
}

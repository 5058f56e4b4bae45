//! Upstream's own tests of per-request metrics, by their numbers, as far as the core answers them: T1-T13 and C1-C9
//! where they speak of headers, events, lines and clocks, and the key set of a completion's line.
//!
//! Two differ on purpose. T5: a budget keeps whole items and says what it left out, instead of dropping all details.
//! T3: a time that a peer did not send is missing, instead of a guess.

use std::sync::Arc;

use serde_json::Value;
use uring_serve_core::gate::{self, File, FileGrant, Policy, Response, ResponseGrant, Tokens};
use uring_serve_core::headers::{
    CLOCK_SYNC, CTX_CHUNK_METRICS, ClockStamp, HeaderSet, SERVER_TIMING, START_END_TIME, STEP_METRICS,
    TRUNCATED, WriteOptions, read_phase,
};
use uring_serve_core::jsonl::{Extras, Line, RequestId, write_line};
use uring_serve_core::limits::{METRICS_EVENT_BUDGET, METRICS_HEADER_BUDGET, METRICS_HEADER_BUDGET_MAX};
use uring_serve_core::metrics::{
    BlockCounts, Builder, EngineReport, Phase, Record, Status, StepRecord, StepSpans, StepTrace, Steps, Times,
};
use uring_serve_core::sse::{Item, METRICS_EVENT, MetricsEvent, Parser, write_end};
use uring_serve_core::time::{ClockOffset, MonoNs, ReportNs};

#[test]
fn t1_metrics_headers_use_metric_list_syntax() {
    let headers = written(&[base_record()], Tokens::Upstream, METRICS_HEADER_BUDGET);
    let contained = [
        (SERVER_TIMING, "server_queue;dur=10.000000, server_ttft;dur=20.000000, server_e2e;dur=50.000000"),
        (START_END_TIME, "server-start;ts=1.000000000, server-end;ts=1.050000000"),
        (STEP_METRICS, "server-step-3-forward;dur=2.000000"),
        (STEP_METRICS, "server-step-3-gpu-sample;dur=0.500000"),
        (CTX_CHUNK_METRICS, "server-ctx-chunk-0-forward;dur=4.000000"),
    ];
    for (name, text) in contained {
        assert!(value(&headers, name).is_some_and(|value| value.contains(text)), "{text}");
    }
}

#[test]
fn t2_the_details_of_both_legs_are_told_again() {
    let chunk = StepSpans { number: 0, ns: [Some(4_000_000), None, None, None] };
    let step = StepSpans { number: 3, ns: [Some(2_000_000), None, None, None] };
    let ctx = Record {
        phase: Phase::Ctx,
        steps: Steps::Spans { steps: vec![], chunks: vec![chunk] },
        ..Record::default()
    };
    let generation = Record {
        phase: Phase::Gen,
        steps: Steps::Spans { steps: vec![step], chunks: vec![] },
        ..Record::default()
    };
    let headers = written(&[ctx, generation], Tokens::Upstream, METRICS_HEADER_BUDGET);
    assert_eq!(value(&headers, CTX_CHUNK_METRICS), Some("ctx-ctx-chunk-0-forward;dur=4.000000"));
    assert_eq!(value(&headers, STEP_METRICS), Some("gen-step-3-forward;dur=2.000000"));
}

#[test]
fn t3_both_legs_are_read_from_headers_once() {
    let worker = written(&[base_record()], Tokens::Upstream, METRICS_HEADER_BUDGET);
    let legs = [Phase::Ctx, Phase::Gen].map(|phase| read(&worker, phase, ClockOffset::default()));
    for leg in &legs {
        assert_eq!(leg.times, base_record().times);
        assert_eq!(
            (leg.times.server_arrival, leg.times.server_first_token),
            (None, None),
            "missing, not guessed"
        );
    }
    let merged = written(&legs, Tokens::Extended, METRICS_HEADER_BUDGET_MAX);
    assert_eq!(value(&merged, START_END_TIME).map(|value| value.matches("ctx-start;").count()), Some(1));
    assert_eq!(value(&merged, SERVER_TIMING).map(|value| value.matches("ctx_queue;").count()), Some(1));
}

#[test]
fn t4_t6_policy_and_request_decide_together() {
    // (exposed by the server, asked for, shown)
    for (response, asked, shown) in [
        (Response::Deny, true, false),
        (Response::AllowOnRequest, false, false),
        (Response::AllowOnRequest, true, true),
    ] {
        let values = asked.then_some(b"1".as_slice()).into_iter();
        let grants = gate::decide(Policy { response, file: File::On }, values);
        let mut headers = HeaderSet::new(CLOCK_SYNC);
        if let Some(grant) = grants.response {
            let options = options(Tokens::Upstream, METRICS_HEADER_BUDGET);
            headers.write_records(grant, &[base_record(), base_record()], &options);
        }
        let queues = headers
            .iter()
            .find(|(name, _)| *name == SERVER_TIMING)
            .map(|(_, value)| String::from_utf8_lossy(value).matches("server_queue;").count());
        assert_eq!(queues, shown.then_some(2));

        let event = MetricsEvent {
            headers: &headers,
            id: "cmpl-1",
            object: "text_completion",
            created: 1,
            model: "m",
        };
        let mut stream = Vec::new();
        write_end(b"{}", grants.response.is_some().then_some(&event), &mut stream);
        let stream = String::from_utf8(stream).expect("UTF-8");
        let behind =
            stream.strip_prefix("data: {}\n\ndata: [DONE]\n\n").expect("the OpenAI stream comes first");
        assert_eq!(behind.starts_with("event: trtllm.perf_metrics\ndata: {"), shown);
        assert_eq!(behind.is_empty(), !shown);
    }
}

#[test]
fn t5_a_budget_keeps_whole_items_and_says_what_it_left_out() {
    let log = (1..=4_000).map(|iter| StepRecord { iter, ..base_log()[1] });
    let trace = StepTrace {
        slices: vec![log.collect()],
        chunk_iters: (1..=2_000).collect(),
        decode_iters: Some((2_001, 4_000)),
    };
    let record = Record { steps: Steps::Shared { trace, clock: ClockOffset::default() }, ..base_record() };
    for budget in [METRICS_HEADER_BUDGET, METRICS_EVENT_BUDGET] {
        let headers = written(std::slice::from_ref(&record), Tokens::Upstream, budget);
        let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        assert!(bytes <= budget as usize && bytes > budget as usize - 200, "{bytes} of {budget}");
        assert!(value(&headers, SERVER_TIMING).is_some() && value(&headers, START_END_TIME).is_some());
        assert_eq!(value(&headers, CTX_CHUNK_METRICS), None);
        let steps = value(&headers, STEP_METRICS).map_or(0, |value| value.matches("-gpu-sample;").count());
        let mark = format!("record=0, step={}, ctx-chunk=2000", 2_000 - steps);
        assert_eq!(value(&headers, TRUNCATED), Some(mark.as_str()));
    }
}

#[test]
fn t10_every_time_survives_the_headers() {
    for phase in [Phase::Ctx, Phase::Gen] {
        let sent = full_record();
        let headers = written(std::slice::from_ref(&sent), Tokens::Extended, METRICS_HEADER_BUDGET_MAX);
        let read = read(&headers, phase, ClockOffset::default());
        assert_eq!(read.times, sent.times);
        assert_eq!(read.kv_cache_size, sent.kv_cache_size);
        assert_eq!((read.request_id, read.blocks), (sent.request_id, sent.blocks));
        assert_eq!((read.first_iter, read.last_iter), (sent.first_iter, sent.last_iter));
        let text = written(&[read], Tokens::Extended, METRICS_HEADER_BUDGET_MAX);
        let points = value(&text, START_END_TIME).expect("points");
        let name = phase.name();
        assert!(!points.contains("server") && !points.contains(&format!("{name}-{name}-")), "{points}");
    }
}

#[test]
fn t11_t12_kv_times_are_kept_without_a_size_and_absent_when_missing() {
    let headers = "server-kv-start;ts=1000.036, server-kv-end;ts=1000.045";
    let record = read(&[(START_END_TIME.into(), headers.into())], Phase::Gen, ClockOffset::default());
    let timing = &parsed(&record)["perf_metrics"]["timing_metrics"];
    assert_eq!(timing["kv_cache_transfer_start"], 1000.036);
    assert_eq!(timing["kv_cache_transfer_end"], 1000.045);
    assert_eq!(timing.get("kv_cache_size"), None);

    for missing in ["null", "0", "0.0"] {
        let line = format!(
            r#"{{"perf_metrics":{{"timing_metrics":{{"arrival_time":1.5,"kv_cache_transfer_start":{missing},"kv_cache_transfer_end":{missing}}}}}}}"#
        );
        let line: Line = serde_json::from_str(&line).expect("a line");
        let times = line.perf_metrics.timing_metrics.times();
        assert_eq!((times.arrival, times.kv_start, times.kv_end), (at_ms(1_500), None, None), "{missing}");
        let timing = &parsed(&Record { times, ..Record::default() })["perf_metrics"]["timing_metrics"];
        assert_eq!(
            (timing.get("kv_cache_transfer_start"), timing.get("kv_cache_transfer_end")),
            (None, None)
        );
    }
}

#[test]
fn t13_headers_give_twelve_spans() {
    // Milliseconds after T0 = 1000 s.
    let at = |ms: i64| at_ms(1_000_000 + ms);
    let ctx = Record {
        times: Times {
            server_arrival: at(1),
            arrival: at(3),
            first_scheduled: at(6),
            first_token: at(10),
            last_token: at(10),
            server_first_token: at(15),
            ..Times::default()
        },
        ..Record::default()
    };
    let generation = Record {
        times: Times {
            server_arrival: at(21),
            arrival: at(28),
            kv_start: at(36),
            kv_end: at(45),
            first_scheduled: at(55),
            first_token: at(66),
            server_first_token: at(66),
            last_token: at(200),
        },
        kv_cache_size: Some(2_048),
        ..Record::default()
    };
    let through_headers = |record: Record, phase| {
        let headers = written(&[record], Tokens::Extended, METRICS_HEADER_BUDGET_MAX);
        read(&headers, phase, ClockOffset::default()).times
    };
    let (ctx, generation) = (through_headers(ctx, Phase::Ctx), through_headers(generation, Phase::Gen));
    let spans = [
        (at(0), ctx.server_arrival),
        (ctx.server_arrival, ctx.arrival),
        (ctx.arrival, ctx.first_scheduled),
        (ctx.first_scheduled, ctx.first_token),
        (ctx.first_token, ctx.server_first_token),
        (ctx.server_first_token, generation.server_arrival),
        (generation.server_arrival, generation.arrival),
        (generation.arrival, generation.kv_start),
        (generation.kv_start, generation.kv_end),
        (generation.kv_end, generation.first_scheduled),
        (generation.first_scheduled, generation.server_first_token),
        (generation.server_first_token, at(78)),
    ];
    for (ms, (from, to)) in (1..).zip(spans) {
        assert_eq!(to.expect("known").checked_since(from.expect("known")), Some(ms * 1_000_000), "span {ms}");
    }
}

#[test]
fn c1_an_offset_is_replaced_not_added() {
    let seconds = |reading: f64, offset: f64| {
        let reading = MonoNs::from_raw((reading * 1e9) as u64);
        ClockOffset::from_seconds(offset).expect("finite").to_reference(reading).as_raw() as f64 / 1e9
    };
    assert_eq!((seconds(10.0, 2.0), seconds(20.0, 2.0), seconds(10.0, -3.0)), (12.0, 22.0, 7.0));
}

#[test]
fn c3_the_clock_header_comes_without_a_record() {
    for (offset, expected) in [
        (0.0, "receive;ts=10.000000000, transmit;ts=10.250000000"),
        (1000.0, "receive;ts=1010.000000000, transmit;ts=1010.250000000"),
    ] {
        let clock = ClockOffset::from_seconds(offset).expect("finite");
        let stamp = ClockStamp {
            receive: clock.to_reference(MonoNs::from_raw(10_000_000_000)),
            transmit: clock.to_reference(MonoNs::from_raw(10_250_000_000)),
        };
        let mut headers = HeaderSet::new("X-Clock");
        let options = WriteOptions { clock: Some(stamp), ..options(Tokens::Upstream, METRICS_HEADER_BUDGET) };
        headers.write_records(response_grant(), &[], &options);
        assert!(headers.iter().eq([("X-Clock", expected.as_bytes())]));
    }
}

#[test]
fn c4_a_bad_clock_header_changes_nothing() {
    for header in ["", "receive;ts=invalid, transmit;ts=1", "receive;ts=1", "receive;ts=nan, transmit;ts=1"] {
        assert_eq!(ClockStamp::read_value(header.as_bytes()), None, "{header:?}");
    }
    assert_eq!(
        ClockOffset::default().shift(ReportNs::from_raw(1_000_000_000)),
        ReportNs::from_raw(1_000_000_000)
    );
}

#[test]
fn c5_c6_a_workers_times_move_to_our_clock() {
    // (offset of the worker's clock in seconds, clock header, start and end)
    let rows = [
        ("receive;ts=100.05, transmit;ts=100.35", "server-start;ts=100.1, server-end;ts=100.3"),
        ("receive;ts=1100.05, transmit;ts=1100.35", "server-start;ts=1100.1, server-end;ts=1100.3"),
    ];
    for (clock, points) in rows {
        let stamp = ClockStamp::read_value(clock.as_bytes()).expect("both times");
        let (Some(originate), Some(destination)) = (at_ms(100_000), at_ms(100_400)) else { panic!() };
        let exchange = stamp.exchange(originate, destination);
        let durations = "server_queue;dur=10, server_ttft;dur=50, server_e2e;dur=200";
        let headers = [(START_END_TIME.into(), points.into()), (SERVER_TIMING.into(), durations.into())];
        let times = read(&headers, Phase::Ctx, exchange.to_ours()).times;
        assert_eq!(times.arrival, at_ms(100_100));
        assert_eq!(times.first_scheduled, at_ms(100_110));
        assert_eq!(times.first_token, at_ms(100_150));
        assert_eq!(times.last_token, at_ms(100_300));
        assert_eq!(exchange.round_trip(), Some(100_000_000));
    }
}

#[test]
fn c8_c9_the_metrics_event_is_found_behind_done_in_any_split() {
    let mut headers = HeaderSet::new(CLOCK_SYNC);
    let options = options(Tokens::Extended, METRICS_EVENT_BUDGET);
    headers.write_records(response_grant(), &[full_record()], &options);
    let event = MetricsEvent { headers: &headers, id: "x", object: "y", created: 1, model: "z" };
    let mut stream = Vec::new();
    write_end(b"{\"a\":1}", Some(&event), &mut stream);
    for cut in 0..=stream.len() {
        let mut parser = Parser::new(1 << 20);
        let mut events = Vec::new();
        for mut piece in [&stream[..cut], &stream[cut..]] {
            while let Some(item) = parser.next_item(&mut piece).expect("small") {
                let Item::Event(event) = item else { panic!("no comments") };
                events.push((event.name.to_vec(), event.data.to_vec()));
            }
        }
        let [(_, chunk), (_, done), (name, data)] = events.as_slice() else {
            panic!("{} events", events.len())
        };
        assert_eq!((chunk.as_slice(), done.as_slice()), (b"{\"a\":1}".as_slice(), b"[DONE]".as_slice()));
        assert_eq!(name, METRICS_EVENT.as_bytes());
        let json: Value = serde_json::from_slice(data).expect("JSON");
        let object = json.as_object().expect("an object");
        let fields =
            object.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?.as_bytes())));
        let read = read_phase(fields, Phase::Gen, ClockOffset::default()).expect("a record");
        assert_eq!(read.times, full_record().times);
        assert_eq!(json["choices"], Value::Array(vec![]));
        assert!(!object.contains_key("usage") && !object.contains_key("error"));
    }
}

#[test]
fn a_completions_line_has_exactly_four_keys() {
    for (tokens, lists) in [(1, vec!["ctx_chunk_metrics"]), (2, vec!["ctx_chunk_metrics", "step_metrics"])] {
        let (record, _) = served(tokens);
        let line = parsed(&record);
        let keys = |value: &Value| {
            let mut keys: Vec<_> = value.as_object().expect("an object").keys().cloned().collect();
            keys.sort();
            keys
        };
        assert_eq!(keys(&line), ["perf_metrics", "request_id", "status", "time_breakdown_metrics"]);
        assert_eq!(
            keys(&line["perf_metrics"]),
            ["first_iter", "kv_cache_metrics", "last_iter", "timing_metrics"]
        );
        assert_eq!(keys(&line["time_breakdown_metrics"]), lists);
        assert_eq!((&line["request_id"], &line["status"]), (&Value::from(42), &Value::from("complete")));
        let timing = &line["perf_metrics"]["timing_metrics"];
        let time = |key: &str| timing[key].as_f64().expect("a time");
        assert!(time("server_arrival_time") <= time("arrival_time"));
        assert!(time("arrival_time") < time("first_scheduled_time"));
        assert!(time("first_scheduled_time") < time("first_token_time"));
        assert!(time("first_token_time") <= time("last_token_time"));
        assert_eq!((timing.get("kv_cache_transfer_start"), timing.get("kv_cache_size")), (None, None));
        assert!(line["perf_metrics"]["first_iter"].as_u64() <= line["perf_metrics"]["last_iter"].as_u64());
        let blocks = &line["perf_metrics"]["kv_cache_metrics"];
        assert!(blocks["num_new_allocated_blocks"].as_u64() <= blocks["num_total_allocated_blocks"].as_u64());
    }
}

#[test]
fn one_mark_is_one_number_in_every_carrier() {
    let (record, line) = served(2);
    let headers = written(&[record], Tokens::Extended, METRICS_HEADER_BUDGET);
    let points = value(&headers, START_END_TIME).expect("points");
    for (token, key, text) in [
        ("server-start", "arrival_time", "1.000000002"),
        ("server-end", "last_token_time", "1.000000019"),
        ("server-srv-start", "server_arrival_time", "1.000000001"),
        ("server-srv-first-token", "server_first_token_time", "1.000000020"),
    ] {
        assert!(points.contains(&format!("{token};ts={text}")), "{token} in {points}");
        assert!(line.contains(&format!("\"{key}\":{text}")), "{key} in {line}");
    }
    // The step's begin and the request's begin are one instant, and so is the end of the step that sampled the last token.
    assert!(
        line.contains("\"first_scheduled_time\":1.000000005")
            && line.contains("\"forward_start_time\":1.000000005")
    );
    assert!(line.contains("\"sample_end_time\":1.000000019"));
}

#[test]
fn a_line_reads_back_what_was_written() {
    for seed in 1..=1_000 {
        let mut random = Random(seed);
        let mut time = || random.maybe(1 << 52).map(|ns| ReportNs::from_raw(ns as i64 - (1 << 51) + 1));
        let times = Times {
            server_arrival: time(),
            arrival: time(),
            first_scheduled: time(),
            first_token: time(),
            last_token: time(),
            server_first_token: time(),
            kv_start: time(),
            kv_end: time(),
        };
        let record = Record {
            request_id: random.maybe(u64::MAX),
            x_request_id: random
                .maybe(0x11_0000)
                .map(|n| format!("{:?}{}", char::from_u32(n as u32), n as u8 as char)),
            status: Status::ALL[random.below(5) as usize],
            times,
            kv_cache_size: random.maybe(u64::MAX),
            first_iter: random.maybe(u64::MAX),
            last_iter: random.maybe(u64::MAX),
            blocks: None,
            ctx_request_id: random.maybe(u64::MAX),
            disagg_request_id: random.maybe(u64::MAX),
            ..base_record()
        };
        let text = line(&record, Extras { dropped_before: seed % 3 });
        assert!(text.is_ascii() && text.ends_with("}\n") && text.matches('\n').count() == 1);
        let line: Line = serde_json::from_str(&text).expect("valid JSON");
        let metrics = &line.perf_metrics;
        assert_eq!(metrics.timing_metrics.times(), times, "seed {seed}");
        assert_eq!(metrics.timing_metrics.kv_cache_size, record.kv_cache_size);
        assert_eq!((metrics.first_iter, metrics.last_iter), (record.first_iter, record.last_iter));
        assert_eq!(metrics.kv_cache_metrics, None);
        assert_eq!(line.request_id, record.request_id.map(RequestId::Number));
        assert_eq!(line.x_request_id, record.x_request_id);
        assert_eq!(line.status.as_deref(), Some(record.status.name()));
        assert_eq!(
            (line.ctx_request_id, line.disagg_request_id),
            (record.ctx_request_id, record.disagg_request_id)
        );
        assert_eq!(line.dropped_before, seed % 3);
        let steps = line.time_breakdown_metrics.expect("always there");
        assert_eq!((steps.step_metrics.len(), steps.ctx_chunk_metrics.len()), (1, 1));
        let step = steps.step_metrics[0];
        assert_eq!(
            (step.iter, step.forward_end_time, step.sample_end_time),
            (Some(3), Some(2.002), Some(2.003))
        );
        assert_eq!((step.gpu_forward_time, step.gpu_sample_time), (Some(1.5), Some(0.5)));
    }
}

#[test]
fn an_upstream_line_is_read_with_what_we_do_not_know() {
    let line: Line = serde_json::from_str(
        r#"{"request_id":"ctx-7","perf_metrics":{"timing_metrics":{"arrival_time":1,"new":1},"speculative_decoding":{}},
            "time_breakdown_metrics":{"ctx_gpu_forward_time":1.5,"step_metrics":[{"token_time":2.5,"other":null}]}}"#,
    )
    .expect("a line");
    assert_eq!(line.request_id, Some(RequestId::Text("ctx-7".into())));
    assert_eq!(line.perf_metrics.timing_metrics.times().arrival, at_ms(1_000));
    assert_eq!(line.time_breakdown_metrics.expect("there").step_metrics[0].token_time, Some(2.5));
    assert_eq!(line.status, None);
}

/// The steps of UF 8.1's base record: a context chunk, and a decode step with number 3.
fn base_log() -> [StepRecord; 2] {
    let ms = |ms: u64| MonoNs::from_raw(ms * 1_000_000);
    let step = |iter, start, end, sampled, gpu: [u64; 2]| StepRecord {
        iter,
        forward_start: ms(start),
        forward_end: ms(end),
        sample_end: ms(sampled),
        gpu_forward_ns: Some(gpu[0]),
        gpu_sample_ns: Some(gpu[1]),
    };
    [step(2, 1_000, 1_004, 1_005, [3_000_000, 250_000]), step(3, 2_000, 2_002, 2_003, [1_500_000, 500_000])]
}

/// UF 8.1's base record.
fn base_record() -> Record {
    let trace =
        StepTrace { slices: vec![Arc::from(base_log())], chunk_iters: vec![2], decode_iters: Some((3, 3)) };
    Record {
        request_id: Some(42),
        times: Times {
            arrival: at_ms(1_000),
            first_scheduled: at_ms(1_010),
            first_token: at_ms(1_020),
            last_token: at_ms(1_050),
            ..Times::default()
        },
        steps: Steps::Shared { trace, clock: ClockOffset::default() },
        ..Record::default()
    }
}

fn full_record() -> Record {
    let record = base_record();
    Record {
        times: Times {
            server_arrival: at_ms(990),
            server_first_token: at_ms(1_025),
            kv_start: at_ms(1_001),
            kv_end: at_ms(1_009),
            ..record.times
        },
        kv_cache_size: Some(2_048),
        first_iter: Some(2),
        last_iter: Some(3),
        blocks: Some(BlockCounts { total_allocated: 2, new_allocated: 1, reused: 1, missed: 0 }),
        ..record
    }
}

/// A request as a server makes its record, one nanosecond a tick after a second; and its line.
fn served(tokens: u64) -> (Record, String) {
    let tick = |ns| MonoNs::from_raw(1_000_000_000 + ns);
    let step = |iter| StepRecord {
        iter,
        forward_start: tick(5 * iter),
        forward_end: tick(5 * iter + 3),
        sample_end: tick(5 * iter + 4),
        gpu_forward_ns: None,
        gpu_sample_ns: None,
    };
    let last = step(1 + tokens);
    let trace = StepTrace {
        slices: vec![(1..10).map(step).collect()],
        chunk_iters: vec![1, 2],
        decode_iters: (tokens > 1).then_some((3, last.iter)),
    };
    let policy = Policy { file: File::On, ..Policy::default() };
    let grants = gate::decide(policy, std::iter::empty());
    let mut builder = Builder::new(grants.collect().expect("a file"), tick(1));
    builder.mark_arrival(tick(2)).expect("in order");
    builder.mark_server_first_token(tick(20)).expect("in order");
    let report = EngineReport {
        request_id: 42,
        first_scheduled: Some(step(1).forward_start),
        first_token: Some(step(2).sample_end),
        last_token: Some(last.sample_end),
        first_iter: Some(1),
        last_iter: Some(last.iter),
        blocks: BlockCounts { total_allocated: 2, new_allocated: 2, reused: 0, missed: 2 },
        steps: trace,
    };
    let record = builder.finish(Status::Complete, Some(report), ClockOffset::default());
    let line = line(&record, Extras::default());
    (record, line)
}

fn at_ms(ms: i64) -> Option<ReportNs> {
    Some(ReportNs::from_raw(ms * 1_000_000))
}

fn response_grant() -> ResponseGrant {
    let policy = Policy { response: Response::AllowOnRequest, ..Policy::default() };
    gate::decide(policy, std::iter::once(b"1".as_slice())).response.expect("asked")
}

fn file_grant() -> FileGrant {
    gate::decide(Policy { file: File::On, ..Policy::default() }, std::iter::empty()).file.expect("on")
}

fn options(tokens: Tokens, budget: u32) -> WriteOptions {
    WriteOptions { budget, tokens, clock: None }
}

fn written(records: &[Record], tokens: Tokens, budget: u32) -> Vec<(String, String)> {
    let mut headers = HeaderSet::new(CLOCK_SYNC);
    headers.write_records(response_grant(), records, &options(tokens, budget));
    headers.iter().map(|(name, value)| (name.into(), String::from_utf8_lossy(value).into_owned())).collect()
}

fn value<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|header| header.0 == name).map(|header| header.1.as_str())
}

fn read(headers: &[(String, String)], phase: Phase, clock: ClockOffset) -> Record {
    let fields = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    read_phase(fields, phase, clock).expect("a record")
}

fn line(record: &Record, extras: Extras) -> String {
    let mut out = Vec::new();
    write_line(file_grant(), record, extras, &mut out);
    String::from_utf8(out).expect("ASCII")
}

fn parsed(record: &Record) -> Value {
    serde_json::from_str(&line(record, Extras::default())).expect("valid JSON")
}

/// A small generator (xorshift64).
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
}

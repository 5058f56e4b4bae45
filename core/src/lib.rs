//! The sans-IO core of `uring-serve`: what an LLM server says, decides and remembers, without a socket, a thread or a
//! clock.
//!
//! `#![no_std]` and `forbid(unsafe_code)` make that a fact and not a promise: there is no way from here to the system.
//! The same code runs behind io_uring, behind any other loop, in a simulator and in a fuzzer.
//!
//! # The contract
//!
//! State machines have methods of four kinds, told apart by their first word:
//!
//! | kind | begins with | what it does |
//! | --- | --- | --- |
//! | observation | `handle_`, `mark_` | tells what happened, and when; keeps what matters of it |
//! | question | `poll_` | says what is next; `None` is "not yet", and asking again costs nothing |
//! | command | `send_`, `write_`, `finish` | appends bytes to the caller's `out`, or refuses and appends none |
//! | bracket | `begin_` … `end_` | holds what is in use until the end comes ([`sched::Planner`]) |
//!
//! **Time is yours.** Every moment is an argument, read once by the driver for everything that it then does. [`MonoNs`]
//! is a point on this host's monotonic clock, [`ReportNs`] one on the clock that reports are told in; the one becomes
//! the other only by a [`ClockOffset`].
//!
//! **Memory is yours.** Input stays in the caller's buffer and is looked at in place; output goes to the caller's `Vec`.
//! Nothing is queued inside. Every bound is in [`limits`] or an argument.
//!
//! **Errors name who is to blame.** A peer's fault is latched and can be answered ([`http1::PeerError`]); a misuse by
//! the embedder changes nothing ([`http1::Misuse`]).
//!
//! Modules use only those to their left: `time, limits → http1, sched → gate → metrics → headers → sse, jsonl → fuzzing`,
//! the last only with the feature of its name.
//!
//! # The whole loop, with an in-memory peer
//!
//! Bytes in, a request out; the gate's decision; marks of the front end and the engine's report; a record; bytes out.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use uring_serve_core::gate::{self, BudgetPolicy, Budgets, Grants, Policy};
//! use uring_serve_core::headers::{CLOCK_SYNC, HeaderSet, WriteOptions};
//! use uring_serve_core::http1::{Connection, Error, Event, Framing, Limits, Next, ResponseHead};
//! use uring_serve_core::metrics::{Builder, EngineReport, Status, StepRecord, StepTrace};
//! use uring_serve_core::sse::{self, MetricsEvent};
//! use uring_serve_core::time::{ClockOffset, MonoNs};
//!
//! const DATE: &[u8; 29] = b"Tue, 01 Dec 2026 12:00:00 GMT";
//! const POLICY: Policy = Policy { response: gate::Response::AllowOnRequest, file: gate::File::Off };
//!
//! /// The driver's clock. Here it moves when the example says so.
//! struct Clock(MonoNs);
//!
//! impl Clock {
//!     fn after_ms(&mut self, ms: u64) -> MonoNs {
//!         self.0 = self.0.saturating_add(Duration::from_millis(ms));
//!         self.0
//!     }
//! }
//!
//! /// Stands for an engine: one step for the prompt and the first token, one for the second.
//! fn generate(clock: &mut Clock) -> EngineReport {
//!     let mut step = |iter| StepRecord {
//!         iter,
//!         forward_start: clock.after_ms(0),
//!         forward_end: clock.after_ms(8),
//!         sample_end: clock.after_ms(2),
//!         gpu_forward_ns: None,
//!         gpu_sample_ns: None,
//!     };
//!     let steps = [step(1), step(2)];
//!     EngineReport {
//!         request_id: 1,
//!         first_scheduled: Some(steps[0].forward_start),
//!         first_token: Some(steps[0].sample_end),
//!         last_token: Some(steps[1].sample_end),
//!         first_iter: Some(1),
//!         last_iter: Some(2),
//!         steps: StepTrace { slices: vec![Arc::from(steps)], chunk_iters: vec![1], decode_iters: Some((2, 2)) },
//!         ..EngineReport::default()
//!     }
//! }
//!
//! /// Serves one request out of `input`, as the driver does when bytes have come.
//! fn serve(
//!     connection: &mut Connection,
//!     clock: &mut Clock,
//!     input: &mut Vec<u8>,
//!     out: &mut Vec<u8>,
//! ) -> Result<Next, Error> {
//!     let mut head_at = clock.0;
//!     loop {
//!         match connection.poll_event(clock.0, input)?.expect("the peer sends whole requests") {
//!             Event::Head => head_at = clock.0,
//!             Event::ExpectContinue => connection.send_continue(out)?,
//!             Event::Body { body } => {
//!                 let request = connection.request(input).expect("one is being served");
//!                 let grants = gate::decide(POLICY, request.header_values(gate::RETURN_METRICS));
//!                 let named = request.header_values(gate::METRICS_BUDGET);
//!                 let Budgets { headers, event, tokens } = gate::choose_budgets(BudgetPolicy::default(), named);
//!                 let is_stream = input[body].ends_with(b"\"stream\":true}");
//!                 let budget = if is_stream { event } else { headers };
//!
//!                 let arrival = clock.after_ms(1);
//!                 clock.after_ms(20);
//!                 let report = generate(clock);
//!                 let times = [head_at, arrival, clock.0];
//!                 let headers = tell(grants, times, report, &WriteOptions { budget, tokens, clock: None });
//!                 match is_stream {
//!                     true => send_stream(connection, &headers, out)?,
//!                     false => send_whole(connection, &headers, out)?,
//!                 }
//!                 return connection.finish(clock.0, out);
//!             }
//!         }
//!     }
//! }
//!
//! /// Makes the record of a request and writes what may be shown of it; nothing without a grant.
//! fn tell(grants: Grants, times: [MonoNs; 3], report: EngineReport, options: &WriteOptions) -> HeaderSet {
//!     let mut headers = HeaderSet::new(CLOCK_SYNC);
//!     // A builder takes a proof, and so do the headers: what nobody may see is not even collected.
//!     let (Some(proof), Some(grant)) = (grants.collect(), grants.response) else { return headers };
//!     let [head_at, arrival, first_token] = times;
//!     let mut builder = Builder::new(proof, head_at);
//!     builder.mark_arrival(arrival).expect("after the head");
//!     builder.mark_server_first_token(first_token).expect("after the hand-over");
//!     let record = builder.finish(Status::Complete, Some(report), ClockOffset::default());
//!     headers.write_records(grant, &[record], options);
//!     headers
//! }
//!
//! /// An answer that leaves whole carries its metrics as header fields.
//! fn send_whole(connection: &mut Connection, headers: &HeaderSet, out: &mut Vec<u8>) -> Result<(), Error> {
//!     let fields: Vec<_> = headers.iter().collect();
//!     let head = ResponseHead { status: 200, headers: &fields, date: DATE };
//!     connection.send_head(&head, Framing::Length(5), out)?;
//!     connection.send_body(b"hello", out)
//! }
//!
//! /// A stream's head has left long before its end, so its metrics follow as an event behind `[DONE]`.
//! fn send_stream(connection: &mut Connection, headers: &HeaderSet, out: &mut Vec<u8>) -> Result<(), Error> {
//!     let head = ResponseHead { status: 200, headers: &[("Content-Type", b"text/event-stream")], date: DATE };
//!     connection.send_head(&head, Framing::Chunked, out)?;
//!     let mut events = Vec::new();
//!     sse::write_data(br#"{"text":"hel"}"#, &mut events);
//!     let event = MetricsEvent { headers, id: "cmpl-1", object: "text_completion", created: 0, model: "m" };
//!     sse::write_end(br#"{"text":"lo"}"#, Some(&event), &mut events);
//!     connection.send_body(&events, out)
//! }
//!
//! let mut clock = Clock(MonoNs::from_raw(5_000_000_000));
//! let mut connection = Connection::new(Limits::default(), clock.0);
//! let (mut input, mut out) = (Vec::new(), Vec::new());
//! let mut ask = |fields: &str, body: &str| {
//!     let head = format!(
//!         "POST /v1/completions HTTP/1.1\r\nHost: h\r\n{fields}Content-Length: {}\r\n\r\n",
//!         body.len()
//!     );
//!     input.extend_from_slice(format!("{head}{body}").as_bytes());
//!     let next = serve(&mut connection, &mut clock, &mut input, &mut out).expect("a well-behaved peer");
//!     let Next::KeepAlive { consumed } = next else { panic!("HTTP/1.1 goes on") };
//!     input.drain(..consumed);
//!     String::from_utf8(std::mem::take(&mut out)).expect("ASCII")
//! };
//!
//! // Asked for: four headers. The queue took 20 ms, the first token 10 ms more, the second another 10.
//! let answer = ask("X-TRTLLM-return-metrics: 1\r\n", "{}");
//! assert_eq!(
//!     answer,
//!     "HTTP/1.1 200 OK\r\nDate: Tue, 01 Dec 2026 12:00:00 GMT\r\nContent-Length: 5\r\n\
//!  Server-Timing: server_queue;dur=20.000000, server_ttft;dur=30.000000, server_e2e;dur=40.000000\r\n\
//!  X-TRTLLM-Start-End-Time: server-start;ts=5.001000000, server-end;ts=5.041000000\r\n\
//!  X-TRTLLM-Step-Metrics: server-step-2-forward;dur=8.000000, server-step-2-sample;dur=2.000000\r\n\
//!  X-TRTLLM-Ctx-Chunk-Metrics: server-ctx-chunk-0-forward;dur=8.000000, server-ctx-chunk-0-sample;dur=2.000000\r\n\
//!  \r\nhello"
//! );
//!
//! // Not asked for: the bytes of a server without the feature.
//! let answer = ask("", "{}");
//! assert_eq!(
//!     answer,
//!     "HTTP/1.1 200 OK\r\nDate: Tue, 01 Dec 2026 12:00:00 GMT\r\nContent-Length: 5\r\n\r\nhello"
//! );
//!
//! // A stream: two events, [DONE], and behind it the event with the same numbers.
//! let answer = ask("X-TRTLLM-return-metrics: 1\r\n", "{\"stream\":true}");
//! let (events, metrics) = answer.split_once("data: [DONE]\n\n").expect("one end");
//! assert!(events.ends_with("data: {\"text\":\"hel\"}\n\ndata: {\"text\":\"lo\"}\n\n"));
//! assert!(metrics.starts_with(
//! "event: trtllm.perf_metrics\ndata: {\"Server-Timing\":\"server_queue;dur=20.000000, server_ttft;dur=30.000000, \
//!  server_e2e;dur=40.000000\",\"X-TRTLLM-Start-End-Time\":"
//! ));
//! assert!(metrics.ends_with("\"model\":\"m\",\"choices\":[]}\n\n\r\n0\r\n\r\n"));
//! ```
//!
//! [`MonoNs`]: time::MonoNs
//! [`ReportNs`]: time::ReportNs
//! [`ClockOffset`]: time::ClockOffset
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod gate;
pub mod headers;
pub mod http1;
pub mod jsonl;
pub mod limits;
pub mod metrics;
pub mod sched;
pub mod sse;
pub mod time;

//! Every bound of the core, related to each other by `const` assertions.

use core::time::Duration;

// ---- sched: the planner sizes its tables from these, once.

/// Most sequences running at once, in sequences.
pub const BATCH_SEQS_MAX: u32 = 4096;
/// Most sequences waiting, in sequences.
pub const QUEUE_MAX: u32 = 1 << 16;
/// Most KV blocks, in blocks: two lists of 4 bytes each, 128 MiB in all.
pub const BLOCK_COUNT_MAX: u32 = 1 << 24;

const _: () = assert!(BATCH_SEQS_MAX <= BLOCK_COUNT_MAX, "a running sequence holds at least one block");

// Metrics on the wire, in bytes. A header counts as name + value + 4 (UF 1.4).

/// Default budget of the metrics headers: a stock nginx answers 502 above 4 KiB of response head.
pub const METRICS_HEADER_BUDGET: u32 = 3_584;
/// Default ceiling of what a request may ask for by `X-TRTLLM-Metrics-Budget`; upstream's own budget.
pub const METRICS_HEADER_BUDGET_MAX: u32 = 81_920;
/// Default budget of the metrics event of a stream.
pub const METRICS_EVENT_BUDGET: u32 = 81_920;
/// Default limit of one server-sent event that a peer sends: bytes held, over all its lines.
pub const SSE_EVENT_BYTES_MAX: u32 = 2 * 1024 * 1024;

const _: () = assert!(METRICS_HEADER_BUDGET <= METRICS_HEADER_BUDGET_MAX);
// A peer's metrics event must fit the parser, its JSON around it included.
const _: () = assert!(METRICS_EVENT_BUDGET < SSE_EVENT_BYTES_MAX / 2);

// ---- http1: what a deployment may change (the fields of `http1::Limits`) and what it may not.

/// Most bytes of a request line plus header section, unless configured otherwise: 16 KiB. More is answered 431 (414
/// if the request line alone is longer).
pub const HEAD_BYTES_DEFAULT: u32 = 16 << 10;

/// Most that `head_bytes_max` may be raised to, in bytes: field offsets are `u32`.
pub const HEAD_BYTES_CEILING: u32 = 16 << 20;

/// Most bytes of a request body, decoded, unless configured otherwise: 16 MiB. More is answered 413.
pub const BODY_BYTES_DEFAULT: u32 = 16 << 20;

/// From the first byte of a head to its last, unless configured otherwise. Later is answered 408.
pub const HEAD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// From the end of a head to the end of its body, unless configured otherwise. Later is answered 408.
pub const BODY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Between two requests, or before the first, unless configured otherwise. Later closes the connection.
pub const IDLE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(75);

/// Most fields of a header section, and of a trailer section. More are answered 431.
pub const HEADER_COUNT_MAX: usize = 64;

/// Most bytes of a method. A longer one is no method of ours and is answered 501 (RFC 9112 §3).
pub const METHOD_BYTES_MAX: u32 = 32;

/// Most empty lines skipped before a request line (RFC 9112 §2.2 asks for at least one). More are answered 400.
pub const EMPTY_LINES_MAX: u32 = 2;

/// Most bytes of one chunk-size line: size, extensions, CRLF. More are answered 400.
pub const CHUNK_LINE_BYTES_MAX: u32 = 1 << 10;

/// Most bytes of one body's chunk framing: all size lines and the CRLF after each chunk. More are answered 413.
/// Together with `body_bytes_max` and [`TRAILER_BYTES_MAX`] it bounds what a driver buffers for one message. It lets
/// through 16 MiB in chunks of 512 bytes, or 40,000 chunks of one byte.
pub const CHUNK_FRAMING_BYTES_MAX: u32 = 256 << 10;

/// Most bytes of a trailer section, its final empty line included. More are answered 431.
pub const TRAILER_BYTES_MAX: u32 = 8 << 10;

const _: () = assert!(HEAD_BYTES_DEFAULT <= HEAD_BYTES_CEILING);
const _: () = assert!(HEAD_BYTES_CEILING < u32::MAX - 2 * EMPTY_LINES_MAX);
const _: () = assert!(METHOD_BYTES_MAX < HEAD_BYTES_DEFAULT);
const _: () = assert!(CHUNK_LINE_BYTES_MAX < CHUNK_FRAMING_BYTES_MAX);
const _: () = assert!(TRAILER_BYTES_MAX <= HEAD_BYTES_DEFAULT);
const _: () = assert!(EMPTY_LINES_MAX >= 1);

//! The one table of wire quantities: names, units, digits, accessors.

use super::{BlockCounts, Mark, Record};

/// A moment on the wire: in seconds, with 9 digits.
#[derive(Clone, Copy, Debug)]
pub struct TimeField {
    /// Which.
    pub mark: Mark,
    /// Key in `timing_metrics` of a JSONL line.
    pub key: &'static str,
    /// What a line says of a missing one.
    pub missing: Missing,
    /// Token after the phase in `X-TRTLLM-Start-End-Time`; `None` where a span of [`SPANS`] carries it from
    /// [`Mark::Arrival`] on.
    pub token: Option<Token>,
}

/// How a JSONL line says that a time is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The key is left out.
    Absent,
    /// The value is `null`.
    Null,
}

/// A token, and who writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// Ours: only for requests that named a budget.
    Extended(&'static str),
    /// Upstream's: for every request that was granted metrics.
    Upstream(&'static str),
}

impl Token {
    /// Returns its text, without the phase.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Extended(text) | Self::Upstream(text) => text,
        }
    }
}

/// All moments, in the order of a JSONL line (UF 2.3).
pub const TIMES: [TimeField; 8] = [
    TimeField {
        mark: Mark::Arrival,
        key: "arrival_time",
        missing: Missing::Null,
        token: Some(Token::Upstream("start")),
    },
    TimeField {
        mark: Mark::FirstScheduled,
        key: "first_scheduled_time",
        missing: Missing::Null,
        token: None,
    },
    TimeField { mark: Mark::FirstToken, key: "first_token_time", missing: Missing::Null, token: None },
    TimeField {
        mark: Mark::LastToken,
        key: "last_token_time",
        missing: Missing::Null,
        token: Some(Token::Upstream("end")),
    },
    TimeField {
        mark: Mark::KvStart,
        key: "kv_cache_transfer_start",
        missing: Missing::Absent,
        token: Some(Token::Extended("kv-start")),
    },
    TimeField {
        mark: Mark::KvEnd,
        key: "kv_cache_transfer_end",
        missing: Missing::Absent,
        token: Some(Token::Extended("kv-end")),
    },
    TimeField {
        mark: Mark::ServerArrival,
        key: "server_arrival_time",
        missing: Missing::Null,
        token: Some(Token::Extended("srv-start")),
    },
    TimeField {
        mark: Mark::ServerFirstToken,
        key: "server_first_token_time",
        missing: Missing::Null,
        token: Some(Token::Extended("srv-first-token")),
    },
];

/// A duration of `Server-Timing`: in milliseconds, with 6 digits.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Name after the phase.
    pub name: &'static str,
    /// Where it begins.
    pub from: Mark,
    /// Where it ends.
    pub to: Mark,
}

/// All durations, in header order (UF 1.3).
pub const SPANS: [Span; 4] = [
    Span { name: "queue", from: Mark::Arrival, to: Mark::FirstScheduled },
    Span { name: "ttft", from: Mark::Arrival, to: Mark::FirstToken },
    Span { name: "e2e", from: Mark::Arrival, to: Mark::LastToken },
    Span { name: "kv_transfer", from: Mark::KvStart, to: Mark::KvEnd },
];

/// A whole number of a record, which travels in a token of ours.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    /// Key in a JSONL line; its place there is UF 2.3's.
    pub key: &'static str,
    /// Token after the phase in `X-TRTLLM-Start-End-Time`.
    pub token: &'static str,
    /// Reads it; `None` leaves it out.
    pub read: fn(&Record) -> Option<u64>,
    /// Sets it; a number out of its range changes nothing.
    pub set: fn(&mut Record, u64),
}

/// All whole numbers, in header order.
pub const COUNTS: [Count; 10] = [
    REQUEST_ID,
    CTX_REQUEST_ID,
    DISAGG_REQUEST_ID,
    KV_CACHE_SIZE,
    FIRST_ITER,
    LAST_ITER,
    BLOCKS[0],
    BLOCKS[1],
    BLOCKS[2],
    BLOCKS[3],
];

/// The record's own number.
pub const REQUEST_ID: Count = Count {
    key: "request_id",
    token: "request-id",
    read: |record| record.request_id,
    set: |record, n| record.request_id = Some(n),
};
/// The context worker's number.
pub const CTX_REQUEST_ID: Count = Count {
    key: "ctx_request_id",
    token: "context-request-id",
    read: |record| record.ctx_request_id,
    set: |record, n| record.ctx_request_id = Some(n),
};
/// The number that joins two legs.
pub const DISAGG_REQUEST_ID: Count = Count {
    key: "disagg_request_id",
    token: "disagg-request-id",
    read: |record| record.disagg_request_id,
    set: |record, n| record.disagg_request_id = Some(n),
};
/// Bytes of KV cache transferred.
pub const KV_CACHE_SIZE: Count = Count {
    key: "kv_cache_size",
    token: "kv-size",
    read: |record| record.kv_cache_size,
    set: |record, n| record.kv_cache_size = Some(n),
};
/// First step.
pub const FIRST_ITER: Count = Count {
    key: "first_iter",
    token: "first-iter",
    read: |record| record.first_iter,
    set: |record, n| record.first_iter = Some(n),
};
/// Last step.
pub const LAST_ITER: Count = Count {
    key: "last_iter",
    token: "last-iter",
    read: |record| record.last_iter,
    set: |record, n| record.last_iter = Some(n),
};

/// KV blocks, in the order of a JSONL line.
pub const BLOCKS: [Count; 4] = [
    Count {
        key: "num_total_allocated_blocks",
        token: "kv-blocks-total",
        read: |record| Some(record.blocks?.total_allocated.into()),
        set: |record, n| set_blocks(record, n, |blocks| &mut blocks.total_allocated),
    },
    Count {
        key: "num_new_allocated_blocks",
        token: "kv-blocks-new",
        read: |record| Some(record.blocks?.new_allocated.into()),
        set: |record, n| set_blocks(record, n, |blocks| &mut blocks.new_allocated),
    },
    Count {
        key: "num_reused_blocks",
        token: "kv-blocks-reused",
        read: |record| Some(record.blocks?.reused.into()),
        set: |record, n| set_blocks(record, n, |blocks| &mut blocks.reused),
    },
    Count {
        key: "num_missed_blocks",
        token: "kv-blocks-missed",
        read: |record| Some(record.blocks?.missed.into()),
        set: |record, n| set_blocks(record, n, |blocks| &mut blocks.missed),
    },
];

fn set_blocks(record: &mut Record, n: u64, field: fn(&mut BlockCounts) -> &mut u32) {
    if let Ok(n) = u32::try_from(n) {
        *field(record.blocks.get_or_insert_default()) = n;
    }
}

/// The items of a step or context chunk, in header order: in milliseconds, with 6 digits (UF 1.3).
pub const STEP_ITEMS: [&str; 4] = ["forward", "sample", "gpu-forward", "gpu-sample"];

//! The rows of the table: what is asked of whom.

use crate::children::Kind;

/// One comparison.
pub(crate) struct Row {
    /// What `--only` selects by.
    pub(crate) name: &'static str,
    /// In words.
    pub(crate) title: &'static str,
    /// The one compared, and what it is compared with.
    pub(crate) sides: [Side; 2],
    pub(crate) connections: usize,
    pub(crate) body: Body,
    pub(crate) unit: Unit,
    /// Highest ratio of CPU time to be content with.
    pub(crate) target: f64,
}

/// One server of a comparison.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    pub(crate) kind: Kind,
    pub(crate) name: &'static str,
    /// Flags beyond those of every server.
    pub(crate) flags: &'static [&'static str],
    /// A header line of every request, or nothing.
    pub(crate) header: &'static str,
    /// Writes records to a directory of its own.
    pub(crate) records: bool,
}

/// What is sent.
#[derive(Clone, Copy)]
pub(crate) enum Body {
    /// A completion of one token behind a prompt of about 450 bytes.
    OneToken,
    /// A stream of a chat, of so many tokens.
    Chat(u32),
    /// A stream of 64 tokens behind a prompt of 128.
    Completion,
}

/// What CPU time is counted per.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// A whole answer.
    Request,
    /// An event of a stream.
    Event,
}

impl Unit {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Event => "event",
        }
    }
}

impl Row {
    /// The bytes of one request of a side.
    pub(crate) fn request(&self, side: &Side) -> Vec<u8> {
        let (path, body) = self.body.render();
        let (length, header) = (body.len(), side.header);
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        );
        format!("{head}{header}\r\n{body}").into_bytes()
    }
}

impl Body {
    /// Whether the answer is an event stream.
    pub(crate) const fn is_stream(self) -> bool {
        matches!(self, Self::Chat(_) | Self::Completion)
    }

    fn render(self) -> (&'static str, String) {
        let prompt = |bytes: usize| PROMPT.chars().cycle().take(bytes).collect::<String>();
        match self {
            Self::OneToken => {
                let fields = r#""model":"sim","max_tokens":1,"temperature":0"#;
                ("/v1/completions", format!(r#"{{{fields},"prompt":"{}"}}"#, prompt(436)))
            }
            Self::Chat(tokens) => {
                let fields = r#""model":"sim","stream":true,"ignore_eos":true,"temperature":0"#;
                let messages = format!(r#"[{{"role":"user","content":"{}"}}]"#, prompt(100));
                let body = format!(r#"{{{fields},"max_tokens":{tokens},"messages":{messages}}}"#);
                ("/v1/chat/completions", body)
            }
            Self::Completion => {
                let fields =
                    r#""model":"sim","stream":true,"ignore_eos":true,"temperature":0,"max_tokens":64"#;
                ("/v1/completions", format!(r#"{{{fields},"prompt":"{}"}}"#, prompt(128)))
            }
        }
    }
}

const fn ours(name: &'static str, flags: &'static [&'static str]) -> Side {
    Side { kind: Kind::Ours, name, flags, header: "", records: false }
}

const fn against_hyper(flags: &'static [&'static str]) -> [Side; 2] {
    [ours("uring", flags), Side { kind: Kind::Hyper, name: "hyper", flags, header: "", records: false }]
}

const fn on_against_off(on: &'static [&'static str], off: &'static [&'static str]) -> [Side; 2] {
    let side = ours("on", on);
    [Side { header: "X-TRTLLM-return-metrics: 1\r\n", records: true, ..side }, ours("off", off)]
}

/// All rows, in the order of the table.
pub(crate) const ROWS: [Row; 7] = [
    Row {
        name: "post-64",
        title: "POST JSON of 500 bytes, 1 token, keep-alive, c=64",
        sides: against_hyper(AT_ONCE),
        connections: 64,
        body: Body::OneToken,
        unit: Unit::Request,
        target: 0.60,
    },
    Row {
        name: "post-512",
        title: "the same, c=512",
        sides: against_hyper(AT_ONCE),
        connections: 512,
        body: Body::OneToken,
        unit: Unit::Request,
        target: 0.60,
    },
    Row {
        name: "post-4096",
        title: "the same, c=4096",
        sides: against_hyper(AT_ONCE),
        connections: 4096,
        body: Body::OneToken,
        unit: Unit::Request,
        target: 0.62,
    },
    Row {
        name: "sse-10ms",
        title: "SSE, 512 streams, a token each 10 ms",
        sides: against_hyper(PACED),
        connections: 512,
        body: Body::Chat(4000),
        unit: Unit::Event,
        target: 0.70,
    },
    Row {
        name: "sse-flat-out",
        title: "SSE, 512 streams, tokens as fast as they can be made",
        sides: against_hyper(AT_ONCE),
        connections: 512,
        body: Body::Chat(512),
        unit: Unit::Event,
        target: 0.25,
    },
    Row {
        name: "metrics-stream",
        title: "metrics and JSONL on against off: streams of 128 tokens in, 64 out, 1 ms each, c=64",
        sides: on_against_off(METRICS_1_MS, ONE_MS),
        connections: 64,
        body: Body::Completion,
        unit: Unit::Request,
        target: 1.02,
    },
    Row {
        name: "metrics-post",
        title: "metrics and JSONL on against off: POST JSON, 1 token, c=64",
        sides: on_against_off(METRICS_AT_ONCE, AT_ONCE),
        connections: 64,
        body: Body::OneToken,
        unit: Unit::Request,
        target: 1.15,
    },
];

const AT_ONCE: &[&str] = &["--sim-ttft-us", "0", "--sim-tpot-us", "0"];
const PACED: &[&str] = &["--sim-ttft-us", "0", "--sim-tpot-us", "10000"];
const ONE_MS: &[&str] = &["--sim-ttft-us", "1000", "--sim-tpot-us", "1000"];
const METRICS_AT_ONCE: &[&str] = &["--sim-ttft-us", "0", "--sim-tpot-us", "0", "--return-perf-metrics"];
const METRICS_1_MS: &[&str] = &["--sim-ttft-us", "1000", "--sim-tpot-us", "1000", "--return-perf-metrics"];

/// What every server is started with: room for all connections of a row.
pub(crate) const COMMON: &[&str] =
    &["--max-batch-size", "512", "--max-num-tokens", "1048576", "--max-queued-requests", "8192"];

const PROMPT: &str =
    "The river was cold in the morning, and the small boat lay by the green water as before. ";

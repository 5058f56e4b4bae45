//! What the server runs with: flags, environment and YAML resolved and checked once, then never changed.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use uring_serve_core::gate;
use uring_serve_core::http1;
use uring_serve_core::limits::BLOCK_COUNT_MAX;
use uring_serve_kernels::cpu;

pub use crate::args::{Engine, LogFormat};
use crate::args::{ServeArgs, nearest};
use crate::failure::Failure;

/// Everything the flags of `serve` say. Sizes are in the unit that the name ends in.
#[derive(Clone, Debug)]
pub struct Config {
    /// `MODEL`: a file or a directory. Present unless the engine is [`Engine::Sim`].
    pub model: Option<PathBuf>,
    /// `--engine`, as asked.
    pub engine: Engine,
    /// `--served-model-name`, or the model's own: the last part of its path, or `sim`.
    pub served_model_name: String,
    /// `--strict-model`.
    pub strict_model: bool,
    /// `--host`: an address, a name, or `localhost` for both loopback addresses.
    pub host: String,
    /// `--port`; 0 picks one.
    pub port: u16,
    /// `--api-key`, or the environment's.
    pub api_key: Option<ApiKey>,
    /// `--workers`: ring threads, 1 to 256.
    pub workers: u16,
    /// `--threads`: CPU kernel threads, 1 to [`cpu::THREADS_MAX`].
    pub threads: u16,
    /// `--frontend-threads`: 1 to 64.
    pub frontend_threads: u16,
    /// `--max-batch-size`, in sequences.
    pub max_batch_size: u32,
    /// `--max-num-tokens`, at least one for each sequence of a full batch.
    pub max_num_tokens: u32,
    /// `--tokens-per-block`.
    pub tokens_per_block: u32,
    /// `--max-queued-requests`, in sequences.
    pub max_queued_requests: u32,
    /// `--max-seq-len`, in tokens; `None` takes the model's, at most 8192.
    pub max_seq_len: Option<u32>,
    /// `--kv-cache-tokens`, at least one block; `None` takes batch times sequence, at most a quarter of memory.
    pub kv_cache_tokens: Option<u32>,
    /// `--head-bytes-max`, `--body-bytes-max`, `--head-timeout`, `--body-timeout`, `--idle-timeout`.
    pub http: http1::Limits,
    /// `--drain-timeout`.
    pub drain_timeout: Duration,
    /// `--request-timeout`.
    pub request_timeout: Option<Duration>,
    /// `--stream-head-after`.
    pub stream_head_after: Duration,
    /// `--sse-keepalive`.
    pub sse_keepalive: Option<Duration>,
    /// `--return-perf-metrics` and whether there is a `--perf-metrics-output-dir`.
    pub policy: gate::Policy,
    /// `--perf-metrics-output-dir`.
    pub perf_metrics_output_dir: Option<PathBuf>,
    /// `--perf-metrics-failed-requests`.
    pub perf_metrics_failed_requests: bool,
    /// `--metrics-header-budget`, in bytes; at most `metrics_header_budget_max`.
    pub metrics_header_budget: u32,
    /// `--metrics-header-budget-max`, in bytes.
    pub metrics_header_budget_max: u32,
    /// `--metrics-event-budget`, in bytes.
    pub metrics_event_budget: u32,
    /// `--clock-header`: a valid field name.
    pub clock_header: String,
    /// `--sim-ttft-us`.
    pub sim_ttft: Duration,
    /// `--sim-tpot-us`.
    pub sim_tpot: Duration,
    /// `--sim-seed`.
    pub sim_seed: u64,
    /// `--log-format`.
    pub log_format: LogFormat,
}

impl Config {
    /// Checks what no single flag can check alone, and fills in what depends on the machine.
    pub(crate) fn from_args(args: ServeArgs) -> Result<Self, Failure> {
        check(&args)?;
        let threads = args.threads.unwrap_or_else(cpu_count);
        let policy = gate::Policy {
            response: if args.return_perf_metrics {
                gate::Response::AllowOnRequest
            } else {
                gate::Response::Deny
            },
            file: if args.perf_metrics_output_dir.is_some() { gate::File::On } else { gate::File::Off },
        };
        Ok(Self {
            served_model_name: args.served_model_name.unwrap_or_else(|| model_name(args.model.as_deref())),
            model: args.model,
            engine: args.engine,
            strict_model: args.strict_model,
            host: args.host,
            port: args.port,
            api_key: args.api_key.map(ApiKey),
            workers: args.workers,
            threads,
            frontend_threads: args.frontend_threads,
            max_batch_size: args.max_batch_size,
            max_num_tokens: args.max_num_tokens,
            tokens_per_block: args.tokens_per_block,
            max_queued_requests: args.max_queued_requests,
            max_seq_len: args.max_seq_len,
            kv_cache_tokens: args.kv_cache_tokens,
            http: http1::Limits {
                head_bytes_max: args.head_bytes_max,
                body_bytes_max: args.body_bytes_max,
                head_timeout: args.head_timeout,
                body_timeout: args.body_timeout,
                idle_timeout: args.idle_timeout,
            },
            drain_timeout: args.drain_timeout,
            request_timeout: args.request_timeout,
            stream_head_after: args.stream_head_after,
            sse_keepalive: args.sse_keepalive,
            policy,
            perf_metrics_output_dir: args.perf_metrics_output_dir,
            perf_metrics_failed_requests: args.perf_metrics_failed_requests,
            metrics_header_budget: args.metrics_header_budget,
            metrics_header_budget_max: args.metrics_header_budget_max,
            metrics_event_budget: args.metrics_event_budget,
            clock_header: args.clock_header,
            sim_ttft: Duration::from_micros(args.sim_ttft_us),
            sim_tpot: Duration::from_micros(args.sim_tpot_us),
            sim_seed: args.sim_seed,
            log_format: args.log_format,
        })
    }
}

/// A secret: it never shows in a log or a debug print.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// Returns whether `presented` is the key, in time that depends on the length of `presented` only.
    #[must_use]
    pub fn matches(&self, presented: &[u8]) -> bool {
        let key = self.0.as_bytes();
        let mut differs = usize::from(presented.len() != key.len());
        for (index, byte) in presented.iter().enumerate() {
            differs |= usize::from(byte ^ key[index % key.len()]);
        }
        std::hint::black_box(differs) == 0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(hidden)")
    }
}

fn check(args: &ServeArgs) -> Result<(), Failure> {
    let role = args.server_role.as_str();
    let batch = args.max_batch_size;
    let block = args.tokens_per_block;
    if role != "server" {
        return Err(Failure::usage(
            format!("--server-role is {role}: this build serves the role `server` only"),
            "leave the flag out",
        ));
    }
    if args
        .api_key
        .as_ref()
        .is_some_and(|key| !(1..=256).contains(&key.len()) || key.contains(char::is_control))
    {
        // The value itself is a secret and is not shown.
        return Err(Failure::usage(
            "the API key is empty, longer than 256 bytes, or has a control character",
            "give 1 to 256 printable characters; a key read from a file may end in a newline",
        ));
    }
    if args.model.is_none() && args.engine != Engine::Sim {
        return Err(Failure::usage(
            "MODEL is missing",
            "name a .gguf file or a model directory, or pass `--engine sim`, which needs none",
        ));
    }
    if args.max_num_tokens < batch {
        return Err(Failure::usage(
            format!("--max-num-tokens is {}: less than --max-batch-size, {batch}", args.max_num_tokens),
            "each running sequence takes one token of a step; raise the one or lower the other",
        ));
    }
    if args.engine != Engine::Sim && !block.is_multiple_of(cpu::BLOCK_TOKENS_UNIT) {
        return Err(Failure::usage(
            format!("--tokens-per-block is {block}: no multiple of {}", cpu::BLOCK_TOKENS_UNIT),
            "the CPU engine's cache is laid out in such tiles; 32 is the default",
        ));
    }
    if args.kv_cache_tokens.is_some_and(|tokens| tokens < block) {
        return Err(Failure::usage(
            format!("--kv-cache-tokens is {}: less than one block", args.kv_cache_tokens.unwrap_or_default()),
            format!("--tokens-per-block is {block}; give the cache at least that"),
        ));
    }
    if let Some(tokens) = args.kv_cache_tokens.filter(|tokens| tokens.div_ceil(block) > BLOCK_COUNT_MAX) {
        return Err(Failure::usage(
            format!("--kv-cache-tokens is {tokens}: more than {BLOCK_COUNT_MAX} blocks"),
            format!("--tokens-per-block is {block}; raise it or give the cache less"),
        ));
    }
    if args.metrics_header_budget > args.metrics_header_budget_max {
        let (budget, max) = (args.metrics_header_budget, args.metrics_header_budget_max);
        return Err(Failure::usage(
            format!("--metrics-header-budget is {budget}: more than --metrics-header-budget-max, {max}"),
            "raise the one or lower the other",
        ));
    }
    Ok(())
}

fn cpu_count() -> u16 {
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u16::try_from(cpus.min(cpu::THREADS_MAX)).unwrap_or(u16::MAX)
}

fn model_name(model: Option<&Path>) -> String {
    let Some(model) = model else { return "sim".into() };
    // A path such as `..` has no last part of its own.
    let named = model
        .file_name()
        .map(PathBuf::from)
        .or_else(|| fs::canonicalize(model).ok().and_then(|full| full.file_name().map(PathBuf::from)));
    named.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// Reads the YAML file as the text of its values by key. Whether a value fits is for the flag of that name to say.
pub(crate) fn read_yaml(path: &Path, known: &[String]) -> Result<BTreeMap<String, String>, Failure> {
    let file = path.display();
    let text = read_bounded(path).map_err(|error| {
        Failure::usage(format!("--config is {file}: {error}"), "name a readable file of at most 1 MiB")
    })?;
    let malformed = |error: serde_saphyr::Error| {
        let plain = error.without_snippet();
        let reason = if let serde_saphyr::Error::DuplicateMappingKey { key: Some(key), location } = plain {
            format!("key `{key}` is given again in line {}", location.line())
        } else {
            plain.to_string()
        };
        Failure::usage(format!("{file}: {reason}"), YAML_HINT)
    };
    let shapes: Option<BTreeMap<String, Shape>> = serde_saphyr::from_str(&text).map_err(malformed)?;
    let Some(shapes) = shapes else { return Ok(BTreeMap::new()) };
    for (key, shape) in &shapes {
        if !known.contains(key) {
            let near = nearest(key, known).map_or("none", String::as_str);
            return Err(Failure::usage(
                format!("{file}: unknown key `{key}`"),
                format!(
                    "the nearest known one is `{near}`; keys are the flags of `uring-serve serve` with underscores"
                ),
            ));
        }
        match shape {
            Shape::Nested => {
                let what =
                    format!("{file}: key `{key}` holds a list or a block, where one plain value belongs");
                return Err(Failure::usage(what, YAML_HINT));
            }
            Shape::Nothing => {
                return Err(Failure::usage(
                    format!("{file}: key `{key}` has no value"),
                    "give it one, or remove it",
                ));
            }
            Shape::Plain => {}
        }
    }
    serde_saphyr::from_str(&text).map_err(malformed)
}

/// What kind of value a key has.
enum Shape {
    Nested,
    Nothing,
    Plain,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShapeVisitor;

        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one plain value")
            }
            fn visit_bool<E>(self, _: bool) -> Result<Shape, E> {
                Ok(Shape::Plain)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
                Ok(Shape::Plain)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Shape, E> {
                Ok(Shape::Plain)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Shape::Nested)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Shape::Nested)
            }
            fn visit_str<E>(self, _: &str) -> Result<Shape, E> {
                Ok(Shape::Plain)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Shape, E> {
                Ok(Shape::Plain)
            }
            fn visit_unit<E>(self) -> Result<Shape, E> {
                Ok(Shape::Nothing)
            }
        }

        deserializer.deserialize_any(ShapeVisitor)
    }
}

fn read_bounded(path: &Path) -> io::Result<String> {
    use io::Read;
    let mut text = String::new();
    fs::File::open(path)?.take(YAML_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > YAML_BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(text)
}

const YAML_HINT: &str =
    "the file holds one `key: value` per line; a key is a flag of `uring-serve serve` with underscores";
const YAML_BYTES_MAX: u64 = 1 << 20;

//! `/metrics`: the names of UF 6.1 and our own, as Prometheus text (exposition format 0.0.4).
//!
//! Written by hand. The `prometheus-client` crate takes a mutex for every histogram observation and prints
//! OpenMetrics, where a counter's family has another name than its sample; here a ring thread only adds to atomics
//! of its own shard, a scrape sums the shards, and any thread can answer for the whole process.

use std::fmt::{Display, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use uring_serve_core::time::MonoNs;

use crate::journal::JournalCounters;

/// The `Content-Type` of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Everything that `/metrics` shows. Made once, then shared.
pub struct Metrics {
    labels: String,
    shards: Box<[Shard]>,
    engine: EngineGauges,
    sources: Vec<Source>,
}

type Source = Box<dyn Fn(&mut Page<'_>) + Send + Sync>;

impl Metrics {
    /// Creates the metrics of a process with `workers` ring threads. `model_name` and `engine_type` are the labels of
    /// every `trtllm_` sample.
    #[must_use]
    pub fn new(model_name: &str, engine_type: &str, workers: u16) -> Self {
        let labels = format!("{},{}", label("model_name", model_name), label("engine_type", engine_type));
        let shards = (0..workers.max(1)).map(|_| Shard::default()).collect();
        Self { labels, shards, engine: EngineGauges::default(), sources: Vec::new() }
    }

    /// Has `source` add its families to every page, after the others, in the order of the calls.
    pub fn add_source(&mut self, source: impl Fn(&mut Page<'_>) + Send + Sync + 'static) {
        self.sources.push(Box::new(source));
    }

    /// Returns the shard that ring thread `worker` observes into. A number past the last wraps around.
    #[must_use]
    pub fn shard(&self, worker: u16) -> &Shard {
        &self.shards[usize::from(worker) % self.shards.len()]
    }

    /// Returns what the engine thread sets.
    #[must_use]
    pub fn engine(&self) -> &EngineGauges {
        &self.engine
    }

    /// Appends the whole page. What has no value yet, such as the engine's gauges before it runs, is left out.
    pub fn write_page(&self, out: &mut String) {
        let mut page = Page { out };
        self.write_requests(&mut page);
        for (index, family) in HISTOGRAMS.iter().enumerate() {
            let mut counts = vec![0; family.bounds_ms.len() + 1];
            let mut sum_ns = 0_u64;
            for shard in &self.shards {
                let histogram = &shard.histograms[index];
                sum_ns = sum_ns.wrapping_add(histogram.sum_ns.load(Ordering::Relaxed));
                for (count, bucket) in counts.iter_mut().zip(&histogram.buckets) {
                    *count += bucket.load(Ordering::Relaxed);
                }
            }
            page.histogram(family, &self.labels, &counts, sum_ns);
        }
        self.engine.write(&mut page, &self.labels);
        for source in &self.sources {
            source(&mut page);
        }
    }

    fn write_requests(&self, page: &mut Page<'_>) {
        let count = |outcome: Outcome| self.sum(|shard| &shard.outcomes[outcome.index()]);
        let (stop, length) = (count(Outcome::Stop), count(Outcome::Length));
        let failed = count(Outcome::Error) + count(Outcome::Timeout);
        let reason = |reason| format!("{},{}", self.labels, label("finished_reason", reason));
        page.counter(
            "trtllm_request_success_total",
            "Requests that completed, by reason.",
            &[(&reason("stop"), stop), (&reason("length"), length)],
        );
        page.counter(
            "trtllm_request_error_total",
            "Requests that failed or timed out.",
            &[(&self.labels, failed)],
        );
        page.counter(
            "trtllm_num_requests_completed_total",
            "Requests that completed.",
            &[(&self.labels, stop + length)],
        );
        let tokens = [
            ("trtllm_prompt_tokens_total", "Prompt tokens of requests that completed.", 0),
            ("trtllm_generation_tokens_total", "Output tokens of requests that completed.", 1),
            ("trtllm_prompt_cached_tokens_total", "Prompt tokens whose KV came from the cache.", 2),
        ];
        for (name, help, index) in tokens {
            page.counter(name, help, &[(&self.labels, self.sum(|shard| &shard.tokens[index]))]);
        }
        let statuses = [
            ("complete", stop + length),
            ("rejected", count(Outcome::Rejected)),
            ("aborted", count(Outcome::Aborted)),
            ("timeout", count(Outcome::Timeout)),
            ("error", count(Outcome::Error)),
        ]
        .map(|(status, count)| (label("status", status), count));
        let samples: Vec<(&str, u64)> =
            statuses.iter().map(|(label, count)| (label.as_str(), *count)).collect();
        page.counter(
            "uring_serve_requests_total",
            "Sequences of generation requests by how they ended; one for a request that had none yet.",
            &samples,
        );
    }

    fn sum(&self, counter: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.shards.iter().map(|shard| counter(shard).load(Ordering::Relaxed)).sum()
    }
}

/// One ring thread's counts. Aligned so that two threads never write to one cache line, nor to its prefetched pair.
#[derive(Debug)]
#[repr(align(128))]
pub struct Shard {
    histograms: [Histogram; HISTOGRAMS.len()],
    outcomes: [AtomicU64; Outcome::COUNT],
    tokens: [AtomicU64; 3],
}

impl Default for Shard {
    fn default() -> Self {
        let histograms = HISTOGRAMS.map(|family| Histogram::new(family.bounds_ms));
        Self { histograms, outcomes: Default::default(), tokens: Default::default() }
    }
}

impl Shard {
    /// Counts one request that is over. Only complete ones go into the histograms, each span if both its ends are
    /// known.
    pub fn observe(&self, request: &Observation) {
        self.outcomes[request.outcome.index()].fetch_add(1, Ordering::Relaxed);
        if !request.outcome.is_complete() {
            return;
        }
        let tokens = [request.prompt_tokens, request.output_tokens, request.cached_tokens];
        for (total, tokens) in self.tokens.iter().zip(tokens) {
            total.fetch_add(u64::from(tokens), Ordering::Relaxed);
        }
        let span = |from: Option<MonoNs>, to: Option<MonoNs>| to?.checked_since(from?);
        let decode = span(request.first_token, request.last_token);
        let gaps = request.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0);
        // In the order of `HISTOGRAMS`.
        let spans = [
            span(request.arrival, request.last_token),
            span(request.arrival, request.first_token),
            decode.zip(gaps).map(|(decode, gaps)| decode / gaps),
            span(request.arrival, request.first_scheduled),
            span(request.first_scheduled, request.first_token),
            decode,
            span(request.first_scheduled, request.last_token),
        ];
        for ((histogram, family), span) in self.histograms.iter().zip(&HISTOGRAMS).zip(spans) {
            if let Some(span) = span {
                histogram.observe(family.bounds_ms, span);
            }
        }
    }
}

/// One generation request that is over.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// How it ended.
    pub outcome: Outcome,
    /// Handed to the engine.
    pub arrival: Option<MonoNs>,
    /// Begin of the first step that worked on it.
    pub first_scheduled: Option<MonoNs>,
    /// End of the step that sampled the first token.
    pub first_token: Option<MonoNs>,
    /// End of the step that sampled the last token.
    pub last_token: Option<MonoNs>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of those, the ones whose KV came from the cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
}

/// How a generation request ended (product contract 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The client was known gone before the final send.
    Aborted,
    /// The server failed it.
    Error,
    /// Complete, by its length limit.
    Length,
    /// Refused before it was scheduled.
    Rejected,
    /// Complete, by a stop token or stop string.
    Stop,
    /// It took longer than it may.
    Timeout,
}

impl Outcome {
    const COUNT: usize = Self::Timeout as usize + 1;

    const fn index(self) -> usize {
        self as usize
    }

    const fn is_complete(self) -> bool {
        matches!(self, Self::Length | Self::Stop)
    }
}

/// Sizes that are fixed once the engine has its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineShape {
    /// Most sequences in one step.
    pub max_batch_size: u32,
    /// Most tokens in one step.
    pub max_num_tokens: u32,
    /// Most tokens of a sequence.
    pub max_seq_len: u32,
    /// KV blocks in all.
    pub kv_blocks: u32,
    /// Tokens in a KV block.
    pub tokens_per_block: u32,
}

/// What the engine thread reports after a step, or when its queue changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// KV blocks that nobody holds.
    pub kv_blocks_free: u32,
    /// Sequences that hold blocks.
    pub running: u32,
    /// Sequences that wait for their first step.
    pub waiting: u32,
}

/// The engine's gauges. Written by its thread alone.
#[derive(Debug, Default)]
pub struct EngineGauges {
    shape: OnceLock<EngineShape>,
    kv_blocks_free: AtomicU64,
    running: AtomicU64,
    waiting: AtomicU64,
    step_ns: AtomicU64,
    steps: AtomicU64,
}

impl EngineGauges {
    /// Says that the engine is ready, with all its blocks free. A second call changes nothing.
    pub fn set_shape(&self, shape: EngineShape) {
        self.kv_blocks_free.store(u64::from(shape.kv_blocks), Ordering::Relaxed);
        // A shape that is set already is the same one.
        let _ = self.shape.set(shape);
    }

    /// Sets the load.
    pub fn set_load(&self, load: EngineLoad) {
        self.kv_blocks_free.store(u64::from(load.kv_blocks_free), Ordering::Relaxed);
        self.running.store(u64::from(load.running), Ordering::Relaxed);
        self.waiting.store(u64::from(load.waiting), Ordering::Relaxed);
    }

    /// Counts a step that took `span`.
    pub fn count_step(&self, span: Duration) {
        self.step_ns.store(ns_of(span), Ordering::Relaxed);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    fn write(&self, page: &mut Page<'_>, labels: &str) {
        let Some(shape) = self.shape.get() else { return };
        let load = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let blocks = u64::from(shape.kv_blocks);
        let free = load(&self.kv_blocks_free).min(blocks);
        let used = blocks - free;
        page.gauge("trtllm_kv_cache_max_blocks", "KV blocks in all.", labels, blocks);
        page.gauge("trtllm_kv_cache_free_blocks", "KV blocks that nobody holds.", labels, free);
        page.gauge("trtllm_kv_cache_used_blocks", "KV blocks in use.", labels, used);
        page.gauge(
            "trtllm_kv_cache_tokens_per_block",
            "Tokens in a KV block.",
            labels,
            shape.tokens_per_block,
        );
        if blocks > 0 {
            let share = used as f64 / blocks as f64;
            page.gauge("trtllm_kv_cache_utilization", "Share of KV blocks in use, 0 to 1.", labels, share);
        }
        page.gauge(
            "trtllm_num_requests_running",
            "Sequences holding KV blocks.",
            labels,
            load(&self.running),
        );
        page.gauge(
            "trtllm_num_requests_waiting",
            "Sequences not yet scheduled.",
            labels,
            load(&self.waiting),
        );
        page.gauge(
            "trtllm_max_num_active_requests",
            "Most sequences in a step.",
            labels,
            shape.max_batch_size,
        );
        let steps = load(&self.steps);
        if steps > 0 {
            let seconds = Seconds(load(&self.step_ns));
            page.gauge(
                "trtllm_iteration_latency_seconds",
                "Length of the last engine step.",
                labels,
                seconds,
            );
        }
        page.counter("uring_serve_engine_steps_total", "Engine steps.", &[("", steps)]);
        let model = [("max_batch_size", shape.max_batch_size), ("max_num_tokens", shape.max_num_tokens)];
        let model = [model.as_slice(), &[("max_seq_len", shape.max_seq_len)]].concat();
        let cache = [("num_blocks", shape.kv_blocks), ("tokens_per_block", shape.tokens_per_block)];
        page.info("trtllm_model_config_info", "The model's limits, as labels.", labels, &model);
        page.info("trtllm_kv_cache_config_info", "The KV cache's sizes, as labels.", labels, &cache);
    }
}

/// A source of the journal's counters, for [`Metrics::add_source`].
pub fn write_journal(counters: &JournalCounters, page: &mut Page<'_>) {
    let rows = [
        ("uring_serve_journal_written_total", "JSONL lines written whole.", counters.written()),
        (
            "uring_serve_journal_dropped_total",
            "Metrics records that no line was written for.",
            counters.dropped(),
        ),
        ("uring_serve_journal_errors_total", "Failed opens and writes of the JSONL file.", counters.errors()),
    ];
    for (name, help, value) in rows {
        page.counter(name, help, &[("", value)]);
    }
    if let Some(seconds) = counters.last_write() {
        let help = "When the last batch of lines was written, in seconds since the UNIX epoch.";
        page.gauge("uring_serve_journal_last_write_timestamp_seconds", help, "", seconds);
    }
}

/// The page being written. Families come whole, one after the other. Label sets are given without braces, as
/// [`label`] makes them, joined by commas; an empty one is none.
#[derive(Debug)]
pub struct Page<'o> {
    out: &'o mut String,
}

impl Page<'_> {
    /// Appends a counter family, with one sample for each label set. Its name ends in `_total`.
    pub fn counter(&mut self, name: &str, help: &str, samples: &[(&str, u64)]) {
        self.family(name, help, "counter");
        for (labels, value) in samples {
            self.sample(name, labels, value);
        }
    }

    /// Appends a gauge.
    pub fn gauge(&mut self, name: &str, help: &str, labels: &str, value: impl Display) {
        self.family(name, help, "gauge");
        self.sample(name, labels, value);
    }

    /// Appends facts as labels of a gauge that is 1.
    pub fn info(&mut self, name: &str, help: &str, labels: &str, facts: &[(&str, u32)]) {
        let facts = facts.iter().map(|(name, value)| label(name, &value.to_string()));
        let labels: Vec<String> = std::iter::once(labels.to_owned()).chain(facts).collect();
        self.gauge(name, help, &labels.join(","), 1);
    }

    fn histogram(&mut self, family: &Family, labels: &str, counts: &[u64], sum_ns: u64) {
        let name = family.name;
        self.family(name, family.help, "histogram");
        let mut total = 0;
        let bounds = family.bounds_ms.iter().map(|ms| format!("{:?}", f64::from(*ms) / 1e3));
        for (bound, count) in bounds.chain(std::iter::once("+Inf".into())).zip(counts) {
            total += count;
            self.sample(&format!("{name}_bucket"), &format!("{labels},{}", label("le", &bound)), total);
        }
        self.sample(&format!("{name}_sum"), labels, Seconds(sum_ns));
        self.sample(&format!("{name}_count"), labels, total);
    }

    fn family(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.out, "{name} {value}"),
            labels => writeln!(self.out, "{name}{{{labels}}} {value}"),
        };
    }
}

/// Renders one label, its value escaped.
#[must_use]
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    format!("{name}=\"{value}\"")
}

/// Nanoseconds that print as seconds, exactly.
struct Seconds(u64);

impl Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:09}", self.0 / NS_PER_SECOND, self.0 % NS_PER_SECOND)
    }
}

#[derive(Debug)]
struct Histogram {
    /// One per bound, each counting what is above the bound before, and one for the rest.
    buckets: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds_ms: &[u32]) -> Self {
        let buckets = (0..=bounds_ms.len()).map(|_| AtomicU64::new(0)).collect();
        Self { buckets, sum_ns: AtomicU64::new(0) }
    }

    fn observe(&self, bounds_ms: &[u32], span: Duration) {
        let ns = ns_of(span);
        let bucket = bounds_ms.partition_point(|ms| u64::from(*ms) * NS_PER_MS < ns);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

fn ns_of(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A histogram family. Upper bounds are in milliseconds, which all of UF 6.1's are whole numbers of.
struct Family {
    name: &'static str,
    help: &'static str,
    bounds_ms: &'static [u32],
}

const HISTOGRAMS: [Family; 7] = [
    Family {
        name: "trtllm_e2e_request_latency_seconds",
        help: "From the engine's hand-over to the last token.",
        bounds_ms: &LONG_MS,
    },
    Family {
        name: "trtllm_time_to_first_token_seconds",
        help: "From the engine's hand-over to the first token.",
        bounds_ms: &TTFT_MS,
    },
    Family {
        name: "trtllm_time_per_output_token_seconds",
        help: "Mean gap between the tokens of a request that has two or more.",
        bounds_ms: &TPOT_MS,
    },
    Family {
        name: "trtllm_request_queue_time_seconds",
        help: "From the engine's hand-over to the first step.",
        bounds_ms: &LONG_MS,
    },
    Family {
        name: "trtllm_request_prefill_time_seconds",
        help: "From the first step to the first token.",
        bounds_ms: &PREFILL_MS,
    },
    Family {
        name: "trtllm_request_decode_time_seconds",
        help: "From the first token to the last.",
        bounds_ms: &LONG_MS,
    },
    Family {
        name: "trtllm_request_inference_time_seconds",
        help: "From the first step to the last token.",
        bounds_ms: &LONG_MS,
    },
];

#[rustfmt::skip]
const LONG_MS: [u32; 21] = [
    300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000,
    120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000,
];
#[rustfmt::skip]
const TTFT_MS: [u32; 22] = [
    1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000,
    160_000, 640_000, 2_560_000,
];
#[rustfmt::skip]
const TPOT_MS: [u32; 19] = [
    10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000,
];
#[rustfmt::skip]
const PREFILL_MS: [u32; 18] = [
    1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 640_000,
    2_560_000,
];
const NS_PER_MS: u64 = 1_000_000;
const NS_PER_SECOND: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn bounds_are_inclusive_and_buckets_add_up() {
        // (nanoseconds, first bound that counts it)
        let rows = [
            (0, "0.01"),
            (10_000_000, "0.01"),
            (10_000_001, "0.025"),
            (1_000_000_000, "1.0"),
            (80_000_000_000, "80.0"),
            (80_000_000_001, "+Inf"),
        ];
        for (ns, expected) in rows {
            let metrics = Metrics::new("m", "sim", 1);
            let last = MonoNs::from_raw(5 + ns);
            metrics.shard(0).observe(&Observation { last_token: Some(last), ..complete(5) });
            let page = page_of(&metrics);
            let buckets = lines_of(&page, "trtllm_time_per_output_token_seconds_bucket");
            let first = buckets.iter().find(|line| line.ends_with(" 1")).unwrap();
            assert!(first.contains(&format!("le=\"{expected}\"")), "{ns}: {first}");
            assert!(buckets.last().unwrap().ends_with(" 1"), "{ns}");
            let sum = format!("{}.{:09}", ns / NS_PER_SECOND, ns % NS_PER_SECOND);
            let sums = lines_of(&page, "trtllm_time_per_output_token_seconds_sum");
            assert!(sums[0].ends_with(&sum), "{ns}: {sums:?}");
        }
    }

    #[test]
    fn spans_without_both_ends_and_requests_that_failed_are_not_observed() {
        let none = Observation { first_scheduled: None, first_token: None, last_token: None, ..complete(1) };
        // (name, observation, counts of the seven histograms)
        let rows = [
            ("complete", complete(1), [1, 1, 1, 1, 1, 1, 1]),
            ("one token has no gap", Observation { output_tokens: 1, ..complete(1) }, [1, 1, 0, 1, 1, 1, 1]),
            (
                "no tokens, no division",
                Observation { output_tokens: 0, ..complete(1) },
                [1, 1, 0, 1, 1, 1, 1],
            ),
            ("never scheduled", none, [0; 7]),
            ("failed", Observation { outcome: Outcome::Error, ..complete(1) }, [0; 7]),
        ];
        for (name, observation, expected) in rows {
            let metrics = Metrics::new("m", "sim", 1);
            metrics.shard(0).observe(&observation);
            let page = page_of(&metrics);
            let counts = HISTOGRAMS.map(|family| {
                let line = lines_of(&page, &format!("{}_count", family.name))[0];
                line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
            });
            assert_eq!(counts, expected, "{name}");
        }
    }

    #[test]
    fn a_page_before_any_request_has_the_families_and_no_engine_gauges() {
        let mut metrics = Metrics::new("m", "sim", 2);
        let page = page_of(&metrics);
        assert!(page.contains(
            "trtllm_request_success_total{model_name=\"m\",engine_type=\"sim\",finished_reason=\"stop\"} 0\n"
        ));
        assert!(!page.contains("trtllm_kv_cache"), "no shape yet");
        metrics.engine().set_shape(SHAPE);
        metrics.add_source(|page| write_journal(&JournalCounters::default(), page));
        let page = page_of(&metrics);
        for present in [
            "trtllm_kv_cache_free_blocks{model_name=\"m\",engine_type=\"sim\"} 8\n",
            "trtllm_kv_cache_utilization{model_name=\"m\",engine_type=\"sim\"} 0\n",
            "uring_serve_journal_dropped_total 0\n",
        ] {
            assert!(page.contains(present), "{present}");
        }
        for absent in ["iteration_latency", "last_write"] {
            assert!(!page.contains(absent), "{absent} has no value yet");
        }
    }

    #[test]
    fn every_shard_counts_into_the_one_page() {
        let metrics = Arc::new(Metrics::new("m", "sim", 3));
        let outcomes =
            [Outcome::Stop, Outcome::Length, Outcome::Timeout, Outcome::Aborted, Outcome::Rejected];
        let threads = (0..3).map(|worker| {
            let metrics = Arc::clone(&metrics);
            std::thread::spawn(move || {
                for outcome in outcomes {
                    metrics.shard(worker).observe(&Observation { outcome, ..complete(1) });
                }
            })
        });
        threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
        let page = page_of(&metrics);
        for line in [
            "trtllm_num_requests_completed_total{model_name=\"m\",engine_type=\"sim\"} 6",
            "trtllm_request_error_total{model_name=\"m\",engine_type=\"sim\"} 3",
            "trtllm_prompt_tokens_total{model_name=\"m\",engine_type=\"sim\"} 42",
            "uring_serve_requests_total{status=\"aborted\"} 3",
            "uring_serve_requests_total{status=\"rejected\"} 3",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}");
        }
    }

    #[test]
    fn each_family_comes_once_with_its_type_and_whole() {
        let metrics = Metrics::new("a \"b\" \\ c\nd", "cpu", 1);
        metrics.engine().set_shape(SHAPE);
        metrics.engine().count_step(Duration::from_micros(1_500));
        metrics.engine().set_load(EngineLoad { kv_blocks_free: 6, running: 1, waiting: 0 });
        let page = page_of(&metrics);
        let mut seen = Vec::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let name = rest.split(' ').next().unwrap();
                assert!(!seen.contains(&name), "{name} comes twice");
                seen.push(name);
            } else if !line.starts_with('#') {
                assert!(line.starts_with(seen.last().unwrap()), "{line} is outside its family");
            }
        }
        assert!(page.contains(r#"model_name="a \"b\" \\ c\nd""#));
        let values = ["utilization{L} 0.25", "used_blocks{L} 2", "iteration_latency_seconds{L} 0.001500000"];
        let labels = page.lines().find_map(|line| line.split_once("max_blocks{")).unwrap().1;
        let labels = labels.rsplit_once('}').unwrap().0;
        for value in values.map(|value| value.replace('L', labels)) {
            assert!(page.contains(&value), "{value}");
        }
    }

    const SHAPE: EngineShape = EngineShape {
        max_batch_size: 4,
        max_num_tokens: 64,
        max_seq_len: 128,
        kv_blocks: 8,
        tokens_per_block: 16,
    };

    /// Two output tokens, at `at` and later: the gap is what the caller makes of `last_token`.
    fn complete(at: u64) -> Observation {
        let at = Some(MonoNs::from_raw(at));
        Observation {
            outcome: Outcome::Stop,
            arrival: at,
            first_scheduled: at,
            first_token: at,
            last_token: at,
            prompt_tokens: 7,
            cached_tokens: 0,
            output_tokens: 2,
        }
    }

    fn page_of(metrics: &Metrics) -> String {
        let mut page = String::new();
        metrics.write_page(&mut page);
        page
    }

    fn lines_of<'p>(page: &'p str, name: &str) -> Vec<&'p str> {
        page.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect()
    }
}

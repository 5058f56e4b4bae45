//! The engine turn by turn: simulated backend, virtual clock, no threads.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use uring_serve_kernels::sim::{Sim, SimConfig};

use super::*;
use crate::clock::VirtualClock;
use crate::pool::Wake;

#[test]
fn a_request_is_answered_token_by_token_and_its_times_are_the_steps_own() {
    let mut bench = Bench::new(Shape { batch_seqs_max: 2, ..SHAPE });
    bench.submit(vec![bench.job(1, 0, 8, 3)]);
    let deltas = bench.run();
    let tokens: Vec<u32> = deltas.iter().map(|delta| delta.tokens).collect();
    assert_eq!(tokens, [1, 2, 3]);
    let end = deltas[2].end.as_ref().expect("the last delta ends it");
    assert_eq!(end.ended, Ended::Length);
    assert_eq!(deltas[0].first_token, end.report.first_token);
    assert_eq!((deltas[1].first_token, deltas[2].first_token), (None, None));
    let since = |to: Option<MonoNs>| to?.checked_since(end.report.first_scheduled?);
    assert_eq!(since(end.report.first_token), Some(TTFT));
    assert_eq!(since(end.report.last_token), Some(TTFT + TPOT * 2));
    assert_eq!((end.report.first_iter, end.report.last_iter), (Some(1), Some(3)));
    assert_eq!(end.report.blocks.total_allocated, 1);
}

#[test]
fn a_cancelled_sequence_takes_no_further_step_and_its_blocks_are_free() {
    let mut bench = Bench::new(Shape { batch_seqs_max: 1, ..SHAPE });
    let (running, waiting) = (bench.job(1, 0, 8, 16), bench.job(2, 0, 8, 16));
    let flags = [Arc::clone(&running.cancelled), Arc::clone(&waiting.cancelled)];
    bench.submit(vec![running]);
    bench.submit(vec![waiting]);
    bench.engine.turn();
    assert_eq!(bench.take().len(), 1, "the first token of the one that runs");
    flags.iter().for_each(|flag| flag.store(true, Ordering::Relaxed));
    bench.engine.turn();
    let deltas = bench.take();
    let ended: Vec<_> = deltas.iter().map(|delta| delta.end.as_ref().map(|end| &end.ended)).collect();
    assert_eq!(ended, [Some(&Ended::Cancelled), Some(&Ended::Cancelled)]);
    assert_eq!(deltas[0].end.as_ref().and_then(|end| end.report.first_scheduled), None, "it only waited");
    let occupancy = bench.engine.planner.occupancy();
    assert_eq!((occupancy.running, occupancy.waiting, occupancy.blocks_free), (0, 0, SHAPE.block_count));
}

#[test]
fn a_request_is_queued_whole_or_refused_whole() {
    let mut bench = Bench::new(Shape { queue_max: 3, ..SHAPE });
    bench.submit((0..4).map(|choice| bench.job(1, choice, 8, 1)).collect());
    bench.submit((0..3).map(|choice| bench.job(2, choice, 8, 1)).collect());
    let deltas = bench.run();
    let ends = |serial: u64| -> Vec<&Ended> {
        let of = deltas.iter().filter(|delta| delta.exchange.serial == serial);
        of.filter_map(|delta| delta.end.as_ref().map(|end| &end.ended)).collect()
    };
    assert_eq!(ends(1), [&Ended::QueueFull; 4]);
    assert_eq!(ends(2), [&Ended::Length; 3]);
}

#[test]
fn a_sequence_that_could_never_fit_is_told_so() {
    let mut bench = Bench::new(SHAPE);
    let too_long = SHAPE.block_tokens * SHAPE.block_count;
    bench.submit(vec![bench.job(1, 0, too_long, 2)]);
    bench.engine.turn();
    let deltas = bench.take();
    assert_eq!(deltas[0].end.as_ref().map(|end| &end.ended), Some(&Ended::NeverFits));
}

#[test]
fn traced_sequences_share_the_step_records() {
    let mut bench = Bench::new(SHAPE);
    let traced = |job: Job| Job { trace: true, ..job };
    bench.submit(vec![
        traced(bench.job(1, 0, 8, 100)),
        traced(bench.job(1, 1, 8, 100)),
        bench.job(1, 2, 8, 100),
    ]);
    let deltas = bench.run();
    let reports: Vec<&EngineReport> =
        deltas.iter().filter_map(|delta| delta.end.as_ref().map(|end| &end.report)).collect();
    assert_eq!(reports.len(), 3);
    for report in &reports[..2] {
        let steps: Vec<u64> = report.steps.decode_steps().map(|step| step.iter).collect();
        assert_eq!(steps, (2..=100).collect::<Vec<u64>>());
        assert_eq!(report.steps.chunks().map(|step| step.iter).collect::<Vec<u64>>(), [1]);
    }
    assert!(Arc::ptr_eq(&reports[0].steps.slices[0], &reports[1].steps.slices[0]), "one slice, two owners");
    assert!(reports[2].steps.slices.is_empty() && reports[2].steps.chunk_iters.is_empty(), "not asked for");
}

#[test]
fn a_step_that_fails_ends_its_sequences_and_no_other() {
    let mut bench = Bench::with_backend(Shape { batch_seqs_max: 1, ..SHAPE }, Box::new(FailsOnce::default()));
    bench.submit(vec![bench.job(1, 0, 8, 2)]);
    bench.submit(vec![bench.job(2, 0, 8, 2)]);
    let deltas = bench.run();
    let ends: Vec<_> =
        deltas.iter().filter_map(|delta| Some((delta.exchange.serial, &delta.end.as_ref()?.ended))).collect();
    assert_eq!(ends, [(1, &Ended::Failed), (2, &Ended::Length)]);
    assert_eq!(bench.engine.planner.occupancy().blocks_free, SHAPE.block_count);
}

#[test]
fn a_backend_that_broke_is_told_once_and_every_request_is_still_answered() {
    let backend = FailsOnce { broken: true, ..FailsOnce::default() };
    let bench = Bench::with_backend(SHAPE, Box::new(backend));
    for serial in 1..=3 {
        bench.submit(vec![bench.job(serial, 0, 8, 2)]);
    }
    let Bench { engine, client, .. } = bench;
    let calls = Arc::<Counter>::default();
    let told = Arc::clone(&calls);
    let thread = std::thread::spawn(move || engine.run(|| told.wake()));
    let mut ends = Vec::new();
    while ends.len() < 3 {
        while let Some(mut batch) = client.take_batch() {
            ends.extend(batch.deltas.drain(..).filter_map(|delta| Some(delta.end?.ended)));
            client.return_batch(batch);
        }
        std::thread::yield_now();
    }
    assert_eq!(ends, [Ended::Failed, Ended::Failed, Ended::Failed]);
    drop(client);
    assert_eq!(thread.join().unwrap(), Err(BackendError { message: "lost".into() }));
    assert_eq!(calls.0.load(Ordering::Relaxed), 1);
}

#[test]
fn a_ring_that_does_not_drain_gets_everything_later_and_is_woken_once_a_step() {
    let mut bench = Bench::new(SHAPE);
    bench.submit(vec![bench.job(1, 0, 8, 40)]);
    for _ in 0..40 {
        bench.engine.turn();
    }
    assert_eq!(bench.wakes.0.load(Ordering::Relaxed), 3, "as many batches as were spare");
    let deltas = bench.run();
    assert_eq!(deltas.iter().map(|delta| delta.tokens).collect::<Vec<_>>(), (1..=40).collect::<Vec<u32>>());
}

#[test]
fn the_clock_is_read_three_times_a_step_whatever_the_batch() {
    for jobs in [1, 8] {
        let mut bench = Bench::new(SHAPE);
        bench.submit((0..jobs).map(|choice| bench.job(1, choice, 8, 5)).collect());
        let before = bench.reads.0.load(Ordering::Relaxed);
        for _ in 0..5 {
            bench.engine.turn();
        }
        assert_eq!(bench.reads.0.load(Ordering::Relaxed) - before, 3 * 5, "{jobs} sequences");
    }
}

const TTFT: Duration = Duration::from_millis(3);
const TPOT: Duration = Duration::from_millis(2);
const SHAPE: Shape =
    Shape { block_tokens: 128, block_count: 16, batch_seqs_max: 8, batch_tokens_max: 64, queue_max: 8 };

/// An engine and the ring's end of its queues.
struct Bench {
    engine: Engine,
    client: EngineClient,
    wakes: Arc<Counter>,
    reads: Arc<Counter>,
}

#[derive(Default)]
struct Counter(AtomicU64);

impl Wake for Counter {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A virtual clock that counts its readings.
struct Counted(VirtualClock, Arc<Counter>);

impl Clock for Counted {
    fn now(&self) -> MonoNs {
        self.1.wake();
        self.0.now()
    }

    fn wait_until(&self, deadline: MonoNs) {
        self.0.wait_until(deadline);
    }

    fn wall_since_epoch(&self) -> Duration {
        self.0.wall_since_epoch()
    }
}

/// The simulator, whose first step fails.
struct FailsOnce {
    sim: Sim,
    failed: bool,
    /// Fails in all the others as well, and says so.
    broken: bool,
}

impl Default for FailsOnce {
    fn default() -> Self {
        Self { sim: sim(), failed: false, broken: false }
    }
}

impl Backend for FailsOnce {
    fn spec(&self) -> &uring_serve_kernels::ModelSpec {
        self.sim.spec()
    }

    fn forward(&mut self, plan: &Plan, sequences: &Sequences) -> Result<Duration, BackendError> {
        if !std::mem::replace(&mut self.failed, true) || self.broken {
            return Err(BackendError { message: "lost".into() });
        }
        self.sim.forward(plan, sequences)
    }

    fn sample(
        &mut self,
        plan: &Plan,
        sequences: &mut Sequences,
        tokens: &mut Vec<u32>,
    ) -> Result<(), BackendError> {
        self.sim.sample(plan, sequences, tokens)
    }

    fn is_broken(&self) -> bool {
        self.failed && self.broken
    }
}

fn sim() -> Sim {
    Sim::new(SimConfig { ttft: TTFT, tpot: TPOT, seed: 7, unicode: false })
}

impl Bench {
    fn new(shape: Shape) -> Self {
        Self::with_backend(shape, Box::new(sim()))
    }

    fn with_backend(shape: Shape, backend: Box<dyn Backend>) -> Self {
        let (wakes, reads) = (Arc::<Counter>::default(), Arc::<Counter>::default());
        let (mailroom, mut clients) = Mailroom::new(vec![Arc::clone(&wakes) as Arc<dyn Wake>], 16);
        let clock = Arc::new(Counted(VirtualClock::new(1_700_000_000), Arc::clone(&reads)));
        let metrics = Arc::new(Metrics::new("sim", "sim", 1));
        let tokenizer = Arc::new(Tokenizer::bytes());
        let engine = Engine::new(backend, clock, shape, tokenizer, mailroom, metrics).expect("a valid shape");
        Self { engine, client: clients.remove(0), wakes, reads }
    }

    fn job(&self, serial: u64, choice: u32, prompt_tokens: u32, output_tokens_max: u32) -> Job {
        Job {
            exchange: ExchangeId { worker: 0, slot: 0, serial },
            choice,
            prompt: (0..prompt_tokens).map(|at| at % 256).collect(),
            output_tokens_max,
            sampling: SamplingParams::greedy(),
            stop: Arc::new(StopRules {
                token_ids: Vec::new(),
                strings: Arc::default(),
                special: SpecialTokens::Skip,
            }),
            trace: false,
            cancelled: Arc::default(),
        }
    }

    fn submit(&self, jobs: Vec<Job>) {
        self.client.submit(Submission { jobs }).expect("room");
    }

    /// Turns the engine until nothing runs or waits, draining as a ring would.
    fn run(&mut self) -> Vec<Delta> {
        let mut all = Vec::new();
        for _ in 0..1000 {
            self.engine.turn();
            all.extend(self.take());
            let occupancy = self.engine.planner.occupancy();
            if occupancy.running == 0 && occupancy.waiting == 0 {
                self.engine.mailroom.deliver();
                all.extend(self.take());
                return all;
            }
        }
        panic!("the engine does not come to an end");
    }

    fn take(&self) -> Vec<Delta> {
        let mut all = Vec::new();
        while let Some(mut batch) = self.client.take_batch() {
            all.append(&mut batch.deltas);
            self.client.return_batch(batch);
        }
        all
    }
}

//! Our side: the planner and the `cpu` backend, driven as the server's engine thread drives them.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use uring_serve::clock::{Clock as _, SystemClock};
use uring_serve_core::sched::{Outcome, Plan, Planner, SeqId, SeqRequest, Shape, SlotId};
use uring_serve_core::time::MonoNs;
use uring_serve_kernels::cpu::{Cpu, CpuOptions};
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::weights::Gguf;
use uring_serve_kernels::{Backend as _, Sequence, Sequences};

use crate::workload::Workload;

/// A loaded model.
pub(crate) struct Ours {
    backend: Cpu,
    load_time: Duration,
}

impl Ours {
    /// Loads the model.
    ///
    /// # Errors
    /// What is wrong with the file, or lacking on the machine.
    pub(crate) fn load(model: &Path, threads: usize) -> Result<Self, Box<dyn Error>> {
        let begin = SystemClock.now();
        let options = CpuOptions { threads, shape: SHAPE, isa: None };
        let backend = Cpu::load(&Gguf::open(model)?, &options, &|_, _| {})?;
        Ok(Self { backend, load_time: since(begin) })
    }

    /// Returns how long it took to open and pack the file.
    pub(crate) fn load_time(&self) -> Duration {
        self.load_time
    }

    /// Names what computes.
    pub(crate) fn device(&self) -> &str {
        &self.backend.spec().device
    }

    /// Runs a workload and returns its tokens per second.
    ///
    /// Whole steps are timed: planning, forward pass, greedy sampling, and the planner's end of the step.
    ///
    /// # Errors
    /// When the planner or the device refuses.
    pub(crate) fn tokens_per_second(&mut self, workload: Workload) -> Result<f64, Box<dyn Error>> {
        let Workload { seqs, prompt_tokens, output_tokens } = workload;
        let mut run = Run::new(self.backend.spec().vocab, workload)?;
        let mut begin = SystemClock.now();
        if run.step(&mut self.backend)? != seqs {
            return Err(format!("{seqs} prompts of {prompt_tokens} tokens do not fit one step").into());
        }
        let Some(output_tokens) = output_tokens else {
            return Ok(f64::from(seqs * prompt_tokens) / since(begin).as_secs_f64());
        };
        begin = SystemClock.now();
        let mut tokens = 0;
        for _ in 0..output_tokens {
            tokens += run.step(&mut self.backend)?;
        }
        Ok(f64::from(tokens) / since(begin).as_secs_f64())
    }
}

/// One batch, from its first step on.
struct Run {
    planner: Planner,
    prompt_tokens: u32,
    vocab: u32,
    plan: Plan,
    sequences: Sequences,
    sampled: Vec<u32>,
    outcomes: Vec<Outcome>,
    left: Vec<(SeqId, SlotId)>,
}

impl Run {
    fn new(vocab: u32, workload: Workload) -> Result<Self, Box<dyn Error>> {
        let Workload { seqs, prompt_tokens, output_tokens } = workload;
        let mut planner = Planner::new(SHAPE)?;
        // The first token comes with the prompt's step, and is not timed as decoding.
        let output_tokens_max = 1 + output_tokens.unwrap_or(0);
        for _ in 0..seqs {
            planner.admit(SeqRequest { prompt_tokens, output_tokens_max })?;
        }
        Ok(Self {
            planner,
            prompt_tokens,
            vocab,
            plan: Plan::default(),
            sequences: Sequences::new(SHAPE.batch_seqs_max),
            sampled: Vec::new(),
            outcomes: Vec::new(),
            left: Vec::new(),
        })
    }

    /// Runs one step and returns how many tokens it sampled.
    fn step(&mut self, backend: &mut Cpu) -> Result<u32, Box<dyn Error>> {
        let Self { planner, plan, sequences, sampled, outcomes, left, .. } = self;
        let step = planner.begin_step(plan).ok_or("the planner has no work left")?;
        for &(seq, slot) in &plan.started {
            let tokens = prompt(seq, self.prompt_tokens, self.vocab);
            let sampler = Sampler::new(SamplingParams::greedy(), &tokens);
            sequences.insert(slot, Sequence { tokens, sampler });
        }
        backend.forward(plan, sequences)?;
        sampled.clear();
        backend.sample(plan, sequences, sampled)?;
        for (item, &token) in plan.items.iter().filter(|item| item.samples).zip(&*sampled) {
            sequences.at_mut(item.slot).ok_or("a planned slot is empty")?.tokens.push(token);
        }
        outcomes.clear();
        outcomes
            .extend(plan.items.iter().map(|item| if item.samples { Outcome::Token } else { Outcome::Chunk }));
        planner.end_step(step, plan, outcomes, left);
        for &(_, slot) in &*left {
            sequences.remove(slot);
        }
        Ok(u32::try_from(sampled.len())?)
    }
}

/// Tokens without meaning, as llama.cpp's benchmarks take them; each sequence has its own.
fn prompt(seq: SeqId, tokens: u32, vocab: u32) -> Vec<u32> {
    // A full-period generator modulo 2^32 (Numerical Recipes); its high bits choose.
    let mut state = seq.get() as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(state) * u64::from(vocab)) >> 32) as u32
    };
    (0..tokens).map(|_| next()).collect()
}

fn since(begin: MonoNs) -> Duration {
    SystemClock.now().checked_since(begin).unwrap_or_default()
}

/// What the server takes without flags, and a cache that holds the largest workload.
const SHAPE: Shape =
    Shape { block_tokens: 32, block_count: 128, batch_seqs_max: 32, batch_tokens_max: 2048, queue_max: 32 };

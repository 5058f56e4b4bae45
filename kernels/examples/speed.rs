//! Tokens per second of the CPU backend: `speed MODEL.gguf [THREADS] [ISA]`.
//!
//! Prints the best of three for a prompt of 512 tokens in one step, and for 64 steps of decoding behind prompts of 128
//! tokens at several batch sizes. Best, because other load on the machine only ever makes a run slower.
#![expect(clippy::print_stdout, reason = "the figures are the program's output")]
#![expect(clippy::disallowed_methods, reason = "a measurement reads a clock")]

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use uring_serve_core::sched::{Outcome, Plan, Planner, SeqRequest, Shape};
use uring_serve_kernels::cpu::{Cpu, CpuOptions, Isa};
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::weights::Gguf;
use uring_serve_kernels::{Backend, Sequence, Sequences};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: speed MODEL.gguf [THREADS] [avx512|avx2|portable]")?;
    let threads = args.next().map_or(Ok(2), |threads| threads.parse())?;
    let isa = match args.next().as_deref() {
        None => None,
        Some("avx512") => Some(Isa::Avx512Vnni),
        Some("avx2") => Some(Isa::Avx2),
        Some("portable") => Some(Isa::Portable),
        Some(other) => return Err(format!("no such instruction set: {other}").into()),
    };
    let started = Instant::now();
    let gguf = Gguf::open(Path::new(&path))?;
    let mut backend = Cpu::load(&gguf, &CpuOptions { threads, shape: SHAPE, isa }, &|_, _| {})?;
    drop(gguf);
    println!("{}: loaded in {} ms", backend.spec().device, started.elapsed().as_millis());

    let prefill = best(|| Ok(512.0 / seconds(&mut backend, 1, 512, 1)?.0))?;
    println!("prefill 512: {prefill:.0} tokens/s");
    for batch in [1, 4, 8, 16, 32] {
        let decode = best(|| {
            let (_, decode) = seconds(&mut backend, batch, 128, 65)?;
            Ok(f64::from(64 * batch) / decode)
        })?;
        println!("decode B={batch}: {decode:.0} tokens/s");
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    status.lines().filter(|line| line.starts_with("VmHWM")).for_each(|line| println!("{line}"));
    Ok(())
}

fn best(mut run: impl FnMut() -> Result<f64, Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    (0..3).try_fold(0.0, |best: f64, _| Ok(best.max(run()?)))
}

/// Runs `count` sequences to their end and returns the seconds of the steps until all have their first token, and of
/// those after.
fn seconds(backend: &mut Cpu, count: u32, prompt: u32, output: u32) -> Result<(f64, f64), Box<dyn Error>> {
    let mut planner = Planner::new(SHAPE).map_err(|error| format!("{error:?}"))?;
    for _ in 0..count {
        let request = SeqRequest { prompt_tokens: prompt, output_tokens_max: output };
        planner.admit(request).map_err(|error| format!("{error:?}"))?;
    }
    let mut sequences = Sequences::new(SHAPE.batch_seqs_max);
    let (mut plan, mut left, mut tokens) = (Plan::default(), Vec::new(), Vec::new());
    let (mut prefill, mut decode) = (0.0, 0.0);
    while let Some(step) = planner.begin_step(&mut plan) {
        for &(seq, slot) in &plan.started {
            let ids: Vec<u32> = (0..prompt).map(|i| (i * 7919 + seq.get() as u32) % 40_000 + 100).collect();
            let sampler = Sampler::new(SamplingParams::greedy(), &ids);
            sequences.insert(slot, Sequence { tokens: ids, sampler });
        }
        let begun = Instant::now();
        backend.forward(&plan, &sequences)?;
        tokens.clear();
        backend.sample(&plan, &mut sequences, &mut tokens)?;
        let took = begun.elapsed().as_secs_f64();
        match plan.items.len() == count as usize && plan.items.iter().all(|item| item.positions.len() == 1) {
            true => decode += took,
            false => prefill += took,
        }
        let mut tokens = tokens.iter();
        let mut outcomes = Vec::new();
        for item in &plan.items {
            match item.samples.then(|| tokens.next()).flatten() {
                Some(&token) => {
                    sequences.at_mut(item.slot).ok_or("an item has its sequence")?.tokens.push(token);
                    outcomes.push(Outcome::Token);
                }
                None => outcomes.push(Outcome::Chunk),
            }
        }
        planner.end_step(step, &plan, &outcomes, &mut left);
        left.iter().for_each(|&(_, slot)| drop(sequences.remove(slot)));
    }
    Ok((prefill, decode))
}

const SHAPE: Shape =
    Shape { block_tokens: 16, block_count: 1024, batch_seqs_max: 32, batch_tokens_max: 512, queue_max: 32 };

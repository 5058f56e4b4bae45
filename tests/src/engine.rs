//! Runs sequences through a planner and a backend as the engine's thread does, without the thread.

use uring_serve_core::sched::{Item, Outcome, Plan, Planner, SeqRequest, Shape};
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::{Backend, Sequence, Sequences};

/// Runs all `prompts` at once, each to `output_tokens` tokens, and returns those.
///
/// `next` sees the prompt's index, the count of tokens it has got, and the logits of the next; the token that it
/// returns takes the place of the greedy one.
///
/// # Panics
/// If the backend fails, or the planner cannot take so much.
pub fn run(
    backend: &mut dyn Backend,
    shape: Shape,
    prompts: &[&[u32]],
    output_tokens: u32,
    mut next: impl FnMut(usize, usize, &[f32]) -> Option<u32>,
) -> Vec<Vec<u32>> {
    let mut planner = Planner::new(shape).expect("the test's shape is sound");
    for prompt in prompts {
        let request = SeqRequest { prompt_tokens: prompt.len() as u32, output_tokens_max: output_tokens };
        planner.admit(request).expect("the queue takes all prompts");
    }
    // Numbers count from 1 in order of admission.
    let index = |item: &Item| item.seq.get() as usize - 1;
    let (mut plan, mut left, mut sampled) = (Plan::default(), Vec::new(), Vec::new());
    let mut sequences = Sequences::new(shape.batch_seqs_max);
    let mut outputs = vec![Vec::new(); prompts.len()];
    while let Some(step) = planner.begin_step(&mut plan) {
        for &(seq, slot) in &plan.started {
            let tokens = prompts[seq.get() as usize - 1].to_vec();
            let sampler = Sampler::new(SamplingParams::greedy(), &tokens);
            sequences.insert(slot, Sequence { tokens, sampler });
        }
        backend.forward(&plan, &sequences).expect("the backend computes");
        let sampling = || plan.items.iter().filter(|item| item.samples);
        let forced: Vec<Option<u32>> = sampling()
            .enumerate()
            .map(|(at, item)| {
                let logits = backend.logits(at).expect("each item that samples has logits");
                next(index(item), outputs[index(item)].len(), logits)
            })
            .collect();
        sampled.clear();
        backend.sample(&plan, &mut sequences, &mut sampled).expect("the backend samples");
        assert_eq!(sampled.len(), forced.len(), "one token for each item that samples");
        for ((item, greedy), forced) in sampling().zip(&sampled).zip(forced) {
            let token = forced.unwrap_or(*greedy);
            sequences.at_mut(item.slot).expect("a planned slot is filled").tokens.push(token);
            outputs[index(item)].push(token);
        }
        let outcome = |item: &Item| if item.samples { Outcome::Token } else { Outcome::Chunk };
        let outcomes: Vec<Outcome> = plan.items.iter().map(outcome).collect();
        planner.end_step(step, &plan, &outcomes, &mut left);
        left.iter().for_each(|&(_, slot)| drop(sequences.remove(slot)));
    }
    outputs
}

/// Returns the logits of each prompt's last position, `[prompt][V]`, where all run at once for `output_tokens`.
///
/// # Panics
/// As [`run`].
pub fn prompt_logits(
    backend: &mut dyn Backend,
    shape: Shape,
    prompts: &[&[u32]],
    output_tokens: u32,
) -> Vec<Vec<f32>> {
    let mut all = vec![Vec::new(); prompts.len()];
    run(backend, shape, prompts, output_tokens, |prompt, count, logits| {
        if count == 0 {
            all[prompt] = logits.to_vec();
        }
        None
    });
    all
}

/// Returns the logits of every position, `[position][V]`, each computed by a step of its own, the given token
/// following whatever the logits say.
///
/// # Panics
/// As [`run`].
pub fn teacher_forced(backend: &mut dyn Backend, shape: Shape, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut all = Vec::with_capacity(tokens.len());
    run(backend, shape, &[&tokens[..1]], tokens.len() as u32, |_, count, logits| {
        all.push(logits.to_vec());
        tokens.get(count + 1).copied()
    });
    all
}

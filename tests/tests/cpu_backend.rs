//! The CPU backend on the real model: exact equality within an instruction set, and closeness to the F32 reference.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde::Deserialize;
use uring_serve_core::sched::{Outcome, Plan, Planner, SeqRequest, Shape};
use uring_serve_kernels::cpu::{Cpu, CpuError, CpuOptions, Isa};
use uring_serve_kernels::reference::{KvType, Reference};
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::weights::Gguf;
use uring_serve_kernels::{Backend, Sequence, Sequences};
use uring_serve_tests::setup::model;

#[test]
fn tokens_are_equal_alone_in_any_batch_in_chunks_and_on_any_threads() {
    let prompts = prompts(16);
    for isa in isas() {
        // The portable loops are slow; few prompts exercise them as well.
        let (few, output) = if isa == Isa::Portable { (4, 2) } else { (16, 8) };
        let mut alone = cpu(2, SHAPE, Some(isa));
        let expected: Vec<Vec<Token>> = prompts[..few]
            .iter()
            .map(|prompt| run(&mut alone, SHAPE, std::slice::from_ref(prompt), output).remove(0))
            .collect();
        for (name, threads, chunk, block_tokens, batch) in [
            ("again, after other sequences used the cache", 2, 512, 16, 1),
            ("1 thread", 1, 512, 16, 1),
            ("3 threads", 3, 512, 16, 1),
            ("chunks of 7", 2, 7, 16, 1),
            ("chunks of 32", 2, 32, 16, 1),
            ("token by token", 2, 1, 16, 1),
            ("batches of 4", 2, 512, 16, 4),
            ("a batch of 16", 2, 512, 16, 16),
            ("a batch of 16, in chunks of 33, 1 thread", 1, 33, 16, 16),
            ("larger blocks", 2, 512, 64, 4),
        ] {
            let shape =
                Shape { batch_tokens_max: chunk, batch_seqs_max: batch as u32, block_tokens, ..SHAPE };
            let mut backend = cpu(threads, shape, Some(isa));
            for (prompts, expected) in prompts[..few].chunks(batch).zip(expected.chunks(batch)).take(4) {
                assert!(run(&mut backend, shape, prompts, output) == expected, "{isa}: {name}");
            }
        }
    }
}

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    let texts = chats();
    let gguf = Gguf::open(model()).unwrap();
    let mut reference = Reference::new(&gguf, &SHAPE, KvType::F32).unwrap();
    let expected = teach(&mut reference, &texts);
    for isa in isas() {
        // The portable loops take a second for what the others do in a tenth.
        let (skipped, least) = if isa == Isa::Portable { (texts.len() - 1, 100) } else { (0, 400) };
        let actual = teach(&mut cpu(2, SHAPE, Some(isa)), &texts[skipped..]);
        let pairs = || expected[expected.len() - actual.len()..].iter().zip(&actual);
        let agreed = pairs().filter(|(expected, actual)| argmax(expected) == argmax(actual)).count();
        let mut divergences: Vec<f64> =
            pairs().map(|(expected, actual)| divergence(expected, actual)).collect();
        let count = divergences.len();
        let share = agreed as f64 / count as f64;
        let mean = divergences.iter().sum::<f64>() / count as f64;
        let suite_max = divergences[count - suite().tokens.len()..].iter().copied().fold(0.0, f64::max);
        divergences.sort_by(f64::total_cmp);
        let (most, max) = (divergences[count * 99 / 100], divergences[count - 1]);
        println!(
            "{isa}: best tokens agree at {share:.4}, KL mean {mean:.5}, 99 of 100 below {most:.5}, largest {max:.5}, \
             {suite_max:.5} in the suite's text, {count} positions"
        );
        assert!(count >= least);
        // Activations as bytes are all that differs: with a second byte for what the first leaves, every position is
        // within 2e-5. The largest of so many depends on the text, 0.04 to 0.11 over those tried, and so has no bound of
        // its own here; the suite's text has.
        // What llama.cpp reaches on this file.
        assert!(share >= suite().llamacpp_argmax_agreement, "{isa}: {share}");
        assert!(mean <= 0.005 && most <= 0.05, "{isa}: KL mean {mean}, 99 of 100 below {most}");
        assert!(suite_max <= 0.05, "{isa}: KL {suite_max} in the suite's text");
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let gguf = Gguf::open(model()).unwrap();
    for (name, threads, shape) in [
        ("threads", 0, SHAPE),
        ("threads", 257, SHAPE),
        ("block_tokens", 1, Shape { block_tokens: 0, ..SHAPE }),
        ("block_tokens", 1, Shape { block_tokens: 15, ..SHAPE }),
        ("block_count", 1, Shape { block_count: 0, ..SHAPE }),
        ("batch_seqs_max", 1, Shape { batch_seqs_max: 0, ..SHAPE }),
        ("batch_tokens_max", 1, Shape { batch_tokens_max: 0, ..SHAPE }),
    ] {
        let error = Cpu::load(&gguf, &CpuOptions { threads, shape, isa: None }, &|_, _| {}).err().unwrap();
        assert!(matches!(error, CpuError::Option { name: found, .. } if found == name), "{name}: {error}");
    }
}

#[test]
fn a_plan_that_would_write_one_block_twice_is_refused() {
    let mut backend = cpu(2, SHAPE, None);
    let mut planner = Planner::new(SHAPE).unwrap();
    let mut sequences = Sequences::new(SHAPE.batch_seqs_max);
    for _ in 0..2 {
        planner.admit(SeqRequest { prompt_tokens: 3, output_tokens_max: 1 }).unwrap();
    }
    let mut plan = Plan::default();
    let _step = planner.begin_step(&mut plan).unwrap();
    for &(_, slot) in &plan.started {
        sequences.insert(slot, sequence(&[5, 6, 7], 0.0, 0));
    }
    backend.forward(&plan, &sequences).unwrap();
    plan.items[1].blocks = plan.items[0].blocks.clone();
    let error = backend.forward(&plan, &sequences).unwrap_err();
    assert!(error.message.contains("two items that write block"), "{error}");
}

/// A chosen token and the logits it was chosen from.
#[derive(PartialEq)]
struct Token {
    id: u32,
    logits: Vec<f32>,
}

/// Runs sequences together, greedily, and returns each one's tokens.
fn run(backend: &mut dyn Backend, shape: Shape, prompts: &[Vec<u32>], output: u32) -> Vec<Vec<Token>> {
    let sequences = prompts.iter().map(|prompt| sequence(prompt, 0.0, 0)).collect();
    let tokens = drive(backend, shape, sequences, output, |_, _, id| id);
    assert!(
        tokens.iter().flatten().all(|token| token.id == argmax(&token.logits)),
        "sampling is greedy here"
    );
    tokens
}

/// Returns the suite's chat and five others: its prompt, answered at random as the model would.
fn chats() -> Vec<Vec<u32>> {
    let text = suite().tokens;
    let prompt = &text[..CHAT_PROMPT];
    let sequences = (1..6).map(|seed| sequence(prompt, 0.8, seed)).collect();
    let answers =
        drive(&mut cpu(2, SHAPE, None), SHAPE, sequences, (text.len() - prompt.len()) as u32, |_, _, id| id);
    let answered =
        |answer: Vec<Token>| prompt.iter().copied().chain(answer.into_iter().map(|token| token.id)).collect();
    let mut chats: Vec<Vec<u32>> = answers.into_iter().map(answered).collect();
    chats.push(text);
    chats
}

/// Feeds each text token by token, whatever the model would choose, and returns the logits of all positions; those of
/// the prompt that all texts share, of the last text only.
fn teach(backend: &mut dyn Backend, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let sequences = texts.iter().map(|text| sequence(&text[..1], 0.0, 0)).collect();
    let forced = |seq: usize, position: usize, _| texts[seq].get(position).copied().unwrap_or(0);
    let tokens = drive(backend, SHAPE, sequences, texts[0].len() as u32, forced);
    let last = tokens.len() - 1;
    let skipped = |seq| if seq == last { 0 } else { CHAT_PROMPT };
    let each = tokens.into_iter().enumerate().flat_map(|(seq, tokens)| tokens.into_iter().skip(skipped(seq)));
    each.map(|token| token.logits).collect()
}

/// `next` says which token follows: of which sequence, at which position, and what the model chose.
fn drive(
    backend: &mut dyn Backend,
    shape: Shape,
    waiting: Vec<Sequence>,
    output: u32,
    next: impl Fn(usize, usize, u32) -> u32,
) -> Vec<Vec<Token>> {
    let mut planner = Planner::new(shape).unwrap();
    for sequence in &waiting {
        let prompt_tokens = sequence.tokens.len() as u32;
        planner.admit(SeqRequest { prompt_tokens, output_tokens_max: output }).unwrap();
    }
    let mut sequences = Sequences::new(shape.batch_seqs_max);
    let mut ran: Vec<Vec<Token>> = waiting.iter().map(|_| Vec::new()).collect();
    let mut waiting = waiting.into_iter();
    let (mut plan, mut left, mut chosen) = (Plan::default(), Vec::new(), Vec::new());
    while let Some(step) = planner.begin_step(&mut plan) {
        for &(_, slot) in &plan.started {
            sequences.insert(slot, waiting.next().unwrap());
        }
        backend.forward(&plan, &sequences).unwrap();
        let logits: Vec<Vec<f32>> =
            (0..).map_while(|index| backend.logits(index).map(<[f32]>::to_vec)).collect();
        chosen.clear();
        backend.sample(&plan, &mut sequences, &mut chosen).unwrap();
        let mut results = chosen.drain(..).zip(logits);
        let mut outcomes = Vec::new();
        for item in &plan.items {
            if !item.samples {
                outcomes.push(Outcome::Chunk);
                continue;
            }
            let (id, logits) = results.next().unwrap();
            let (seq, tokens) =
                (item.seq.get() as usize - 1, &mut sequences.at_mut(item.slot).unwrap().tokens);
            tokens.push(next(seq, tokens.len(), id));
            ran[seq].push(Token { id, logits });
            outcomes.push(Outcome::Token);
        }
        assert!(results.next().is_none(), "one token for each item that samples");
        planner.end_step(step, &plan, &outcomes, &mut left);
        left.drain(..).for_each(|(_, slot)| drop(sequences.remove(slot)));
    }
    ran
}

/// Prompts of different lengths, on both sides of blocks and kernel tiles, one longer than a span of attention.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let text = suite().tokens;
    (0..count)
        .map(|index| {
            let length = [1, 15, 16, 17, 40, 8, 9, 300][index % 8] + index / 8;
            text.iter().cycle().skip(3 * index).take(length).copied().collect()
        })
        .collect()
}

fn cpu(threads: usize, shape: Shape, isa: Option<Isa>) -> Cpu {
    let gguf = Gguf::open(model()).unwrap();
    Cpu::load(&gguf, &CpuOptions { threads, shape, isa }, &|_, _| {}).unwrap()
}

fn isas() -> impl Iterator<Item = Isa> {
    [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable].into_iter().filter(|isa| isa.is_available())
}

fn sequence(prompt: &[u32], temperature: f32, seed: u64) -> Sequence {
    let params = SamplingParams {
        temperature,
        top_p: 1.0,
        top_k: None,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
        seed,
        min_tokens: 0,
        banned_until_min: Vec::new(),
    };
    Sequence { tokens: prompt.to_vec(), sampler: Sampler::new(params, prompt) }
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.unwrap() as u32
}

/// Kullback-Leibler divergence `sum p ln(p / q)` of two softmaxes over the whole vocabulary, in nats.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        best + logits.iter().map(|&logit| (f64::from(logit) - best).exp()).sum::<f64>().ln()
    };
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
        p.exp() * (p - q)
    });
    terms.sum()
}

fn suite() -> Suite {
    serde_json::from_str(include_str!("../suites/numerics.json")).unwrap()
}

const SHAPE: Shape =
    Shape { block_tokens: 16, block_count: 256, batch_seqs_max: 16, batch_tokens_max: 512, queue_max: 16 };

/// Tokens of the suite's chat up to where the assistant's answer starts.
const CHAT_PROMPT: usize = 41;

#[derive(Deserialize)]
struct Suite {
    tokens: Vec<u32>,
    llamacpp_argmax_agreement: f64,
}

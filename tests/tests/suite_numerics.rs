//! Suite `numerics`: teacher-forced logits of the real model against an independent F32 implementation.
//!
//! [`check`] takes any backend. Its bounds are the caller's, because the reference is held to rounding and a quantised
//! device to a divergence.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "the figures are part of the result")]

use serde::Deserialize;
use uring_serve_core::sched::Shape;
use uring_serve_kernels::Backend;
use uring_serve_kernels::model::{Config, Weights};
use uring_serve_kernels::reference::{KvType, Reference};
use uring_serve_kernels::weights::{Format, Gguf};
use uring_serve_tests::engine::{prompt_logits, teacher_forced};
use uring_serve_tests::setup;

#[test]
fn the_real_model_is_read_as_it_says() {
    let gguf = model();
    let config = Config::from_gguf(&gguf).unwrap();
    assert_eq!((config.layers, config.d_model, config.d_ff, config.vocab), (30, 576, 1_536, 49_152));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.rope_dims), (9, 3, 64, 64));
    assert_eq!((config.context_tokens, config.rope_base), (8_192, 100_000.0));
    let weights = Weights::from_gguf(&gguf, &config).unwrap();
    assert_eq!(weights.output.format, Format::Q8_0, "the output is the token embedding");
    assert_eq!(weights.layers[29].down.format, Format::Q4_1);

    let vocabulary = gguf.vocabulary().unwrap().unwrap();
    assert_eq!((vocabulary.tokens.len(), vocabulary.tokens.strings().count()), (49_152, 49_152));
    assert_eq!(vocabulary.tokens.strings().next(), Some(b"<|endoftext|>".as_slice()));
    assert_eq!(vocabulary.merges.unwrap().strings().last(), Some(b"ect able".as_slice()));
    assert_eq!(vocabulary.token_types.unwrap().i32s().filter(|&kind| kind == 3).count(), 17);
    assert!(vocabulary.scores.is_none());
    assert_eq!(gguf.boolean("tokenizer.ggml.add_bos_token"), Ok(Some(false)));
    assert!(gguf.string("tokenizer.chat_template").unwrap().unwrap().contains("<|im_start|>"));
}

#[test]
fn the_reference_agrees_with_an_independent_implementation_and_an_f16_cache_costs_little() {
    let gguf = model();
    let mut oracle = Reference::new(&gguf, &SHAPE, KvType::F32).unwrap();
    // Both sum in F32, in different orders; the suite prints four digits after the point.
    let bounds = Bounds { logit: 1e-3, argmax_share: 1.0, kl_mean: 1e-5, kl_max: 1e-4 };
    let expected = check("reference, F32 cache", &mut oracle, &bounds);
    drop(oracle);

    let mut backend = Reference::new(&gguf, &SHAPE, KvType::F16).unwrap();
    let bounds = Bounds { logit: 5e-2, argmax_share: 0.99, kl_mean: 1e-5, kl_max: 1e-4 };
    let logits = check("reference, F16 cache", &mut backend, &bounds);
    let (mean, max) = divergence(&expected, &logits);
    println!("numerics, F16 cache against F32: KL mean {mean:.2e} max {max:.2e} over all tokens");
    assert!(mean <= 1e-5 && max <= 1e-4, "KL {mean} {max}");
}

#[test]
fn a_prompt_in_chunks_and_in_company_has_the_same_logits_to_the_bit() {
    let gguf = model();
    let tokens = &suite().tokens[..40];
    let company: &[&[u32]] = &[&tokens[5..15], &tokens[9..30], tokens];
    let logits = |batch_tokens_max, prompts: &[&[u32]]| {
        let shape = Shape { batch_tokens_max, ..SHAPE };
        let mut backend = Reference::new(&gguf, &shape, KvType::F16).unwrap();
        prompt_logits(&mut backend, shape, prompts, 4).pop().unwrap()
    };
    let alone = logits(64, &[tokens]);
    assert!(alone == logits(7, &[tokens]), "chunks of 7");
    assert!(alone == logits(64, company), "in company");
    assert!(alone == logits(3, company), "in company, by one to three tokens");
}

/// How far a backend may be from the suite's implementation.
struct Bounds {
    /// Of the five best logits and the log of the sum of all exponentials, absolute.
    logit: f32,
    /// Least share of positions whose best token is the same.
    argmax_share: f64,
    /// Mean and largest Kullback-Leibler divergence over the suite's positions, in nats, of six outcomes: the five
    /// best tokens, and the rest as one.
    kl_mean: f64,
    kl_max: f64,
}

/// Holds a backend's logits against all that the suite knows, and returns them, `[position][V]`.
fn check(name: &str, backend: &mut dyn Backend, bounds: &Bounds) -> Vec<Vec<f32>> {
    let suite = suite();
    let logits = teacher_forced(backend, SHAPE, &suite.tokens);
    let agreed = logits.iter().zip(&suite.reference_argmax).filter(|(logits, best)| argmax(logits) == **best);
    let agreed = agreed.count();
    let (mut worst, mut divergences) = (0_f32, Vec::new());
    for known in &suite.positions {
        let logits = &logits[known.pos];
        let sum = logsumexp(logits);
        worst = worst.max((sum - known.logsumexp).abs());
        for &(token, logit) in &known.top5 {
            worst = worst.max((logits[token as usize] - logit).abs());
        }
        divergences.push(known.divergence(logits, sum));
    }
    let (mean, max) = mean_and_max(&divergences);
    println!(
        "numerics, {name}: {agreed} of {} best tokens agree, worst logit off by {worst:.5}, \
         KL mean {mean:.2e} max {max:.2e} over {} positions",
        suite.tokens.len(),
        divergences.len(),
    );
    let argmax_share = agreed as f64 / suite.tokens.len() as f64;
    assert!(argmax_share >= bounds.argmax_share, "{name}: best tokens agree at {argmax_share}");
    assert!(worst <= bounds.logit, "{name}: a logit is off by {worst}");
    assert!(mean <= bounds.kl_mean && max <= bounds.kl_max, "{name}: KL {mean} {max}");
    logits
}

/// Returns the mean and the largest Kullback-Leibler divergence from `expected`, in nats, over whole distributions.
fn divergence(expected: &[Vec<f32>], logits: &[Vec<f32>]) -> (f64, f64) {
    assert_eq!(expected.len(), logits.len());
    let of_position = |(expected, logits): (&Vec<f32>, &Vec<f32>)| {
        let (p_sum, q_sum) = (f64::from(logsumexp(expected)), f64::from(logsumexp(logits)));
        let term = |(&p, &q): (&f32, &f32)| {
            let (ln_p, ln_q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
            ln_p.exp() * (ln_p - ln_q)
        };
        expected.iter().zip(logits).map(term).sum()
    };
    mean_and_max(&expected.iter().zip(logits).map(of_position).collect::<Vec<f64>>())
}

fn mean_and_max(values: &[f64]) -> (f64, f64) {
    (values.iter().sum::<f64>() / values.len() as f64, values.iter().copied().fold(0.0, f64::max))
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.unwrap() as u32
}

fn logsumexp(logits: &[f32]) -> f32 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - best).exp()).sum();
    best + sum.ln() as f32
}

fn model() -> Gguf {
    Gguf::open(setup::model()).unwrap()
}

fn suite() -> Suite {
    serde_json::from_str(include_str!("../suites/numerics.json")).unwrap()
}

const SHAPE: Shape =
    Shape { block_tokens: 16, block_count: 32, batch_seqs_max: 3, batch_tokens_max: 64, queue_max: 4 };

#[derive(Deserialize)]
struct Suite {
    tokens: Vec<u32>,
    reference_argmax: Vec<u32>,
    positions: Vec<Position>,
}

#[derive(Deserialize)]
struct Position {
    pos: usize,
    top5: [(u32, f32); 5],
    logsumexp: f32,
}

impl Position {
    /// Returns `sum p ln(p / q)`, `p` being the suite's.
    fn divergence(&self, logits: &[f32], sum: f32) -> f64 {
        let (mut divergence, mut p_rest, mut q_rest) = (0.0, 1.0, 1.0);
        for &(token, logit) in &self.top5 {
            let p = f64::from(logit - self.logsumexp).exp();
            let q = f64::from(logits[token as usize] - sum).exp();
            divergence += p * (p / q).ln();
            p_rest -= p;
            q_rest -= q;
        }
        // Where almost nothing is left, the suite's four digits leave no rest to compare.
        if p_rest > 1e-3 && q_rest > 0.0 {
            divergence += p_rest * f64::ln(p_rest / q_rest);
        }
        divergence
    }
}

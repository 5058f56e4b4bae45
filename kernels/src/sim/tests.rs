use super::*;
use crate::sample::{Sampler, SamplingParams};
use uring_serve_core::sched::{Outcome, Planner, SeqRequest, Shape};

#[test]
fn a_text_is_printable_and_ends_by_itself() {
    let mut lens = std::collections::BTreeSet::new();
    for seed in 0..500 {
        let text = run_one(config(seed), &job("hello", drawn(seed)));
        let (end, body) = text.split_last().unwrap();
        assert_eq!(*end, EOS, "seed {seed}");
        assert!(text.len() <= TEXT_TOKENS_MAX as usize, "seed {seed}: {} tokens", text.len());
        let body = utf8(body);
        assert!(body.len() > 4 && body.ends_with('.'), "{body}");
        assert!(body.starts_with(|c: char| c.is_ascii_uppercase()), "{body}");
        assert!(body.chars().all(|c| c.is_ascii_alphabetic() || " ,.".contains(c)), "{body}");
        lens.insert(text.len());
    }
    assert!(lens.len() > 30 && *lens.last().unwrap() >= 60, "{lens:?}");
}

#[test]
fn a_text_is_the_same_alone_and_in_any_batch_or_chunks() {
    let jobs: Vec<_> = (0..12u64)
        .map(|nth| {
            job(
                &"prompt ".repeat(1 + nth as usize),
                if nth % 3 == 0 { SamplingParams::greedy() } else { drawn(nth) },
            )
        })
        .collect();
    let alone: Vec<_> = jobs.iter().map(|job| run_one(config(1), job)).collect();
    for (batch_seqs_max, batch_tokens_max) in [(1, 3), (2, 1000), (5, 7), (12, 64)] {
        let together = run(config(1), &jobs, batch_seqs_max, batch_tokens_max);
        assert_eq!(together, alone, "{batch_seqs_max} sequences, {batch_tokens_max} tokens");
    }
}

#[test]
fn a_text_depends_on_both_seeds_and_the_prompt() {
    let base = run_one(config(1), &job("hello", drawn(1)));
    let greedy = run_one(config(1), &job("hello", SamplingParams::greedy()));
    let rows = [
        ("the same", config(1), job("hello", drawn(1)), true),
        ("another simulator", config(2), job("hello", drawn(1)), false),
        ("another seed", config(1), job("hello", drawn(2)), false),
        ("another prompt", config(1), job("hellp", drawn(1)), false),
        ("slower", SimConfig { ttft: Duration::from_secs(1), ..config(1) }, job("hello", drawn(1)), true),
    ];
    for (name, config, job, same) in rows {
        assert_eq!(run_one(config, &job) == base, same, "{name}");
    }
    let reseeded = SamplingParams { seed: 9, ..SamplingParams::greedy() };
    assert_eq!(run_one(config(1), &job("hello", reseeded)), greedy, "a greedy text has no sampling seed");
}

#[test]
fn a_ban_on_the_end_brings_more_sentences() {
    for min_tokens in [1, 63, 64, 65, 300] {
        let params = SamplingParams { min_tokens, banned_until_min: vec![EOS], ..drawn(3) };
        let text = run_one(config(1), &job("hello", params));
        let (end, body) = text.split_last().unwrap();
        assert_eq!(*end, EOS);
        assert!(body.len() as u32 >= min_tokens && body.len() as u32 <= min_tokens + 2 * TEXT_TOKENS_MAX);
        assert!(utf8(body).ends_with('.') && !utf8(body).contains(".."), "{}", utf8(body));
    }
    let for_ever = SamplingParams { min_tokens: u32::MAX, banned_until_min: vec![EOS], ..drawn(3) };
    let text = run_one(config(1), &Job { output_tokens_max: 500, ..job("hello", for_ever) });
    assert_eq!((text.len(), text.contains(&EOS)), (500, false));
}

#[test]
fn a_caller_that_ignores_the_end_meets_it_once() {
    let ignoring = Job { output_tokens_max: 500, ignore_eos: true, ..job("hello", drawn(3)) };
    let text = run_one(config(1), &ignoring);
    assert_eq!(text.iter().filter(|token| **token == EOS).count(), 1);
    let body: Vec<_> = text.into_iter().filter(|token| *token != EOS).collect();
    assert_eq!(body.len(), 499);
    assert!(utf8(&body).contains(". "), "sentence after sentence");
}

#[test]
fn sampling_parameters_act() {
    let x = u32::from(b'x');
    let select = SamplingParams { logit_bias: vec![(x, 100.0)], ..drawn(1) };
    let text = run_one(config(1), &Job { output_tokens_max: 20, ..job("hello", select) });
    assert_eq!(text, [x; 20]);
    let exclude = SamplingParams { logit_bias: vec![(u32::from(b'e'), -100.0), (EOS, -100.0)], ..drawn(1) };
    let text = run_one(config(1), &Job { output_tokens_max: 400, ..job("hello", exclude) });
    assert_eq!(text.len(), 400);
    assert!(text.iter().all(|token| *token < 128 && *token != u32::from(b'e')));
    let end_now = SamplingParams { logit_bias: vec![(EOS, 100.0)], ..SamplingParams::greedy() };
    assert_eq!(run_one(config(1), &job("hello", end_now)), [EOS]);
}

#[test]
fn characters_of_several_bytes_come_only_when_asked_for_and_whole() {
    let mut foreign = 0;
    for seed in 0..100 {
        let unicode = SimConfig { unicode: true, ..config(seed) };
        let text = run_one(unicode, &job("hello", SamplingParams::greedy()));
        assert!(text.len() <= TEXT_TOKENS_MAX as usize);
        foreign += usize::from(!utf8(&text[..text.len() - 1]).is_ascii());
    }
    assert!(foreign > 50, "{foreign} of 100");
}

#[test]
fn a_step_lasts_as_configured_whatever_the_batch() {
    let (ttft, tpot) = (Duration::from_micros(900), Duration::from_micros(50));
    let rows = [
        // Prompt lengths, under a budget of 8 tokens a step.
        ("alone", vec![6], vec![ttft, tpot, tpot]),
        ("a chunk alone takes no time", vec![12], vec![Duration::ZERO, ttft, tpot]),
        ("the longer of both", vec![6, 10], vec![ttft, tpot, ttft, tpot]),
        ("two at once", vec![2, 2], vec![ttft, tpot, tpot]),
    ];
    for (name, prompts, expected) in rows {
        let config = SimConfig { ttft, tpot, ..config(0) };
        let jobs: Vec<_> = prompts
            .iter()
            .map(|len| Job { output_tokens_max: 3, ..job(&"x".repeat(*len), SamplingParams::greedy()) })
            .collect();
        let mut durations = Vec::new();
        drive(config, &jobs, 4, 8, &mut |lasts| durations.push(lasts));
        assert_eq!(durations[..expected.len()], expected, "{name}");
    }
    let slow_decode = SimConfig { ttft: tpot, tpot: ttft, ..config(0) };
    let mut sum = Duration::ZERO;
    drive(
        slow_decode,
        &[Job { output_tokens_max: 4, ..job("x", SamplingParams::greedy()) }],
        1,
        8,
        &mut |lasts| sum += lasts,
    );
    assert_eq!(sum, tpot + 3 * ttft);
}

#[test]
fn an_empty_slot_is_an_error() {
    let mut planner = planner(1, 8);
    planner.admit(SeqRequest { prompt_tokens: 1, output_tokens_max: 1 }).unwrap();
    let mut plan = Plan::default();
    let _step = planner.begin_step(&mut plan).unwrap();
    let mut sim = Sim::new(config(0));
    let error = sim.forward(&plan, &Sequences::new(1)).unwrap_err();
    assert_eq!(error.message, "slot 0 of the plan holds no sequence");
    assert_eq!(sim.sample(&plan, &mut Sequences::new(1), &mut Vec::new()), Err(error));
}

#[test]
fn the_words_fit() {
    assert!(WORDS.iter().chain(&FOREIGN).all(|word| " .".len() + word.len() < SENTENCE_BYTES_MIN));
    assert!(WORDS.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase())));
    assert_eq!(Sim::new(config(0)).spec().vocab, VOCAB);
}

/// A request to the little driver below.
#[derive(Clone)]
struct Job {
    prompt: Vec<u32>,
    params: SamplingParams,
    output_tokens_max: u32,
    ignore_eos: bool,
}

fn job(prompt: &str, params: SamplingParams) -> Job {
    let prompt = prompt.bytes().map(u32::from).collect();
    Job { prompt, params, output_tokens_max: 1000, ignore_eos: false }
}

fn drawn(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 2.0, seed, ..SamplingParams::greedy() }
}

fn config(seed: u64) -> SimConfig {
    SimConfig { seed, ..SimConfig::default() }
}

fn run_one(config: SimConfig, job: &Job) -> Vec<u32> {
    run(config, std::slice::from_ref(job), 1, 1000).remove(0)
}

fn run(config: SimConfig, jobs: &[Job], batch_seqs_max: u32, batch_tokens_max: u32) -> Vec<Vec<u32>> {
    drive(config, jobs, batch_seqs_max, batch_tokens_max, &mut |_| {})
}

/// Runs all jobs to their ends and returns their output tokens.
fn drive(
    config: SimConfig,
    jobs: &[Job],
    batch_seqs_max: u32,
    batch_tokens_max: u32,
    on_step: &mut dyn FnMut(Duration),
) -> Vec<Vec<u32>> {
    let mut planner = planner(batch_seqs_max, batch_tokens_max);
    let mut sim = Sim::new(config);
    let mut sequences = Sequences::new(batch_seqs_max);
    let (mut plan, mut tokens, mut outcomes, mut left) =
        (Plan::default(), Vec::new(), Vec::new(), Vec::new());
    for job in jobs {
        let (prompt_tokens, output_tokens_max) = (job.prompt.len() as u32, job.output_tokens_max);
        planner.admit(SeqRequest { prompt_tokens, output_tokens_max }).unwrap();
    }
    // Sequence numbers count from 1 in the order of admission.
    let job_index = |seq: SeqId| seq.get() as usize - 1;
    let mut outputs = vec![Vec::new(); jobs.len()];
    while let Some(step) = planner.begin_step(&mut plan) {
        for &(seq, slot) in &plan.started {
            let job = &jobs[job_index(seq)];
            let sampler = Sampler::new(job.params.clone(), &job.prompt);
            sequences.insert(slot, Sequence { tokens: job.prompt.clone(), sampler });
        }
        on_step(sim.forward(&plan, &sequences).unwrap());
        tokens.clear();
        sim.sample(&plan, &mut sequences, &mut tokens).unwrap();
        let mut sampled = tokens.iter();
        outcomes.clear();
        for item in &plan.items {
            if !item.samples {
                outcomes.push(Outcome::Chunk);
                continue;
            }
            let token = *sampled.next().unwrap();
            sequences.at_mut(item.slot).unwrap().tokens.push(token);
            outputs[job_index(item.seq)].push(token);
            let ends = token == EOS && !jobs[job_index(item.seq)].ignore_eos;
            outcomes.push(if ends { Outcome::Last } else { Outcome::Token });
        }
        planner.end_step(step, &plan, &outcomes, &mut left);
        for &(_, slot) in &left {
            sequences.remove(slot);
        }
    }
    outputs
}

fn planner(batch_seqs_max: u32, batch_tokens_max: u32) -> Planner {
    let shape =
        Shape { block_tokens: 16, block_count: 1024, batch_seqs_max, batch_tokens_max, queue_max: 100 };
    Planner::new(shape).unwrap()
}

fn utf8(tokens: &[u32]) -> String {
    String::from_utf8(tokens.iter().map(|token| u8::try_from(*token).unwrap()).collect()).unwrap()
}

//! A model file that is sound as a file is still refused, by name, when it is no model that can be computed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use uring_serve_core::sched::{Item, Plan, Planner, SeqRequest, Shape, SlotId};
use uring_serve_kernels::model::{Batch, Config, ModelError, Weights};
use uring_serve_kernels::reference::{KvType, Reference};
use uring_serve_kernels::sample::{Sampler, SamplingParams};
use uring_serve_kernels::weights::Gguf;
use uring_serve_kernels::{Sequence, Sequences};
use uring_serve_tests::engine::{prompt_logits, run};
use uring_serve_tests::gguf::{File, Sizes, Value};

#[test]
fn a_model_of_odd_sizes_is_read_as_it_says() {
    let config = Config::from_gguf(&open(&odd())).unwrap();
    assert_eq!((config.layers, config.d_model, config.d_ff), (2, 18, 37));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.rope_dims), (6, 2, 10, 6));
    assert_eq!((config.query_width(), config.kv_width()), (60, 20));
    assert_eq!((config.vocab, config.context_tokens), (51, 256));
    assert_eq!((config.rope_base, config.rms_eps), (10_000.0, 1e-5));
}

#[test]
fn metadata_that_do_not_fit_are_refused_by_key() {
    let u32_rows = [
        ("attention.head_count", 0),
        ("attention.head_count", 1_025),
        ("attention.head_count", 5),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 4),
        ("attention.key_length", 9),
        ("attention.value_length", 8),
        ("block_count", 0),
        ("block_count", 513),
        ("context_length", 0),
        ("embedding_length", u32::MAX),
        ("feed_forward_length", 0),
        ("rope.dimension_count", 5),
        ("rope.dimension_count", 12),
    ];
    let rows = u32_rows.map(|(key, value)| (key, Value::U32(value)));
    let f32_rows = [0.0, -1.0, f32::NAN, f32::INFINITY]
        .map(|value| ("attention.layer_norm_rms_epsilon", Value::F32(value)))
        .into_iter()
        .chain([0.0, f32::NAN].map(|value| ("rope.freq_base", Value::F32(value))));
    let types = [("block_count", Value::Text("2")), ("rope.freq_base", Value::U32(10_000))];
    for (key, value) in rows.into_iter().chain(f32_rows).chain(types) {
        let mut file = odd();
        file.set(&format!("llama.{key}"), value.clone());
        let message = refusal(&file);
        // Heads that their KV heads do not divide are reported at the latter.
        assert!(
            message.contains(&format!("`llama.{}", key.trim_end_matches("_kv"))),
            "{key} {value:?}: {message}"
        );
    }
}

#[test]
fn each_needed_key_and_tensor_is_missed_by_name() {
    let whole = odd();
    let optional = ["rope.freq_base", "head_count_kv", "key_length", "value_length", "dimension_count"];
    for at in 0..whole.metadata.len() {
        let mut file = whole.clone();
        let (key, _) = file.metadata.remove(at);
        if optional.iter().all(|part| !key.ends_with(part)) {
            assert_eq!(refusal(&file), format!("metadata key `{key}` is missing"));
        }
    }
    for at in 0..whole.tensors.len() {
        let mut file = whole.clone();
        let (name, ..) = file.tensors.remove(at);
        assert_eq!(refusal(&file), format!("tensor `{name}` is missing"));
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused_by_name() {
    let whole = odd();
    for at in 0..whole.tensors.len() {
        let mut file = whole.clone();
        let (name, dims, _) = &mut file.tensors[at];
        dims[0] -= 1;
        let name = name.clone();
        assert!(refusal(&file).starts_with(&format!("tensor `{name}` has dimensions")), "{}", refusal(&file));
    }
}

#[test]
fn what_the_block_has_no_place_for_is_refused_by_name() {
    for name in [
        "blk.+0.attn_q.weight",
        "blk.00.attn_q.weight",
        "blk.0.attn_q.bias",
        "blk.2.attn_q.weight",
        "blk.0.attn_q_norm.weight",
        "rope_freqs.weight",
        "t",
    ] {
        let mut file = odd();
        file.tensors.push((name.to_owned(), vec![60], vec![0.0; 60]));
        assert!(refusal(&file).starts_with(&format!("tensor `{name}` has no place")), "{}", refusal(&file));
    }
    let mut file = odd();
    file.metadata.push(("llama.rope.scaling.type".to_owned(), Value::Text("yarn")));
    assert!(refusal(&file).starts_with("`llama.rope.scaling.type` is `yarn`"), "{}", refusal(&file));
    file.set("llama.rope.scaling.type", Value::Text("none"));
    load(&file).unwrap();
    file.set("general.architecture", Value::Text("qwen2"));
    assert_eq!(refusal(&file), "architecture `qwen2` is not supported; supported: `llama`");
}

#[test]
fn an_output_of_its_own_is_used() {
    let tied = odd();
    let mut own = tied.clone();
    let (_, dims, values) = own.tensors[0].clone();
    own.tensors.push(("output.weight".to_owned(), dims.clone(), values.clone()));
    assert_eq!(logits(&tied, SHAPE), logits(&own, SHAPE), "equal tables give equal logits");
    own.tensors.last_mut().unwrap().2 = values.iter().map(|value| 2.0 * value).collect();
    let doubled: Vec<f32> = logits(&tied, SHAPE).iter().map(|logit| 2.0 * logit).collect();
    assert_eq!(doubled, logits(&own, SHAPE));
}

#[test]
fn chunks_and_blocks_of_any_size_give_the_same_logits_to_the_bit() {
    let file = odd();
    let whole = logits(&file, SHAPE);
    assert!(whole.iter().all(|logit| logit.is_finite()) && whole.iter().any(|logit| *logit != whole[0]));
    for (block_tokens, batch_tokens_max) in [(1, 64), (3, 5), (5, 1), (64, 13), (16, 16), (7, 64)] {
        let block_count = 64_u32.div_ceil(block_tokens);
        let shape = Shape { block_tokens, block_count, batch_tokens_max, ..SHAPE };
        assert!(logits(&file, shape) == whole, "blocks of {block_tokens}, chunks of {batch_tokens_max}");
    }
}

#[test]
fn greedy_tokens_are_the_best_and_the_same_alone_and_in_company() {
    let gguf = open(&odd());
    let prompt = prompt();
    let company: &[&[u32]] = &[&prompt[3..], &prompt[..1], &prompt];
    let generate = |shape, prompts: &[&[u32]]| {
        let mut backend = Reference::new(&gguf, &shape, KvType::F16).unwrap();
        let mut best = vec![Vec::new(); 3];
        let outputs = run(&mut backend, shape, prompts, 20, |prompt, _, logits| {
            let by_logit = |a: &usize, b: &usize| logits[*a].total_cmp(&logits[*b]);
            best[prompt].push((0..logits.len()).max_by(by_logit).unwrap() as u32);
            None
        });
        assert_eq!(outputs, best[..prompts.len()]);
        outputs
    };
    let alone = generate(SHAPE, &[&prompt]).pop();
    let (queue_max, block_count) = (3, 9);
    for (batch_seqs_max, batch_tokens_max) in [(1, 64), (2, 5), (3, 64), (3, 3)] {
        let shape = Shape { batch_seqs_max, batch_tokens_max, queue_max, block_count, ..SHAPE };
        assert_eq!(
            generate(shape, company).pop(),
            alone,
            "{batch_seqs_max} at once, {batch_tokens_max} tokens"
        );
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused_before_it_is_computed() {
    let config = Config::from_gguf(&open(&odd())).unwrap();
    let (plan, sequences) = planned(SHAPE);
    let fill = |plan: &Plan, sequences: &Sequences, shape: Shape| {
        Batch::default().fill(plan, sequences, &config, &shape).map_err(|error| error.message)
    };
    assert_eq!(fill(&plan, &sequences, SHAPE), Ok(()));
    for (what, change) in [
        ("the slot is empty", (|item| item.slot = SlotId(7)) as fn(&mut Item)),
        ("no such tokens", |item| item.positions.end += 1),
        ("no such tokens", |item| item.positions = 5..5),
        ("not in the plan", |item| item.blocks.end += 1),
        ("too short", |item| item.blocks.end -= 1),
    ] {
        let mut plan = planned(SHAPE).0;
        change(&mut plan.items[0]);
        assert!(fill(&plan, &sequences, SHAPE).unwrap_err().contains(what), "{what}");
    }
    for (what, shape) in [
        ("not on the device", Shape { block_count: 1, ..SHAPE }),
        ("more tokens", Shape { batch_tokens_max: 19, ..SHAPE }),
        ("more sequences", Shape { batch_seqs_max: 0, ..SHAPE }),
    ] {
        assert!(fill(&plan, &sequences, shape).unwrap_err().contains(what), "{what}");
    }
    let mut foreign = planned(SHAPE).1;
    foreign.at_mut(plan.items[0].slot).unwrap().tokens[3] = 51;
    assert!(fill(&plan, &foreign, SHAPE).unwrap_err().contains("vocabulary"));
    let short = Config { context_tokens: 19, ..config };
    let error = Batch::default().fill(&plan, &sequences, &short, &SHAPE).unwrap_err();
    assert!(error.message.contains("context"), "{error}");
}

/// Plans a prompt of 20 tokens whole.
fn planned(shape: Shape) -> (Plan, Sequences) {
    let mut planner = Planner::new(shape).unwrap();
    planner.admit(SeqRequest { prompt_tokens: 20, output_tokens_max: 8 }).unwrap();
    let mut plan = Plan::default();
    let _in_flight = planner.begin_step(&mut plan).unwrap();
    let mut sequences = Sequences::new(shape.batch_seqs_max);
    let (tokens, params) = (prompt(), SamplingParams::greedy());
    let sampler = Sampler::new(params, &tokens);
    sequences.insert(plan.items[0].slot, Sequence { tokens, sampler });
    (plan, sequences)
}

/// Computes the prompt and returns the logits of its last position.
fn logits(file: &File, shape: Shape) -> Vec<f32> {
    let mut backend = Reference::new(&open(file), &shape, KvType::F16).unwrap();
    prompt_logits(&mut backend, shape, &[&prompt()], 1).pop().unwrap()
}

fn prompt() -> Vec<u32> {
    (0..20).map(|i| i * 31 % 51).collect()
}

fn refusal(file: &File) -> String {
    load(file).unwrap_err().to_string()
}

fn load(file: &File) -> Result<(), ModelError> {
    let gguf = open(file);
    let config = Config::from_gguf(&gguf)?;
    Weights::from_gguf(&gguf, &config).map(drop)
}

fn open(file: &File) -> Gguf {
    Gguf::from_bytes(file.bytes()).unwrap()
}

fn odd() -> File {
    File::llama(Sizes::ODD, 7)
}

const SHAPE: Shape =
    Shape { block_tokens: 16, block_count: 4, batch_seqs_max: 1, batch_tokens_max: 64, queue_max: 1 };

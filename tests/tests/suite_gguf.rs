//! Suite `gguf`: a malformed model file gives one clear sentence, and nothing else.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use uring_serve_kernels::model::{Config, ModelError, Weights};
use uring_serve_kernels::weights::Gguf;
use uring_serve_tests::gguf::{File, Value};

#[test]
fn every_case_has_an_allowed_outcome_and_a_refusal_names_the_field() {
    let suite = suite();
    assert_eq!(suite.cases.len(), suite.count);
    let (mut loaded, mut refused, mut failures) = (0, 0, Vec::new());
    for case in &suite.cases {
        let (kind, message) = match load(case.bytes()) {
            Ok(()) => ("load", String::new()),
            Err(error) => ("clean-error", error.to_string()),
        };
        println!("{} {:24} {kind} {message}", case.id, case.name);
        loaded += usize::from(kind == "load");
        refused += usize::from(kind == "clean-error");
        if !case.expect.kinds().contains(&kind) {
            failures.push(format!("{} {}: {kind} {message}", case.id, case.name));
        } else if kind == "clean-error" && !message.contains(phrase(&case.field)) {
            failures.push(format!("{} {}: `{message}` does not name {}", case.id, case.name, case.field));
        }
    }
    println!("gguf: {} cases, {loaded} loaded, {refused} refused, {} failed", suite.count, failures.len());
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = valid_minimal();
    let tensor_end = whole.len() - TRAILING_BYTES;
    for length in 0..whole.len() {
        let outcome = load(whole[..length].to_vec());
        assert_eq!(outcome.is_ok(), length >= tensor_end, "cut at {length}: {outcome:?}");
    }
}

#[test]
fn a_file_with_any_one_byte_changed_loads_or_is_refused() {
    let whole = valid_minimal();
    let mut loaded = 0;
    for at in 0..whole.len() {
        for change in 1..=u8::MAX {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            let outcome = load(bytes);
            let is_data = at >= whole.len() - TENSOR_BYTES - TRAILING_BYTES;
            assert!(!is_data || outcome.is_ok(), "byte {at} is data: {outcome:?}");
            loaded += usize::from(outcome.is_ok());
        }
    }
    println!("gguf: {} changed files, {loaded} loaded", whole.len() * 255);
    assert!((TENSOR_BYTES..whole.len() * 255 / 2).contains(&loaded), "{loaded} loaded");
}

#[test]
fn names_stand_once_and_tensors_do_not_overlap() {
    let tensor = |name: &str| (name.to_owned(), vec![8], vec![1.0; 8]);
    let file = File { metadata: vec![], tensors: vec![tensor("a"), tensor("b")] };
    let bytes = file.bytes();
    assert_eq!(load(bytes.clone()), Ok(()));
    // The table ends with the offset of `b`: a header of 24 bytes, then two entries of 33.
    for (offset, message) in [
        (0_u64, "tensors `a` and `b` overlap"),
        (16, "tensor `b` has offset 16, which is no multiple of 32"),
        (64, "tensor `b`, 32 bytes at offset 64, is not inside the file"),
    ] {
        let mut bytes = bytes.clone();
        bytes[82..90].copy_from_slice(&offset.to_le_bytes());
        assert_eq!(load(bytes).unwrap_err().to_string(), message);
    }
    let twice = File { tensors: vec![tensor("a"), tensor("a")], ..file.clone() };
    assert_eq!(load(twice.bytes()).unwrap_err().to_string(), "tensor `a` stands twice");
    let key = ("k".to_owned(), Value::U32(1));
    let twice = File { metadata: vec![key.clone(), key], ..file };
    assert_eq!(load(twice.bytes()).unwrap_err().to_string(), "metadata key `k` stands twice");
}

#[test]
fn what_is_no_model_file_is_refused_by_name() {
    let directory = std::env::temp_dir();
    for path in [Path::new("no-such-model.gguf"), &directory] {
        let message = Gguf::open(path).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot read `{}`: ", path.display())), "{message}");
    }
}

/// Opens a file as a server does. The suite's files hold no whole model: what is missing is not held against them.
fn load(bytes: Vec<u8>) -> Result<(), ModelError> {
    let gguf = Gguf::from_bytes(bytes)?;
    gguf.vocabulary()?;
    let model = Config::from_gguf(&gguf).and_then(|config| Weights::from_gguf(&gguf, &config).map(drop));
    match model {
        Err(ModelError::MissingKey { .. } | ModelError::MissingTensor { .. }) => Ok(()),
        outcome => outcome,
    }
}

/// Returns what a message calls a field of the suite; the table lists the names that differ.
fn phrase(field: &str) -> &str {
    PHRASES.iter().find(|(name, _)| *name == field).map_or(field, |(_, phrase)| phrase)
}

const PHRASES: [(&str, &str); 14] = [
    ("array type", "array of arrays"),
    ("data", "tensor `t"),
    ("dim[0]", "rows of 33"),
    ("dims", "tensor `t"),
    ("file", "the file ends"),
    ("ggml type", "tensor `t` has type"),
    ("head_count", "llama.attention.head_count"),
    ("merges", "tokenizer.ggml.merges"),
    ("n_dims", "dimension count"),
    ("n_kv", "key count"),
    ("n_tensors", "tensor "),
    ("rms_eps", "llama.attention.layer_norm_rms_epsilon"),
    ("token_type", "tokenizer.ggml.token_type"),
    ("tokens", "tokenizer.ggml.tokens"),
];

fn valid_minimal() -> Vec<u8> {
    let case = suite().cases.swap_remove(0);
    assert_eq!(case.id, "gguf-0001");
    case.bytes()
}

/// `t`, four values of F32.
const TENSOR_BYTES: usize = 16;
/// The suite's file is padded after its tensor.
const TRAILING_BYTES: usize = 16;

fn suite() -> Suite {
    serde_json::from_str(include_str!("../suites/gguf.json")).unwrap()
}

#[derive(Deserialize)]
struct Suite {
    count: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    name: String,
    field: String,
    file_b64: String,
    expect: Expect,
}

impl Case {
    fn bytes(&self) -> Vec<u8> {
        STANDARD.decode(&self.file_b64).unwrap()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expect {
    One(Outcome),
    AnyOf(Vec<Outcome>),
}

#[derive(Deserialize)]
struct Outcome {
    kind: String,
}

impl Expect {
    fn kinds(&self) -> Vec<&str> {
        match self {
            Self::One(outcome) => vec![&outcome.kind],
            Self::AnyOf(outcomes) => outcomes.iter().map(|outcome| outcome.kind.as_str()).collect(),
        }
    }
}

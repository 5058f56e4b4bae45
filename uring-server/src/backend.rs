//! From the configuration to something that computes: reads the model file, sizes the KV cache, makes the backend.

use std::path::Path;
use std::sync::Arc;

use uring_serve_core::sched::Shape;
use uring_serve_kernels::Backend;
use uring_serve_kernels::cpu::{self, Cpu, CpuError, CpuOptions};
use uring_serve_kernels::model;
use uring_serve_kernels::sim::{Sim, SimConfig};
use uring_serve_kernels::weights::Gguf;

use crate::api::template::ChatTemplate;
use crate::app::Model;
use crate::config::{Config, Engine};
use crate::engine::tokenizer::{SpecialTokens, Tokenizer, TokenizerSource};
use crate::failure::Failure;
use crate::loading::progress_bar;

/// A model that can be served.
pub struct Loaded {
    /// What computes.
    pub backend: Box<dyn Backend>,
    /// Sizes of its batches and cache.
    pub shape: Shape,
    /// What the front end needs.
    pub model: Model,
}

/// The engines of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The kernels for the CPU.
    Cpu,
    /// The simulator.
    Sim,
}

impl EngineKind {
    /// Chooses by `--engine`.
    ///
    /// # Errors
    /// This build lacks the engine.
    pub fn choose(asked: Engine) -> Result<Self, Failure> {
        match asked {
            Engine::Auto | Engine::Cpu => Ok(Self::Cpu),
            Engine::Cuda => Err(Failure::run("this build has no CUDA backend", "pass `--engine cpu`")),
            Engine::Sim => Ok(Self::Sim),
        }
    }

    /// Returns its name, as `--engine` takes it and as metrics label it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Sim => "sim",
        }
    }
}

/// Looks for the model's file, so that a wrong path is told before anything starts.
///
/// # Errors
/// There is no such file, or it is a directory.
pub fn check_model(config: &Config, kind: EngineKind) -> Result<(), Failure> {
    let (EngineKind::Cpu, Some(path)) = (kind, &config.model) else { return Ok(()) };
    let hint = "pass the path of a .gguf file";
    match std::fs::metadata(path) {
        Err(error) => Err(Failure::run(format!("cannot read the model {}: {error}", path.display()), hint)),
        Ok(file) if file.is_dir() => Err(Failure::run(format!("{} is a directory", path.display()), hint)),
        Ok(_) => Ok(()),
    }
}

/// Makes the engine that the configuration asks for. `created` is the time to list the model under, in seconds since
/// the UNIX epoch.
///
/// # Errors
/// The file cannot be used, or the sizes do not fit the machine.
pub fn load(config: &Config, kind: EngineKind, created: u64) -> Result<Loaded, Failure> {
    match (kind, &config.model) {
        (EngineKind::Sim, _) => load_sim(config, created),
        (EngineKind::Cpu, Some(path)) => load_cpu(config, path, created),
        (EngineKind::Cpu, None) => {
            Err(Failure::usage("no MODEL is given", "pass the path of a .gguf file, or `--engine sim`"))
        }
    }
}

fn load_sim(config: &Config, created: u64) -> Result<Loaded, Failure> {
    let backend = Sim::new(SimConfig {
        ttft: config.sim_ttft,
        tpot: config.sim_tpot,
        seed: config.sim_seed,
        unicode: false,
    });
    let spec = backend.spec().clone();
    let (shape, context_tokens) = choose_shape(config, spec.context_tokens, 0)?;
    let tokenizer = Tokenizer::bytes();
    let template = ChatTemplate::chatml();
    let model = Model {
        spec,
        context_tokens,
        tokenizer: Arc::new(tokenizer),
        template: Some(template),
        created,
        engine: EngineKind::Sim.name(),
        kv_cache_tokens: kv_cache_tokens(shape),
    };
    Ok(Loaded { backend: Box::new(backend), shape, model })
}

fn load_cpu(config: &Config, path: &Path, created: u64) -> Result<Loaded, Failure> {
    let name = path.display();
    let unusable = |what: String| Failure::run(format!("cannot serve {name}: {what}"), MODEL_HINT);
    let gguf = Gguf::open(path).map_err(|error| unusable(error.to_string()))?;
    let hyper = model::Config::from_gguf(&gguf).map_err(|error| unusable(error.to_string()))?;
    let source = TokenizerSource::from_gguf(&gguf).map_err(|error| unusable(error.to_string()))?;
    let tokenizer = Tokenizer::from_source(source).map_err(|error| unusable(error.to_string()))?;
    if u64::from(tokenizer.vocab()) != hyper.vocab as u64 {
        return Err(unusable(format!(
            "the tokenizer has {} tokens and the embedding {}",
            tokenizer.vocab(),
            hyper.vocab
        )));
    }
    let template = read_template(&gguf, &tokenizer).map_err(unusable)?;
    let (shape, context_tokens) =
        choose_shape(config, hyper.context_tokens as u32, cpu::kv_bytes_per_token(&hyper))?;
    let options = CpuOptions { threads: usize::from(config.threads), shape, isa: None };
    let bar = progress_bar("packing weights   {bar:30} {binary_bytes}/{binary_total_bytes}", 0);
    let backend = Cpu::load(&gguf, &options, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })
    .map_err(|error| cannot_load(path, &error))?;
    bar.finish_and_clear();
    let spec = backend.spec().clone();
    let model = Model {
        spec,
        context_tokens,
        tokenizer: Arc::new(tokenizer),
        template,
        created,
        engine: EngineKind::Cpu.name(),
        kv_cache_tokens: kv_cache_tokens(shape),
    };
    Ok(Loaded { backend: Box::new(backend), shape, model })
}

/// Says what to do where it is not the file that is to blame.
fn cannot_load(path: &Path, error: &CpuError) -> Failure {
    let hint = match error {
        CpuError::Memory { .. } => "pass a smaller model, or lower --kv-cache-tokens or --max-num-tokens",
        CpuError::Threads { .. } => "lower --threads, or raise the limit on processes (`ulimit -u`)",
        CpuError::IsaMissing { .. } | CpuError::Model(_) | CpuError::Option { .. } | _ => MODEL_HINT,
    };
    Failure::run(format!("cannot serve {}: {error}", path.display()), hint)
}

/// Sizes batches and cache, and says how long a sequence may be.
fn choose_shape(config: &Config, model_context: u32, kv_bytes: u64) -> Result<(Shape, u32), Failure> {
    let sequence = config.max_seq_len.unwrap_or(SEQUENCE_TOKENS_DEFAULT).min(model_context);
    let block = u64::from(config.tokens_per_block);
    let wanted = u64::from(config.max_batch_size) * u64::from(sequence);
    let tokens = match (config.kv_cache_tokens, kv_bytes) {
        (Some(tokens), _) => u64::from(tokens),
        (None, 0) => wanted,
        (None, bytes) => wanted.min(memory_bytes() / KV_SHARE_OF_MEMORY / bytes),
    };
    let block_count = u32::try_from(tokens.div_ceil(block)).unwrap_or(u32::MAX);
    if block_count == 0 {
        return Err(Failure::run(
            "no memory is left for a KV cache",
            "pass a smaller model, or --kv-cache-tokens with what this machine has room for",
        ));
    }
    let held = u64::from(block_count) * block;
    // The last token's K and V are never written, so a sequence may be one longer than the cache.
    let context_tokens = sequence.min(u32::try_from(held + 1).unwrap_or(u32::MAX));
    let shape = Shape {
        block_tokens: config.tokens_per_block,
        block_count,
        batch_seqs_max: config.max_batch_size,
        batch_tokens_max: config.max_num_tokens.max(config.max_batch_size),
        queue_max: config.max_queued_requests,
    };
    tracing::info!(
        kv_cache_tokens = held,
        kv_cache_mib = (held * kv_bytes) >> 20,
        kv_blocks = block_count,
        context_tokens,
        "KV cache"
    );
    Ok((shape, context_tokens))
}

/// Physical memory, in bytes.
fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}

fn read_template(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, String> {
    let source = gguf.string("tokenizer.chat_template").map_err(|error| error.to_string())?;
    let Some(source) = source else { return Ok(None) };
    let text =
        |id: Option<u32>| id.map(|id| tokenizer.decode(&[id], SpecialTokens::Show)).unwrap_or_default();
    let eos = gguf.unsigned("tokenizer.ggml.eos_token_id").map_err(|error| error.to_string())?;
    let eos = eos.and_then(|id| u32::try_from(id).ok());
    ChatTemplate::new(&source, &text(tokenizer.bos()), &text(eos))
        .map(Some)
        .map_err(|error| error.to_string())
}

fn kv_cache_tokens(shape: Shape) -> u64 {
    u64::from(shape.block_count) * u64::from(shape.block_tokens)
}

const MODEL_HINT: &str = "pass a llama-family model as one .gguf file";
/// Longest sequence when `--max-seq-len` is not given.
const SEQUENCE_TOKENS_DEFAULT: u32 = 8192;
/// The cache takes at most one part in this many of physical memory.
const KV_SHARE_OF_MEMORY: u64 = 4;

//! The CPU backend: packed integer weights, activations rounded to bytes, a paged F16 cache, and a pool of threads.
//!
//! Exact equality: within one instruction set, a sequence's logits are the same to the bit alone, in any batch, however
//! its prompt is cut into chunks, and on any number of threads. Between instruction sets they differ in rounding.

use core::fmt;
use core::time::Duration;
use std::io;
use std::sync::{Mutex, PoisonError};

use uring_serve_core::sched::{Plan, Shape, SlotId};

use self::device::{Device, Scratch};
use self::kernels::{KV_TILE, Kernels};
use self::pool::Pool;
use crate::model::{Batch, Config, ModelError, Weights};
use crate::weights::Gguf;
use crate::{Backend, BackendError, ModelSpec, Sequence, Sequences};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod device;
mod kernels;
mod memory;
mod panels;
mod pool;
mod portable;
#[cfg(test)]
mod tests;

pub use self::kernels::Isa;

/// Sizes and choices fixed at load.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included, `1..=`[`THREADS_MAX`].
    pub threads: usize,
    /// Cache and step sizes; `block_tokens` is a multiple of [`BLOCK_TOKENS_UNIT`], no size is 0.
    pub shape: Shape,
    /// Instruction set; `None` takes the fastest that the processor has.
    pub isa: Option<Isa>,
}

/// A llama-family model on the CPU.
pub struct Cpu {
    spec: ModelSpec,
    shape: Shape,
    batch: Batch,
    device: Device,
    pool: Pool,
    /// One per lane; each is locked by its lane alone, so no lock is ever waited for.
    scratches: Vec<Mutex<Scratch>>,
    /// Sequences lent to the lanes that sample, in plan order.
    drawn: Vec<Mutex<Drawn>>,
    /// Which step last wrote each block.
    claims: Vec<u64>,
    step: u64,
}

impl Cpu {
    /// Packs the weights of a model file for this processor and starts the threads.
    ///
    /// Calls `progress` on this thread with bytes of the file's matrices done and in all; the last call has both equal.
    /// The file is not needed afterwards. The KV cache is reserved but takes memory only as it is used.
    ///
    /// # Errors
    /// [`CpuError`], which names what does not fit.
    pub fn load(gguf: &Gguf, options: &CpuOptions, progress: &dyn Fn(u64, u64)) -> Result<Self, CpuError> {
        let CpuOptions { threads, shape, isa } = options;
        let isa = isa.unwrap_or_else(Isa::detect);
        let kernels = Kernels::new(isa).ok_or(CpuError::IsaMissing { isa })?;
        check_options(*threads, shape)?;
        let config = Config::from_gguf(gguf)?;
        let weights = Weights::from_gguf(gguf, &config)?;
        let device = Device::new(config, &weights, shape, kernels, *threads, progress);
        let device = device.map_err(|source| CpuError::Memory { source })?;
        let pool = Pool::new(*threads).map_err(|source| CpuError::Threads { source })?;
        let unit = if *threads == 1 { "thread" } else { "threads" };
        let spec = ModelSpec {
            vocab: config.vocab as u32,
            context_tokens: config.context_tokens as u32,
            kv_bytes_per_token: kv_bytes_per_token(&config),
            device: format!("cpu ({}, {threads} {unit})", kernels.isa()),
        };
        Ok(Self {
            spec,
            shape: *shape,
            batch: Batch::default(),
            scratches: (0..*threads).map(|_| Mutex::new(device.scratch())).collect(),
            drawn: Vec::with_capacity(shape.batch_seqs_max as usize),
            claims: vec![0; shape.block_count as usize],
            step: 0,
            device,
            pool,
        })
    }

    /// Takes the blocks that the plan's items write, each for one item: two threads must not write one place.
    fn claim_blocks(&mut self, plan: &Plan) -> Result<(), BackendError> {
        self.step += 1;
        for item in &plan.items {
            let first = item.positions.start / self.shape.block_tokens;
            let last = (item.positions.end - 1) / self.shape.block_tokens;
            let table = &plan.block_tables[item.blocks.start as usize..];
            for block in &table[first as usize..=last as usize] {
                let claim = &mut self.claims[block.0 as usize];
                if *claim == self.step {
                    let message = format!("the plan has two items that write block {}", block.0);
                    return Err(BackendError { message });
                }
                *claim = self.step;
            }
        }
        Ok(())
    }
}

impl Backend for Cpu {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, plan: &Plan, sequences: &Sequences) -> Result<Duration, BackendError> {
        self.batch.fill(plan, sequences, &self.device.config, &self.shape)?;
        self.claim_blocks(plan)?;
        let outcome = self.device.forward(&mut self.pool, &self.scratches, &self.batch);
        outcome.map_err(|_| panicked())?;
        Ok(Duration::ZERO)
    }

    fn sample(
        &mut self,
        plan: &Plan,
        sequences: &mut Sequences,
        tokens: &mut Vec<u32>,
    ) -> Result<(), BackendError> {
        let sampled = plan.items.iter().filter(|item| item.samples);
        if sampled.clone().count() != self.batch.logit_rows.len() {
            return Err(BackendError {
                message: "sampling follows another plan than the last step's".to_owned(),
            });
        }
        for item in sampled {
            let Some(sequence) = sequences.remove(item.slot) else {
                give_back(&mut self.drawn, sequences);
                return Err(BackendError { message: format!("slot {} is empty at sampling", item.slot.0) });
            };
            self.drawn.push(Mutex::new(Drawn { slot: item.slot, sequence, token: 0 }));
        }
        let drawn = &self.drawn;
        let outcome = self.device.share_logits(&mut self.pool, drawn.len(), &|index, logits| {
            let mut drawn = drawn[index].lock().unwrap_or_else(PoisonError::into_inner);
            drawn.token = drawn.sequence.sampler.choose(logits);
        });
        tokens.extend(self.drawn.iter_mut().map(|drawn| inner(drawn).token));
        give_back(&mut self.drawn, sequences);
        outcome.map_err(|_| panicked())
    }

    fn is_broken(&self) -> bool {
        self.pool.is_broken()
    }

    fn logits(&self, index: usize) -> Option<&[f32]> {
        (index < self.batch.logit_rows.len()).then(|| self.device.logits_row(index))
    }
}

/// Returns the bytes of K and V together for one token, over all layers, in F16.
#[must_use]
pub fn kv_bytes_per_token(config: &Config) -> u64 {
    (2 * config.layers * config.kv_width() * size_of::<u16>()) as u64
}

/// A model cannot be run here. Each message is one sentence.
#[derive(Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// The processor lacks the instruction set asked for.
    IsaMissing {
        /// Which.
        isa: Isa,
    },
    /// The system has not enough memory.
    Memory {
        /// What it said.
        source: io::Error,
    },
    /// The file does not hold a model that can be computed.
    Model(ModelError),
    /// An option is out of its range.
    Option {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: u64,
        /// What would do.
        wanted: &'static str,
    },
    /// A thread cannot be started.
    Threads {
        /// What the system said.
        source: io::Error,
    },
}

impl From<ModelError> for CpuError {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IsaMissing { isa } => write!(f, "this processor has no {isa}"),
            Self::Memory { source } => write!(f, "not enough memory for the model and its cache: {source}"),
            Self::Model(error) => write!(f, "{error}"),
            Self::Option { name, value, wanted } => write!(f, "`{name}` is {value}; it must be {wanted}"),
            Self::Threads { source } => write!(f, "cannot start a kernel thread: {source}"),
        }
    }
}

impl core::error::Error for CpuError {}

/// A sequence on loan to the lane that samples for it.
struct Drawn {
    slot: SlotId,
    sequence: Sequence,
    token: u32,
}

fn give_back(drawn: &mut Vec<Mutex<Drawn>>, sequences: &mut Sequences) {
    for drawn in drawn.drain(..) {
        let Drawn { slot, sequence, .. } = drawn.into_inner().unwrap_or_else(PoisonError::into_inner);
        sequences.insert(slot, sequence);
    }
}

fn inner(drawn: &mut Mutex<Drawn>) -> &mut Drawn {
    drawn.get_mut().unwrap_or_else(PoisonError::into_inner)
}

fn panicked() -> BackendError {
    BackendError { message: "a kernel thread panicked; the backend cannot go on".to_owned() }
}

fn check_options(threads: usize, shape: &Shape) -> Result<(), CpuError> {
    let rows = [
        ("threads", threads as u64, (1..=THREADS_MAX).contains(&threads), "in 1..=256"),
        (
            "block_tokens",
            u64::from(shape.block_tokens),
            shape.block_tokens != 0 && shape.block_tokens.is_multiple_of(BLOCK_TOKENS_UNIT),
            "a multiple of 16",
        ),
        ("block_count", u64::from(shape.block_count), shape.block_count != 0, "at least 1"),
        ("batch_seqs_max", u64::from(shape.batch_seqs_max), shape.batch_seqs_max != 0, "at least 1"),
        ("batch_tokens_max", u64::from(shape.batch_tokens_max), shape.batch_tokens_max != 0, "at least 1"),
    ];
    match rows.into_iter().find(|(_, _, fits, _)| !fits) {
        Some((name, value, _, wanted)) => Err(CpuError::Option { name, value, wanted }),
        None => Ok(()),
    }
}

/// Most threads, the caller's included.
pub const THREADS_MAX: usize = 256;
/// KV blocks hold a multiple of this many tokens.
pub const BLOCK_TOKENS_UNIT: u32 = KV_TILE as u32;

//! A llama-family model: its hyper-parameters, its tensors, and one step, operation by operation, in paper order.
//!
//! Every backend that computes reads a model through [`Config`] and [`Weights`], turns a plan into a [`Batch`], and
//! runs [`forward`] over its own [`Ops`]. The order of operations is thus written once.
//!
//! Sources: Touvron et al., "LLaMA" (2023) §2.2 for the block; Zhang and Sennrich (2019) for RMSNorm; Su et al.,
//! "RoFormer" (2021) eq. 34 for the rotation; Shazeer (2020) for SwiGLU; Ainslie et al. (2023) for grouped queries.

use core::fmt;
use core::ops::{Range, RangeInclusive};

use uring_serve_core::sched::{BlockId, Plan, Shape};

use crate::weights::{Format, Gguf, Tensor, WeightsError};
use crate::{BackendError, Sequences};

/// Hyper-parameters, checked: none is zero, widths fit each other, and all products used as sizes fit `usize`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Transformer blocks.
    pub layers: usize,
    /// Model width, `D`.
    pub d_model: usize,
    /// Feed-forward width, `F`.
    pub d_ff: usize,
    /// Query heads, `H`.
    pub heads: usize,
    /// KV heads, `G`; divides `heads`. Query head `h` reads KV head `h / (H / G)`.
    pub kv_heads: usize,
    /// Head width, `K`; even.
    pub head_dim: usize,
    /// Entries of the vocabulary, `V`.
    pub vocab: usize,
    /// Longest sequence the model was trained for, in tokens.
    pub context_tokens: usize,
    /// Base of the rotary angles: pair `i` turns by `position * rope_base^(-2i / rope_dims)` radians.
    pub rope_base: f32,
    /// Leading values of a head that are rotated, in adjacent pairs `(2i, 2i + 1)`; even, at most `head_dim`.
    pub rope_dims: usize,
    /// Added to the mean square under RMSNorm's root.
    pub rms_eps: f32,
}

/// The tensors of a model, each present, of the shape that [`Config`] asks for, and of a known format.
///
/// A matrix `[R, C]` maps `C` inputs to `R` outputs: `y = x W^T`.
#[derive(Clone, Debug)]
pub struct Weights<'a> {
    /// `E`, `[V, D]`.
    pub token_embedding: Tensor<'a>,
    /// One per transformer block.
    pub layers: Vec<LayerWeights<'a>>,
    /// Gains of the last RMSNorm, `[D]`, F32.
    pub output_norm: Tensor<'a>,
    /// `[V, D]`; the token embedding itself where the model ties them.
    pub output: Tensor<'a>,
}

/// The tensors of one transformer block.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    /// Gains of the RMSNorm before attention, `[D]`, F32.
    pub attention_norm: Tensor<'a>,
    /// `[H * K, D]`.
    pub query: Tensor<'a>,
    /// `[G * K, D]`.
    pub key: Tensor<'a>,
    /// `[G * K, D]`.
    pub value: Tensor<'a>,
    /// `Wo`, `[D, H * K]`.
    pub attention_output: Tensor<'a>,
    /// Gains of the RMSNorm before the feed-forward part, `[D]`, F32.
    pub feed_forward_norm: Tensor<'a>,
    /// `Wg`, `[F, D]`.
    pub gate: Tensor<'a>,
    /// `Wu`, `[F, D]`.
    pub up: Tensor<'a>,
    /// `Wd`, `[D, F]`.
    pub down: Tensor<'a>,
}

/// One token of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its id, below `V`.
    pub token: u32,
    /// Its place in its sequence, from 0.
    pub position: u32,
    /// Where its sequence's block table lies in [`Batch::block_tables`].
    pub blocks: Range<u32>,
}

/// A plan, flattened to rows. Reused from step to step; its vectors keep their capacity.
#[derive(Debug, Default)]
pub struct Batch {
    /// Tokens of the step, `T` of them, each sequence's in rising position.
    pub rows: Vec<Row>,
    /// Block tables, concatenated as in [`Plan::block_tables`].
    pub block_tables: Vec<BlockId>,
    /// Rows whose logits are wanted, one per item that samples, in plan order.
    pub logit_rows: Vec<u32>,
}

/// The device's operations, each over all rows of a batch, named in the order that [`forward`] calls them.
///
/// `x` is the residual stream `[T, D]`, `h` a normalised copy of it `[T, D]`, `a` the output of attention `[T, H * K]`
/// or of the gate `[T, F]`. A device with several threads gives each its own lane that implements `Ops`, lets each run
/// [`forward`], and meets at a barrier where an operation reads what other lanes wrote.
pub trait Ops {
    /// `x = E[token]`.
    fn embed(&mut self, batch: &Batch);
    /// `h = RMSNorm(x) * g; q = h Wq^T; k = h Wk^T; v = h Wv^T`.
    fn attention_input(&mut self, layer: usize, batch: &Batch);
    /// Rotates `q` and `k` by their position, then writes `k` and `v` to the paged cache.
    fn rotate_and_store(&mut self, layer: usize, batch: &Batch);
    /// `a = softmax(q K^T / sqrt(head_dim)) V` over positions `0..=position`, read back from the cache.
    fn attend(&mut self, layer: usize, batch: &Batch);
    /// `x += a Wo^T`.
    fn attention_output(&mut self, layer: usize, batch: &Batch);
    /// `h = RMSNorm(x) * g; a = silu(h Wg^T) * (h Wu^T)`.
    fn feed_forward_input(&mut self, layer: usize, batch: &Batch);
    /// `x += a Wd^T`.
    fn feed_forward_output(&mut self, layer: usize, batch: &Batch);
    /// For [`Batch::logit_rows`] only: `logits = (RMSNorm(x) * g) Wout^T`, `[logit_rows, V]`.
    fn logits(&mut self, batch: &Batch);
}

/// Computes one step.
pub fn forward<O: Ops + ?Sized>(ops: &mut O, config: &Config, batch: &Batch) {
    ops.embed(batch);
    for layer in 0..config.layers {
        ops.attention_input(layer, batch);
        ops.rotate_and_store(layer, batch);
        ops.attend(layer, batch);
        ops.attention_output(layer, batch);
        ops.feed_forward_input(layer, batch);
        ops.feed_forward_output(layer, batch);
    }
    if !batch.logit_rows.is_empty() {
        ops.logits(batch);
    }
}

impl Batch {
    /// Replaces the contents by the rows of `plan`, with the tokens of `sequences`.
    ///
    /// What passes fits a device sized by `config` and `shape`: tokens are below `V`, positions below the context,
    /// every block exists and covers its position, and there are at most `batch_tokens_max` rows, of which at most
    /// `batch_seqs_max` want logits.
    ///
    /// # Errors
    /// [`BackendError`] when the plan does not fit: a bug of the caller, found before a device reads a wrong address.
    pub fn fill(
        &mut self,
        plan: &Plan,
        sequences: &Sequences,
        config: &Config,
        shape: &Shape,
    ) -> Result<(), BackendError> {
        self.rows.clear();
        self.logit_rows.clear();
        self.block_tables.clear();
        self.block_tables.extend_from_slice(&plan.block_tables);
        for item in &plan.items {
            let misfit = |what: &str| {
                let (Range { start, end }, slot) = (&item.positions, item.slot.0);
                BackendError { message: format!("plan of positions {start}..{end} in slot {slot}: {what}") }
            };
            let positions = item.positions.start as usize..item.positions.end as usize;
            let sequence = sequences.at(item.slot).ok_or_else(|| misfit("the slot is empty"))?;
            let tokens = sequence.tokens.get(positions.clone()).filter(|tokens| !tokens.is_empty());
            let tokens = tokens.ok_or_else(|| misfit("the sequence has no such tokens"))?;
            if positions.end > config.context_tokens {
                return Err(misfit("past the end of the context"));
            }
            if tokens.iter().any(|&token| token as usize >= config.vocab) {
                return Err(misfit("a token is not in the vocabulary"));
            }
            let blocks = plan.block_tables.get(item.blocks.start as usize..item.blocks.end as usize);
            let blocks = blocks.ok_or_else(|| misfit("its block table is not in the plan"))?;
            if blocks.len() < positions.end.div_ceil(shape.block_tokens as usize) {
                return Err(misfit("its block table is too short"));
            }
            if blocks.iter().any(|block| block.0 >= shape.block_count) {
                return Err(misfit("a block is not on the device"));
            }
            if self.rows.len() + tokens.len() > shape.batch_tokens_max as usize {
                return Err(misfit("more tokens than a step may have"));
            }
            let row = |(position, &token)| Row { token, position, blocks: item.blocks.clone() };
            self.rows.extend(item.positions.clone().zip(tokens).map(row));
            if item.samples {
                self.logit_rows.push(self.rows.len() as u32 - 1);
            }
            if self.logit_rows.len() > shape.batch_seqs_max as usize {
                return Err(misfit("more sequences than a step may have"));
            }
        }
        Ok(())
    }

    /// Returns the block table of a row: block `i` holds positions `i * block_tokens..(i + 1) * block_tokens`.
    #[must_use]
    pub fn blocks(&self, row: &Row) -> &[BlockId] {
        &self.block_tables[row.blocks.start as usize..row.blocks.end as usize]
    }
}

impl Config {
    /// Returns the width of a query or attention output row, `H * K`.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the width of a key or value row, `G * K`.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Reads the hyper-parameters from a file's metadata.
    ///
    /// Every value present is checked before a missing one is reported, so that a bad file is named by its bad field.
    ///
    /// # Errors
    /// [`ModelError`] naming the architecture, or the metadata key that is missing, of a wrong type or out of range.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let architecture = gguf
            .string("general.architecture")?
            .ok_or(ModelError::MissingKey { key: "general.architecture".to_owned() })?;
        // Mistral files carry this architecture too: the block is the same.
        if architecture != "llama" {
            return Err(ModelError::UnknownArchitecture { name: architecture.chars().take(64).collect() });
        }
        let keys = Keys { gguf, architecture: &architecture };
        let layers = keys.count("block_count", 1..=LAYERS_MAX)?;
        let d_model = keys.count("embedding_length", 1..=WIDTH_MAX)?;
        let d_ff = keys.count("feed_forward_length", 1..=WIDTH_MAX)?;
        let heads = keys.count("attention.head_count", 1..=HEADS_MAX)?;
        let kv_heads = keys.count("attention.head_count_kv", 1..=HEADS_MAX)?;
        let key_dim = keys.count("attention.key_length", 1..=HEAD_DIM_MAX)?;
        let value_dim = keys.count("attention.value_length", 1..=HEAD_DIM_MAX)?;
        let rope_dims = keys.count("rope.dimension_count", 1..=HEAD_DIM_MAX)?;
        let context = keys.count("context_length", 1..=CONTEXT_MAX)?;
        let rope_base = keys.real("rope.freq_base", 1.0..=1e12)?;
        let rms_eps = keys.real("attention.layer_norm_rms_epsilon", 1e-12..=0.1)?;
        keys.refuse_rope_scaling()?;

        let d_model = keys.require("embedding_length", d_model)?;
        let heads = keys.require("attention.head_count", heads)?;
        if key_dim.is_none() && !d_model.is_multiple_of(heads) {
            let wanted = format!("a divisor of the width {d_model}");
            return Err(keys.bad("attention.head_count", heads, wanted));
        }
        let head_dim = key_dim.unwrap_or(d_model / heads);
        let config = Self {
            layers: keys.require("block_count", layers)?,
            d_model,
            d_ff: keys.require("feed_forward_length", d_ff)?,
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim,
            vocab: vocab(gguf)?,
            context_tokens: keys.require("context_length", context)?,
            rope_base: rope_base.unwrap_or(10_000.0),
            rope_dims: rope_dims.unwrap_or(head_dim),
            rms_eps: keys.require("attention.layer_norm_rms_epsilon", rms_eps)?,
        };
        config.check_fit(&keys, value_dim.unwrap_or(head_dim))?;
        Ok(config)
    }

    /// Checks the values against each other.
    fn check_fit(&self, keys: &Keys<'_>, value_dim: usize) -> Result<(), ModelError> {
        let Self { heads, kv_heads, head_dim, rope_dims, .. } = *self;
        if !heads.is_multiple_of(kv_heads) {
            let wanted = format!("a divisor of {heads} query heads");
            return Err(keys.bad("attention.head_count_kv", kv_heads, wanted));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(keys.bad("attention.key_length", head_dim, "an even head width".to_owned()));
        }
        if value_dim != head_dim {
            let wanted = format!("the key width {head_dim}");
            return Err(keys.bad("attention.value_length", value_dim, wanted));
        }
        if rope_dims > head_dim || !rope_dims.is_multiple_of(2) {
            let wanted = format!("an even number up to the head width {head_dim}");
            return Err(keys.bad("rope.dimension_count", rope_dims, wanted));
        }
        Ok(())
    }
}

impl<'a> Weights<'a> {
    /// Looks up every tensor of the model and checks its shape and format.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor that is missing, misshapen, of a format that does not fit its use, or that
    /// `config`'s architecture has no place for (a bias, say): ignoring one would compute another model.
    pub fn from_gguf(gguf: &'a Gguf, config: &Config) -> Result<Self, ModelError> {
        let file = Tensors { gguf };
        let (d, f, v) = (config.d_model, config.d_ff, config.vocab);
        let (q, kv) = (config.query_width(), config.kv_width());
        let token_embedding = file.matrix("token_embd.weight", v, d)?;
        let output = match gguf.tensor("output.weight") {
            Some(_) => file.matrix("output.weight", v, d)?,
            None => token_embedding,
        };
        let output_norm = file.gains("output_norm.weight", d)?;
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            layers.push(LayerWeights {
                attention_norm: file.gains(&name("attn_norm"), d)?,
                query: file.matrix(&name("attn_q"), q, d)?,
                key: file.matrix(&name("attn_k"), kv, d)?,
                value: file.matrix(&name("attn_v"), kv, d)?,
                attention_output: file.matrix(&name("attn_output"), d, q)?,
                feed_forward_norm: file.gains(&name("ffn_norm"), d)?,
                gate: file.matrix(&name("ffn_gate"), f, d)?,
                up: file.matrix(&name("ffn_up"), f, d)?,
                down: file.matrix(&name("ffn_down"), d, f)?,
            });
        }
        file.refuse_unused(config.layers)?;
        Ok(Self { token_embedding, layers, output_norm, output })
    }
}

/// A file cannot be run as a model. Each message is one sentence that names the key or tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelError {
    /// A metadata value is outside its range, or does not fit the others.
    BadValue {
        /// Metadata key.
        key: String,
        /// What the file says.
        value: String,
        /// What would do.
        wanted: String,
    },
    /// A vector of gains is not F32.
    GainsFormat {
        /// Tensor name.
        name: String,
        /// Its format.
        format: Format,
    },
    /// A metadata key is needed and absent.
    MissingKey {
        /// Metadata key.
        key: String,
    },
    /// A tensor is needed and absent.
    MissingTensor {
        /// Tensor name.
        name: String,
    },
    /// A tensor has other dimensions than the metadata ask for. Dimensions are innermost first, as in the file.
    Shape {
        /// Tensor name.
        name: String,
        /// What the file has.
        dims: Vec<u64>,
        /// What the metadata ask for.
        wanted: Vec<u64>,
    },
    /// No code here computes this architecture.
    UnknownArchitecture {
        /// `general.architecture`, cut at 64 characters.
        name: String,
    },
    /// The file holds a tensor that the architecture has no place for.
    UnusedTensor {
        /// Tensor name.
        name: String,
    },
    /// The file itself is broken.
    Weights(WeightsError),
}

impl From<WeightsError> for ModelError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadValue { key, value, wanted } => {
                write!(f, "`{key}` is {value}; it must be {wanted}")
            }
            Self::GainsFormat { name, format } => {
                write!(f, "tensor `{name}` is {format}; gains of a norm must be F32")
            }
            Self::MissingKey { key } => write!(f, "metadata key `{key}` is missing"),
            Self::MissingTensor { name } => write!(f, "tensor `{name}` is missing"),
            Self::Shape { name, dims, wanted } => {
                write!(f, "tensor `{name}` has dimensions {dims:?}; the metadata ask for {wanted:?}")
            }
            Self::UnknownArchitecture { name } => {
                write!(f, "architecture `{name}` is not supported; supported: `llama`")
            }
            Self::UnusedTensor { name } => {
                write!(f, "tensor `{name}` has no place in a `llama` model; its use is not supported")
            }
            Self::Weights(error) => write!(f, "{error}"),
        }
    }
}

impl core::error::Error for ModelError {}

/// Metadata under an architecture's prefix.
struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let key = self.name(key);
        let Some(value) = self.gguf.unsigned(&key)? else { return Ok(None) };
        let fits = usize::try_from(value).ok().filter(|value| range.contains(value));
        fits.map(Some).ok_or_else(|| ModelError::BadValue {
            key,
            value: value.to_string(),
            wanted: format!("{} to {}", range.start(), range.end()),
        })
    }

    /// NaN is in no range, so it is refused as well.
    fn real(&self, key: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ModelError> {
        let key = self.name(key);
        let Some(value) = self.gguf.real(&key)? else { return Ok(None) };
        if range.contains(&value) {
            return Ok(Some(value));
        }
        let wanted = format!("{:e} to {:e}", range.start(), range.end());
        Err(ModelError::BadValue { key, value: value.to_string(), wanted })
    }

    fn bad(&self, key: &str, value: usize, wanted: String) -> ModelError {
        ModelError::BadValue { key: self.name(key), value: value.to_string(), wanted }
    }

    fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::MissingKey { key: self.name(key) })
    }

    fn refuse_rope_scaling(&self) -> Result<(), ModelError> {
        let key = self.name("rope.scaling.type");
        match self.gguf.string(&key)?.as_deref() {
            None | Some("none") => Ok(()),
            Some(value) => Err(ModelError::BadValue {
                key,
                value: format!("`{}`", value.chars().take(64).collect::<String>()),
                wanted: "`none`: no scaling of rotary angles is supported".to_owned(),
            }),
        }
    }
}

/// The vocabulary is as long as the embedding table, whatever other keys say: ids index that table.
fn vocab(gguf: &Gguf) -> Result<usize, ModelError> {
    let name = "token_embd.weight";
    let missing = || ModelError::MissingTensor { name: name.to_owned() };
    let table = gguf.tensor(name).ok_or_else(missing)?;
    match table.dims {
        &[_, entries] if (1..=VOCAB_MAX as u64).contains(&entries) => Ok(entries as usize),
        dims => Err(ModelError::Shape {
            name: name.to_owned(),
            dims: dims.to_vec(),
            wanted: vec![dims.first().copied().unwrap_or(0), VOCAB_MAX as u64],
        }),
    }
}

struct Tensors<'a> {
    gguf: &'a Gguf,
}

impl<'a> Tensors<'a> {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Tensor<'a>, ModelError> {
        self.shaped(name, &[columns as u64, rows as u64])
    }

    fn gains(&self, name: &str, width: usize) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.shaped(name, &[width as u64])?;
        if tensor.format == Format::F32 {
            return Ok(tensor);
        }
        Err(ModelError::GainsFormat { name: name.to_owned(), format: tensor.format })
    }

    fn shaped(&self, name: &str, wanted: &[u64]) -> Result<Tensor<'a>, ModelError> {
        let missing = || ModelError::MissingTensor { name: name.to_owned() };
        let tensor = self.gguf.tensor(name).ok_or_else(missing)?;
        if tensor.dims == wanted {
            return Ok(tensor);
        }
        Err(ModelError::Shape { name: name.to_owned(), dims: tensor.dims.to_vec(), wanted: wanted.to_vec() })
    }

    fn refuse_unused(&self, layers: usize) -> Result<(), ModelError> {
        let used = |name: &str| {
            let Some(rest) = name.strip_prefix("blk.") else { return MODEL_TENSORS.contains(&name) };
            // `parse` also takes `+0` and `00`, which no lookup above asked for.
            let exists =
                |layer: &str| layer.parse().is_ok_and(|n: usize| n < layers && n.to_string() == layer);
            rest.split_once('.').is_some_and(|(layer, part)| exists(layer) && LAYER_TENSORS.contains(&part))
        };
        match self.gguf.tensor_names().find(|name| !used(name)) {
            Some(name) => Err(ModelError::UnusedTensor { name: name.to_owned() }),
            None => Ok(()),
        }
    }
}

const MODEL_TENSORS: [&str; 3] = ["token_embd.weight", "output_norm.weight", "output.weight"];

const LAYER_TENSORS: [&str; 9] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];

// Bounds an order of magnitude above the largest published models of the family, so that no product of two overflows.
const LAYERS_MAX: usize = 512;
const WIDTH_MAX: usize = 1 << 18;
const HEADS_MAX: usize = 1 << 10;
const HEAD_DIM_MAX: usize = 1 << 10;
const VOCAB_MAX: usize = 1 << 22;
const CONTEXT_MAX: usize = 1 << 24;

//! The oracle: every operation as plain F32 loops over dequantised weights.
//!
//! It is written to be read and believed. What other backends compute is compared with it, so nothing here is clever:
//! the one liberty is `dot`, which sums in sixteen lanes so that the compiler can use vector registers.
//!
//! Each row of a step is computed by itself, from its own inputs and the cache, in an order that depends on nothing
//! else. A sequence's logits are therefore the same to the bit in any batch and any cut of its prompt.

use core::time::Duration;

use half::f16;
use uring_serve_core::sched::{Plan, Shape};

use crate::model::{self, Batch, Config, ModelError, Ops, Row, Weights};
use crate::weights::{Gguf, Tensor};
use crate::{Backend, BackendError, ModelSpec, Sequences};

/// What a stored key or value is rounded to. Attention reads back what was stored, also for the step's own tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision, as fast backends keep them.
    F16,
    /// Not rounded.
    F32,
}

/// The reference backend: one thread, F32 throughout.
#[derive(Debug)]
pub struct Reference {
    spec: ModelSpec,
    shape: Shape,
    batch: Batch,
    device: Device,
}

impl Reference {
    /// Dequantises all weights (four bytes each) and makes an empty cache of `shape.block_count` blocks.
    ///
    /// # Errors
    /// [`ModelError`] when the file does not hold a model that can be computed.
    pub fn new(gguf: &Gguf, shape: &Shape, kv_type: KvType) -> Result<Self, ModelError> {
        let config = Config::from_gguf(gguf)?;
        let weights = Weights::from_gguf(gguf, &config)?;
        let spec = ModelSpec {
            vocab: config.vocab as u32,
            context_tokens: config.context_tokens as u32,
            kv_bytes_per_token: (2 * config.layers * config.kv_width() * size_of::<f32>()) as u64,
            device: "reference (f32 loops, 1 thread)".to_owned(),
        };
        let device = Device::new(config, &weights, shape, kv_type);
        Ok(Self { spec, shape: *shape, batch: Batch::default(), device })
    }
}

impl Backend for Reference {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, plan: &Plan, sequences: &Sequences) -> Result<Duration, BackendError> {
        self.batch.fill(plan, sequences, &self.device.config, &self.shape)?;
        let config = self.device.config;
        model::forward(&mut self.device, &config, &self.batch);
        Ok(Duration::ZERO)
    }

    fn sample(
        &mut self,
        plan: &Plan,
        sequences: &mut Sequences,
        tokens: &mut Vec<u32>,
    ) -> Result<(), BackendError> {
        let rows = self.device.logits.chunks_exact_mut(self.device.config.vocab);
        for (item, logits) in plan.items.iter().filter(|item| item.samples).zip(rows) {
            let Some(sequence) = sequences.at_mut(item.slot) else {
                return Err(BackendError { message: format!("slot {} is empty at sampling", item.slot.0) });
            };
            tokens.push(sequence.sampler.choose(logits));
        }
        Ok(())
    }

    fn logits(&self, index: usize) -> Option<&[f32]> {
        let vocab = self.device.config.vocab;
        (index < self.batch.logit_rows.len()).then(|| &self.device.logits[index * vocab..(index + 1) * vocab])
    }
}

/// Weights, cache and activations. Activations hold `T` rows of the width in the margin.
#[derive(Debug)]
struct Device {
    config: Config,
    kv_type: KvType,
    block_tokens: usize,
    weights: Dequantised,
    /// Radians per position for each rotated pair.
    frequencies: Vec<f64>,
    keys: Vec<f32>,     // [block, layer, block_tokens, G * K]
    values: Vec<f32>,   // [block, layer, block_tokens, G * K]
    x: Vec<f32>,        // [T, D]
    h: Vec<f32>,        // [T, D]
    q: Vec<f32>,        // [T, H * K]
    k: Vec<f32>,        // [T, G * K]
    v: Vec<f32>,        // [T, G * K]
    attended: Vec<f32>, // [T, H * K]
    gate: Vec<f32>,     // [T, F]
    up: Vec<f32>,       // [T, F]
    scores: Vec<f32>,   // [context]
    logits: Vec<f32>,   // [batch_seqs_max, V]
}

/// A [`Weights`] in F32; names and shapes as there.
#[derive(Debug)]
struct Dequantised {
    token_embedding: Vec<f32>,
    layers: Vec<DequantisedLayer>,
    output_norm: Vec<f32>,
    /// `None` where the token embedding serves.
    output: Option<Vec<f32>>,
}

#[derive(Debug)]
struct DequantisedLayer {
    attention_norm: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attention_output: Vec<f32>,
    feed_forward_norm: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl Device {
    fn new(config: Config, weights: &Weights<'_>, shape: &Shape, kv_type: KvType) -> Self {
        let rows = shape.batch_tokens_max as usize;
        let block_tokens = shape.block_tokens as usize;
        let zeros = |rows: usize, width: usize| vec![0.0; rows * width];
        let cache_rows = shape.block_count as usize * config.layers * block_tokens;
        let frequency =
            |pair: usize| f64::from(config.rope_base).powf(-2.0 * pair as f64 / config.rope_dims as f64);
        Self {
            kv_type,
            block_tokens,
            weights: Dequantised::new(weights),
            frequencies: (0..config.rope_dims / 2).map(frequency).collect(),
            keys: zeros(cache_rows, config.kv_width()),
            values: zeros(cache_rows, config.kv_width()),
            x: zeros(rows, config.d_model),
            h: zeros(rows, config.d_model),
            q: zeros(rows, config.query_width()),
            k: zeros(rows, config.kv_width()),
            v: zeros(rows, config.kv_width()),
            attended: zeros(rows, config.query_width()),
            gate: zeros(rows, config.d_ff),
            up: zeros(rows, config.d_ff),
            scores: zeros(1, config.context_tokens),
            logits: zeros(shape.batch_seqs_max as usize, config.vocab),
            config,
        }
    }

    /// Returns where the key and value rows of one position start in the cache.
    fn cache_at(&self, layer: usize, batch: &Batch, row: &Row, position: usize) -> usize {
        let block = batch.blocks(row)[position / self.block_tokens].0 as usize;
        let offset = position % self.block_tokens;
        ((block * self.config.layers + layer) * self.block_tokens + offset) * self.config.kv_width()
    }

    /// Computes one head of one row, `[K]`, into `attended`.
    fn attend_head(&mut self, layer: usize, batch: &Batch, t: usize, head: usize) {
        let (row, width) = (&batch.rows[t], self.config.head_dim);
        let at = t * self.config.query_width() + head * width;
        let kv_head = head / (self.config.heads / self.config.kv_heads) * width;
        let query = &self.q[at..at + width];
        let scale = 1.0 / (width as f32).sqrt();
        let positions = row.position as usize + 1;
        for position in 0..positions {
            let key = self.cache_at(layer, batch, row, position) + kv_head;
            self.scores[position] = dot(query, &self.keys[key..key + width]) * scale;
        }
        softmax(&mut self.scores[..positions]);
        self.attended[at..at + width].fill(0.0);
        for position in 0..positions {
            let value = self.cache_at(layer, batch, row, position) + kv_head;
            let values = &self.values[value..value + width];
            for (sum, value) in self.attended[at..at + width].iter_mut().zip(values) {
                *sum += self.scores[position] * value;
            }
        }
    }
}

impl Ops for Device {
    fn embed(&mut self, batch: &Batch) {
        let width = self.config.d_model;
        for (row, x) in batch.rows.iter().zip(self.x.chunks_exact_mut(width)) {
            let at = row.token as usize * width;
            x.copy_from_slice(&self.weights.token_embedding[at..at + width]);
        }
    }

    fn attention_input(&mut self, layer: usize, batch: &Batch) {
        let (layer, rows) = (&self.weights.layers[layer], batch.rows.len());
        rms_norm(&self.x, &layer.attention_norm, self.config.rms_eps, rows, &mut self.h);
        multiply(&self.h, &layer.query, rows, self.config.d_model, &mut self.q);
        multiply(&self.h, &layer.key, rows, self.config.d_model, &mut self.k);
        multiply(&self.h, &layer.value, rows, self.config.d_model, &mut self.v);
    }

    fn rotate_and_store(&mut self, layer: usize, batch: &Batch) {
        let (heads, width) = (self.config.head_dim, self.config.kv_width());
        let query_width = self.config.query_width();
        for (t, row) in batch.rows.iter().enumerate() {
            let query = &mut self.q[t * query_width..(t + 1) * query_width];
            query.chunks_exact_mut(heads).for_each(|head| rotate(head, row.position, &self.frequencies));
            let key = &mut self.k[t * width..(t + 1) * width];
            key.chunks_exact_mut(heads).for_each(|head| rotate(head, row.position, &self.frequencies));
            let at = self.cache_at(layer, batch, row, row.position as usize);
            self.kv_type.store(&self.k[t * width..(t + 1) * width], &mut self.keys[at..at + width]);
            self.kv_type.store(&self.v[t * width..(t + 1) * width], &mut self.values[at..at + width]);
        }
    }

    fn attend(&mut self, layer: usize, batch: &Batch) {
        for t in 0..batch.rows.len() {
            for head in 0..self.config.heads {
                self.attend_head(layer, batch, t, head);
            }
        }
    }

    fn attention_output(&mut self, layer: usize, batch: &Batch) {
        let weights = &self.weights.layers[layer].attention_output;
        multiply(&self.attended, weights, batch.rows.len(), self.config.query_width(), &mut self.h);
        add(&self.h, batch.rows.len() * self.config.d_model, &mut self.x);
    }

    fn feed_forward_input(&mut self, layer: usize, batch: &Batch) {
        let (layer, rows) = (&self.weights.layers[layer], batch.rows.len());
        rms_norm(&self.x, &layer.feed_forward_norm, self.config.rms_eps, rows, &mut self.h);
        multiply(&self.h, &layer.gate, rows, self.config.d_model, &mut self.gate);
        multiply(&self.h, &layer.up, rows, self.config.d_model, &mut self.up);
        for (gate, up) in self.gate[..rows * self.config.d_ff].iter_mut().zip(&self.up) {
            *gate = silu(*gate) * up;
        }
    }

    fn feed_forward_output(&mut self, layer: usize, batch: &Batch) {
        let weights = &self.weights.layers[layer].down;
        multiply(&self.gate, weights, batch.rows.len(), self.config.d_ff, &mut self.h);
        add(&self.h, batch.rows.len() * self.config.d_model, &mut self.x);
    }

    fn logits(&mut self, batch: &Batch) {
        let (width, vocab) = (self.config.d_model, self.config.vocab);
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.token_embedding);
        for (&t, logits) in batch.logit_rows.iter().zip(self.logits.chunks_exact_mut(vocab)) {
            let x = &self.x[t as usize * width..(t as usize + 1) * width];
            rms_norm(x, &self.weights.output_norm, self.config.rms_eps, 1, &mut self.h);
            multiply(&self.h, output, 1, width, logits);
        }
    }
}

impl Dequantised {
    fn new(weights: &Weights<'_>) -> Self {
        let tied = core::ptr::eq(weights.output.bytes, weights.token_embedding.bytes);
        Self {
            token_embedding: dequantised(&weights.token_embedding),
            layers: weights
                .layers
                .iter()
                .map(|layer| DequantisedLayer {
                    attention_norm: dequantised(&layer.attention_norm),
                    query: dequantised(&layer.query),
                    key: dequantised(&layer.key),
                    value: dequantised(&layer.value),
                    attention_output: dequantised(&layer.attention_output),
                    feed_forward_norm: dequantised(&layer.feed_forward_norm),
                    gate: dequantised(&layer.gate),
                    up: dequantised(&layer.up),
                    down: dequantised(&layer.down),
                })
                .collect(),
            output_norm: dequantised(&weights.output_norm),
            output: (!tied).then(|| dequantised(&weights.output)),
        }
    }
}

impl KvType {
    fn store(self, from: &[f32], to: &mut [f32]) {
        match self {
            Self::F16 => {
                for (to, &from) in to.iter_mut().zip(from) {
                    *to = f16::from_f32(from).to_f32();
                }
            }
            Self::F32 => to.copy_from_slice(from),
        }
    }
}

fn dequantised(tensor: &Tensor<'_>) -> Vec<f32> {
    let mut values = vec![0.0; tensor.rows() * tensor.columns()];
    tensor.dequantise(&mut values);
    values
}

/// `output = input weights^T` for `rows` rows of `[columns]`; a weight row serves all of them while it is in cache.
fn multiply(input: &[f32], weights: &[f32], rows: usize, columns: usize, output: &mut [f32]) {
    let width = weights.len() / columns;
    for (r, weights) in weights.chunks_exact(columns).enumerate() {
        for (t, input) in input.chunks_exact(columns).take(rows).enumerate() {
            output[t * width + r] = dot(weights, input);
        }
    }
}

fn add(input: &[f32], count: usize, output: &mut [f32]) {
    for (output, input) in output[..count].iter_mut().zip(input) {
        *output += input;
    }
}

/// `output = input / sqrt(mean(input^2) + eps) * gains`, row by row.
fn rms_norm(input: &[f32], gains: &[f32], eps: f32, rows: usize, output: &mut [f32]) {
    let width = gains.len();
    for (input, output) in input.chunks_exact(width).zip(output.chunks_exact_mut(width)).take(rows) {
        let scale = 1.0 / (dot(input, input) / width as f32 + eps).sqrt();
        for ((output, input), gain) in output.iter_mut().zip(input).zip(gains) {
            *output = input * scale * gain;
        }
    }
}

/// Turns the leading pairs of a head `[K]`. Angles are F64: at position 8,000 an F32 angle is off by up to 2^-12.
fn rotate(head: &mut [f32], position: u32, frequencies: &[f64]) {
    for (pair, frequency) in head.as_chunks_mut().0.iter_mut().zip(frequencies) {
        let angle = f64::from(position) * frequency;
        let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, a * sin + b * cos];
    }
}

/// Subtracts the largest score first, so that no exponential overflows.
fn softmax(scores: &mut [f32]) {
    let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in &mut *scores {
        *score = (*score - best).exp();
        sum += *score;
    }
    for score in scores {
        *score /= sum;
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Sums in sixteen lanes, then the lanes in order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

const LANES: usize = 16;

#[cfg(test)]
mod tests {
    use core::f32::consts::{FRAC_1_SQRT_2, FRAC_PI_4};

    use super::{KvType, dot, multiply, rms_norm, rotate, silu, softmax};

    #[test]
    fn dot_counts_each_product_once_on_both_sides_of_its_lanes() {
        for length in [0_u16, 1, 15, 16, 17, 31, 32, 33, 576] {
            let values: Vec<f32> = (1..=length).map(f32::from).collect();
            let n = f32::from(length);
            assert_eq!(dot(&values, &vec![1.0; values.len()]), n * (n + 1.0) / 2.0, "{length}");
        }
    }

    #[test]
    fn multiply_maps_each_row_by_itself() {
        let weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // [3, 2]
        let mut output = [9.0; 9];
        multiply(&[1.0, 0.0, 0.0, 1.0, 7.0, 7.0], &weights, 2, 2, &mut output);
        assert_eq!(
            output,
            [1.0, 3.0, 5.0, 2.0, 4.0, 6.0, 9.0, 9.0, 9.0],
            "the third row is not of this step"
        );
    }

    #[test]
    fn rms_norm_divides_by_the_root_of_the_mean_square() {
        let mut output = [0.0; 4];
        rms_norm(&[3.0, 4.0, 1.0, 1.0], &[1.0, 10.0], 0.0, 2, &mut output);
        let rms = 12.5_f32.sqrt();
        let expected = [3.0 / rms, 40.0 / rms, 1.0, 10.0];
        assert!(output.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{output:?}");
        rms_norm(&[0.0, 0.0], &[1.0, 1.0], 1e-5, 1, &mut output);
        assert_eq!(output[..2], [0.0, 0.0], "nothing is divided by zero");
    }

    #[test]
    fn rotate_turns_adjacent_pairs_by_position_times_frequency() {
        let mut head = [1.0, 0.0, 0.0, 1.0, 5.0, 6.0];
        rotate(&mut head, 2, &[f64::from(FRAC_PI_4), f64::from(FRAC_PI_4) / 2.0]);
        let expected = [0.0, 1.0, -FRAC_1_SQRT_2, FRAC_1_SQRT_2, 5.0, 6.0];
        assert!(head.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{head:?}");
        let mut head = [1.0, 2.0];
        rotate(&mut head, 0, &[1.0]);
        assert_eq!(head, [1.0, 2.0], "position 0 is not turned");
    }

    #[test]
    fn softmax_sums_to_one_and_survives_large_scores() {
        for (name, mut scores, expected) in [
            ("equal", vec![1.0, 1.0], vec![0.5, 0.5]),
            ("one", vec![-7.0], vec![1.0]),
            ("large", vec![1e4, 1e4, -1e4], vec![0.5, 0.5, 0.0]),
        ] {
            softmax(&mut scores);
            assert_eq!(scores, expected, "{name}");
        }
    }

    #[test]
    fn silu_is_x_times_its_sigmoid() {
        for (x, expected) in
            [(0.0, 0.0), (1.0, 0.731_058_6), (-1.0, -0.268_941_43), (100.0, 100.0), (-200.0, 0.0)]
        {
            assert!((silu(x) - expected).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn stored_values_are_rounded_to_the_type_of_the_cache() {
        let mut stored = [0.0; 2];
        KvType::F16.store(&[1.0, 1.0 + 2.0_f32.powi(-12)], &mut stored);
        assert_eq!(stored, [1.0, 1.0]);
        KvType::F32.store(&[1.0, 1.0 + 2.0_f32.powi(-12)], &mut stored);
        assert_eq!(stored, [1.0, 1.0 + 2.0_f32.powi(-12)]);
    }
}

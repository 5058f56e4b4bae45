//! Kernels in plain loops: what every processor runs, and what the others are measured against.
//!
//! Functions that the vector instruction sets do not write by hand are `inline(always)`, so that their wrappers compile
//! the same loops for wider registers. Sums go through sixteen partial sums for that, in the same order everywhere.

use half::f16;

use super::kernels::{BLOCK, Block, KV_TILE, Panel, ROWS, Running, SPAN, Tile};

pub(super) fn dot(panel: Panel<'_>, tokens: &[Block], side: usize, out: &mut Tile) {
    let blocks = match panel {
        Panel::Nibbles { quants, .. } => quants.len(),
        Panel::Bytes { quants, .. } => quants.len(),
    };
    for (token, out) in tokens.chunks_exact(blocks).zip(out) {
        out[side] = match panel {
            Panel::Nibbles { quants, scales } => dot_nibbles(quants, scales, token),
            Panel::Bytes { quants, scales } => dot_bytes(quants, scales, token),
        };
    }
}

fn dot_nibbles(quants: &[[[u8; 64]; 4]], scales: &[[[u16; ROWS]; 2]], token: &[Block]) -> [f32; ROWS] {
    let mut total = [0.0; ROWS];
    for ((quants, [scales, offsets]), block) in quants.iter().zip(scales).zip(token) {
        let mut sums = [0; ROWS];
        let (low, high) = block.words.split_at(4);
        for ((quad, low), high) in quants.iter().zip(low).zip(high) {
            let (low, high) = (low.to_le_bytes(), high.to_le_bytes());
            for i in 0..4 {
                let (low, high) = (i32::from(low[i].cast_signed()), i32::from(high[i].cast_signed()));
                for (sum, word) in sums.iter_mut().zip(quad.as_chunks().0) {
                    let bits = u32::from_le_bytes(*word) >> (8 * i);
                    *sum += (bits & 15) as i32 * low + (bits >> 4 & 15) as i32 * high;
                }
            }
        }
        for r in 0..ROWS {
            let (scale, offset) = (half_to_f32(scales[r]), half_to_f32(offsets[r]));
            total[r] += block.scale * (scale * sums[r] as f32 + offset * block.sum);
        }
    }
    total
}

fn dot_bytes(quants: &[[[u8; 64]; 8]], scales: &[[u16; ROWS]], token: &[Block]) -> [f32; ROWS] {
    let mut total = [0.0; ROWS];
    for ((quants, scales), block) in quants.iter().zip(scales).zip(token) {
        let mut sums = [0; ROWS];
        for (quad, word) in quants.iter().zip(block.words) {
            for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                let byte = i32::from(byte.cast_signed());
                for (sum, word) in sums.iter_mut().zip(quad.as_chunks().0) {
                    *sum += (u32::from_le_bytes(*word) >> (8 * i) & 255) as i32 * byte;
                }
            }
        }
        for r in 0..ROWS {
            // Takes the 128 of every unsigned byte out again, in whole numbers.
            let sum = sums[r] - 128 * block.sum as i32;
            total[r] += block.scale * (half_to_f32(scales[r]) * sum as f32);
        }
    }
    total
}

#[inline(always)]
pub(super) fn quantise(values: &[f32], blocks: &mut [Block]) {
    let (whole, rest) = values.as_chunks::<BLOCK>();
    let (blocks, last) = blocks.split_at_mut(whole.len());
    for (values, block) in whole.iter().zip(blocks) {
        quantise_block(values, block);
    }
    if let [block] = last {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        quantise_block(&padded, block);
    }
}

#[inline(always)]
fn quantise_block(values: &[f32; BLOCK], block: &mut Block) {
    let mut lanes = [0.0; 16];
    for chunk in values.as_chunks::<16>().0 {
        for i in 0..16 {
            lanes[i] = greater(lanes[i], chunk[i].abs());
        }
    }
    let max = reduce(lanes, greater);
    let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
    let mut bytes = [0; BLOCK];
    let mut sum = 0;
    for i in 0..BLOCK {
        bytes[i] = round(values[i] * inverse);
        sum += bytes[i];
    }
    for (word, bytes) in block.words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(bytes.map(|byte| byte as u8));
    }
    block.scale = max / 127.0;
    block.sum = sum as f32;
}

#[inline(always)]
pub(super) fn rms_norm(values: &[f32], gains: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0.0; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] += chunk[i] * chunk[i];
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value * value;
    }
    let mean = reduce(lanes, |a, b| a + b) / values.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for ((out, value), gain) in out.iter_mut().zip(values).zip(gains) {
        *out = value * factor * gain;
    }
}

pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    swiglu_with::<false>(gate, up);
}

/// `FUSED` where the caller's instruction set has a fused multiply-add; elsewhere it would be a call.
#[inline(always)]
pub(super) fn swiglu_with<const FUSED: bool>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp::<FUSED>(-*gate)) * up;
    }
}

#[inline(always)]
pub(super) fn rotate(values: &mut [f32], turns: &[[f32; 2]]) {
    for (pair, [cos, sin]) in values.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, a * sin + b * cos];
    }
}

pub(super) fn to_half(values: &[f32], out: &mut [u16]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = f16::from_f32(*value).to_bits();
    }
}

pub(super) fn scores(queries: &[f32], keys: &[&[u16]], scale: f32, scores: &mut [[f32; SPAN]]) {
    let dim = queries.len() / scores.len();
    for (query, scores) in queries.chunks_exact(dim).zip(scores) {
        for (tile, scores) in keys.iter().zip(scores.as_chunks_mut::<KV_TILE>().0) {
            let mut sums = [0.0; KV_TILE];
            for (value, keys) in query.iter().zip(tile.as_chunks::<KV_TILE>().0) {
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum += value * half_to_f32(*key);
                }
            }
            *scores = sums.map(|sum| sum * scale);
        }
    }
}

pub(super) fn soften(scores: &mut [f32; SPAN], visible: usize, span: usize, running: &mut Running) -> f32 {
    soften_with::<false>(scores, visible, span, running)
}

/// `FUSED` as in [`swiglu_with`].
#[inline(always)]
pub(super) fn soften_with<const FUSED: bool>(
    scores: &mut [f32; SPAN],
    visible: usize,
    span: usize,
    running: &mut Running,
) -> f32 {
    scores[visible..span].fill(f32::NEG_INFINITY);
    let mut lanes = [f32::NEG_INFINITY; 16];
    let scores = scores[..span].as_chunks_mut::<16>().0;
    for chunk in scores.iter() {
        for i in 0..16 {
            lanes[i] = greater(lanes[i], chunk[i]);
        }
    }
    let max = greater(running.max, reduce(lanes, greater));
    let mut lanes = [0.0; 16];
    for chunk in scores {
        for i in 0..16 {
            chunk[i] = exp::<FUSED>(chunk[i] - max);
            lanes[i] += chunk[i];
        }
    }
    let factor = exp::<FUSED>(running.max - max);
    running.sum = running.sum * factor + reduce(lanes, |a, b| a + b);
    running.max = max;
    factor
}

pub(super) fn mix(weights: &[[f32; SPAN]], values: &[&[u16]], positions: usize, out: &mut [f32]) {
    let dim = out.len() / weights.len();
    for (weights, out) in weights.iter().zip(out.chunks_exact_mut(dim)) {
        let rows = values.iter().flat_map(|tile| tile.chunks_exact(dim));
        for (weight, row) in weights[..positions].iter().zip(rows) {
            for (out, value) in out.iter_mut().zip(row) {
                *out += weight * half_to_f32(*value);
            }
        }
    }
}

#[inline(always)]
pub(super) fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

/// Widens F16 bits; infinities and NaN, which no cache or scale holds, come out as large finite numbers.
///
/// Moving exponent and fraction to their places in an F32 leaves the exponent 112 short, subnormals included.
#[inline(always)]
fn half_to_f32(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * HALF_EXPONENT_SHIFT;
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Rounds to nearest even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves the integer in the low bits.
#[inline(always)]
fn round(value: f32) -> i32 {
    (value + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()).cast_signed()
}

/// `e^x` within 2 units in the last place; 0 below -87, where the result would leave the normal numbers.
///
/// Splits off the power of two, then the minimax polynomial of Cephes' `expf` on `[-ln 2 / 2, ln 2 / 2]`. `exp(0)` is
/// exactly 1: a span in which a query sees nothing must change nothing.
#[inline(always)]
fn exp<const FUSED: bool>(x: f32) -> f32 {
    let multiply_add = |a: f32, b: f32, c: f32| if FUSED { a.mul_add(b, c) } else { a * b + c };
    let clamped = if x < 88.0 { x } else { 88.0 };
    let clamped = if clamped > -87.0 { clamped } else { -87.0 };
    let shifted = multiply_add(clamped, core::f32::consts::LOG2_E, ROUNDER);
    let whole = shifted - ROUNDER;
    let r = multiply_add(whole, -LN_2_LOW, multiply_add(whole, -LN_2_HIGH, clamped));
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = multiply_add(p, r, coefficient);
    }
    let fraction = multiply_add(p, r * r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127)) << 23);
    if x < -87.0 { 0.0 } else { fraction * power }
}

/// Combines sixteen partial results pairwise, in a fixed order.
#[inline(always)]
fn reduce(mut lanes: [f32; 16], combine: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = combine(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// `f32::max` without its care for NaN, which costs three instructions instead of one.
#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

const ROUNDER: f32 = 12_582_912.0;
/// 2^112.
const HALF_EXPONENT_SHIFT: f32 = f32::from_bits((112 + 127) << 23);
/// The first nine bits of ln 2, so that its product with a small integer is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

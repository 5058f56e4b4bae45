//! Kernels for AVX2: one register holds a word of eight rows, half a panel; bytes are multiplied into pairs of 16 bits.

use core::arch::x86_64::*;

use super::avx512::rows;
use super::kernels::{Block, KV_TILE, Panel, QUERIES, ROWS, Running, SPAN, Tile};
use super::portable;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot(panel: Panel<'_>, tokens: &[Block], side: usize, out: &mut Tile) {
    let blocks = match panel {
        Panel::Nibbles { quants, .. } => quants.len(),
        Panel::Bytes { quants, .. } => quants.len(),
    };
    for (tokens, out) in tokens.chunks(FEW * blocks).zip(out.chunks_mut(FEW)) {
        match tokens.len() / blocks {
            1 => dot_few::<1>(panel, tokens, side, out),
            2 => dot_few::<2>(panel, tokens, side, out),
            3 => dot_few::<3>(panel, tokens, side, out),
            _ => dot_few::<FEW>(panel, tokens, side, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_few<const T: usize>(panel: Panel<'_>, tokens: &[Block], side: usize, out: &mut [[[f32; ROWS]; 2]]) {
    for half in 0..2 {
        let total = match panel {
            Panel::Nibbles { quants, scales } => dot_nibbles::<T>(quants, scales, tokens, half),
            Panel::Bytes { quants, scales } => dot_bytes::<T>(quants, scales, tokens, half),
        };
        for t in 0..T {
            store(&mut out[t][side].as_chunks_mut::<8>().0[half], total[t]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_nibbles<const T: usize>(
    quants: &[[[u8; 64]; 4]],
    scales: &[[[u16; ROWS]; 2]],
    tokens: &[Block],
    half: usize,
) -> [__m256; T] {
    let blocks = quants.len();
    let scales = &scales[..blocks];
    let tokens: [&[Block]; T] = rows(tokens, blocks);
    let mut total = [_mm256_setzero_ps(); T];
    let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    for b in 0..blocks {
        // Eight pairs of products of at most 15 * 127 stay below 2^15, so a block's sum fits 16 bits.
        let mut sums = [_mm256_setzero_si256(); T];
        for (w, quad) in quants[b].iter().enumerate() {
            let quad = load_bytes(&quad.as_chunks::<32>().0[half]);
            let low = _mm256_and_si256(quad, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(quad), mask);
            for t in 0..T {
                let words = &tokens[t][b].words;
                let low = _mm256_maddubs_epi16(low, _mm256_set1_epi32(words[w]));
                let high = _mm256_maddubs_epi16(high, _mm256_set1_epi32(words[4 + w]));
                sums[t] = _mm256_add_epi16(sums[t], _mm256_add_epi16(low, high));
            }
        }
        let scale = load_halves(&scales[b][0].as_chunks::<8>().0[half]);
        let offset = load_halves(&scales[b][1].as_chunks::<8>().0[half]);
        for t in 0..T {
            let block = &tokens[t][b];
            let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[t], ones));
            let value = _mm256_fmadd_ps(scale, sums, _mm256_mul_ps(offset, _mm256_set1_ps(block.sum)));
            total[t] = _mm256_fmadd_ps(value, _mm256_set1_ps(block.scale), total[t]);
        }
    }
    total
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_bytes<const T: usize>(
    quants: &[[[u8; 64]; 8]],
    scales: &[[u16; ROWS]],
    tokens: &[Block],
    half: usize,
) -> [__m256; T] {
    let blocks = quants.len();
    let scales = &scales[..blocks];
    let tokens: [&[Block]; T] = rows(tokens, blocks);
    let mut total = [_mm256_setzero_ps(); T];
    let (flip, ones) = (_mm256_set1_epi8(i8::MIN), _mm256_set1_epi16(1));
    for b in 0..blocks {
        let mut sums = [_mm256_setzero_si256(); T];
        for (w, quad) in quants[b].iter().enumerate() {
            // The multiplication takes unsigned by signed bytes: magnitude of the weight, activation with its sign. A
            // pair is at most 2 * 128 * 127, below 2^15; with the stored offset of 128 it would not be.
            let weight = _mm256_xor_si256(load_bytes(&quad.as_chunks::<32>().0[half]), flip);
            let magnitude = _mm256_abs_epi8(weight);
            for t in 0..T {
                let word = _mm256_sign_epi8(_mm256_set1_epi32(tokens[t][b].words[w]), weight);
                let pairs = _mm256_maddubs_epi16(magnitude, word);
                sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, ones));
            }
        }
        let scale = load_halves(&scales[b].as_chunks::<8>().0[half]);
        for t in 0..T {
            let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[t]), _mm256_set1_ps(tokens[t][b].scale));
            total[t] = _mm256_fmadd_ps(scale, value, total[t]);
        }
    }
    total
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantise(values: &[f32], blocks: &mut [Block]) {
    portable::quantise(values, blocks);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rms_norm(values: &[f32], gains: &[f32], eps: f32, out: &mut [f32]) {
    portable::rms_norm(values, gains, eps, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    portable::swiglu_with::<true>(gate, up);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rotate(values: &mut [f32], turns: &[[f32; 2]]) {
    portable::rotate(values, turns);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn to_half(values: &[f32], out: &mut [u16]) {
    let (chunks, rest) = values.as_chunks::<8>();
    let (out_chunks, out_rest) = out.as_chunks_mut::<8>();
    for (values, out) in chunks.iter().zip(out_chunks) {
        store_halves(out, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(values)));
    }
    portable::to_half(rest, out_rest);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scores(queries: &[f32], keys: &[&[u16]], scale: f32, scores: &mut [[f32; SPAN]]) {
    match scores.len() {
        1 => scores_of::<1>(queries, keys, scale, scores),
        2 => scores_of::<2>(queries, keys, scale, scores),
        3 => scores_of::<3>(queries, keys, scale, scores),
        4 => scores_of::<4>(queries, keys, scale, scores),
        5 => scores_of::<5>(queries, keys, scale, scores),
        _ => scores_of::<QUERIES>(queries, keys, scale, scores),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scores_of<const Q: usize>(queries: &[f32], keys: &[&[u16]], scale: f32, scores: &mut [[f32; SPAN]]) {
    let dim = queries.len() / Q;
    let queries: [&[f32]; Q] = rows(queries, dim);
    let scale = _mm256_set1_ps(scale);
    for (p, tile) in keys.iter().enumerate() {
        let tile = &tile.as_chunks::<KV_TILE>().0[..dim];
        let mut sums = [[_mm256_setzero_ps(); 2]; Q];
        for d in 0..dim {
            let halves = tile[d].as_chunks::<8>().0;
            let keys = [load_halves(&halves[0]), load_halves(&halves[1])];
            for q in 0..Q {
                let value = _mm256_set1_ps(queries[q][d]);
                for half in 0..2 {
                    sums[q][half] = _mm256_fmadd_ps(value, keys[half], sums[q][half]);
                }
            }
        }
        for q in 0..Q {
            let out = scores[q].as_chunks_mut::<8>().0;
            for half in 0..2 {
                store(&mut out[2 * p + half], _mm256_mul_ps(sums[q][half], scale));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn soften(scores: &mut [f32; SPAN], visible: usize, span: usize, running: &mut Running) -> f32 {
    portable::soften_with::<true>(scores, visible, span, running)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mix(weights: &[[f32; SPAN]], values: &[&[u16]], positions: usize, out: &mut [f32]) {
    match weights.len() {
        1 => mix_of::<1>(weights, values, positions, out),
        2 => mix_of::<2>(weights, values, positions, out),
        3 => mix_of::<3>(weights, values, positions, out),
        4 => mix_of::<4>(weights, values, positions, out),
        5 => mix_of::<5>(weights, values, positions, out),
        _ => mix_of::<QUERIES>(weights, values, positions, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn mix_of<const Q: usize>(weights: &[[f32; SPAN]], values: &[&[u16]], positions: usize, out: &mut [f32]) {
    let dim = out.len() / Q;
    if !dim.is_multiple_of(16) {
        portable::mix(weights, values, positions, out);
        return;
    }
    for column in (0..dim).step_by(16) {
        mix_columns::<Q>(weights, values, positions, column, out);
    }
}

/// Two registers of columns from `column` on: with six queries they fill the sixteen that there are.
#[target_feature(enable = "avx2,fma,f16c")]
fn mix_columns<const Q: usize>(
    weights: &[[f32; SPAN]],
    values: &[&[u16]],
    positions: usize,
    column: usize,
    out: &mut [f32],
) {
    let dim = out.len() / Q;
    // Index loops over constant bounds: only those are unrolled early enough to keep the sums in registers.
    let mut sums = [[_mm256_setzero_ps(); 2]; Q];
    for q in 0..Q {
        let out = &out[q * dim + column..][..16].as_chunks::<8>().0;
        for half in 0..2 {
            sums[q][half] = load(&out[half]);
        }
    }
    for (index, tile) in values.iter().enumerate() {
        let first = index * KV_TILE;
        for (p, row) in tile.chunks_exact(dim).take(positions.saturating_sub(first)).enumerate() {
            let row = &row[column..][..16].as_chunks::<8>().0;
            let value = [load_halves(&row[0]), load_halves(&row[1])];
            for q in 0..Q {
                let weight = _mm256_set1_ps(weights[q][first + p]);
                for half in 0..2 {
                    sums[q][half] = _mm256_fmadd_ps(weight, value[half], sums[q][half]);
                }
            }
        }
    }
    for q in 0..Q {
        let out = out[q * dim + column..][..16].as_chunks_mut::<8>().0;
        for half in 0..2 {
            store(&mut out[half], sums[q][half]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scale(values: &mut [f32], factor: f32) {
    portable::scale(values, factor);
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bytes(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes read; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_halves(bits: &[u16; 8]) -> __m256 {
    // SAFETY: the reference covers the 16 bytes read; the load asks for no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bits.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 32 bytes read; the load asks for no alignment.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(out: &mut [f32; 8], values: __m256) {
    // SAFETY: the exclusive reference covers the 32 bytes written; the store asks for no alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_halves(out: &mut [u16; 8], bits: __m128i) {
    // SAFETY: the exclusive reference covers the 16 bytes written; the store asks for no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), bits) }
}

/// Tokens computed at once: four sums and four totals leave registers for the weights.
const FEW: usize = 4;

//! Kernels for AVX-512 with VNNI: one register holds a word of each of a panel's sixteen rows.
//!
//! The functions are safe but for the instruction set they need; loads and stores go through the array references at the
//! end of the file.

use core::arch::x86_64::*;

use super::kernels::{BLOCK, Block, KV_TILE, Panel, QUERIES, ROWS, Running, SPAN, TILE, Tile};
use super::portable;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn dot(panel: Panel<'_>, tokens: &[Block], side: usize, out: &mut Tile) {
    match panel {
        Panel::Nibbles { quants, scales } => match tokens.len() / quants.len() {
            1 => dot_nibbles::<1>(quants, scales, tokens, side, out),
            2 => dot_nibbles::<2>(quants, scales, tokens, side, out),
            3 => dot_nibbles::<3>(quants, scales, tokens, side, out),
            4 => dot_nibbles::<4>(quants, scales, tokens, side, out),
            5 => dot_nibbles::<5>(quants, scales, tokens, side, out),
            6 => dot_nibbles::<6>(quants, scales, tokens, side, out),
            7 => dot_nibbles::<7>(quants, scales, tokens, side, out),
            _ => dot_nibbles::<TILE>(quants, scales, tokens, side, out),
        },
        Panel::Bytes { quants, scales } => match tokens.len() / quants.len() {
            1 => dot_bytes::<1>(quants, scales, tokens, side, out),
            2 => dot_bytes::<2>(quants, scales, tokens, side, out),
            3 => dot_bytes::<3>(quants, scales, tokens, side, out),
            4 => dot_bytes::<4>(quants, scales, tokens, side, out),
            5 => dot_bytes::<5>(quants, scales, tokens, side, out),
            6 => dot_bytes::<6>(quants, scales, tokens, side, out),
            7 => dot_bytes::<7>(quants, scales, tokens, side, out),
            _ => dot_bytes::<TILE>(quants, scales, tokens, side, out),
        },
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn dot_nibbles<const T: usize>(
    quants: &[[[u8; 64]; 4]],
    scales: &[[[u16; ROWS]; 2]],
    tokens: &[Block],
    side: usize,
    out: &mut Tile,
) {
    let blocks = quants.len();
    let scales = &scales[..blocks];
    let tokens: [&[Block]; T] = rows(tokens, blocks);
    let mut total = [_mm512_setzero_ps(); T];
    let mask = _mm512_set1_epi8(15);
    for b in 0..blocks {
        // Two sums for each token: with few tokens the instruction's latency is what bounds. Integers add up to the
        // same in any order.
        let mut low_sums = [_mm512_setzero_si512(); T];
        let mut high_sums = [_mm512_setzero_si512(); T];
        for (w, quad) in quants[b].iter().enumerate() {
            let quad = load_bytes(quad);
            let low = _mm512_and_si512(quad, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(quad), mask);
            for t in 0..T {
                low_sums[t] = _mm512_dpbusd_epi32(low_sums[t], low, _mm512_set1_epi32(tokens[t][b].words[w]));
            }
            for t in 0..T {
                let word = _mm512_set1_epi32(tokens[t][b].words[4 + w]);
                if T <= TWO_SUMS {
                    high_sums[t] = _mm512_dpbusd_epi32(high_sums[t], high, word);
                } else {
                    low_sums[t] = _mm512_dpbusd_epi32(low_sums[t], high, word);
                }
            }
        }
        let (scale, offset) = (load_halves(&scales[b][0]), load_halves(&scales[b][1]));
        for t in 0..T {
            let sums = if T <= TWO_SUMS { _mm512_add_epi32(low_sums[t], high_sums[t]) } else { low_sums[t] };
            let block = &tokens[t][b];
            let offset = _mm512_mul_ps(offset, _mm512_set1_ps(block.sum));
            let value = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums), offset);
            total[t] = _mm512_fmadd_ps(value, _mm512_set1_ps(block.scale), total[t]);
        }
    }
    for t in 0..T {
        store(&mut out[t][side], total[t]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn dot_bytes<const T: usize>(
    quants: &[[[u8; 64]; 8]],
    scales: &[[u16; ROWS]],
    tokens: &[Block],
    side: usize,
    out: &mut Tile,
) {
    let blocks = quants.len();
    let scales = &scales[..blocks];
    let tokens: [&[Block]; T] = rows(tokens, blocks);
    let mut total = [_mm512_setzero_ps(); T];
    for b in 0..blocks {
        let mut even_sums = [_mm512_setzero_si512(); T];
        let mut odd_sums = [_mm512_setzero_si512(); T];
        for (w, [even, odd]) in quants[b].as_chunks::<2>().0.iter().enumerate() {
            let (even, odd) = (load_bytes(even), load_bytes(odd));
            for t in 0..T {
                let word = _mm512_set1_epi32(tokens[t][b].words[2 * w]);
                even_sums[t] = _mm512_dpbusd_epi32(even_sums[t], even, word);
            }
            for t in 0..T {
                let word = _mm512_set1_epi32(tokens[t][b].words[2 * w + 1]);
                if T <= TWO_SUMS {
                    odd_sums[t] = _mm512_dpbusd_epi32(odd_sums[t], odd, word);
                } else {
                    even_sums[t] = _mm512_dpbusd_epi32(even_sums[t], odd, word);
                }
            }
        }
        let scale = load_halves(&scales[b]);
        for t in 0..T {
            let sums = if T <= TWO_SUMS { _mm512_add_epi32(even_sums[t], odd_sums[t]) } else { even_sums[t] };
            let block = &tokens[t][b];
            // Takes the 128 of every unsigned byte out again. All three are whole numbers below 2^24, so this is exact.
            let sums =
                _mm512_fnmadd_ps(_mm512_set1_ps(128.0), _mm512_set1_ps(block.sum), _mm512_cvtepi32_ps(sums));
            total[t] = _mm512_fmadd_ps(scale, _mm512_mul_ps(sums, _mm512_set1_ps(block.scale)), total[t]);
        }
    }
    for t in 0..T {
        store(&mut out[t][side], total[t]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn quantise_block(values: &[f32; BLOCK], block: &mut Block) {
    let halves = values.as_chunks::<16>().0;
    let (low, high) = (load(&halves[0]), load(&halves[1]));
    let max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    let inverse = _mm512_set1_ps(if max > 0.0 { 127.0 / max } else { 0.0 });
    let low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    let high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    let words = block.words.as_chunks_mut::<4>().0;
    store_words(&mut words[0], _mm512_cvtsepi32_epi8(low));
    store_words(&mut words[1], _mm512_cvtsepi32_epi8(high));
    block.scale = max / 127.0;
    block.sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high)) as f32;
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn rms_norm(values: &[f32], gains: &[f32], eps: f32, out: &mut [f32]) {
    portable::rms_norm(values, gains, eps, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    portable::swiglu_with::<true>(gate, up);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn rotate(values: &mut [f32], turns: &[[f32; 2]]) {
    portable::rotate(values, turns);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn to_half(values: &[f32], out: &mut [u16]) {
    let (chunks, rest) = values.as_chunks::<16>();
    let (out_chunks, out_rest) = out.as_chunks_mut::<16>();
    for (values, out) in chunks.iter().zip(out_chunks) {
        store_halves(out, _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(values)));
    }
    portable::to_half(rest, out_rest);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn scores_of<const Q: usize>(queries: &[f32], keys: &[&[u16]], scale: f32, scores: &mut [[f32; SPAN]]) {
    let dim = queries.len() / Q;
    let queries: [&[f32]; Q] = rows(queries, dim);
    let scale = _mm512_set1_ps(scale);
    for (p, tile) in keys.iter().enumerate() {
        let tile = &tile.as_chunks::<KV_TILE>().0[..dim];
        // Even and odd columns apart: one sum per query would wait for its own latency.
        let mut even = [_mm512_setzero_ps(); Q];
        let mut odd = [_mm512_setzero_ps(); Q];
        for d in (0..dim).step_by(2) {
            let key = load_halves(&tile[d]);
            for q in 0..Q {
                even[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q][d]), key, even[q]);
            }
            if d + 1 < dim {
                let key = load_halves(&tile[d + 1]);
                for q in 0..Q {
                    odd[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q][d + 1]), key, odd[q]);
                }
            }
        }
        for q in 0..Q {
            let value = _mm512_mul_ps(_mm512_add_ps(even[q], odd[q]), scale);
            store(&mut scores[q].as_chunks_mut::<16>().0[p], value);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn soften(scores: &mut [f32; SPAN], visible: usize, span: usize, running: &mut Running) -> f32 {
    portable::soften_with::<true>(scores, visible, span, running)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn mix_of<const Q: usize>(weights: &[[f32; SPAN]], values: &[&[u16]], positions: usize, out: &mut [f32]) {
    let dim = out.len() / Q;
    if !dim.is_multiple_of(16) {
        portable::mix(weights, values, positions, out);
        return;
    }
    let wide = dim / 64 * 64;
    for column in (0..wide).step_by(64) {
        mix_columns::<Q, 4>(weights, values, positions, column, out);
    }
    for column in (wide..dim).step_by(16) {
        mix_columns::<Q, 1>(weights, values, positions, column, out);
    }
}

/// `C` registers of columns from `column` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn mix_columns<const Q: usize, const C: usize>(
    weights: &[[f32; SPAN]],
    values: &[&[u16]],
    positions: usize,
    column: usize,
    out: &mut [f32],
) {
    let dim = out.len() / Q;
    // Index loops over constant bounds: only those are unrolled early enough to keep the sums in registers.
    let mut sums = [[_mm512_setzero_ps(); C]; Q];
    for q in 0..Q {
        let out = &out[q * dim + column..][..16 * C].as_chunks::<16>().0;
        for c in 0..C {
            sums[q][c] = load(&out[c]);
        }
    }
    for (index, tile) in values.iter().enumerate() {
        let first = index * KV_TILE;
        for (p, row) in tile.chunks_exact(dim).take(positions.saturating_sub(first)).enumerate() {
            let row = &row[column..][..16 * C].as_chunks::<16>().0;
            let mut value = [_mm512_setzero_ps(); C];
            for c in 0..C {
                value[c] = load_halves(&row[c]);
            }
            for q in 0..Q {
                let weight = _mm512_set1_ps(weights[q][first + p]);
                for c in 0..C {
                    sums[q][c] = _mm512_fmadd_ps(weight, value[c], sums[q][c]);
                }
            }
        }
    }
    for q in 0..Q {
        let out = out[q * dim + column..][..16 * C].as_chunks_mut::<16>().0;
        for c in 0..C {
            store(&mut out[c], sums[q][c]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn scale(values: &mut [f32], factor: f32) {
    portable::scale(values, factor);
}

/// The rows of `[N, width]`. A loop, because a closure given to the library is not compiled for this instruction set, and
/// so stays a call.
#[inline(always)]
pub(super) fn rows<T, const N: usize>(values: &[T], width: usize) -> [&[T]; N] {
    let mut rows = [&values[..width]; N];
    for (n, row) in rows.iter_mut().enumerate() {
        *row = &values[n * width..][..width];
    }
    rows
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bytes(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes read; the load asks for no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves(bits: &[u16; 16]) -> __m512 {
    // SAFETY: the reference covers the 32 bytes read; the load asks for no alignment.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; 16]) -> __m512 {
    // SAFETY: the reference covers the 64 bytes read; the load asks for no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(out: &mut [f32; 16], values: __m512) {
    // SAFETY: the exclusive reference covers the 64 bytes written; the store asks for no alignment.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_halves(out: &mut [u16; 16], bits: __m256i) {
    // SAFETY: the exclusive reference covers the 32 bytes written; the store asks for no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bits) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_words(out: &mut [i32; 4], words: __m128i) {
    // SAFETY: the exclusive reference covers the 16 bytes written; the store asks for no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), words) }
}

/// Up to this many tokens each has two integer sums; above it the tokens themselves hide the latency, and registers
/// run out.
const TWO_SUMS: usize = 4;

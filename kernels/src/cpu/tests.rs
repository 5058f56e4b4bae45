//! Each kernel of each instruction set that the machine has, against plain loops in F64.

use half::f16;

use super::kernels::{BLOCK, Block, Isa, KV_TILE, Kernels, QUERIES, ROWS, Running, SPAN, TILE};
use super::panels::{self, Panels};
use crate::weights::{Format, Tensor};

#[test]
fn an_instruction_set_that_is_missing_has_no_kernels() {
    for isa in [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable] {
        assert_eq!(Kernels::new(isa).is_some(), isa.is_available(), "{isa}");
    }
    assert!(Isa::Portable.is_available() && Isa::detect().is_available());
}

#[test]
fn dot_products_match_loops_over_the_same_integers() {
    for (format, rows, columns) in [
        (Format::Q4_0, 16, 32),
        (Format::Q4_0, 17, 96),
        (Format::Q4_1, 16, 64),
        (Format::Q4_1, 33, 576),
        (Format::Q8_0, 16, 32),
        (Format::Q8_0, 40, 352),
        (Format::F32, 5, 40),
        (Format::F16, 18, 7),
        (Format::Bf16, 16, 33),
    ] {
        let matrix = Matrix::random(format, rows, columns);
        let (panels, weights) = (matrix.packed(2), matrix.packed_values());
        for tokens in [1, 2, 3, 4, 5, 6, 7, 8] {
            each_isa(|kernels| {
                let (blocks, values) = activations(kernels, tokens, columns);
                for panel in 0..panels.count() {
                    let mut sums = [[[0.0; ROWS]; 2]; TILE];
                    kernels.dot(panels.panel(panel), &blocks, panel % 2, &mut sums);
                    for (t, values) in values.chunks_exact(columns).enumerate() {
                        for (r, row) in panels.panel_rows(panel).enumerate() {
                            let weights = &weights[row * columns..(row + 1) * columns];
                            let (expected, size) = dot(weights, values);
                            // The integers are exact; what rounds is one F32 multiply-add per block.
                            let tolerance = 1e-6 * size + 1e-6;
                            let what =
                                format!("{format} [{rows}, {columns}], token {t} of {tokens}, row {row}");
                            close(kernels, &what, sums[t][panel % 2][r], expected, tolerance);
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn a_dot_product_is_the_same_to_the_bit_in_any_company() {
    for format in [Format::Q4_1, Format::Q8_0] {
        let matrix = Matrix::random(format, 16, 576);
        let panels = matrix.packed(1);
        each_isa(|kernels| {
            let (blocks, _) = activations(kernels, TILE, 576);
            let mut alone = [[[0.0; ROWS]; 2]; TILE];
            for (t, token) in blocks.chunks_exact(panels.blocks()).enumerate() {
                let mut sums = [[[0.0; ROWS]; 2]; TILE];
                kernels.dot(panels.panel(0), token, 1, &mut sums);
                alone[t] = sums[0];
            }
            for first in 0..TILE {
                for last in first + 1..=TILE {
                    let mut sums = [[[0.0; ROWS]; 2]; TILE];
                    let company = &blocks[first * panels.blocks()..last * panels.blocks()];
                    kernels.dot(panels.panel(0), company, 1, &mut sums);
                    assert_eq!(sums[..last - first], alone[first..last], "{} {format}", kernels.isa());
                }
            }
        });
    }
}

#[test]
fn the_extreme_bytes_do_not_saturate() {
    // -128 is a legal byte of Q8_0, and 127 the largest activation: the widest sums that the 16-bit path of AVX2 meets.
    for (name, format, file_block, weight) in [
        ("Q8_0, -128", Format::Q8_0, [vec![0, 0x3c], vec![0x80; 32]].concat(), -128.0),
        ("Q8_0, 127", Format::Q8_0, [vec![0, 0x3c], vec![0x7f; 32]].concat(), 127.0),
        ("Q4_1, 15", Format::Q4_1, [vec![0, 0x3c, 0, 0], vec![0xff; 16]].concat(), 15.0),
    ] {
        let matrix = Matrix { format, dims: [32, 16], bytes: file_block.repeat(16) };
        let panels = matrix.packed(1);
        for sign in [1.0, -1.0] {
            each_isa(|kernels| {
                let mut block = [Block::default()];
                kernels.quantise(&[sign * 127.0; 32], &mut block);
                let mut sums = [[[0.0; ROWS]; 2]; TILE];
                kernels.dot(panels.panel(0), &block, 0, &mut sums);
                close(kernels, name, sums[0][0][15], f64::from(sign) * 127.0 * 32.0 * weight, 0.0);
            });
        }
    }
}

#[test]
fn packing_keeps_every_value() {
    for (format, rows, columns, tolerance) in [
        // Integers and scales are kept.
        (Format::Q4_0, 2100, 32, 0.0),
        (Format::Q4_1, 19, 96, 0.0),
        (Format::Q8_0, 19, 96, 0.0),
        // Half a step of 1/127 of the block's largest value, which is below 1, and what F16 takes off the scale.
        (Format::F32, 19, 50, 0.0045),
        (Format::F16, 19, 50, 0.0045),
        (Format::Bf16, 19, 50, 0.0045),
    ] {
        let matrix = Matrix::random(format, rows, columns);
        let file = matrix.values();
        for threads in [1, 3] {
            let packed = matrix.packed_on(threads);
            for (at, (packed, file)) in packed.iter().zip(&file).enumerate() {
                assert!((packed - file).abs() <= tolerance, "{format}, value {at}: {packed} for {file}");
            }
        }
    }
}

#[test]
fn packing_reports_every_byte_and_ends_with_all() {
    let matrix = Matrix::random(Format::Q8_0, 5000, 32);
    let mut packed = Panels::new(&matrix.tensor()).unwrap();
    let calls = std::cell::RefCell::new(Vec::new());
    panels::pack(packed.pieces(matrix.tensor()).collect(), 2, &|done, total| {
        calls.borrow_mut().push((done, total))
    });
    let calls = calls.into_inner();
    assert!(calls.iter().all(|&(_, total)| total == 5000 * 34));
    assert!(calls.is_sorted());
    assert_eq!(calls.last(), Some(&(5000 * 34, 5000 * 34)));
}

#[test]
fn quantising_rounds_to_the_nearest_of_255_steps() {
    for (name, values) in [
        ("zeros", vec![0.0; 32]),
        ("random", random(96, 1)),
        ("one large", [vec![1000.0], vec![0.001; 31]].concat()),
        ("a last block that is not full", random(45, 2)),
        ("a single value", vec![-3.5]),
    ] {
        each_isa(|kernels| {
            let mut blocks = vec![Block::default(); values.len().div_ceil(BLOCK)];
            kernels.quantise(&values, &mut blocks);
            for (block, values) in blocks.iter().zip(values.chunks(BLOCK)) {
                let max = values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
                let bytes: Vec<i8> =
                    block.words.iter().flat_map(|word| word.to_le_bytes()).map(u8::cast_signed).collect();
                assert_eq!(block.scale, max / 127.0, "{} {name}", kernels.isa());
                assert_eq!(block.sum, bytes.iter().map(|&byte| f32::from(byte)).sum::<f32>(), "{name}");
                for (i, &byte) in bytes.iter().enumerate() {
                    let value = f64::from(values.get(i).copied().unwrap_or(0.0));
                    let rounded = f64::from(block.scale) * f64::from(byte);
                    // Half a step, and the rounding of the factor.
                    let tolerance = 0.5 * f64::from(block.scale) * (1.0 + 1e-4);
                    assert!((rounded - value).abs() <= tolerance, "{} {name}: {rounded}", kernels.isa());
                }
            }
        });
    }
}

#[test]
fn norm_gate_and_rotation_match_loops() {
    for width in [1, 2, 16, 40, 576] {
        let (values, gains) = (random(width, 3), random(width, 4));
        let mean = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>() / width as f64;
        let angles: Vec<f64> = (0..width / 2).map(|pair| 0.37 * pair as f64).collect();
        let turns: Vec<[f32; 2]> = angles.iter().map(|a| [a.cos() as f32, a.sin() as f32]).collect();
        each_isa(|kernels| {
            let mut normal = vec![0.0; width];
            kernels.rms_norm(&values, &gains, 1e-5, &mut normal);
            let mut turned = values.clone();
            kernels.rotate(&mut turned, &turns);
            for i in 0..width {
                let expected = f64::from(values[i]) / (mean + 1e-5).sqrt() * f64::from(gains[i]);
                close(kernels, "norm", normal[i], expected, 1e-6 * (1.0 + expected.abs()));
                let Some(angle) = angles.get(i / 2) else { continue };
                let (a, b) = (f64::from(values[i / 2 * 2]), f64::from(values[i / 2 * 2 + 1]));
                let expected = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()][i % 2];
                close(kernels, "rotation", turned[i], expected, 1e-6);
            }
        });
    }
    for scale in [0.01, 1.0, 30.0, 500.0] {
        let gate: [f32; BLOCK] = core::array::from_fn(|i| scale * (i as f32 / 16.0 - 1.0));
        let up: [f32; BLOCK] = random(BLOCK, 5).try_into().unwrap();
        each_isa(|kernels| {
            let mut gated = gate;
            kernels.swiglu(&mut gated, &up);
            for i in 0..BLOCK {
                let x = f64::from(gate[i]);
                let expected = x / (1.0 + (-x).exp()) * f64::from(up[i]);
                // The exponential is good to 2 units in the last place.
                close(kernels, "gate", gated[i], expected, 1e-6 * expected.abs() + 1e-30);
            }
        });
    }
}

#[test]
fn halves_round_to_the_nearest_even() {
    let values =
        [random(37, 6), vec![0.0, 65504.0, 6e-8, -2.5e-5, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0]].concat();
    each_isa(|kernels| {
        let mut bits = vec![0; values.len()];
        kernels.to_half(&values, &mut bits);
        let expected: Vec<u16> = values.iter().map(|&value| f16::from_f32(value).to_bits()).collect();
        assert_eq!(bits, expected, "{}", kernels.isa());
    });
}

#[test]
fn attention_matches_loops() {
    for dim in [2, 48, 64, 72, 128] {
        for positions in [1, 15, 16, 17, SPAN - 1, SPAN, SPAN + 1, 600] {
            for queries in 1..=QUERIES {
                let attention = Attention::random(dim, positions, queries);
                let expected = attention.by_loops();
                each_isa(|kernels| {
                    for (at, (value, expected)) in attention.by(kernels).iter().zip(&expected).enumerate() {
                        // Scores are below 1 in size: their rounding moves weights by 1e-6 or so each.
                        let what = format!("dim {dim}, {positions} positions, {queries} queries, value {at}");
                        close(kernels, &what, *value, *expected, 3e-6);
                    }
                });
            }
        }
    }
}

#[test]
fn a_query_is_the_same_to_the_bit_in_any_company() {
    for dim in [64, 72, 128] {
        for positions in [SPAN, SPAN + 1, SPAN + 2] {
            let attention = Attention::random(dim, positions, QUERIES);
            each_isa(|kernels| {
                let together = attention.by(kernels);
                for query in 0..QUERIES {
                    // Alone it does not even look at the span that only the longer ones reach.
                    let alone = attention.only(query).by(kernels);
                    assert_eq!(alone, together[query * dim..(query + 1) * dim], "{} {query}", kernels.isa());
                }
            });
        }
    }
}

/// Queries `q` sees `positions - (last - q)` positions, as consecutive tokens do.
struct Attention {
    dim: usize,
    queries: Vec<f32>,
    visible: Vec<usize>,
    /// Tiles with the positions after the last left as garbage, as in a reused block.
    keys: Vec<Vec<u16>>,
    values: Vec<Vec<u16>>,
}

impl Attention {
    fn random(dim: usize, positions: usize, queries: usize) -> Self {
        let tiles = positions.div_ceil(KV_TILE);
        let (keys, values) = (random(tiles * KV_TILE * dim, 7), random(tiles * KV_TILE * dim, 8));
        let tiled = |values: &[f32], at: fn(usize, usize, usize) -> usize| {
            let mut tiles = vec![vec![f16::NAN.to_bits(); KV_TILE * dim]; tiles];
            for (position, row) in values.chunks_exact(dim).take(positions).enumerate() {
                for (d, value) in row.iter().enumerate() {
                    let tile = &mut tiles[position / KV_TILE];
                    tile[at(position % KV_TILE, d, dim)] = f16::from_f32(*value).to_bits();
                }
            }
            tiles
        };
        Self {
            dim,
            queries: random(queries * dim, 9),
            visible: (0..queries).map(|q| positions.saturating_sub(queries - 1 - q).max(1)).collect(),
            keys: tiled(&keys, |position, d, _| d * KV_TILE + position),
            values: tiled(&values, |position, d, dim| position * dim + d),
        }
    }

    fn only(&self, query: usize) -> Self {
        Self {
            dim: self.dim,
            queries: self.queries[query * self.dim..(query + 1) * self.dim].to_vec(),
            visible: vec![self.visible[query]],
            keys: self.keys.clone(),
            values: self.values.clone(),
        }
    }

    fn by(&self, kernels: Kernels) -> Vec<f32> {
        let longest = *self.visible.last().unwrap();
        let mut out = vec![0.0; self.queries.len()];
        let mut running = vec![Running::START; self.visible.len()];
        for span in (0..longest).step_by(SPAN) {
            let positions = (longest - span).min(SPAN);
            let tiles = span / KV_TILE..(span + positions).div_ceil(KV_TILE);
            let keys: Vec<&[u16]> = self.keys[tiles.clone()].iter().map(Vec::as_slice).collect();
            let values: Vec<&[u16]> = self.values[tiles.clone()].iter().map(Vec::as_slice).collect();
            let mut scores = vec![[0.0; SPAN]; self.visible.len()];
            kernels.scores(&self.queries, &keys, self.scale(), &mut scores);
            for (q, scores) in scores.iter_mut().enumerate() {
                let seen = self.visible[q].saturating_sub(span).min(positions);
                let factor = kernels.soften(scores, seen, tiles.len() * KV_TILE, &mut running[q]);
                kernels.scale(&mut out[q * self.dim..(q + 1) * self.dim], factor);
            }
            kernels.mix(&scores, &values, positions, &mut out);
        }
        for (out, running) in out.chunks_exact_mut(self.dim).zip(running) {
            kernels.scale(out, 1.0 / running.sum);
        }
        out
    }

    fn by_loops(&self) -> Vec<f64> {
        let value = |tiles: &[Vec<u16>], position: usize, at: usize| {
            f64::from(f16::from_bits(tiles[position / KV_TILE][at]).to_f32())
        };
        let each = self.queries.chunks_exact(self.dim).zip(&self.visible);
        each.flat_map(|(query, &visible)| {
            let weight = |position: usize| {
                let products = query.iter().enumerate().map(|(d, query)| {
                    f64::from(*query) * value(&self.keys, position, d * KV_TILE + position % KV_TILE)
                });
                (products.sum::<f64>() * f64::from(self.scale())).exp()
            };
            let weights: Vec<f64> = (0..visible).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            (0..self.dim).map(move |d| {
                let mixed = weights.iter().enumerate().map(|(position, weight)| {
                    weight * value(&self.values, position, position % KV_TILE * self.dim + d)
                });
                mixed.sum::<f64>() / sum
            })
        })
        .collect()
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// A matrix as a model file holds it.
struct Matrix {
    format: Format,
    dims: [u64; 2],
    bytes: Vec<u8>,
}

impl Matrix {
    /// Random bits, with scales of about 0.01 and values below 1.
    fn random(format: Format, rows: usize, columns: usize) -> Self {
        let mut state = 10;
        let blocks = rows * columns / format.block_values();
        let mut bytes = Vec::new();
        for _ in 0..blocks {
            let start = bytes.len();
            bytes.extend((0..format.block_bytes()).map(|_| next(&mut state) as u8));
            let block = &mut bytes[start..];
            let value = (next(&mut state) % 2000) as f32 / 1000.0 - 1.0;
            let small = |state: &mut u64| f16::from_f32(((next(state) % 1000) as f32 - 500.0) / 50_000.0);
            match format {
                Format::F32 => block.copy_from_slice(&value.to_le_bytes()),
                Format::F16 => block.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                Format::Bf16 => block.copy_from_slice(&value.to_bits().to_le_bytes()[2..]),
                Format::Q4_1 => {
                    block[..2].copy_from_slice(&small(&mut state).to_le_bytes());
                    block[2..4].copy_from_slice(&small(&mut state).to_le_bytes());
                }
                Format::Q4_0 | Format::Q8_0 => block[..2].copy_from_slice(&small(&mut state).to_le_bytes()),
                Format::Q4K | Format::Q6K => unreachable!("no case asks for it"),
            }
        }
        Self { format, dims: [columns as u64, rows as u64], bytes }
    }

    fn tensor(&self) -> Tensor<'_> {
        Tensor { format: self.format, dims: &self.dims, bytes: &self.bytes }
    }

    fn packed(&self, threads: usize) -> Panels {
        let mut packed = Panels::new(&self.tensor()).unwrap();
        panels::pack(packed.pieces(self.tensor()).collect(), threads, &|_, _| {});
        packed
    }

    /// What the panels hold.
    fn packed_on(&self, threads: usize) -> Vec<f32> {
        let (packed, columns) = (self.packed(threads), self.dims[0] as usize);
        let mut values = vec![0.0; self.dims[1] as usize * columns];
        values.chunks_exact_mut(columns).enumerate().for_each(|(row, values)| packed.read_row(row, values));
        values
    }

    fn packed_values(&self) -> Vec<f32> {
        self.packed_on(1)
    }

    /// What the file holds.
    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; (self.dims[0] * self.dims[1]) as usize];
        self.tensor().dequantise(&mut values);
        values
    }
}

/// Random rows as blocks, and what the blocks stand for.
fn activations(kernels: Kernels, tokens: usize, columns: usize) -> (Vec<Block>, Vec<f32>) {
    let width = columns.div_ceil(BLOCK);
    let mut blocks = vec![Block::default(); tokens * width];
    let mut values = random(tokens * columns, 11);
    for (values, blocks) in values.chunks_exact_mut(columns).zip(blocks.chunks_exact_mut(width)) {
        kernels.quantise(values, blocks);
        for (i, value) in values.iter_mut().enumerate() {
            let block = &blocks[i / BLOCK];
            let byte = block.words[i % BLOCK / 4].to_le_bytes()[i % 4].cast_signed();
            *value = block.scale * f32::from(byte);
        }
    }
    (blocks, values)
}

/// Returns the dot product and the sum of its terms' sizes.
fn dot(a: &[f32], b: &[f32]) -> (f64, f64) {
    let terms = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
}

fn each_isa(mut test: impl FnMut(Kernels)) {
    [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable].into_iter().filter_map(Kernels::new).for_each(&mut test);
}

fn close(kernels: Kernels, what: &str, value: f32, expected: f64, tolerance: f64) {
    let isa = kernels.isa();
    assert!((f64::from(value) - expected).abs() <= tolerance, "{isa}: {what}: {value} for {expected}");
}

fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count).map(|_| (next(&mut state) % 20_000) as f32 / 10_000.0 - 1.0).collect()
}

/// SplitMix64 (Steele, Lea and Flood 2014).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) >> 33
}

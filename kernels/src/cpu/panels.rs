//! Weight matrices, packed at load so that a kernel reads them front to back.

use core::ops::Range;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

use half::f16;

use super::kernels::{BLOCK, Panel, ROWS};
use super::memory::Zeroed;
use crate::weights::{Format, Tensor};

/// A matrix `[R, C]` as `R / 16` panels of `C / 32` blocks, both rounded up; what the rounding adds is zero.
///
/// Q4_1 keeps its integers and scales, and so does Q4_0, with the offset `-8 d`: exact in F16 for every scale below
/// 8,189. All others become signed bytes, which is exact for Q8_0. Activations have seven bits and a sign, so bytes are
/// no worse than what they meet.
pub(super) struct Panels {
    rows: usize,
    columns: usize,
    packing: Packing,
    quants: Zeroed<u8>,
    scales: Zeroed<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    Nibbles,
    Bytes,
}

impl Panels {
    /// Reserves the panels of a matrix of this shape and format.
    ///
    /// # Errors
    /// The system's, when it has not that much memory.
    pub(super) fn new(tensor: &Tensor<'_>) -> io::Result<Self> {
        let (rows, columns) = (tensor.rows(), tensor.columns());
        let packing = match tensor.format {
            Format::Q4_0 | Format::Q4_1 => Packing::Nibbles,
            Format::Bf16 | Format::F16 | Format::F32 | Format::Q4K | Format::Q6K | Format::Q8_0 => {
                Packing::Bytes
            }
        };
        let blocks = rows.div_ceil(ROWS) * columns.div_ceil(BLOCK);
        let quants = Zeroed::new(blocks * packing.quant_bytes())?;
        let scales = Zeroed::new(blocks * packing.scale_count())?;
        Ok(Self { rows, columns, packing, quants, scales })
    }

    /// Returns the count of rows, `R`.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the count of panels.
    pub(super) fn count(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Returns the count of blocks in a row.
    pub(super) fn blocks(&self) -> usize {
        self.columns.div_ceil(BLOCK)
    }

    /// Returns the rows of a panel that the matrix has.
    pub(super) fn panel_rows(&self, index: usize) -> Range<usize> {
        index * ROWS..((index + 1) * ROWS).min(self.rows)
    }

    /// Returns a panel.
    ///
    /// # Panics
    /// If there is no such panel.
    pub(super) fn panel(&self, index: usize) -> Panel<'_> {
        let blocks = self.blocks();
        let at = index * blocks..(index + 1) * blocks;
        match self.packing {
            Packing::Nibbles => Panel::Nibbles {
                quants: &self.quants.as_chunks::<64>().0.as_chunks().0[at.clone()],
                scales: &self.scales.as_chunks::<ROWS>().0.as_chunks().0[at],
            },
            Packing::Bytes => Panel::Bytes {
                quants: &self.quants.as_chunks::<64>().0.as_chunks().0[at.clone()],
                scales: &self.scales.as_chunks().0[at],
            },
        }
    }

    /// Writes one row's values.
    ///
    /// # Panics
    /// If there is no such row.
    pub(super) fn read_row(&self, row: usize, values: &mut [f32]) {
        let r = row % ROWS;
        let word = 4 * r..4 * r + 4;
        match self.panel(row / ROWS) {
            Panel::Nibbles { quants, scales } => {
                for ((values, quants), scales) in values.chunks_mut(BLOCK).zip(quants).zip(scales) {
                    let [scale, offset] = [0, 1].map(|which| f16::from_bits(scales[which][r]).to_f32());
                    for (i, value) in values.iter_mut().enumerate() {
                        let byte = quants[i % 16 / 4][word.clone()][i % 4];
                        *value = scale * f32::from(if i < 16 { byte & 15 } else { byte >> 4 }) + offset;
                    }
                }
            }
            Panel::Bytes { quants, scales } => {
                for ((values, quants), scales) in values.chunks_mut(BLOCK).zip(quants).zip(scales) {
                    let scale = f16::from_bits(scales[r]).to_f32();
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = scale * (f32::from(quants[i / 4][word.clone()][i % 4]) - 128.0);
                    }
                }
            }
        }
    }

    /// Cuts the packing of `tensor` into pieces that can be done in any order on any thread.
    pub(super) fn pieces<'a>(&'a mut self, tensor: Tensor<'a>) -> impl Iterator<Item = Piece<'a>> {
        let (packing, blocks) = (self.packing, self.columns.div_ceil(BLOCK));
        let quants = self.quants.chunks_mut(PIECE_PANELS * blocks * packing.quant_bytes());
        let scales = self.scales.chunks_mut(PIECE_PANELS * blocks * packing.scale_count());
        quants.zip(scales).enumerate().map(move |(index, (quants, scales))| {
            let first_row = index * PIECE_PANELS * ROWS;
            let rows = first_row..(first_row + PIECE_PANELS * ROWS).min(tensor.rows());
            Piece { packing, tensor, rows, quants, scales }
        })
    }
}

/// Some panels of a matrix, waiting to be packed.
pub(super) struct Piece<'a> {
    packing: Packing,
    tensor: Tensor<'a>,
    rows: Range<usize>,
    quants: &'a mut [u8],
    scales: &'a mut [u16],
}

/// Packs all pieces on `threads` threads, this one included, which calls `progress` with bytes of the model file done
/// and in all.
pub(super) fn pack(pieces: Vec<Piece<'_>>, threads: usize, progress: &dyn Fn(u64, u64)) {
    let total: u64 = pieces.iter().map(Piece::file_bytes).sum();
    let queue = Mutex::new((pieces.into_iter(), 0));
    // A piece counts as done when the next one is taken, so one lock serves for both.
    let take = |finished: u64| {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.1 += finished;
        (queue.0.next(), queue.1)
    };
    let work = |report: &dyn Fn(u64)| {
        let mut finished = 0;
        loop {
            let (piece, done) = take(finished);
            report(done);
            let Some(piece) = piece else { return };
            finished = piece.file_bytes();
            piece.pack();
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| work(&|_| {}));
        }
        work(&|done| progress(done, total));
    });
    progress(total, total);
}

impl Piece<'_> {
    fn file_bytes(&self) -> u64 {
        (self.rows.len() * self.tensor.row(0).len()) as u64
    }

    fn pack(self) {
        let blocks = self.tensor.columns().div_ceil(BLOCK);
        let mut values = vec![0.0; self.tensor.columns()];
        for (index, row) in self.rows.enumerate() {
            let (r, row) = (index % ROWS, self.tensor.row(row));
            let at = index / ROWS * blocks..(index / ROWS + 1) * blocks;
            match self.packing {
                Packing::Nibbles => {
                    let quants = &mut self.quants.as_chunks_mut::<64>().0.as_chunks_mut().0[at.clone()];
                    let scales = &mut self.scales.as_chunks_mut::<ROWS>().0.as_chunks_mut().0[at];
                    pack_nibbles(self.tensor.format, row, r, quants, scales);
                }
                Packing::Bytes => {
                    let quants = &mut self.quants.as_chunks_mut::<64>().0.as_chunks_mut().0[at.clone()];
                    let scales = &mut self.scales.as_chunks_mut().0[at];
                    if self.tensor.format == Format::Q8_0 {
                        copy_bytes(row, r, quants, scales);
                    } else {
                        self.tensor.format.dequantise(row, &mut values);
                        round_bytes(&values, r, quants, scales);
                    }
                }
            }
        }
    }
}

/// Q4_0 and Q4_1: the file's sixteen bytes are a panel's four words.
fn pack_nibbles(
    format: Format,
    row: &[u8],
    r: usize,
    quants: &mut [[[u8; 64]; 4]],
    scales: &mut [[[u16; ROWS]; 2]],
) {
    let file_blocks = row.chunks_exact(format.block_bytes());
    for ((block, quants), [scales, offsets]) in file_blocks.zip(quants).zip(scales) {
        let (head, nibbles) = block.split_at(block.len() - BLOCK / 2);
        for (quad, word) in quants.iter_mut().zip(nibbles.chunks_exact(4)) {
            quad[4 * r..4 * r + 4].copy_from_slice(word);
        }
        let scale = f16::from_le_bytes([head[0], head[1]]);
        let offset = match head {
            &[_, _, low, high] => f16::from_le_bytes([low, high]),
            _ => f16::from_f32(-8.0 * scale.to_f32()),
        };
        scales[r] = scale.to_bits();
        offsets[r] = offset.to_bits();
    }
}

/// Q8_0: signed bytes, stored with an offset of 128.
fn copy_bytes(row: &[u8], r: usize, quants: &mut [[[u8; 64]; 8]], scales: &mut [[u16; ROWS]]) {
    let file_blocks = row.chunks_exact(Format::Q8_0.block_bytes());
    for ((block, quants), scales) in file_blocks.zip(quants).zip(scales) {
        for (quad, word) in quants.iter_mut().zip(block[2..].as_chunks::<4>().0) {
            quad[4 * r..4 * r + 4].copy_from_slice(&word.map(|byte| byte ^ 0x80));
        }
        scales[r] = u16::from_le_bytes([block[0], block[1]]);
    }
}

/// All other formats: the largest magnitude of a block becomes 127. A scale that F16 cannot hold is its largest number,
/// and its bytes saturate.
fn round_bytes(values: &[f32], r: usize, quants: &mut [[[u8; 64]; 8]], scales: &mut [[u16; ROWS]]) {
    for ((values, quants), scales) in values.chunks(BLOCK).zip(quants).zip(scales) {
        let max = values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
        let scale = f16::from_f32((max / 127.0).min(f16::MAX.to_f32()));
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        for (quad, word) in quants.iter_mut().zip(values.chunks(4)) {
            for (byte, value) in quad[4 * r..4 * r + 4].iter_mut().zip(word) {
                // The cast saturates: F16 may have rounded the scale down, so that the largest is 127.06.
                *byte = ((value * inverse).round_ties_even() as i8).cast_unsigned() ^ 0x80;
            }
        }
        scales[r] = scale.to_bits();
    }
}

impl Packing {
    /// Returns bytes of quants in a block of a panel.
    const fn quant_bytes(self) -> usize {
        match self {
            Self::Nibbles => ROWS * BLOCK / 2,
            Self::Bytes => ROWS * BLOCK,
        }
    }

    /// Returns F16 numbers in a block of a panel.
    const fn scale_count(self) -> usize {
        match self {
            Self::Nibbles => 2 * ROWS,
            Self::Bytes => ROWS,
        }
    }
}

/// Panels in a piece: small enough that two threads end together, large enough that taking one costs nothing.
const PIECE_PANELS: usize = 64;

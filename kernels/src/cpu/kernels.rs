//! The inner loops as one table: which instruction set computes them, and the shapes they share.

use core::fmt;

use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI: 64 products of bytes in one instruction.
    Avx512Vnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain loops that the compiler vectorises for the target's baseline.
    Portable,
}

impl Isa {
    /// Returns the fastest one that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        [Self::Avx512Vnni, Self::Avx2].into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Says whether this processor has it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
                    && Self::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512Vnni | Self::Avx2 => false,
            Self::Portable => true,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512Vnni => "AVX-512 VNNI",
            Self::Avx2 => "AVX2",
            Self::Portable => "portable",
        })
    }
}

/// Thirty-two activations as signed bytes: value `i` is `scale * byte i`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(super) struct Block {
    /// Byte `i` is byte `i % 4` of word `i / 4`, lowest first, in `-127..=127`: a kernel broadcasts one word.
    pub(super) words: [i32; 8],
    /// The largest magnitude is 127 of these.
    pub(super) scale: f32,
    /// Sum of the bytes; a whole number, so exact.
    pub(super) sum: f32,
}

/// Sixteen rows of a packed matrix, 32 columns at a time.
///
/// Word `w` of row `r` is bytes `4 r..4 r + 4` of quad `w`, so that one 64-byte load gives every row's word.
/// Scales are F16 bits, one per row.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Four bits: quad `w` holds columns `4 w..4 w + 4` in the low and `16 + 4 w..` in the high halves.
    /// A value is `scales[0][r] * q + scales[1][r]`, `q` in `0..=15`.
    Nibbles { quants: &'a [[[u8; 64]; 4]], scales: &'a [[[u16; ROWS]; 2]] },
    /// Eight bits: quad `w` holds columns `4 w..4 w + 4`. A value is `scales[r] * (q - 128)`, `q` in `0..=255`: the dot
    /// product instruction wants one side unsigned.
    Bytes { quants: &'a [[[u8; 64]; 8]], scales: &'a [[u16; ROWS]] },
}

/// Rows of a panel.
pub(super) const ROWS: usize = 16;

/// Most tokens that a kernel computes against a panel at once: eight sums and eight totals fill AVX-512's registers.
pub(super) const TILE: usize = 8;

/// Dot products of some tokens with two neighbouring panels: `[token, side, row]`.
pub(super) type Tile = [[[f32; ROWS]; 2]; TILE];

/// Values in a block.
pub(super) const BLOCK: usize = 32;

/// Positions of a KV tile, whose keys are stored column by column.
pub(super) const KV_TILE: usize = 16;

/// Positions that one pass of attention reduces before it is merged into the running result.
pub(super) const SPAN: usize = 256;

/// Most queries that one pass of attention computes against the same keys: six times four registers of sums, four of
/// values and one of weights fit AVX-512's 32.
pub(super) const QUERIES: usize = 6;

/// The kernels of an instruction set that this processor was seen to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kernels {
    isa: Isa,
}

/// Calls `$name` of the module that `self.isa` names.
macro_rules! dispatch {
    ($self:ident, $name:ident($($argument:expr),*)) => {
        match $self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kernels::new` is the only constructor and saw that the processor has every feature that the
            // function is compiled for; a running processor loses none. The function is otherwise safe.
            Isa::Avx512Vnni => unsafe { avx512::$name($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2::$name($($argument),*) },
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512Vnni | Isa::Avx2 => portable::$name($($argument),*),
            Isa::Portable => portable::$name($($argument),*),
        }
    };
}

impl Kernels {
    /// Returns the kernels of `isa`, or `None` where the processor lacks it.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self { isa })
    }

    /// Returns which instruction set it is.
    pub(super) fn isa(self) -> Isa {
        self.isa
    }

    /// `out[t][side][r] = panel row r . token t`, for the `tokens.len() / blocks` tokens, at most [`TILE`], whose blocks lie
    /// one after the other. Each dot product's arithmetic is the same whatever the other tokens are.
    pub(super) fn dot(self, panel: Panel<'_>, tokens: &[Block], side: usize, out: &mut Tile) {
        dispatch!(self, dot(panel, tokens, side, out));
    }

    /// Rounds values to blocks; a last block that they do not fill is filled with zeros.
    pub(super) fn quantise(self, values: &[f32], blocks: &mut [Block]) {
        dispatch!(self, quantise(values, blocks));
    }

    /// `out = values / sqrt(mean(values^2) + eps) * gains` (Zhang and Sennrich 2019, eq. 4).
    pub(super) fn rms_norm(self, values: &[f32], gains: &[f32], eps: f32, out: &mut [f32]) {
        dispatch!(self, rms_norm(values, gains, eps, out));
    }

    /// `gate = silu(gate) * up`, `silu(x) = x / (1 + exp(-x))` (Shazeer 2020, eq. 5 with beta 1).
    pub(super) fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        dispatch!(self, swiglu(gate, up));
    }

    /// Turns each adjacent pair of `values` by its angle, given as `[cos, sin]` (Su et al. 2021, eq. 34).
    pub(super) fn rotate(self, values: &mut [f32], turns: &[[f32; 2]]) {
        dispatch!(self, rotate(values, turns));
    }

    /// Rounds values to F16 bits, to nearest even.
    pub(super) fn to_half(self, values: &[f32], out: &mut [u16]) {
        dispatch!(self, to_half(values, out));
    }

    /// `scores[q][p] = scale * query q . key p`, for whole tiles of [`KV_TILE`] keys, each `[dim][position]` in F16.
    /// `queries` are `[q, dim]`, one after the other, at most [`QUERIES`].
    pub(super) fn scores(self, queries: &[f32], keys: &[&[u16]], scale: f32, scores: &mut [[f32; SPAN]]) {
        dispatch!(self, scores(queries, keys, scale, scores));
    }

    /// Turns the first `visible` scores into weights `exp(score - max)`, the others of the first `span` into zeros, and
    /// takes them into the running `max` and `sum`. Returns what the running sums of earlier spans must be multiplied
    /// with. `span` is a multiple of [`KV_TILE`].
    pub(super) fn soften(
        self,
        scores: &mut [f32; SPAN],
        visible: usize,
        span: usize,
        running: &mut Running,
    ) -> f32 {
        dispatch!(self, soften(scores, visible, span, running))
    }

    /// `out[q] += sum over p < positions of weights[q][p] * value p`, values `[position][dim]` in F16, tile by tile.
    /// `out` is `[q, dim]`. Positions are added in order.
    pub(super) fn mix(self, weights: &[[f32; SPAN]], values: &[&[u16]], positions: usize, out: &mut [f32]) {
        dispatch!(self, mix(weights, values, positions, out));
    }

    /// `values *= factor`.
    pub(super) fn scale(self, values: &mut [f32], factor: f32) {
        dispatch!(self, scale(values, factor));
    }
}

/// The state of a softmax over the spans seen so far (Milakov and Gimelshein 2018, algorithm 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Running {
    /// Greatest score.
    pub(super) max: f32,
    /// Sum of `exp(score - max)`.
    pub(super) sum: f32,
}

impl Running {
    /// Before the first span.
    pub(super) const START: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

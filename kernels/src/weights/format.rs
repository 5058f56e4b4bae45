//! How values are stored, and back to F32.

use core::fmt;

use half::f16;

/// How a tensor's values are stored. A row is a whole number of blocks; multi-byte numbers are little-endian.
///
/// Below, `d` is a block's F16 scale, `m` its F16 offset, and `q[i]` the stored integer of value `i`. In the formats of
/// four bits and 32 values, byte `i` of the sixteen holds value `i` in its low half and value `i + 16` in its high half.
///
/// | format | values | bytes | layout | value `i` |
/// |---|---|---|---|---|
/// | BF16 | 1 | 2 | the upper half of an F32 | itself |
/// | F16 | 1 | 2 | IEEE 754 binary16 | itself |
/// | F32 | 1 | 4 | IEEE 754 binary32 | itself |
/// | Q4_0 | 32 | 18 | `d`, 16 bytes of `q` | `d * (q[i] - 8)` |
/// | Q4_1 | 32 | 20 | `d`, `m`, 16 bytes of `q` | `d * q[i] + m` |
/// | Q4_K | 256 | 144 | `d`, `m`, 12 bytes of scales, 128 bytes of `q` | see [`Format::Q4K`] |
/// | Q6_K | 256 | 210 | 128 bytes low, 64 bytes high, 16 scales, `d` | see [`Format::Q6K`] |
/// | Q8_0 | 32 | 34 | `d`, 32 signed bytes of `q` | `d * q[i]` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Truncated F32.
    Bf16,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// Four bits, symmetric.
    Q4_0,
    /// Four bits with an offset.
    Q4_1,
    /// Four bits; eight groups of 32 values, each with a six-bit scale `s` and offset `o`: `d * s * q[i] - m * o`.
    /// Groups `2n` and `2n + 1` are the low and the high halves of bytes `32n..32n + 32` of `q`. Of the twelve scale
    /// bytes, the low six bits of bytes `0..4` and `4..8` are `s` and `o` of groups `0..4`; groups `4..8` have their low
    /// four bits in the halves of bytes `8..12`, and their high two at the top of bytes `0..4` and `4..8`.
    Q4K,
    /// Six bits; sixteen groups of 16 values, each with a signed byte `s`: `d * s * (q[i] - 32)`. In each half of 128
    /// values, value `32n + i` has its low four bits in half `n / 2` of low byte `32 (n % 2) + i`, and its high two at
    /// bit `2n` of high byte `i`.
    Q6K,
    /// Eight bits, symmetric.
    Q8_0,
}

impl Format {
    /// Returns values per block.
    #[must_use]
    pub const fn block_values(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::F32 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Returns bytes per block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4K => 144,
            Self::Q6K => 210,
            Self::Q8_0 => 34,
        }
    }

    /// Writes the values of whole blocks as F32.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of blocks, or `values` not as long as their values.
    pub fn dequantise(self, bytes: &[u8], values: &mut [f32]) {
        match self {
            Self::Bf16 => each(bytes, values, |block, [value]| {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
            }),
            Self::F16 => each::<2, 1>(bytes, values, |block, [value]| *value = half(block, 0)),
            Self::F32 => each(bytes, values, |block, [value]| *value = f32::from_le_bytes(*block)),
            Self::Q4_0 => each::<18, 32>(bytes, values, |block, values| {
                let d = half(block, 0);
                halves(&block[2..], values, |q| d * (f32::from(q) - 8.0));
            }),
            Self::Q4_1 => each::<20, 32>(bytes, values, |block, values| {
                let (d, m) = (half(block, 0), half(block, 2));
                halves(&block[4..], values, |q| d * f32::from(q) + m);
            }),
            Self::Q4K => each(bytes, values, dequantise_q4_k),
            Self::Q6K => each(bytes, values, dequantise_q6_k),
            Self::Q8_0 => each::<34, 32>(bytes, values, |block, values| {
                let d = half(block, 0);
                for (value, &q) in values.iter_mut().zip(&block[2..]) {
                    *value = d * f32::from(q.cast_signed());
                }
            }),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
            Self::Q8_0 => "Q8_0",
        })
    }
}

/// Calls `block` for each block of `B` bytes and its `N` values.
fn each<const B: usize, const N: usize>(
    bytes: &[u8],
    values: &mut [f32],
    block: impl Fn(&[u8; B], &mut [f32; N]),
) {
    let (blocks, bytes_rest) = bytes.as_chunks::<B>();
    let (outputs, values_rest) = values.as_chunks_mut::<N>();
    assert!(bytes_rest.is_empty() && values_rest.is_empty(), "not a whole number of blocks");
    assert_eq!(blocks.len(), outputs.len(), "blocks of bytes against blocks of values");
    for (input, output) in blocks.iter().zip(outputs) {
        block(input, output);
    }
}

/// Low halves of all bytes first, then high halves.
fn halves(bytes: &[u8], values: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(bytes.len());
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

fn dequantise_q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (d, m) = (half(block, 0), half(block, 2));
    let scales = &block[4..16];
    for (n, (bytes, values)) in block[16..].chunks_exact(32).zip(values.chunks_exact_mut(64)).enumerate() {
        let (low, high) = values.split_at_mut(32);
        for (values, group, shift) in [(low, 2 * n, 0), (high, 2 * n + 1, 4)] {
            let (scale, offset) = q4_k_scale(scales, group);
            let (scale, offset) = (d * f32::from(scale), m * f32::from(offset));
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = scale * f32::from(byte >> shift & 15) - offset;
            }
        }
    }
}

/// Returns a group's scale and offset, six bits each.
fn q4_k_scale(bytes: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (bytes[group] & 63, bytes[group + 4] & 63);
    }
    let low = bytes[group + 4];
    (low & 15 | bytes[group - 4] >> 6 << 4, low >> 4 | bytes[group] >> 6 << 4)
}

fn dequantise_q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (at, value) in values.iter_mut().enumerate() {
        let (part, n, i) = (at / 128, at % 128 / 32, at % 32);
        let low = low[64 * part + 32 * (n % 2) + i] >> (n / 2 * 4) & 15;
        let high = high[32 * part + i] >> (2 * n) & 3;
        let scale = f32::from(scales[at / 16].cast_signed());
        *value = d * scale * (f32::from(low | high << 4) - 32.0);
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::Format;

    /// Blocks of byte `37 i + 11`, scale 0.5 and offset 0.125. The sums `1 v[0] + 2 v[1] + …` were made with the
    /// `gguf` Python package 0.19, so that a wrong place or sign anywhere shows.
    #[test]
    fn a_block_of_each_format_has_the_values_of_another_implementation() {
        for (format, scale_at, offset_at, first, last, weighted_sum) in [
            (Format::Q4_0, Some(0), None, -1.5, 0.0, -259.0),
            (Format::Q4_1, Some(0), Some(2), 7.625, 6.125, 2_057.5),
            (Format::Q4K, Some(0), Some(2), 164.125, 28.625, 3_905_348.0),
            (Format::Q6K, Some(208), None, -715.5, -30.0, 392_210.0),
            (Format::Q8_0, Some(0), None, 42.5, -24.0, -4_040.0),
            (Format::F16, None, None, 0.126_342_77, 0.126_342_77, 0.126_342_773_437_5),
            (Format::Bf16, None, None, 5.056_790_5e-10, 5.056_790_5e-10, 5.056_790_541_857_481e-10),
        ] {
            let mut block: Vec<u8> = (0..format.block_bytes()).map(|i| (i * 37 + 11) as u8).collect();
            for (at, half) in [(scale_at, 0x3800_u16), (offset_at, 0x3000)] {
                if let Some(at) = at {
                    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
            let mut values = vec![f32::NAN; format.block_values()];
            format.dequantise(&block, &mut values);
            assert_eq!((values[0], values[values.len() - 1]), (first, last), "{format}");
            let sum: f64 = values.iter().zip(1..).map(|(&value, i)| f64::from(value) * f64::from(i)).sum();
            assert_eq!(sum, weighted_sum, "{format}");
        }
    }

    #[test]
    fn single_precision_is_read_as_it_stands() {
        let mut values = [0.0; 2];
        Format::F32.dequantise(&[0, 0, 128, 63, 0, 0, 0, 192], &mut values);
        assert_eq!(values, [1.0, -2.0]);
    }

    #[test]
    fn blocks_follow_each_other() {
        let mut values = [0.0; 64];
        let mut bytes = [1; 68];
        bytes[..2].copy_from_slice(&0x3c00_u16.to_le_bytes());
        bytes[34..36].copy_from_slice(&0x4000_u16.to_le_bytes());
        Format::Q8_0.dequantise(&bytes, &mut values);
        assert_eq!((values[0], values[31], values[32], values[63]), (1.0, 1.0, 2.0, 2.0));
    }
}

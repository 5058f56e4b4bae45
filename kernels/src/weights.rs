//! Model files: named tensors as they lie in the file, every length checked before use.

use core::fmt;

mod format;
pub mod gguf;
mod mmap;

pub use format::Format;
pub use gguf::Gguf;

/// A tensor inside a model file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// How its values are stored.
    pub format: Format,
    /// One to four dimensions, innermost first as the file has them: a matrix `[R, C]` is `[C, R]` here.
    pub dims: &'a [u64],
    /// Its blocks, row after row: exactly as many bytes as `dims` and `format` say. Not aligned for anything.
    pub bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Returns the length of a row, in values.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.dims.first().map_or(0, |&columns| columns as usize)
    }

    /// Returns the count of rows, over all outer dimensions.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).map(|&rows| rows as usize).product()
    }

    /// Returns the blocks of one row.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, index: usize) -> &'a [u8] {
        let row_bytes = self.columns() / self.format.block_values() * self.format.block_bytes();
        &self.bytes[index * row_bytes..(index + 1) * row_bytes]
    }

    /// Writes all values as F32, row after row.
    ///
    /// # Panics
    /// If `values` is not as long as the tensor.
    pub fn dequantise(&self, values: &mut [f32]) {
        self.format.dequantise(self.bytes, values);
    }
}

/// A model file cannot be read. Each message is one sentence that names the field.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightsError {
    /// `general.alignment` is not a power of two from 8 to 65,536.
    Alignment {
        /// What the file says.
        bytes: u64,
    },
    /// The file was written for machines of the other byte order.
    BigEndian,
    /// A Boolean is neither 0 nor 1.
    Boolean {
        /// Metadata key.
        key: String,
        /// What the file says.
        byte: u8,
    },
    /// A count or length promises more than the rest of the file could hold.
    Count {
        /// Which.
        field: &'static str,
        /// What the file says.
        count: u64,
        /// The most that could follow.
        count_max: usize,
    },
    /// A tensor has no dimension, or more than four.
    DimensionCount {
        /// Tensor name.
        name: String,
        /// What the file says.
        count: usize,
    },
    /// A name stands twice.
    Duplicate {
        /// Kind of name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The operating system did not give the file.
    Io {
        /// As it was given.
        path: String,
        /// What the system said.
        message: String,
    },
    /// A metadata value has another type than its key needs.
    KeyType {
        /// Metadata key.
        key: String,
        /// What would do.
        wanted: &'static str,
    },
    /// The file does not start with `GGUF`.
    Magic,
    /// A tensor does not start at a multiple of the alignment.
    Misaligned {
        /// Tensor name.
        name: String,
        /// In bytes from the start of the data.
        offset: u64,
        /// In bytes.
        alignment: usize,
    },
    /// A name is empty, too long, or holds a NUL.
    Name {
        /// Kind of name.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest allowed.
        bytes_max: usize,
    },
    /// An array holds arrays.
    NestedArray {
        /// Metadata key.
        key: String,
    },
    /// A name is not UTF-8.
    NotUtf8 {
        /// Kind of name.
        what: &'static str,
    },
    /// Two tensors share bytes.
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
    },
    /// A row is not a whole number of blocks.
    PartBlock {
        /// Tensor name.
        name: String,
        /// Values in a row.
        columns: u64,
        /// The format, which sets the block.
        format: Format,
    },
    /// The model is spread over several files.
    Split {
        /// `split.count`.
        count: u64,
    },
    /// An entry of a tokenizer table is not what it should be.
    TableEntry {
        /// Metadata key of the table.
        key: &'static str,
        /// Which entry, from 0.
        index: usize,
        /// What it should be.
        what: &'static str,
    },
    /// A tokenizer table has not one entry for each token.
    TableLength {
        /// Metadata key of the table.
        key: &'static str,
        /// Its entries.
        entries: usize,
        /// Entries of the token list.
        tokens: usize,
    },
    /// A tensor does not lie inside the file.
    TensorOutside {
        /// Tensor name.
        name: String,
        /// In bytes from the start of the data.
        offset: u64,
        /// Its size.
        bytes: usize,
    },
    /// A tensor is empty, or larger than an address.
    TensorSize {
        /// Tensor name.
        name: String,
        /// Innermost first.
        dims: Vec<u64>,
    },
    /// A tensor has a type that no code here reads.
    TensorType {
        /// Tensor name.
        name: String,
        /// The type's name; empty where the number has none.
        type_name: &'static str,
        /// The type's number.
        number: u32,
    },
    /// The file ends inside a field.
    Truncated {
        /// Which.
        field: &'static str,
        /// Where it starts, in bytes from the start of the file.
        at: usize,
    },
    /// A metadata value has a type number that the format does not know.
    ValueType {
        /// Metadata key.
        key: String,
        /// What the file says.
        number: u32,
    },
    /// The format's version is not 2 or 3.
    Version {
        /// What the file says.
        version: u32,
    },
}

impl fmt::Display for WeightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alignment { bytes } => {
                write!(f, "`general.alignment` is {bytes}; it must be a power of two from 8 to 65536")
            }
            Self::BigEndian => {
                f.write_str("version: the file is big-endian; only little-endian GGUF is read")
            }
            Self::Boolean { key, byte } => {
                write!(f, "`{key}` is a Boolean of value {byte}; it must be 0 or 1")
            }
            Self::Count { field, count, count_max } => {
                write!(f, "{field} is {count}, but the rest of the file holds at most {count_max}")
            }
            Self::DimensionCount { name, count } => {
                write!(f, "tensor `{name}` has dimension count {count}; it must be 1 to 4")
            }
            Self::Duplicate { what, name } => write!(f, "{what} `{name}` stands twice"),
            Self::Io { path, message } => write!(f, "cannot read `{path}`: {message}"),
            Self::KeyType { key, wanted } => write!(f, "`{key}` must be {wanted}"),
            Self::Magic => f.write_str("magic: the file does not start with `GGUF`, so it is no GGUF model"),
            Self::Misaligned { name, offset, alignment } => {
                write!(f, "tensor `{name}` has offset {offset}, which is no multiple of {alignment}")
            }
            Self::Name { what, bytes, bytes_max } => {
                write!(f, "{what} length is {bytes}; it must be 1 to {bytes_max} bytes, none of them NUL")
            }
            Self::NestedArray { key } => write!(f, "`{key}` is an array of arrays, which is not supported"),
            Self::NotUtf8 { what } => write!(f, "{what} is not UTF-8"),
            Self::Overlap { first, second } => write!(f, "tensors `{first}` and `{second}` overlap"),
            Self::PartBlock { name, columns, format } => {
                let block = format.block_values();
                write!(
                    f,
                    "tensor `{name}` has rows of {columns} values; {format} needs a multiple of {block}"
                )
            }
            Self::Split { count } => {
                write!(f, "`split.count` is {count}: models split over files are not read; merge them first")
            }
            Self::TableEntry { key, index, what } => write!(f, "entry {index} of `{key}` is not {what}"),
            Self::TableLength { key, entries, tokens } => {
                write!(f, "`{key}` has {entries} entries for {tokens} tokens")
            }
            Self::TensorOutside { name, offset, bytes } => {
                write!(f, "tensor `{name}`, {bytes} bytes at offset {offset}, is not inside the file")
            }
            Self::TensorSize { name, dims } => {
                write!(f, "tensor `{name}` has dimensions {dims:?}: it is empty or too large to address")
            }
            Self::TensorType { name, type_name: "", number } => {
                write!(f, "tensor `{name}` has type {number}, which is unknown")
            }
            Self::TensorType { name, type_name, .. } => {
                write!(f, "tensor `{name}` has type {type_name}, which is not supported")
            }
            Self::Truncated { field, at } => write!(f, "the file ends inside {field}, at byte {at}"),
            Self::ValueType { key, number } => write!(f, "`{key}` has value type {number}, which is unknown"),
            Self::Version { version } => write!(f, "version is {version}; GGUF 2 and 3 are read"),
        }
    }
}

impl core::error::Error for WeightsError {}

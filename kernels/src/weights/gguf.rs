//! GGUF versions 2 and 3, little-endian, one file: header, metadata, tensor table, data.
//!
//! Nothing in a file is believed: each count, length, type, offset and product is checked before it is used, and no
//! memory is reserved from a count. The source is the format's own description, `docs/gguf.md` of ggml.

use core::ops::Range;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use super::mmap::map_file;
use super::{Format, Tensor, WeightsError};

/// An open model file. Metadata and tensors are looked up by name; tensor bytes stay in the file.
#[derive(Debug)]
pub struct Gguf {
    bytes: Bytes,
    metadata: BTreeMap<String, Stored>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// One metadata value.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// Any number of values of one type.
    Array(Array<'a>),
    /// True or false.
    Bool(bool),
    /// Any integer type of the format, widened.
    Integer(i128),
    /// F32 or F64, widened.
    Real(f64),
    /// A string; mostly UTF-8, but nothing in the format guarantees it.
    Text(&'a [u8]),
}

/// A metadata array, read in place.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    kind: Kind,
    count: usize,
    bytes: &'a [u8],
}

/// The tokenizer's tables, whose lengths agree.
#[derive(Clone, Copy, Debug)]
pub struct Vocabulary<'a> {
    /// Token texts, in id order; byte strings, not always UTF-8, and not always unique.
    pub tokens: Array<'a>,
    /// One F32 per token.
    pub scores: Option<Array<'a>>,
    /// One I32 per token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Option<Array<'a>>,
    /// Pairs `left right`, best first; each holds a space after its first byte.
    pub merges: Option<Array<'a>>,
}

impl Gguf {
    /// Maps a file and reads its header and tables.
    ///
    /// The file must not be written to while it is open: replace a model by renaming a new file over it.
    ///
    /// # Errors
    /// [`WeightsError`], naming the field of the file that is wrong.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let io = |error: std::io::Error| WeightsError::Io {
            path: path.display().to_string(),
            message: error.to_string(),
        };
        let file = File::open(path).map_err(io)?;
        Self::parse(Bytes::Mapped(map_file(&file).map_err(io)?))
    }

    /// Reads a file that is in memory.
    ///
    /// # Errors
    /// [`WeightsError`], naming the field of the file that is wrong.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, WeightsError> {
        Self::parse(Bytes::Owned(bytes))
    }

    /// Returns a metadata value.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<Value<'_>> {
        Some(match *self.metadata.get(key)? {
            Stored::Array { kind, count, ref bytes } => {
                Value::Array(Array { kind, count, bytes: &self.bytes.as_slice()[bytes.clone()] })
            }
            Stored::Bool(value) => Value::Bool(value),
            Stored::Integer(value) => Value::Integer(value),
            Stored::Real(value) => Value::Real(value),
            Stored::Text(ref bytes) => Value::Text(&self.bytes.as_slice()[bytes.clone()]),
        })
    }

    /// Returns a copy of a string; `None` where the key is absent. A copy, since text that was checked once must stay
    /// text, which a mapped file cannot promise.
    ///
    /// # Errors
    /// [`WeightsError::KeyType`] when the value is not a string of UTF-8.
    pub fn string(&self, key: &str) -> Result<Option<String>, WeightsError> {
        self.typed(key, "a string of UTF-8", |value| match value {
            Value::Text(bytes) => String::from_utf8(bytes.to_vec()).ok(),
            Value::Array(_) | Value::Bool(_) | Value::Integer(_) | Value::Real(_) => None,
        })
    }

    /// Returns an integer of any width that is not negative; `None` where the key is absent.
    ///
    /// # Errors
    /// [`WeightsError::KeyType`] when the value is no such integer.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, WeightsError> {
        self.typed(key, "an integer, 0 or more", |value| match value {
            Value::Integer(value) => u64::try_from(value).ok(),
            Value::Array(_) | Value::Bool(_) | Value::Real(_) | Value::Text(_) => None,
        })
    }

    /// Returns a floating-point number, rounded to F32; `None` where the key is absent.
    ///
    /// # Errors
    /// [`WeightsError::KeyType`] when the value is not F32 or F64.
    pub fn real(&self, key: &str) -> Result<Option<f32>, WeightsError> {
        self.typed(key, "a floating-point number", |value| match value {
            Value::Real(value) => Some(value as f32),
            Value::Array(_) | Value::Bool(_) | Value::Integer(_) | Value::Text(_) => None,
        })
    }

    /// Returns a truth value; `None` where the key is absent.
    ///
    /// # Errors
    /// [`WeightsError::KeyType`] when the value is not a Boolean.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, WeightsError> {
        self.typed(key, "a Boolean", |value| match value {
            Value::Bool(value) => Some(value),
            Value::Array(_) | Value::Integer(_) | Value::Real(_) | Value::Text(_) => None,
        })
    }

    /// Returns the tokenizer's tables; `None` where the file has no token list.
    ///
    /// # Errors
    /// [`WeightsError`] when a table has a wrong type or length, a token type is unknown, or a merge is not a pair.
    pub fn vocabulary(&self) -> Result<Option<Vocabulary<'_>>, WeightsError> {
        let Some(tokens) = self.array("tokenizer.ggml.tokens", Kind::Text)? else { return Ok(None) };
        let scores = self.array("tokenizer.ggml.scores", Kind::F32)?;
        let token_types = self.array("tokenizer.ggml.token_type", Kind::I32)?;
        let merges = self.array("tokenizer.ggml.merges", Kind::Text)?;
        for (key, table) in [("tokenizer.ggml.scores", scores), ("tokenizer.ggml.token_type", token_types)] {
            if let Some(table) = table.filter(|table| table.len() != tokens.len()) {
                return Err(WeightsError::TableLength { key, entries: table.len(), tokens: tokens.len() });
            }
        }
        let entry = |key, index, what| Err(WeightsError::TableEntry { key, index, what });
        let unknown = token_types.and_then(|types| types.i32s().position(|kind| !(1..=6).contains(&kind)));
        if let Some(index) = unknown {
            return entry("tokenizer.ggml.token_type", index, "a token type, 1 to 6");
        }
        let is_pair = |merge: &[u8]| merge.iter().skip(1).any(|&byte| byte == b' ');
        if let Some(index) = merges.and_then(|merges| merges.strings().position(|merge| !is_pair(merge))) {
            return entry("tokenizer.ggml.merges", index, "two pieces with a space between");
        }
        Ok(Some(Vocabulary { tokens, scores, token_types, merges }))
    }

    /// Returns a tensor.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let info = self.tensors.get(name)?;
        let dims = &info.dims[..info.dims_count];
        Some(Tensor { format: info.format, dims, bytes: &self.bytes.as_slice()[info.bytes.clone()] })
    }

    /// Returns the names of all tensors, in byte order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the size of the file, in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> usize {
        self.bytes.as_slice().len()
    }

    fn array(&self, key: &'static str, wanted: Kind) -> Result<Option<Array<'_>>, WeightsError> {
        self.typed(key, wanted.array_name(), |value| match value {
            Value::Array(array) => (array.kind == wanted).then_some(array),
            Value::Bool(_) | Value::Integer(_) | Value::Real(_) | Value::Text(_) => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        let Some(value) = self.metadata(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| WeightsError::KeyType { key: key.to_owned(), wanted })
    }

    fn parse(bytes: Bytes) -> Result<Self, WeightsError> {
        let mut reader = Reader { bytes: bytes.as_slice(), at: 0 };
        let (tensor_count, key_count) = reader.read_header()?;
        let metadata = reader.read_metadata(key_count)?;
        let infos = reader.read_tensor_infos(tensor_count)?;
        let table_end = reader.at;
        let mut file = Self { bytes, metadata, tensors: BTreeMap::new() };
        file.refuse_split()?;
        file.tensors = place_tensors(infos, file.alignment()?, table_end, file.file_bytes())?;
        Ok(file)
    }

    fn refuse_split(&self) -> Result<(), WeightsError> {
        match self.unsigned("split.count")? {
            None | Some(0 | 1) => Ok(()),
            Some(count) => Err(WeightsError::Split { count }),
        }
    }

    fn alignment(&self) -> Result<usize, WeightsError> {
        match self.unsigned("general.alignment")? {
            None => Ok(ALIGNMENT_DEFAULT),
            Some(bytes) if bytes.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&bytes) => {
                Ok(bytes as usize)
            }
            Some(bytes) => Err(WeightsError::Alignment { bytes }),
        }
    }
}

impl<'a> Array<'a> {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the values of an array of strings; none for another type.
    pub fn strings(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut reader = Reader { bytes: self.bytes, at: 0 };
        let count = if self.kind == Kind::Text { self.count } else { 0 };
        (0..count).map_while(move |_| reader.read_text("string length").ok().map(|text| &reader.bytes[text]))
    }

    /// Returns the values of an array of F32; none for another type.
    pub fn f32s(&self) -> impl Iterator<Item = f32> + use<'a> {
        self.words(Kind::F32).map(f32::from_le_bytes)
    }

    /// Returns the values of an array of I32; none for another type.
    pub fn i32s(&self) -> impl Iterator<Item = i32> + use<'a> {
        self.words(Kind::I32).map(i32::from_le_bytes)
    }

    fn words(&self, kind: Kind) -> impl Iterator<Item = [u8; 4]> + use<'a> {
        let bytes = if self.kind == kind { self.bytes } else { &[] };
        bytes.as_chunks().0.iter().copied()
    }
}

#[derive(Debug)]
enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A value, with the place of its bytes where it has many.
#[derive(Debug)]
enum Stored {
    Array { kind: Kind, count: usize, bytes: Range<usize> },
    Bool(bool),
    Integer(i128),
    Real(f64),
    Text(Range<usize>),
}

#[derive(Debug)]
struct TensorInfo {
    format: Format,
    dims: [u64; DIMS_MAX],
    dims_count: usize,
    /// In the file; while the table is being read, from the start of the data.
    bytes: Range<usize>,
}

/// Value types, numbered as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Text = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The least bytes that a value takes: exact, but for strings and arrays.
    fn bytes_min(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
            Self::Array => 12,
        }
    }

    fn array_name(self) -> &'static str {
        match self {
            Self::F32 => "an array of F32",
            Self::I32 => "an array of I32",
            Self::Text => "an array of strings",
            Self::U8
            | Self::I8
            | Self::U16
            | Self::I16
            | Self::U32
            | Self::Bool
            | Self::Array
            | Self::U64
            | Self::I64
            | Self::F64 => "an array",
        }
    }
}

/// Reads forward; `at <= bytes.len()` always.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn read_header(&mut self) -> Result<(u64, u64), WeightsError> {
        if self.read_array::<4>("magic")? != *b"GGUF" {
            return Err(WeightsError::Magic);
        }
        match self.read_u32("version")? {
            2 | 3 => {}
            // 2 or 3, written by a machine of the other byte order.
            version if matches!(version.swap_bytes(), 2 | 3) => return Err(WeightsError::BigEndian),
            version => return Err(WeightsError::Version { version }),
        }
        let tensor_count = self.read_u64("tensor count")?;
        let key_count = self.read_u64("key count")?;
        self.check_count("tensor count", tensor_count, TENSOR_INFO_BYTES_MIN)?;
        self.check_count("key count", key_count, KEY_VALUE_BYTES_MIN)?;
        Ok((tensor_count, key_count))
    }

    fn read_metadata(&mut self, count: u64) -> Result<BTreeMap<String, Stored>, WeightsError> {
        let mut metadata = BTreeMap::new();
        for _ in 0..count {
            let key = self.read_name("key", "key length", KEY_BYTES_MAX)?;
            let kind = self.read_kind(&key)?;
            let value = self.read_value(&key, kind)?;
            if metadata.contains_key(&key) {
                return Err(WeightsError::Duplicate { what: "metadata key", name: key });
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn read_kind(&mut self, key: &str) -> Result<Kind, WeightsError> {
        let number = self.read_u32("value type")?;
        Kind::from_number(number).ok_or_else(|| WeightsError::ValueType { key: key.to_owned(), number })
    }

    fn read_value(&mut self, key: &str, kind: Kind) -> Result<Stored, WeightsError> {
        let field = "metadata value";
        Ok(match kind {
            Kind::U8 => Stored::Integer(u8::from_le_bytes(self.read_array(field)?).into()),
            Kind::I8 => Stored::Integer(i8::from_le_bytes(self.read_array(field)?).into()),
            Kind::U16 => Stored::Integer(u16::from_le_bytes(self.read_array(field)?).into()),
            Kind::I16 => Stored::Integer(i16::from_le_bytes(self.read_array(field)?).into()),
            Kind::U32 => Stored::Integer(self.read_u32(field)?.into()),
            Kind::I32 => Stored::Integer(i32::from_le_bytes(self.read_array(field)?).into()),
            Kind::U64 => Stored::Integer(self.read_u64(field)?.into()),
            Kind::I64 => Stored::Integer(i64::from_le_bytes(self.read_array(field)?).into()),
            Kind::F32 => Stored::Real(f32::from_le_bytes(self.read_array(field)?).into()),
            Kind::F64 => Stored::Real(f64::from_le_bytes(self.read_array(field)?)),
            Kind::Bool => match self.read_array(field)? {
                [0] => Stored::Bool(false),
                [1] => Stored::Bool(true),
                [byte] => return Err(WeightsError::Boolean { key: key.to_owned(), byte }),
            },
            Kind::Text => Stored::Text(self.read_text("string length")?),
            Kind::Array => self.read_array_value(key)?,
        })
    }

    fn read_array_value(&mut self, key: &str) -> Result<Stored, WeightsError> {
        let kind = self.read_kind(key)?;
        // No key in use nests arrays, and a depth bound would be one more thing to get wrong.
        if kind == Kind::Array {
            return Err(WeightsError::NestedArray { key: key.to_owned() });
        }
        let count = self.read_u64("array length")?;
        let count = self.check_count("array length", count, kind.bytes_min())?;
        let start = self.at;
        if kind == Kind::Text {
            for _ in 0..count {
                self.read_text("string length")?;
            }
        } else {
            self.at += count * kind.bytes_min();
        }
        Ok(Stored::Array { kind, count, bytes: start..self.at })
    }

    fn read_tensor_infos(&mut self, count: u64) -> Result<BTreeMap<String, TensorInfo>, WeightsError> {
        let mut infos = BTreeMap::new();
        for _ in 0..count {
            let name = self.read_name("tensor name", "tensor name length", TENSOR_NAME_BYTES_MAX)?;
            let info = self.read_tensor_info(&name)?;
            if infos.contains_key(&name) {
                return Err(WeightsError::Duplicate { what: "tensor", name });
            }
            infos.insert(name, info);
        }
        Ok(infos)
    }

    fn read_tensor_info(&mut self, name: &str) -> Result<TensorInfo, WeightsError> {
        let dims_count = self.read_u32("dimension count")? as usize;
        if !(1..=DIMS_MAX).contains(&dims_count) {
            return Err(WeightsError::DimensionCount { name: name.to_owned(), count: dims_count });
        }
        let mut dims = [1; DIMS_MAX];
        for dim in &mut dims[..dims_count] {
            *dim = self.read_u64("dimension")?;
        }
        let number = self.read_u32("tensor type")?;
        let offset = self.read_u64("tensor offset")?;
        let format = format_of(number).ok_or_else(|| WeightsError::TensorType {
            name: name.to_owned(),
            type_name: TYPE_NAMES.get(number as usize).copied().unwrap_or(""),
            number,
        })?;
        let size = || WeightsError::TensorSize { name: name.to_owned(), dims: dims[..dims_count].to_vec() };
        let values = dims.iter().try_fold(1, |product: u64, &dim| product.checked_mul(dim));
        let values = values.and_then(|values| usize::try_from(values).ok()).filter(|&values| values > 0);
        let values = values.ok_or_else(size)?;
        if !dims[0].is_multiple_of(format.block_values() as u64) {
            return Err(WeightsError::PartBlock { name: name.to_owned(), columns: dims[0], format });
        }
        let bytes = (values / format.block_values()).checked_mul(format.block_bytes()).ok_or_else(size)?;
        let outside = || WeightsError::TensorOutside { name: name.to_owned(), offset, bytes };
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let end = start.checked_add(bytes).ok_or_else(outside)?;
        Ok(TensorInfo { format, dims, dims_count, bytes: start..end })
    }

    fn read_name(
        &mut self,
        what: &'static str,
        length: &'static str,
        bytes_max: usize,
    ) -> Result<String, WeightsError> {
        let range = self.read_text(length)?;
        let bytes = &self.bytes[range];
        if bytes.is_empty() || bytes.len() > bytes_max || bytes.contains(&0) {
            return Err(WeightsError::Name { what, bytes: bytes.len(), bytes_max });
        }
        let name = core::str::from_utf8(bytes).map_err(|_| WeightsError::NotUtf8 { what })?;
        Ok(name.to_owned())
    }

    /// Reads a length, and returns where so many bytes follow it.
    fn read_text(&mut self, length: &'static str) -> Result<Range<usize>, WeightsError> {
        let bytes = self.read_u64(length)?;
        let bytes = self.check_count(length, bytes, 1)?;
        self.at += bytes;
        Ok(self.at - bytes..self.at)
    }

    /// Returns `count` if the rest of the file could hold so many items.
    fn check_count(
        &self,
        field: &'static str,
        count: u64,
        item_bytes_min: usize,
    ) -> Result<usize, WeightsError> {
        let count_max = (self.bytes.len() - self.at) / item_bytes_min;
        let fits = usize::try_from(count).ok().filter(|&count| count <= count_max);
        fits.ok_or(WeightsError::Count { field, count, count_max })
    }

    fn read_u32(&mut self, field: &'static str) -> Result<u32, WeightsError> {
        self.read_array(field).map(u32::from_le_bytes)
    }

    fn read_u64(&mut self, field: &'static str) -> Result<u64, WeightsError> {
        self.read_array(field).map(u64::from_le_bytes)
    }

    fn read_array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WeightsError> {
        let rest = &self.bytes[self.at..];
        let Some((head, _)) = rest.split_first_chunk() else {
            return Err(WeightsError::Truncated { field, at: self.at });
        };
        self.at += N;
        Ok(*head)
    }
}

/// Turns offsets from the start of the data into places in the file, and checks them.
fn place_tensors(
    mut tensors: BTreeMap<String, TensorInfo>,
    alignment: usize,
    table_end: usize,
    file_bytes: usize,
) -> Result<BTreeMap<String, TensorInfo>, WeightsError> {
    let data_start = table_end.next_multiple_of(alignment);
    let mut by_start = Vec::new();
    for (name, info) in &mut tensors {
        let Range { start, end } = info.bytes;
        if start % alignment != 0 {
            let offset = start as u64;
            return Err(WeightsError::Misaligned { name: name.clone(), offset, alignment });
        }
        let in_file = data_start.checked_add(end).filter(|&end| end <= file_bytes);
        let Some(end_in_file) = in_file else {
            let offset = start as u64;
            return Err(WeightsError::TensorOutside { name: name.clone(), offset, bytes: end - start });
        };
        info.bytes = data_start + start..end_in_file;
        by_start.push((info.bytes.clone(), name.as_str()));
    }
    by_start.sort_unstable_by_key(|(bytes, _)| bytes.start);
    for pair in by_start.windows(2) {
        if pair[0].0.end > pair[1].0.start {
            return Err(WeightsError::Overlap { first: pair[0].1.to_owned(), second: pair[1].1.to_owned() });
        }
    }
    Ok(tensors)
}

fn format_of(number: u32) -> Option<Format> {
    Some(match number {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        8 => Format::Q8_0,
        12 => Format::Q4K,
        14 => Format::Q6K,
        30 => Format::Bf16,
        _ => return None,
    })
}

/// Names of the tensor types, by number, for refusals; an empty name is a number that was withdrawn.
const TYPE_NAMES: [&str; 40] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4",
];

const DIMS_MAX: usize = 4;
const ALIGNMENT_DEFAULT: usize = 32;
const ALIGNMENT_MAX: u64 = 1 << 16;
const KEY_BYTES_MAX: usize = 65_535;
/// The format says 64; some writers do not count the final NUL of C.
const TENSOR_NAME_BYTES_MAX: usize = 64;
/// Name length, one byte of name, dimension count, one dimension, type, offset.
const TENSOR_INFO_BYTES_MIN: usize = 8 + 1 + 4 + 8 + 4 + 8;
/// Key length, one byte of key, type, one byte of value.
const KEY_VALUE_BYTES_MIN: usize = 8 + 1 + 4 + 1;

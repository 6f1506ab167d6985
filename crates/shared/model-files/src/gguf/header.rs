//! Reads the header of a GGUF file and checks every number before it is used.

use std::{collections::HashMap, ops::Range};

use types::TensorType;

use super::{
    limits::{
        DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_ARRAY_DEPTH, MAX_DIMENSIONS, MAX_ENTRIES, MAX_KEY_BYTES,
        MAX_NAME_BYTES, MAX_STRING_BYTES, MAX_TENSORS, MAX_VALUES,
    },
    value::{Array, ShortText, Value, ValueKind},
};

/// Error in the header of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum FormatError {
    #[error("it does not begin with the bytes `GGUF`")]
    Magic,
    #[error("it has version {0}; versions 2 and 3 are supported")]
    Version(u32),
    #[error("it is big-endian; only little-endian files are supported")]
    BigEndian,
    #[error("it ends in the middle of {0}")]
    Truncated(&'static str),
    #[error("it declares {found} {what}, and the limit is {limit}")]
    TooMany { what: &'static str, found: u64, limit: u64 },
    #[error("{0} is not valid UTF-8")]
    NotUtf8(&'static str),
    #[error("metadata `{key}` has the unknown type {code}")]
    UnknownValueKind { key: String, code: u32 },
    #[error("metadata `{key}` has the boolean value {byte}, which is neither 0 nor 1")]
    NotABool { key: String, byte: u8 },
    #[error("{what} `{name}` appears twice")]
    Duplicate { what: &'static str, name: String },
    #[error("general.alignment is not a power of two between 1 and {MAX_ALIGNMENT}")]
    Alignment,
    #[error("tensor `{tensor}` has type {kind}, which is not supported")]
    UnsupportedTensorType { tensor: String, kind: String },
    #[error("tensor `{tensor}` has an empty dimension, too many elements, or rows with incomplete blocks")]
    Shape { tensor: String },
    #[error("tensor `{tensor}` does not begin at a multiple of the alignment {alignment}")]
    Unaligned { tensor: String, alignment: u64 },
    #[error("tensor `{tensor}` reaches beyond the end of the file")]
    OutOfBounds { tensor: String },
}

/// Checked tensor: `range` lies inside the file and has the size that `kind` and `dims` require.
#[derive(Debug, Clone)]
pub(super) struct TensorInfo {
    pub(super) kind: TensorType,
    pub(super) dims: Vec<usize>,
    pub(super) range: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// Offset in bytes at which the metadata and the tensor table end.
    pub(super) bytes: usize,
}

/// Tensor as declared, with an unchecked offset.
struct Declared {
    name: String,
    kind: TensorType,
    dims: Vec<usize>,
    bytes: usize,
    offset: u64,
}

impl Header {
    pub(super) fn parse(file: &[u8]) -> Result<Self, FormatError> {
        let mut cursor = Cursor { rest: file, values_left: MAX_VALUES };
        if cursor.take(4, "its first four bytes").map_err(|_| FormatError::Magic)? != b"GGUF" {
            return Err(FormatError::Magic);
        }
        match cursor.u32("its version")? {
            2 | 3 => {}
            version if (1..=3).contains(&version.swap_bytes()) => return Err(FormatError::BigEndian),
            version => return Err(FormatError::Version(version)),
        }
        let tensor_count = within("tensors", cursor.u64("its tensor count")?, MAX_TENSORS)?;
        let entry_count = within("metadata entries", cursor.u64("its metadata count")?, MAX_ENTRIES)?;
        let metadata = read_metadata(&mut cursor, entry_count)?;
        let alignment = alignment(&metadata)?;
        let declared = read_tensor_table(&mut cursor, tensor_count)?;
        let header_bytes = file.len() - cursor.rest.len();
        let tensors = place(declared, header_bytes, alignment, file.len())?;
        Ok(Self { metadata, tensors, bytes: header_bytes })
    }
}

fn within(what: &'static str, found: u64, limit: u64) -> Result<u64, FormatError> {
    if found <= limit { Ok(found) } else { Err(FormatError::TooMany { what, found, limit }) }
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<HashMap<String, Value>, FormatError> {
    let mut metadata = HashMap::new();
    for _ in 0..count {
        let key = cursor.string("a metadata key", MAX_KEY_BYTES)?;
        let kind = cursor.value_kind(&key)?;
        let value = cursor.value(&key, kind)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(FormatError::Duplicate { what: "metadata key", name: key });
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &HashMap<String, Value>) -> Result<u64, FormatError> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(value) => value
            .as_u64()
            .filter(|alignment| alignment.is_power_of_two() && *alignment <= MAX_ALIGNMENT)
            .ok_or(FormatError::Alignment),
    }
}

fn read_tensor_table(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Declared>, FormatError> {
    let mut names = std::collections::HashSet::new();
    let mut table = Vec::new();
    for _ in 0..count {
        let declared = read_tensor(cursor)?;
        if !names.insert(declared.name.clone()) {
            return Err(FormatError::Duplicate { what: "tensor", name: declared.name });
        }
        table.push(declared);
    }
    Ok(table)
}

fn read_tensor(cursor: &mut Cursor<'_>) -> Result<Declared, FormatError> {
    let name = cursor.string("a tensor name", MAX_NAME_BYTES)?;
    let dimensions = cursor.u32("a tensor's dimensions")?;
    within("dimensions of a tensor", dimensions.into(), MAX_DIMENSIONS.into())?;
    let mut dims = Vec::new();
    for _ in 0..dimensions {
        let dim = cursor.u64("a tensor's dimensions")?;
        dims.push(
            usize::try_from(dim).map_err(|_| FormatError::Shape { tensor: ShortText(&name).to_string() })?,
        );
    }
    let code = cursor.u32("a tensor's type")?;
    let kind = tensor_type(code).ok_or_else(|| FormatError::UnsupportedTensorType {
        tensor: ShortText(&name).to_string(),
        kind: tensor_type_name(code),
    })?;
    let offset = cursor.u64("a tensor's offset")?;
    let bytes =
        size(kind, &dims).ok_or_else(|| FormatError::Shape { tensor: ShortText(&name).to_string() })?;
    Ok(Declared { name, kind, dims, bytes, offset })
}

/// Returns a tensor's size in bytes; `None` if no tensor can have this shape.
fn size(kind: TensorType, dims: &[usize]) -> Option<usize> {
    let (&cols, outer) = dims.split_first()?;
    let rows = outer.iter().try_fold(1usize, |rows, &dim| rows.checked_mul(dim))?;
    if rows == 0 || cols == 0 {
        return None;
    }
    // The element count must fit too: callers multiply rows and columns.
    rows.checked_mul(cols)?;
    kind.row_bytes(cols)?.checked_mul(rows)
}

/// Turns offsets into checked ranges of the file.
fn place(
    declared: Vec<Declared>,
    header_bytes: usize,
    alignment: u64,
    file_bytes: usize,
) -> Result<Vec<(String, TensorInfo)>, FormatError> {
    let start = u64::try_from(header_bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(alignment));
    let mut tensors = Vec::with_capacity(declared.len());
    for Declared { name, kind, dims, bytes, offset } in declared {
        if !offset.is_multiple_of(alignment) {
            return Err(FormatError::Unaligned { tensor: ShortText(&name).to_string(), alignment });
        }
        let range = start
            .and_then(|start| usize::try_from(start.checked_add(offset)?).ok())
            .and_then(|begin| Some(begin..begin.checked_add(bytes)?))
            .filter(|range| range.end <= file_bytes)
            .ok_or_else(|| FormatError::OutOfBounds { tensor: ShortText(&name).to_string() })?;
        tensors.push((name, TensorInfo { kind, dims, range }));
    }
    Ok(tensors)
}

/// Unread bytes, and the number of metadata values that may still follow.
struct Cursor<'a> {
    rest: &'a [u8],
    values_left: u64,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: u64, what: &'static str) -> Result<&'a [u8], FormatError> {
        let bytes = usize::try_from(bytes).map_err(|_| FormatError::Truncated(what))?;
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(FormatError::Truncated(what))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FormatError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(FormatError::Truncated(what))?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, FormatError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, FormatError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &'static str, limit: u64) -> Result<String, FormatError> {
        let bytes = self.u64(what)?;
        // A length beyond the end of the file is reported as a broken file, not as an exceeded limit.
        if bytes <= self.rest.len() as u64 {
            within("bytes of a string", bytes, limit)?;
        }
        let text = std::str::from_utf8(self.take(bytes, what)?).map_err(|_| FormatError::NotUtf8(what))?;
        Ok(text.to_owned())
    }

    fn value_kind(&mut self, key: &str) -> Result<ValueKind, FormatError> {
        let code = self.u32("a metadata value")?;
        ValueKind::from_code(code)
            .ok_or_else(|| FormatError::UnknownValueKind { key: ShortText(key).to_string(), code })
    }

    fn value(&mut self, key: &str, kind: ValueKind) -> Result<Value, FormatError> {
        const WHAT: &str = "a metadata value";
        Ok(match kind {
            ValueKind::U8 => Value::U8(u8::from_le_bytes(self.array(WHAT)?)),
            ValueKind::I8 => Value::I8(i8::from_le_bytes(self.array(WHAT)?)),
            ValueKind::U16 => Value::U16(u16::from_le_bytes(self.array(WHAT)?)),
            ValueKind::I16 => Value::I16(i16::from_le_bytes(self.array(WHAT)?)),
            ValueKind::U32 => Value::U32(u32::from_le_bytes(self.array(WHAT)?)),
            ValueKind::I32 => Value::I32(i32::from_le_bytes(self.array(WHAT)?)),
            ValueKind::F32 => Value::F32(f32::from_le_bytes(self.array(WHAT)?)),
            ValueKind::U64 => Value::U64(u64::from_le_bytes(self.array(WHAT)?)),
            ValueKind::I64 => Value::I64(i64::from_le_bytes(self.array(WHAT)?)),
            ValueKind::F64 => Value::F64(f64::from_le_bytes(self.array(WHAT)?)),
            ValueKind::String => Value::String(self.string(WHAT, MAX_STRING_BYTES)?),
            ValueKind::Array => Value::Array(self.array_value(key, 1)?),
            ValueKind::Bool => Value::Bool(self.truth(key)?),
        })
    }

    fn truth(&mut self, key: &str) -> Result<bool, FormatError> {
        match self.array("a metadata value")? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(FormatError::NotABool { key: ShortText(key).to_string(), byte }),
        }
    }

    fn array_value(&mut self, key: &str, depth: u32) -> Result<Array, FormatError> {
        const WHAT: &str = "a metadata array";
        within("arrays inside each other", depth.into(), MAX_ARRAY_DEPTH.into())?;
        let kind = self.value_kind(key)?;
        let count = self.u64(WHAT)?;
        // Checked before the allocation: the elements must fit in the file and in the limit on all elements.
        let least = count.checked_mul(kind.min_bytes()).ok_or(FormatError::Truncated(WHAT))?;
        if least > self.rest.len() as u64 {
            return Err(FormatError::Truncated(WHAT));
        }
        self.values_left = self.values_left.checked_sub(count).ok_or(FormatError::TooMany {
            what: "metadata values in arrays",
            found: count,
            limit: MAX_VALUES,
        })?;
        let count = usize::try_from(count).map_err(|_| FormatError::Truncated(WHAT))?;
        Ok(match kind {
            ValueKind::U8 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            ValueKind::I8 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            ValueKind::U16 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            ValueKind::I16 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            ValueKind::U32 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            ValueKind::I32 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            ValueKind::U64 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            ValueKind::I64 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            ValueKind::F32 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            ValueKind::F64 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            ValueKind::Bool => Array::Bool(self.elements(count, |from| from.truth(key))?),
            ValueKind::String => {
                Array::String(self.elements(count, |from| from.string(WHAT, MAX_STRING_BYTES))?)
            }
            ValueKind::Array => Array::Array(self.elements(count, |from| from.array_value(key, depth + 1))?),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        count: usize,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, FormatError> {
        const WHAT: &str = "a metadata array";
        let bytes = count.checked_mul(N).ok_or(FormatError::Truncated(WHAT))?;
        let (numbers, _) = self.take(bytes as u64, WHAT)?.as_chunks();
        Ok(numbers.iter().map(|&number| decode(number)).collect())
    }

    fn elements<T>(
        &mut self,
        count: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, FormatError>,
    ) -> Result<Vec<T>, FormatError> {
        let mut elements = Vec::with_capacity(count);
        for _ in 0..count {
            elements.push(read(self)?);
        }
        Ok(elements)
    }
}

/// Returns the tensor type that a file stores as `code`, if the executor computes with it.
fn tensor_type(code: u32) -> Option<TensorType> {
    Some(match code {
        0 => TensorType::F32,
        1 => TensorType::F16,
        2 => TensorType::Q4_0,
        3 => TensorType::Q4_1,
        6 => TensorType::Q5_0,
        7 => TensorType::Q5_1,
        8 => TensorType::Q8_0,
        12 => TensorType::Q4K,
        13 => TensorType::Q5K,
        14 => TensorType::Q6K,
        30 => TensorType::Bf16,
        39 => TensorType::Mxfp4,
        _ => return None,
    })
}

/// Returns llama.cpp's name of a tensor type that the executor does not compute with.
fn tensor_type_name(code: u32) -> String {
    let name = match code {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => return format!("number {code}"),
    };
    name.to_owned()
}

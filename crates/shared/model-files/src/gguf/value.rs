//! Metadata values of a GGUF file.

use std::fmt;

/// Stored type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Unsigned integer of 8 bits.
    U8,
    /// Signed integer of 8 bits.
    I8,
    /// Unsigned integer of 16 bits.
    U16,
    /// Signed integer of 16 bits.
    I16,
    /// Unsigned integer of 32 bits.
    U32,
    /// Signed integer of 32 bits.
    I32,
    /// Float of single precision.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// UTF-8 text after its length.
    String,
    /// Elements of one kind, after that kind and their count.
    Array,
    /// Unsigned integer of 64 bits.
    U64,
    /// Signed integer of 64 bits.
    I64,
    /// Float of double precision.
    F64,
}

impl ValueKind {
    /// Returns the kind that a file stores as `code`.
    pub(super) fn from_code(code: u32) -> Option<Self> {
        const BY_CODE: [ValueKind; 13] = [
            ValueKind::U8,
            ValueKind::I8,
            ValueKind::U16,
            ValueKind::I16,
            ValueKind::U32,
            ValueKind::I32,
            ValueKind::F32,
            ValueKind::Bool,
            ValueKind::String,
            ValueKind::Array,
            ValueKind::U64,
            ValueKind::I64,
            ValueKind::F64,
        ];
        BY_CODE.get(usize::try_from(code).ok()?).copied()
    }

    /// Returns the minimum number of bytes that a value of this kind takes in a file.
    pub(super) fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// Metadata value of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants say what they hold")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// Elements of an array, all of one kind. Each element takes only the memory of its kind: as [`Value`]s,
/// the bytes of a file would take four to thirty times as much memory.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants say what they hold")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

impl Array {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::F64(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
        }
    }

    /// True if the array has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements as integers; `None` if they are not integers, or one does not fit.
    #[must_use]
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        Some(match self {
            Self::U8(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I8(v) => v.iter().map(|&v| v.into()).collect(),
            Self::U16(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I16(v) => v.iter().map(|&v| v.into()).collect(),
            Self::U32(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I32(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I64(v) => v.clone(),
            Self::U64(v) => return v.iter().map(|&v| v.try_into().ok()).collect(),
            // An empty list has no element type, so it converts to a list of any type.
            other => return other.is_empty().then(Vec::new),
        })
    }

    /// Returns the elements as floats of single precision; `None` if they are not floats.
    #[must_use]
    pub fn to_f32s(&self) -> Option<Vec<f32>> {
        match self {
            Self::F32(v) => Some(v.clone()),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "rounding to single precision is what is asked"
            )]
            Self::F64(v) => Some(v.iter().map(|&v| v as f32).collect()),
            other => other.is_empty().then(Vec::new),
        }
    }

    /// Returns the elements as texts; `None` if they are not texts.
    #[must_use]
    pub fn as_strs(&self) -> Option<Vec<&str>> {
        match self {
            Self::String(v) => Some(v.iter().map(String::as_str).collect()),
            other => other.is_empty().then(Vec::new),
        }
    }
}

impl Value {
    /// Returns the value as an integer, if it is an integer of any width that fits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::I8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::I64(v) => Some(v),
            Self::U64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// Returns the value as an integer, if it is an integer of any width and not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U64(v) => Some(v),
            _ => self.as_i64()?.try_into().ok(),
        }
    }

    /// Returns the value as a float, if it is a float of either width.
    #[must_use]
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "rounding to single precision is what is asked"
            )]
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// Returns the value if it is a Boolean.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// Returns the value if it is a text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(v) = self { Some(v) } else { None }
    }

    /// Returns the elements if the value is an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&Array> {
        if let Self::Array(v) = self { Some(v) } else { None }
    }

    /// Describes the value, short enough for a message.
    pub(super) fn summary(&self) -> String {
        match self {
            Self::String(text) => format!("the string \"{}\"", ShortText(text)),
            Self::Array(elements) => format!("an array of {} elements", elements.len()),
            scalar => format!("{scalar:?}"),
        }
    }
}

/// Text of a file, escaped and cut for messages.
pub(super) struct ShortText<'a>(pub(super) &'a str);

impl fmt::Display for ShortText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 64;
        for character in self.0.chars().take(SHOWN) {
            write!(f, "{}", character.escape_debug())?;
        }
        if self.0.chars().nth(SHOWN).is_some() { f.write_str("...") } else { Ok(()) }
    }
}

//! Metadata values of a GGUF file.

use std::fmt;

/// The stored type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// 8 bits, unsigned.
    U8,
    /// 8 bits, signed.
    I8,
    /// 16 bits, unsigned.
    U16,
    /// 16 bits, signed.
    I16,
    /// 32 bits, unsigned.
    U32,
    /// 32 bits, signed.
    I32,
    /// Single precision.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// UTF-8 behind its length.
    String,
    /// Elements of one kind behind that kind and their count.
    Array,
    /// 64 bits, unsigned.
    U64,
    /// 64 bits, signed.
    I64,
    /// Double precision.
    F64,
}

impl ValueKind {
    /// The kind a file means by `code`.
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

    /// The fewest bytes a value of this kind takes in a file.
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

/// A metadata value.
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

/// The elements of an array, all of one kind. Each takes the memory its kind takes: a file of bytes must not grow into
/// one of [`Value`]s, which are four to thirty times as large.
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
    /// Elements.
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

    /// True if there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers; `None` if they are none, or one does not fit.
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
            // An empty list is one of anything.
            other => return other.is_empty().then(Vec::new),
        })
    }

    /// The elements as floats of single precision; `None` if they are none.
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

    /// The elements as texts; `None` if they are none.
    #[must_use]
    pub fn as_strs(&self) -> Option<Vec<&str>> {
        match self {
            Self::String(v) => Some(v.iter().map(String::as_str).collect()),
            other => other.is_empty().then(Vec::new),
        }
    }
}

impl Value {
    /// The integer this is, of any width.
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

    /// The integer this is, of any width, if it is not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U64(v) => Some(v),
            _ => self.as_i64()?.try_into().ok(),
        }
    }

    /// The float this is, of either width.
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

    /// The truth value this is.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// The text this is.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(v) = self { Some(v) } else { None }
    }

    /// The elements of the array this is.
    #[must_use]
    pub fn as_array(&self) -> Option<&Array> {
        if let Self::Array(v) = self { Some(v) } else { None }
    }

    /// What this is, short enough for a message.
    pub(super) fn summary(&self) -> String {
        match self {
            Self::String(text) => format!("the string \"{}\"", ShortText(text)),
            Self::Array(elements) => format!("an array of {} elements", elements.len()),
            scalar => format!("{scalar:?}"),
        }
    }
}

/// A text of a file, escaped and cut for messages.
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

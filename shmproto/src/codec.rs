//! Fixed-order little-endian encoding.
//!
//! A value is encoded as its fields in order; a sequence begins with a `u32` count. The decoder checks each
//! count against the bytes left in the message before it allocates, so a hostile count costs nothing.

/// Error of bytes that do not encode the expected message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message ends inside a field.
    #[error("message ends early: {wanted} more bytes were expected, {left} are left")]
    Truncated {
        /// Number of bytes that the field needs.
        wanted: usize,
        /// Number of bytes that are left.
        left: usize,
    },
    /// The tag names no variant.
    #[error("{what} has no variant {tag}")]
    UnknownTag {
        /// Name of the enum that was read.
        what: &'static str,
        /// Tag in the message.
        tag: u8,
    },
    /// The bytes of a string are not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
    /// Bytes remain after the last field.
    #[error("{0} bytes follow the end of the message")]
    Trailing(usize),
}

/// Unread rest of a message.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts reading at the beginning of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Takes the next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or(DecodeError::Truncated { wanted: count, left: self.rest.len() })?;
        self.rest = rest;
        Ok(head)
    }

    /// Checks that every byte was read.
    pub fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError::Trailing(self.rest.len())) }
    }
}

/// Value with exactly one encoding.
pub trait Wire: Sized {
    /// Smallest number of bytes of any value; bounds the count of a sequence before it is allocated.
    const MIN_BYTES: usize;

    /// Appends the encoding to `out`.
    fn put(&self, out: &mut Vec<u8>);

    /// Reads a value from the front.
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError>;

    /// Returns the encoding as new bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        self.put(&mut out);
        out
    }

    /// Reads a value that must fill `bytes` exactly.
    fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let value = Self::get(&mut reader)?;
        reader.finish()?;
        Ok(value)
    }
}

macro_rules! wire_number {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            const MIN_BYTES: usize = size_of::<$type>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                let mut bytes = [0; size_of::<$type>()];
                bytes.copy_from_slice(from.take(size_of::<$type>())?);
                Ok(Self::from_le_bytes(bytes))
            }
        }
    )*};
}
wire_number!(u8, u16, u32, u64, i32, f32);

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    const MIN_BYTES: usize = N * T::MIN_BYTES;
    fn put(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|item| item.put(out));
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut items = [T::default(); N];
        for item in &mut items {
            *item = T::get(from)?;
        }
        Ok(items)
    }
}

impl Wire for String {
    const MIN_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        put_count(self.len(), out);
        out.extend_from_slice(self.as_bytes());
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count = u32::get(from)? as usize;
        let bytes = from.take(count)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| DecodeError::NotUtf8)
    }
}

impl<T: Wire> Wire for Vec<T> {
    const MIN_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        put_count(self.len(), out);
        for item in self {
            item.put(out);
        }
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count = u32::get(from)? as usize;
        let wanted = count.saturating_mul(T::MIN_BYTES.max(1));
        if wanted > from.rest.len() {
            return Err(DecodeError::Truncated { wanted, left: from.rest.len() });
        }
        // The capacity is exactly the checked count; growth by doubling would briefly take three times that.
        let mut items = Self::with_capacity(count);
        for _ in 0..count {
            items.push(T::get(from)?);
        }
        Ok(items)
    }
}

impl<T: Wire> Wire for Option<T> {
    const MIN_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            None => out.push(0),
            Some(value) => {
                out.push(1);
                value.put(out);
            }
        }
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match u8::get(from)? {
            0 => Ok(None),
            1 => Ok(Some(T::get(from)?)),
            tag => Err(DecodeError::UnknownTag { what: "Option", tag }),
        }
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    const MIN_BYTES: usize = A::MIN_BYTES + B::MIN_BYTES;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok((A::get(from)?, B::get(from)?))
    }
}

fn put_count(count: usize, out: &mut Vec<u8>) {
    // Messages are built from bounded parts, so no sequence has 2^32 items.
    let count = u32::try_from(count).expect("a sequence has fewer than 2^32 items");
    count.put(out);
}

/// Implements [`Wire`] for a struct: its fields in order.
#[macro_export]
macro_rules! wire_struct {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident : $type:ty),* $(,)? }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$fmeta])* pub $field: $type),* }
        impl $crate::codec::Wire for $name {
            const MIN_BYTES: usize = 0 $(+ <$type as $crate::codec::Wire>::MIN_BYTES)*;
            fn put(&self, out: &mut Vec<u8>) { $(self.$field.put(out);)* }
            fn get(from: &mut $crate::codec::Reader<'_>) -> Result<Self, $crate::codec::DecodeError> {
                Ok(Self { $($field: <$type as $crate::codec::Wire>::get(from)?),* })
            }
        }
    };
}

/// Implements [`Wire`] for an enum: a tag byte, then the variant's value, if any.
#[macro_export]
macro_rules! wire_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$vmeta:meta])* $variant:ident $(($type:ty))? = $tag:literal),* $(,)? }) => {
        $(#[$meta])*
        pub enum $name { $($(#[$vmeta])* $variant $(($type))?),* }
        impl $crate::codec::Wire for $name {
            const MIN_BYTES: usize = 1;
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $($crate::wire_enum!(@pattern $name $variant value $($type)?) => {
                        out.push($tag);
                        $($crate::wire_enum!(@put value out $type);)?
                    })*
                }
            }
            fn get(from: &mut $crate::codec::Reader<'_>) -> Result<Self, $crate::codec::DecodeError> {
                match <u8 as $crate::codec::Wire>::get(from)? {
                    $($tag => Ok(Self::$variant $((<$type as $crate::codec::Wire>::get(from)?))?),)*
                    tag => Err($crate::codec::DecodeError::UnknownTag { what: stringify!($name), tag }),
                }
            }
        }
    };
    (@pattern $name:ident $variant:ident $value:ident $type:ty) => { $name::$variant($value) };
    (@pattern $name:ident $variant:ident $value:ident) => { $name::$variant };
    (@put $value:ident $out:ident $type:ty) => { $crate::codec::Wire::put($value, $out) };
}

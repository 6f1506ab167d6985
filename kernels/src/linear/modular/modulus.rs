//! Modulus of the integers in rows.

/// Modulus of the modular path: rows are integers modulo a power of two, contiguous and little-endian.
///
/// Fewer bytes are faster in every respect but leave fewer bits for a row and the sums of its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modulus {
    /// 2^48, six bytes per integer.
    Bits48,
    /// 2^64, eight bytes per integer.
    Bits64,
}

impl Modulus {
    /// All moduli of the modular path.
    pub const ALL: [Self; 2] = [Self::Bits48, Self::Bits64];

    /// Returns the bits per integer.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Bits48 => 48,
            Self::Bits64 => 64,
        }
    }

    /// Returns the 32-bit words of `numbers` integers, whose bytes must fill whole words.
    #[must_use]
    pub const fn words(self, numbers: usize) -> usize {
        numbers * self.bytes() / 4
    }

    /// Returns the bytes per integer.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.bits() as usize / 8
    }
}

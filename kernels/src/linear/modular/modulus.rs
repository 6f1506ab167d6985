//! What numbers of rows are taken modulo.

/// Rows of the ring path are whole numbers modulo a power of two: of so many bytes each, the lowest first, one behind the other.
///
/// Fewer bytes are faster in every respect, but for the bits that they leave for a row and the sums of its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modulus {
    /// 2^48.
    Bits48,
    /// 2^64.
    Bits64,
}

impl Modulus {
    /// Each of them.
    pub const ALL: [Self; 2] = [Self::Bits48, Self::Bits64];

    /// Bits of a number.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Bits48 => 48,
            Self::Bits64 => 64,
        }
    }

    /// Words of 32 bits that so many numbers are, which are as many as whole words hold.
    #[must_use]
    pub const fn words(self, numbers: usize) -> usize {
        numbers * self.bytes() / 4
    }

    /// Bytes of a number.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.bits() as usize / 8
    }
}

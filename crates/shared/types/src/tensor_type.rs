//! Element types of stored tensors and how many bytes they take.

/// How the elements of a stored tensor are encoded. Quantized types group elements of a row in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// IEEE single precision, 32 bits.
    F32,
    /// IEEE half precision, 16 bits.
    F16,
    /// Brain float: the upper 16 bits of a single.
    Bf16,
    /// 32 signed 4-bit values and a scale.
    Q4_0,
    /// 32 unsigned 4-bit values, a scale and a minimum.
    Q4_1,
    /// 32 signed 5-bit values and a scale.
    Q5_0,
    /// 32 unsigned 5-bit values, a scale and a minimum.
    Q5_1,
    /// 32 signed 8-bit values and a scale.
    Q8_0,
    /// Super-block of 256: 8 groups of 4-bit values with 6-bit scales and minima.
    Q4K,
    /// Super-block of 256: 8 groups of 5-bit values with 6-bit scales and minima.
    Q5K,
    /// Super-block of 256: 16 groups of 6-bit values with 8-bit scales.
    Q6K,
    /// 32 floats of 4 bits (E2M1) and a power of two (OCP Microscaling).
    Mxfp4,
}

impl TensorType {
    /// Returns the number of elements in one block.
    #[must_use]
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the number of bytes in one block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Mxfp4 => 17,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the bytes of a row of `elements`; `None` for an incomplete block or on overflow.
    #[must_use]
    pub const fn row_bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

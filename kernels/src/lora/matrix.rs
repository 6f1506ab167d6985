//! One adapted layer in shared memory: an adapter's sealed image, or a vector in a test.

use std::{fmt, sync::Arc};

use super::{
    layout::{LayoutError, MatrixLayout},
    pieces::FactorCut,
};

/// Shared memory that is never written, alive while any user holds it.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// One adapted linear layer, ready for the kernels.
#[derive(Clone)]
pub struct LoraMatrix {
    bytes: SharedBytes,
    layout: MatrixLayout,
}

impl LoraMatrix {
    /// Returns the layer that `layout`, which need not be trusted, describes within `bytes`.
    ///
    /// # Errors
    /// Fails if the layout does not fit `bytes` or the kernels.
    pub fn over(bytes: &SharedBytes, layout: MatrixLayout) -> Result<Self, LayoutError> {
        layout.check((**bytes).as_ref().len())?;
        Ok(Self { bytes: Arc::clone(bytes), layout })
    }

    /// Returns the true rank, without padding.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.layout.rank
    }

    /// Returns the number of input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.layout.columns
    }

    /// Returns the number of output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Returns the bytes of both factors.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.a_bytes() + self.layout.b_bytes()
    }

    /// Returns the memory of both factors.
    #[must_use]
    pub fn shared_bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Returns shape, scale and offsets.
    #[must_use]
    pub fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// Returns the bytes of both factors.
    ///
    /// # Panics
    /// Panics if the memory has become shorter since it was checked.
    pub(crate) fn factors(&self) -> [&[u8]; 2] {
        let bytes = (*self.bytes).as_ref();
        let MatrixLayout { a, b, .. } = self.layout;
        [&bytes[a.offset..][..self.layout.a_bytes()], &bytes[b.offset..][..self.layout.b_bytes()]]
    }
}

impl fmt::Debug for LoraMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.layout.fmt(f)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Address(pub(super) *mut u8);

// SAFETY: an address alone gives no access; each access has its own SAFETY comment.
unsafe impl Send for Address {}
// SAFETY: an address alone gives no access; each access has its own SAFETY comment.
unsafe impl Sync for Address {}

/// A factor as kernels read it: contiguous, or in pieces, of which those of leading ranks may be missing.
#[derive(Clone, Copy)]
pub(super) enum FactorView<'a> {
    /// All rank blocks, contiguous in memory.
    Whole(&'a [u8]),
    /// Addresses of pieces, by rank block and then by number.
    Pieces(FactorCut, &'a [Address]),
}

impl FactorView<'_> {
    #[inline(always)]
    pub(super) fn cut(&self) -> FactorCut {
        match *self {
            Self::Whole(_) => FactorCut::WHOLE,
            Self::Pieces(cut, _) => cut,
        }
    }

    /// Returns the address of a rank block's piece; `before` is the block's offset in a contiguous factor.
    #[inline(always)]
    pub(super) fn piece(&self, rank_block: usize, number: usize, before: usize) -> *const u8 {
        match *self {
            Self::Whole(bytes) => bytes.as_ptr().wrapping_add(before),
            Self::Pieces(cut, pieces) => pieces[rank_block * cut.count + number].0,
        }
    }
}

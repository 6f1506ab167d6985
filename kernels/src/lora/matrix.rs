//! One adapted layer over memory that is shared: an adapter's sealed image, or a vector in a test.

use std::{fmt, sync::Arc};

use super::{
    layout::{LayoutError, MatrixLayout},
    pieces::FactorCut,
};

/// Memory that nobody writes while it is shared, kept for as long as anything uses it.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// One adapted linear layer, ready for the kernels.
#[derive(Clone)]
pub struct LoraMatrix {
    bytes: SharedBytes,
    layout: MatrixLayout,
}

impl LoraMatrix {
    /// The layer that `layout` describes within `bytes`. The layout need not be trusted; the numbers may be any.
    ///
    /// # Errors
    ///
    /// The layout does not fit `bytes` or the kernels.
    pub fn over(bytes: &SharedBytes, layout: MatrixLayout) -> Result<Self, LayoutError> {
        layout.check((**bytes).as_ref().len())?;
        Ok(Self { bytes: Arc::clone(bytes), layout })
    }

    /// The true rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.layout.rank
    }

    /// Input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.layout.columns
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Bytes of both factors.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.a_bytes() + self.layout.b_bytes()
    }

    /// The memory both factors lie in.
    #[must_use]
    pub fn shared_bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Shape, scale and place.
    #[must_use]
    pub fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// Both factors.
    ///
    /// # Panics
    ///
    /// If the memory has become shorter since it was checked.
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

/// Memory that kernels read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address(pub(super) *mut u8);

// SAFETY: an address is no access; who reads or writes there says why it may.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A factor as kernels read it: in one, in shared memory, or in pieces on the device, of which those of the first ranks may be
/// missing.
#[derive(Clone, Copy)]
pub(super) enum FactorView<'a> {
    /// Rank blocks one behind the other.
    Whole(&'a [u8]),
    /// Where each piece is, by rank block and then by number.
    Pieces(FactorCut, &'a [Address]),
}

impl FactorView<'_> {
    /// How it is cut.
    #[inline(always)]
    pub(super) fn cut(&self) -> FactorCut {
        match *self {
            Self::Whole(_) => FactorCut::WHOLE,
            Self::Pieces(cut, _) => cut,
        }
    }

    /// Where a rank block's piece begins, before which the factor has so many bytes if it is whole.
    #[inline(always)]
    pub(super) fn piece(&self, rank_block: usize, number: usize, before: usize) -> *const u8 {
        match *self {
            Self::Whole(bytes) => bytes.as_ptr().wrapping_add(before),
            Self::Pieces(cut, pieces) => pieces[rank_block * cut.count + number].0,
        }
    }
}

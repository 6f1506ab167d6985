//! One adapted layer over memory that is shared: an adapter's sealed image, or a vector in a test.

use std::{fmt, marker::PhantomData, sync::Arc};

use super::layout::{LayoutError, MatrixLayout};

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

/// Where a layer's factors are: in shared memory or on the device, where the first ranks may be missing.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    pub(super) a: *const u8,
    pub(super) b: *const u8,
    memory: PhantomData<&'a [u8]>,
}

impl Factors<'_> {
    /// A and B.
    pub(super) fn new([a, b]: [*const u8; 2]) -> Self {
        Self { a, b, memory: PhantomData }
    }
}

//! The matrices of an adapter's experts, in the host tier.
//!
//! A pass finds out at the router which experts a row takes, so neither helpers nor copies to a device can
//! begin early. Therefore these matrices stay in ordinary memory, and the threads of the pass compute with
//! them.

use kernels::lora::{LayoutError, LoraMatrix, SharedBytes};

use crate::{deltas::matrices::ModuleLayout, shape::source::Target};

/// Matrices of experts, at their true ranks.
#[derive(Debug, Default)]
pub struct ExpertMatrices {
    /// Sorted by layer, then target.
    matrices: Vec<((usize, Target), LoraMatrix)>,
    rank: usize,
    bytes: usize,
}

impl ExpertMatrices {
    /// Finds the matrices in `bytes` as described by `modules`, which are sorted by layer, then target.
    ///
    /// # Errors
    ///
    /// A matrix does not lie within `bytes`.
    pub(crate) fn over(modules: &[ModuleLayout], bytes: &SharedBytes) -> Result<Self, LayoutError> {
        let mut experts = Self::default();
        for &ModuleLayout { layer, target, matrix } in modules {
            let matrix = LoraMatrix::over(bytes, matrix)?;
            experts.rank = experts.rank.max(matrix.rank());
            experts.bytes += matrix.bytes();
            experts.matrices.push(((layer, target), matrix));
        }
        Ok(experts)
    }

    /// Returns the matrices of an expert's linear layer, if it is adapted.
    #[must_use]
    pub fn get(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        let at = self.matrices.binary_search_by_key(&(layer, target), |(place, _)| *place).ok()?;
        Some(&self.matrices[at].1)
    }

    /// True if no expert is adapted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    /// Returns the largest rank, or 0 without matrices.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the bytes of all matrices.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

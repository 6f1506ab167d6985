//! The matrices of an adapter on the host, by linear layer in the order of a pass.

use kernels::lora::{LayoutError, LoraMatrix, MatrixLayout, SharedBytes};

use crate::shape::{layout::BLOCK_TARGETS, source::Target};

/// Place of a linear layer's matrices in the bytes of an adapter.
#[derive(Debug, Clone, Copy)]
pub struct ModuleLayout {
    /// Transformer block; 0 for the head.
    pub layer: usize,
    /// Linear layer of the block, or the head.
    pub target: Target,
    /// Shapes, element types and offsets.
    pub matrix: MatrixLayout,
}

/// Number of an adapter image, by which workers name it; never reused in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageNumber(pub u64);

impl ImageNumber {
    /// Number for bytes in ordinary memory, which only this process can read.
    pub const NONE: Self = Self(0);
}

#[derive(Debug)]
pub(crate) struct ByLayer<T> {
    /// Values by layer and target.
    blocks: Vec<[Option<T>; BLOCK_TARGETS.len()]>,
    head: Option<T>,
}

impl<T> ByLayer<T> {
    pub(crate) fn new(layers: usize) -> Self {
        Self { blocks: (0..layers).map(|_| [const { None }; BLOCK_TARGETS.len()]).collect(), head: None }
    }

    pub(crate) fn layers(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn set(&mut self, layer: usize, target: Target, value: T) {
        match target.index_in_block() {
            Some(index) => self.blocks[layer][index] = Some(value),
            None => {
                debug_assert!(target == Target::LmHead, "experts have matrices of their own");
                self.head = Some(value);
            }
        }
    }

    pub(crate) fn get(&self, layer: usize, target: Target) -> Option<&T> {
        match target.index_in_block() {
            Some(index) => self.blocks.get(layer)?[index].as_ref(),
            None => self.head.as_ref().filter(|_| target == Target::LmHead),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Target, &T)> {
        let blocks = self.blocks.iter().enumerate().flat_map(|(layer, targets)| {
            let present = BLOCK_TARGETS.iter().zip(targets);
            present.filter_map(move |(&target, value)| Some((layer, target, value.as_ref()?)))
        });
        blocks.chain(self.head.as_ref().map(|value| (0, Target::LmHead, value)))
    }
}

/// All matrices of an adapter, at their true ranks.
#[derive(Debug)]
pub struct HostMatrices {
    by_layer: ByLayer<LoraMatrix>,
    image: ImageNumber,
    rank: usize,
    bytes: usize,
}

impl HostMatrices {
    /// Finds the matrices in `bytes` as described by `modules`, for a model of `layers` blocks.
    ///
    /// # Errors
    ///
    /// A matrix does not lie within `bytes`.
    pub(crate) fn over(
        modules: &[ModuleLayout],
        layers: usize,
        image: ImageNumber,
        bytes: &SharedBytes,
    ) -> Result<Self, LayoutError> {
        let mut host = Self { by_layer: ByLayer::new(layers), image, rank: 0, bytes: 0 };
        for module in modules {
            let matrix = LoraMatrix::over(bytes, module.matrix)?;
            host.rank = host.rank.max(matrix.rank());
            host.bytes += matrix.bytes();
            host.by_layer.set(module.layer, module.target, matrix);
        }
        Ok(host)
    }

    /// Returns the matrices of a linear layer, if it is adapted.
    #[must_use]
    pub fn get(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        self.by_layer.get(layer, target)
    }

    /// Returns the adapted linear layers in the order of a pass.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Target, &LoraMatrix)> {
        self.by_layer.iter()
    }

    pub(crate) fn layers(&self) -> usize {
        self.by_layer.layers()
    }

    /// Returns the image number for workers.
    #[must_use]
    pub fn image(&self) -> ImageNumber {
        self.image
    }

    /// Returns the adapter image that holds the matrices, or `None` if they lie in ordinary memory.
    #[must_use]
    pub fn image_bytes(&self) -> Option<&SharedBytes> {
        let (_, _, first) = self.iter().next()?;
        (self.image != ImageNumber::NONE).then(|| first.shared_bytes())
    }

    /// Returns the largest rank of all matrices.
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

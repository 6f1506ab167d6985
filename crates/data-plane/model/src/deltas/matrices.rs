//! The matrices of an adapter on the host, linear layer by linear layer in the order of a pass.

use kernels::lora::{LayoutError, LoraMatrix, MatrixLayout, SharedBytes};

use crate::shape::{layout::BLOCK_TARGETS, source::Target};

/// Where a linear layer's matrices lie in the bytes of an adapter.
#[derive(Debug, Clone, Copy)]
pub struct ModuleLayout {
    /// Transformer block; 0 for the head.
    pub layer: usize,
    /// Which of the block's linear layers, or the head.
    pub target: Target,
    /// Shapes, number formats, places.
    pub matrix: MatrixLayout,
}

/// What an image is called among those who compute with it; never used twice in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageNumber(pub u64);

impl ImageNumber {
    /// Of bytes in ordinary memory, which only this process can read.
    pub const NONE: Self = Self(0);
}

/// One thing for each linear layer that an adapter changes.
#[derive(Debug)]
pub(crate) struct ByLayer<T> {
    /// `[layer][target]`.
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
        match target {
            Target::LmHead => self.head = Some(value),
            target => self.blocks[layer][target as usize] = Some(value),
        }
    }

    pub(crate) fn get(&self, layer: usize, target: Target) -> Option<&T> {
        match target {
            Target::LmHead => self.head.as_ref(),
            target => self.blocks.get(layer)?[target as usize].as_ref(),
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
    /// The matrices that lie in `bytes` as `modules` say, for a model of `layers` blocks.
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

    /// The matrices of a linear layer, if it is adapted.
    #[must_use]
    pub fn get(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        self.by_layer.get(layer, target)
    }

    /// The linear layers there are, in the order of a pass.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Target, &LoraMatrix)> {
        self.by_layer.iter()
    }

    /// Blocks of the model, adapted or not.
    pub(crate) fn layers(&self) -> usize {
        self.by_layer.layers()
    }

    /// What the bytes are called among workers.
    #[must_use]
    pub fn image(&self) -> ImageNumber {
        self.image
    }

    /// The mapping of its own that they lie in; `None` if they lie in ordinary memory.
    #[must_use]
    pub fn image_bytes(&self) -> Option<&SharedBytes> {
        let (_, _, first) = self.iter().next()?;
        (self.image != ImageNumber::NONE).then(|| first.shared_bytes())
    }

    /// The largest rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

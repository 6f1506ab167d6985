//! Mixtures of experts: feed-forwards of which each row takes a few, as a router says.

/// Most experts of a block.
pub const MAX_EXPERTS: usize = 1 << 10;
/// Most experts of all blocks: two sites each, of which an executor tells clients.
pub const MAX_EXPERTS_OF_MODEL: usize = 1 << 14;

/// Which expert of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId(pub u16);

/// A linear layer of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertPart {
    /// `[width, hidden]`.
    Gate,
    /// `[width, hidden]`.
    Up,
    /// `[hidden, width]`.
    Down,
}

impl ExpertPart {
    /// All of them, in the order of a pass.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// The experts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// How many a block has.
    pub count: usize,
    /// How many of them a row takes.
    pub chosen: usize,
    /// Width of their middle.
    pub width: usize,
    /// The weights of those that a row takes are made to add up to 1.
    pub normalized: bool,
    /// Blocks with a plain feed-forward all the same; ascending.
    pub dense_layers: Vec<usize>,
}

impl Experts {
    /// The experts there are, in their order.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> + use<> {
        // No more than `MAX_EXPERTS`.
        (0..self.count as u16).map(ExpertId)
    }

    /// Blocks that have experts, of the first so many.
    #[must_use]
    pub fn layers_below(&self, layer: usize) -> usize {
        layer - self.dense_layers.partition_point(|&dense| dense < layer)
    }
}

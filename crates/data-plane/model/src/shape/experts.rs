//! Mixtures of experts: several feed-forwards, of which a router chooses a few for each row.

/// Maximum number of experts per block.
pub const MAX_EXPERTS: usize = 1 << 10;
/// Maximum number of experts in all blocks; each has two sites in the catalog for clients.
pub const MAX_EXPERTS_OF_MODEL: usize = 1 << 14;

/// Number of an expert in its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId(pub u16);

/// Linear layer of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertPart {
    /// Gate matrix, shape `[width, hidden]`.
    Gate,
    /// Up matrix, shape `[width, hidden]`.
    Up,
    /// Down matrix, shape `[hidden, width]`.
    Down,
}

impl ExpertPart {
    /// All parts in the order of a pass.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// Linear layer of an expert that an adapter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertTarget {
    /// Gate and up with common factors, outputs `[gate | up]`.
    GateUp,
    /// Gate with factors of its own.
    Gate,
    /// Up with factors of its own.
    Up,
    /// Down, from the width to the hidden size.
    Down,
}

/// Configuration of a model's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Number of experts per block.
    pub count: usize,
    /// Number of experts per row.
    pub chosen: usize,
    /// Width of an expert's feed-forward.
    pub width: usize,
    /// Whether the weights of a row's experts are normalized to a sum of 1.
    pub normalized: bool,
    /// Blocks with a plain feed-forward instead, ascending.
    pub dense_layers: Vec<usize>,
}

impl Experts {
    /// Returns the numbers of a block's experts, ascending.
    pub fn ids(&self) -> impl Iterator<Item = ExpertId> + use<> {
        // The count is at most `MAX_EXPERTS`.
        (0..self.count as u16).map(ExpertId)
    }

    /// Returns how many of the first `layer` blocks have experts.
    #[must_use]
    pub fn layers_below(&self, layer: usize) -> usize {
        layer - self.dense_layers.partition_point(|&dense| dense < layer)
    }
}

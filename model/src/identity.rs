//! What tells one base from another: adapters, keys and values of one are worth nothing with the other.

use crate::{
    config::ModelConfig,
    layout::BLOCK_TARGETS,
    source::{Target, TensorId, WeightSource},
};

/// Bytes of each tensor that enter the identity, besides its shape.
const IDENTITY_BYTES: usize = 4096;

/// Hash of the configuration, and of each tensor's shape and first bytes: enough to tell two bases apart without
/// reading a large file twice.
#[must_use]
pub fn of_base(source: &dyn WeightSource) -> [u8; 32] {
    let mut identity = Identity::new();
    let config: &ModelConfig = source.config();
    identity.0.update(format!("{config:?}").as_bytes());
    let layers =
        (0..config.layers).flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Weight(layer, target)));
    let ends = [TensorId::TokenEmbedding, TensorId::OutputNorm, TensorId::Weight(0, Target::LmHead)];
    for id in layers.chain(ends) {
        if let Some(tensor) = source.tensor(id) {
            let shape = format!("{id:?} {:?} {} {}", tensor.kind, tensor.rows, tensor.cols);
            identity.add(&shape, &tensor.data);
        }
    }
    identity.finish()
}

/// An identity in the making.
pub(crate) struct Identity(blake3::Hasher);

impl Identity {
    pub(crate) fn new() -> Self {
        Self(blake3::Hasher::new_derive_key("holobiont base identity 1"))
    }

    /// Adds a tensor: what it is, and its first bytes.
    pub(crate) fn add(&mut self, shape: &str, data: &[u8]) {
        self.0.update(shape.as_bytes());
        self.0.update(&data[..data.len().min(IDENTITY_BYTES)]);
    }

    pub(crate) fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

//! The token embedding, which stays with the process that runs the pass.

use std::sync::Arc;

use kernels::{Arena, PackedMatrix};

use crate::{
    shape::source::{TensorId, WeightSource},
    weights::tensors::{WeightsError, pack_tensor},
};

/// Token embedding `[vocab, hidden]`, packed like the linear layers, so that a tied head shares its memory.
#[derive(Debug, Clone)]
pub struct Embedding {
    matrix: Arc<PackedMatrix>,
}

impl Embedding {
    /// Reads and packs the embedding, and nothing else of the model.
    ///
    /// # Errors
    /// The embedding is missing, has another shape than the configuration implies, or memory runs out.
    pub fn load(source: &dyn WeightSource) -> Result<Self, WeightsError> {
        let matrix = pack_tensor(source, &Arena::new(0), TensorId::TokenEmbedding)?;
        Ok(Self::new(Arc::new(matrix)))
    }

    pub(crate) fn new(matrix: Arc<PackedMatrix>) -> Self {
        Self { matrix }
    }

    /// Writes the embeddings of `tokens` to `out`, `[tokens, hidden]`.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    pub fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) {
        for (token, row) in tokens.zip(out.chunks_exact_mut(self.matrix.columns())) {
            self.matrix.read_row(token as usize, row);
        }
    }

    /// Returns the bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.matrix.bytes()
    }

    pub(crate) fn matrix(&self) -> &Arc<PackedMatrix> {
        &self.matrix
    }
}

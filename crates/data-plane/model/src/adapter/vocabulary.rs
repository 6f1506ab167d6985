//! What an adapter does to the weights that have a row for each token: the token embedding, which it adds to (a LoRA) or
//! replaces, and the head, which it replaces (PEFT's `modules_to_save`).

use std::sync::Arc;

use kernels::PackedMatrix;

use super::embedding::EmbeddingFactors;

/// What PEFT calls those that can be replaced.
pub(super) const EMBEDDING_MODULE: &str = "embed_tokens";
pub(super) const HEAD_MODULE: &str = "lm_head";

/// What is done to embedding and head: to one of them at least.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyChanges {
    /// What tokens are embedded as; `None`: as in the base.
    pub embedding: Option<EmbeddingChange>,
    /// The head in the place of the base's; `None`: that one.
    pub head: Option<SavedMatrix>,
}

/// What is done to the token embedding.
#[derive(Debug, Clone, PartialEq)]
pub enum EmbeddingChange {
    /// The base's is added to.
    Factors(EmbeddingFactors),
    /// It is this one.
    Saved(SavedMatrix),
}

/// Weights `[vocab, hidden]` of an adapter's own, in the numbers of 16 or 32 bits that its file has. A clone is over the same bytes.
#[derive(Debug, Clone)]
pub struct SavedMatrix(Arc<PackedMatrix>);

impl SavedMatrix {
    pub(super) fn new(weights: PackedMatrix) -> Self {
        Self(Arc::new(weights))
    }

    /// The weights, as kernels take them.
    #[must_use]
    pub fn weights(&self) -> &PackedMatrix {
        &self.0
    }

    /// The row of `token`: `[hidden]`.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    #[must_use]
    pub fn row(&self, token: u32) -> Vec<f32> {
        self.nth_row(token as usize)
    }

    fn nth_row(&self, row: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.0.columns()];
        self.0.read_row(row, &mut values);
        values
    }

    /// Whether this is the other one, and not only equal to it.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl PartialEq for SavedMatrix {
    /// Number by number.
    fn eq(&self, other: &Self) -> bool {
        let shape = |matrix: &Self| [matrix.0.rows(), matrix.0.columns()];
        self.is(other)
            || shape(self) == shape(other)
                && (0..self.0.rows()).all(|row| self.nth_row(row) == other.nth_row(row))
    }
}

impl VocabularyChanges {
    /// The embedding, if it is replaced.
    fn own_embedding(&self) -> Option<&SavedMatrix> {
        if let Some(EmbeddingChange::Saved(matrix)) = &self.embedding { Some(matrix) } else { None }
    }

    /// What is replaced, by the names that PEFT has for it.
    #[must_use]
    pub fn saved(&self) -> Vec<&'static str> {
        let embedding = self.own_embedding().map(|_| EMBEDDING_MODULE);
        embedding.into_iter().chain(self.head.as_ref().map(|_| HEAD_MODULE)).collect()
    }

    /// How many of the two are changed.
    #[must_use]
    pub fn modules(&self) -> usize {
        usize::from(self.embedding.is_some()) + usize::from(self.head.is_some())
    }

    /// Rank of what is added to the embedding; 0 if nothing is.
    #[must_use]
    pub fn rank(&self) -> usize {
        if let Some(EmbeddingChange::Factors(factors)) = &self.embedding { factors.rank() } else { 0 }
    }

    /// Bytes of all numbers; what embedding and head share is counted once.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let embedding = match &self.embedding {
            None => 0,
            Some(EmbeddingChange::Factors(factors)) => factors.bytes(),
            Some(EmbeddingChange::Saved(matrix)) => matrix.0.bytes(),
        };
        let shares = |head: &&SavedMatrix| self.own_embedding().is_some_and(|own| own.is(head));
        embedding + self.head.as_ref().filter(|head| !shares(head)).map_or(0, |head| head.0.bytes())
    }
}

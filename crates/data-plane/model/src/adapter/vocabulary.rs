//! Changes of the weights with a row for each token. A LoRA adds to the token embedding; PEFT's
//! `modules_to_save` replaces embedding or head, and `trainable_token_indices` some rows of them.

use std::sync::Arc;

use kernels::PackedMatrix;

use super::embedding::EmbeddingFactors;

/// PEFT's names of the modules that can be replaced.
pub(super) const EMBEDDING_MODULE: &str = "embed_tokens";
pub(super) const HEAD_MODULE: &str = "lm_head";

/// Changes of embedding and head; at least one is present.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyChanges {
    /// Change of the token embedding, or `None` for the base's embedding.
    pub embedding: Option<EmbeddingChange>,
    /// Change of the head, or `None` for the base's head.
    pub head: Option<HeadChange>,
}

/// Change of the token embedding.
#[derive(Debug, Clone, PartialEq)]
pub enum EmbeddingChange {
    /// Low-rank factors added to the base's embedding.
    Factors(EmbeddingFactors),
    /// Matrix that replaces the base's embedding.
    Saved(SavedMatrix),
    /// Rows that replace those of some tokens.
    Rows(TokenRows),
}

/// Change of the head.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadChange {
    /// Matrix that replaces the base's head.
    Saved(SavedMatrix),
    /// Rows that replace those of some tokens.
    Rows(TokenRows),
}

/// Rows of some tokens, in 32 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRows {
    /// Tokens in ascending order.
    tokens: Vec<u32>,
    /// Values of shape `[tokens, hidden]`.
    values: Vec<f32>,
}

impl TokenRows {
    /// Sorts the rows `values` of `tokens`, which must be different.
    pub(super) fn new(tokens: &[u32], values: &[f32]) -> Self {
        let width = values.len() / tokens.len().max(1);
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|&at| tokens[at]);
        let values = order.iter().flat_map(|&at| &values[at * width..][..width]).copied().collect();
        Self { tokens: order.into_iter().map(|at| tokens[at]).collect(), values }
    }

    /// Returns the row of `token`, shape `[hidden]`, if it has one here.
    #[must_use]
    pub fn row(&self, token: u32) -> Option<&[f32]> {
        let at = self.tokens.binary_search(&token).ok()?;
        self.values.chunks_exact(self.values.len() / self.tokens.len()).nth(at)
    }

    /// Returns each token with its row, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &[f32])> {
        let width = (self.values.len() / self.tokens.len().max(1)).max(1);
        self.tokens.iter().copied().zip(self.values.chunks_exact(width))
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.tokens[..]) + size_of_val(&self.values[..])
    }
}

/// Replacement weights, `[vocab, hidden]`, of 16 or 32 bits as in the file. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct SavedMatrix(Arc<PackedMatrix>);

impl SavedMatrix {
    pub(super) fn new(weights: PackedMatrix) -> Self {
        Self(Arc::new(weights))
    }

    /// Returns the weights in the kernels' format.
    #[must_use]
    pub fn weights(&self) -> &PackedMatrix {
        &self.0
    }

    /// Returns the row of `token`, shape `[hidden]`.
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

    /// Whether both values share the same bytes in memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl PartialEq for SavedMatrix {
    fn eq(&self, other: &Self) -> bool {
        let shape = |matrix: &Self| [matrix.0.rows(), matrix.0.columns()];
        self.is(other)
            || shape(self) == shape(other)
                && (0..self.0.rows()).all(|row| self.nth_row(row) == other.nth_row(row))
    }
}

impl VocabularyChanges {
    fn own_embedding(&self) -> Option<&SavedMatrix> {
        if let Some(EmbeddingChange::Saved(matrix)) = &self.embedding { Some(matrix) } else { None }
    }

    /// Returns PEFT's names of the replaced modules.
    #[must_use]
    pub fn saved(&self) -> Vec<&'static str> {
        let embedding = self.own_embedding().map(|_| EMBEDDING_MODULE);
        embedding.into_iter().chain(self.own_head().map(|_| HEAD_MODULE)).collect()
    }

    /// Returns the matrix that replaces the head.
    #[must_use]
    pub fn own_head(&self) -> Option<&SavedMatrix> {
        if let Some(HeadChange::Saved(matrix)) = &self.head { Some(matrix) } else { None }
    }

    /// Returns the rows that replace those of some tokens in the head.
    #[must_use]
    pub fn head_rows(&self) -> Option<&TokenRows> {
        if let Some(HeadChange::Rows(rows)) = &self.head { Some(rows) } else { None }
    }

    /// Whether rows of some tokens are replaced, in the embedding or the head.
    #[must_use]
    pub fn have_token_rows(&self) -> bool {
        self.head_rows().is_some() || matches!(self.embedding, Some(EmbeddingChange::Rows(_)))
    }

    /// Returns how many of embedding and head are changed.
    #[must_use]
    pub fn modules(&self) -> usize {
        usize::from(self.embedding.is_some()) + usize::from(self.head.is_some())
    }

    /// Returns the rank of the embedding's factors, or 0 without factors.
    #[must_use]
    pub fn rank(&self) -> usize {
        if let Some(EmbeddingChange::Factors(factors)) = &self.embedding { factors.rank() } else { 0 }
    }

    /// Returns the bytes of all values; weights shared by embedding and head count once.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let embedding = match &self.embedding {
            None => 0,
            Some(EmbeddingChange::Factors(factors)) => factors.bytes(),
            Some(EmbeddingChange::Saved(matrix)) => matrix.0.bytes(),
            Some(EmbeddingChange::Rows(rows)) => rows.bytes(),
        };
        let head = match &self.head {
            Some(HeadChange::Saved(head)) if !self.own_embedding().is_some_and(|own| own.is(head)) => {
                head.0.bytes()
            }
            Some(HeadChange::Rows(rows)) => rows.bytes(),
            Some(HeadChange::Saved(_)) | None => 0,
        };
        embedding + head
    }
}

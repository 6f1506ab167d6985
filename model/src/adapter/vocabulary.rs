//! What an adapter does to the weights that have a row for each token: the token embedding, which it adds to (a LoRA) or
//! replaces, and the head, which it replaces (PEFT's `modules_to_save`).

use std::{path::Path, sync::Arc};

use kernels::PackedMatrix;

use super::{
    embedding::EmbeddingFactors,
    error::AdapterError,
    hasher::GenerationHasher,
    matrix::{StoredMatrix, StoredModule, assemble_modules, check_rows, decode},
    method::{Adapter, AdapterKind},
    saved::{EMBEDDING_MODULE, HEAD_MODULE},
};

/// A LoRA that changes the token embedding or the head as well, read and checked against the base model's shape. Of weights that
/// embedding and head share, the one that it does not name stays as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyAdapter {
    /// What it does to linear layers, a LoRA; there need be none. Its generation is that of all of this.
    pub adapter: Adapter,
    /// What it does to embedding and head.
    pub changes: VocabularyChanges,
}

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

impl VocabularyAdapter {
    /// What it is called.
    pub(super) fn kind(&self) -> AdapterKind {
        if self.changes.saved().is_empty() { AdapterKind::Embedding } else { AdapterKind::Saved }
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

/// The factors of the token embedding as a file stores them.
pub(super) struct StoredEmbeddingFactors<'a> {
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// `[rank, vocab]`.
    pub(super) a: StoredMatrix<'a>,
    /// `[hidden, rank]`.
    pub(super) b: StoredMatrix<'a>,
}

/// What is done to the token embedding as a file stores it.
pub(super) enum StoredEmbedding<'a> {
    Factors(StoredEmbeddingFactors<'a>),
    /// `[vocab, hidden]`.
    Saved(StoredMatrix<'a>),
}

/// What is done to embedding and head as a file stores it: to one of them at least.
pub(super) struct StoredVocabulary<'a> {
    /// Numbers of a row.
    pub(super) hidden: usize,
    pub(super) embedding: Option<StoredEmbedding<'a>>,
    /// `[vocab, hidden]`.
    pub(super) head: Option<StoredMatrix<'a>>,
}

/// Decodes, checks and hashes the adapter in `path`.
pub(super) fn assemble_vocabulary(
    path: &Path,
    modules: Vec<StoredModule<'_>>,
    stored: &StoredVocabulary<'_>,
    base_model: Option<String>,
) -> Result<VocabularyAdapter, AdapterError> {
    let (method, generation, stored_in_16_bits) = assemble_modules(path, stored.hasher(&modules), modules)?;
    let adapter = Adapter { generation, method, base_model, stored_in_16_bits };
    Ok(VocabularyAdapter { adapter, changes: stored.changes(path)? })
}

impl StoredVocabulary<'_> {
    /// Begins the hash of an adapter of these modules, which must follow sorted by layer and target. A LoRA of the embedding alone
    /// has the one that it had before there was anything else.
    fn hasher(&self, modules: &[StoredModule<'_>]) -> GenerationHasher {
        if let (Some(StoredEmbedding::Factors(factors)), None) = (&self.embedding, &self.head) {
            let mut hasher = GenerationHasher::embedding(modules.len());
            factors.hash(&mut hasher);
            return hasher;
        }
        let mut hasher = GenerationHasher::saved(modules.len());
        match &self.embedding {
            None => hasher.nothing(),
            Some(StoredEmbedding::Factors(factors)) => {
                hasher.adapted();
                factors.hash(&mut hasher);
            }
            Some(StoredEmbedding::Saved(matrix)) => hasher.replaced(matrix.kind, &matrix.bytes),
        }
        match &self.head {
            None => hasher.nothing(),
            Some(matrix) => hasher.replaced(matrix.kind, &matrix.bytes),
        }
        hasher
    }

    fn changes(&self, path: &Path) -> Result<VocabularyChanges, AdapterError> {
        let embedding = match &self.embedding {
            None => None,
            Some(StoredEmbedding::Factors(factors)) => Some(EmbeddingChange::Factors(factors.decode(path)?)),
            Some(StoredEmbedding::Saved(matrix)) => Some(EmbeddingChange::Saved(self.pack(path, matrix)?)),
        };
        let head = match (&self.head, &embedding) {
            (None, _) => None,
            (Some(_), Some(EmbeddingChange::Saved(own))) if self.are_one() => Some(own.clone()),
            (Some(head), _) => Some(self.pack(path, head)?),
        };
        Ok(VocabularyChanges { embedding, head })
    }

    /// Whether embedding and head have the same numbers, as PEFT saves what it has tied: one copy is enough in memory.
    fn are_one(&self) -> bool {
        let (Some(StoredEmbedding::Saved(embedding)), Some(head)) = (&self.embedding, &self.head) else {
            return false;
        };
        embedding.kind == head.kind && embedding.bytes == head.bytes
    }

    fn pack(&self, path: &Path, matrix: &StoredMatrix<'_>) -> Result<SavedMatrix, AdapterError> {
        check_rows(path, matrix, self.hidden)?;
        let row_bytes = matrix.kind.row_bytes(self.hidden).unwrap_or(0).max(1);
        let rows = matrix.bytes.len() / row_bytes;
        let packed = PackedMatrix::pack(matrix.kind, &matrix.bytes, rows, self.hidden);
        packed.map(|packed| SavedMatrix(Arc::new(packed))).map_err(|source| AdapterError::Pack {
            path: path.to_path_buf(),
            tensor: matrix.name.clone(),
            source,
        })
    }
}

impl StoredEmbeddingFactors<'_> {
    fn hash(&self, hasher: &mut GenerationHasher) {
        hasher.factors(self.rank, self.scale);
        hasher.matrix(self.a.kind, &self.a.bytes);
        hasher.matrix(self.b.kind, &self.b.bytes);
    }

    fn decode(&self, path: &Path) -> Result<EmbeddingFactors, AdapterError> {
        let (a, b) = (decode(path, &self.a)?, decode(path, &self.b)?);
        Ok(EmbeddingFactors::new(self.rank, self.scale, &a, &b))
    }
}

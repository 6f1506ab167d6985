//! Changes of embedding and head as stored in files, and their assembly to an adapter.

use std::path::Path;

use kernels::PackedMatrix;

use super::{
    embedding::EmbeddingFactors,
    error::AdapterError,
    hasher::VersionHasher,
    matrix::{StoredMatrix, StoredModule, assemble_modules, check_rows, decode},
    method::{Adapter, VocabularyAdapter},
    vocabulary::{EmbeddingChange, HeadChange, SavedMatrix, TokenRows, VocabularyChanges},
};

pub(super) struct StoredEmbeddingFactors<'a> {
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// Matrix of shape `[rank, vocab]`.
    pub(super) a: StoredMatrix<'a>,
    /// Matrix of shape `[hidden, rank]`.
    pub(super) b: StoredMatrix<'a>,
}

pub(super) enum StoredEmbedding<'a> {
    Factors(StoredEmbeddingFactors<'a>),
    /// Matrix of shape `[vocab, hidden]`.
    Saved(StoredMatrix<'a>),
    Rows(StoredTokenRows<'a>),
}

pub(super) enum StoredHead<'a> {
    /// Matrix of shape `[vocab, hidden]`.
    Saved(StoredMatrix<'a>),
    Rows(StoredTokenRows<'a>),
}

/// Rows of some tokens of embedding or head.
#[derive(Clone)]
pub(super) struct StoredTokenRows<'a> {
    /// Tokens in the order of the rows.
    pub(super) tokens: Vec<u32>,
    /// Matrix of shape `[tokens, hidden]`.
    pub(super) values: StoredMatrix<'a>,
}

/// Changes of embedding and head as stored in a file; at least one is present.
pub(super) struct StoredVocabulary<'a> {
    pub(super) hidden: usize,
    pub(super) embedding: Option<StoredEmbedding<'a>>,
    pub(super) head: Option<StoredHead<'a>>,
}

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
    /// Begins the hash of an adapter; `modules` must follow sorted by layer and target. A LoRA with embedding
    /// factors alone keeps its original encoding, so that versions stay valid.
    fn hasher(&self, modules: &[StoredModule<'_>]) -> VersionHasher {
        if let (Some(StoredEmbedding::Factors(factors)), None) = (&self.embedding, &self.head) {
            let mut hasher = VersionHasher::embedding(modules.len());
            factors.hash(&mut hasher);
            return hasher;
        }
        let mut hasher = VersionHasher::saved(modules.len());
        match &self.embedding {
            None => hasher.nothing(),
            Some(StoredEmbedding::Factors(factors)) => {
                hasher.adapted();
                factors.hash(&mut hasher);
            }
            Some(StoredEmbedding::Saved(matrix)) => hasher.replaced(matrix.kind, &matrix.bytes),
            Some(StoredEmbedding::Rows(rows)) => rows.hash(&mut hasher),
        }
        match &self.head {
            None => hasher.nothing(),
            Some(StoredHead::Saved(matrix)) => hasher.replaced(matrix.kind, &matrix.bytes),
            Some(StoredHead::Rows(rows)) => rows.hash(&mut hasher),
        }
        hasher
    }

    fn changes(&self, path: &Path) -> Result<VocabularyChanges, AdapterError> {
        let embedding = match &self.embedding {
            None => None,
            Some(StoredEmbedding::Factors(factors)) => Some(EmbeddingChange::Factors(factors.decode(path)?)),
            Some(StoredEmbedding::Saved(matrix)) => Some(EmbeddingChange::Saved(self.pack(path, matrix)?)),
            Some(StoredEmbedding::Rows(rows)) => Some(EmbeddingChange::Rows(rows.decode(path)?)),
        };
        let head = match (&self.head, &embedding) {
            (None, _) => None,
            (Some(_), Some(EmbeddingChange::Saved(own))) if self.are_one() => {
                Some(HeadChange::Saved(own.clone()))
            }
            (Some(StoredHead::Saved(head)), _) => Some(HeadChange::Saved(self.pack(path, head)?)),
            (Some(StoredHead::Rows(rows)), _) => Some(HeadChange::Rows(rows.decode(path)?)),
        };
        Ok(VocabularyChanges { embedding, head })
    }

    /// Whether embedding and head have equal values, as PEFT saves tied weights; memory then holds one copy.
    fn are_one(&self) -> bool {
        let (Some(StoredEmbedding::Saved(embedding)), Some(StoredHead::Saved(head))) =
            (&self.embedding, &self.head)
        else {
            return false;
        };
        embedding.kind == head.kind && embedding.bytes == head.bytes
    }

    fn pack(&self, path: &Path, matrix: &StoredMatrix<'_>) -> Result<SavedMatrix, AdapterError> {
        check_rows(path, matrix, self.hidden)?;
        let row_bytes = matrix.kind.row_bytes(self.hidden).unwrap_or(0).max(1);
        let rows = matrix.bytes.len() / row_bytes;
        let packed = PackedMatrix::pack(matrix.kind, &matrix.bytes, rows, self.hidden);
        packed.map(SavedMatrix::new).map_err(|source| AdapterError::Pack {
            path: path.to_path_buf(),
            tensor: matrix.name.clone(),
            source,
        })
    }
}

impl StoredTokenRows<'_> {
    fn hash(&self, hasher: &mut VersionHasher) {
        hasher.rows(&self.tokens, self.values.kind, &self.values.bytes);
    }

    fn decode(&self, path: &Path) -> Result<TokenRows, AdapterError> {
        Ok(TokenRows::new(&self.tokens, &decode(path, &self.values)?))
    }
}

impl StoredEmbeddingFactors<'_> {
    fn hash(&self, hasher: &mut VersionHasher) {
        hasher.factors(self.rank, self.scale);
        hasher.matrix(self.a.kind, &self.a.bytes);
        hasher.matrix(self.b.kind, &self.b.bytes);
    }

    fn decode(&self, path: &Path) -> Result<EmbeddingFactors, AdapterError> {
        let (a, b) = (decode(path, &self.a)?, decode(path, &self.b)?);
        Ok(EmbeddingFactors::new(self.rank, self.scale, &a, &b))
    }
}

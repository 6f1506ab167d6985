//! Layout of a file of packed weights, and its layer chunks.
//!
//! ```text
//! header   magic, version, count of matrices, key, hash of the table
//! table    for each matrix: its unit, then a hash for each 64 rows of it
//! panels   matrix after matrix, each from the start of a page: block 0, block 1, ..., token embedding, head
//! ```
//!
//! A layer chunk is read at once: a block, or rows of the head up to the largest block's size.

use std::ops::Range;

use kernels::{PackedLayout, TensorType};

use crate::{
    shape::{
        config::ModelConfig,
        layout::{block_weights, tensor_shape},
        source::{Target, TensorId, WeightSource},
    },
    weights::tensors::WeightsError,
};

/// Alignment of matrices in the file, and of reads that bypass the page cache.
pub(super) const PAGE_BYTES: usize = 4096;
pub(super) const HASH_BYTES: usize = 32;
/// Bytes of the header, before the table.
pub(super) const HEADER_BYTES: usize = 8 + 4 + 4 + 2 * HASH_BYTES;
/// Number of rows per hash.
pub(super) const GRAIN_ROWS: usize = PackedLayout::CUT_ROWS;

/// A matrix of the file, except its unit.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileMatrix {
    pub(super) id: TensorId,
    kind: TensorType,
    /// Packed layout with a unit of 1.
    form: PackedLayout,
    /// Offset of its panels in the file.
    pub(super) at: u64,
}

impl FileMatrix {
    pub(super) fn form(&self, unit: f32) -> PackedLayout {
        let form = PackedLayout::known(self.kind, self.form.rows(), self.form.columns(), unit);
        form.expect("the same tensor is possible with any unit")
    }

    pub(super) fn grains(&self) -> usize {
        self.form.rows().div_ceil(GRAIN_ROWS)
    }

    /// Returns the bytes of its table entry: unit and hashes.
    pub(super) fn table_bytes(&self) -> usize {
        size_of::<f32>() + self.grains() * HASH_BYTES
    }

    pub(super) fn range(&self, rows: &Range<usize>) -> Range<u64> {
        self.at + self.form.offset(rows.start) as u64..self.at + self.form.offset(rows.end) as u64
    }

    pub(super) fn rows(&self) -> usize {
        self.form.rows()
    }

    /// Returns row ranges of at most `bytes` bytes of panels, each at least `GRAIN_ROWS` rows.
    pub(super) fn cuts(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, grain) = (self.rows(), self.form.offset(GRAIN_ROWS.min(self.rows())).max(1));
        let step = (bytes / grain).max(1) * GRAIN_ROWS;
        (0..rows).step_by(step).map(move |first| first..rows.min(first + step))
    }
}

#[derive(Debug, Clone)]
pub(super) struct MatrixRows {
    pub(super) matrix: usize,
    pub(super) rows: Range<usize>,
}

/// Parts of matrices that are read at once.
#[derive(Debug, Clone)]
pub(super) struct LayerChunk {
    pub(super) parts: Vec<MatrixRows>,
    /// Complete pages of the file.
    pub(super) pages: Range<u64>,
}

impl LayerChunk {
    pub(super) fn bytes(&self) -> usize {
        bytes_of(&self.pages)
    }
}

pub(super) fn bytes_of(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

/// Returns the pages that contain `range`.
pub(super) fn pages_of(range: &Range<u64>) -> Range<u64> {
    let page = PAGE_BYTES as u64;
    range.start / page * page..range.end.next_multiple_of(page)
}

#[derive(Debug)]
pub(super) struct WeightFileLayout {
    pub(super) matrices: Vec<FileMatrix>,
    /// Blocks, then pieces of the head.
    pub(super) chunks: Vec<LayerChunk>,
    /// Number of chunks that are blocks.
    pub(super) blocks: usize,
    pub(super) embedding: usize,
    /// Rows of each piece of the head; the last piece may have fewer.
    pub(super) head_rows: usize,
    /// Length of the file.
    pub(super) end: u64,
}

impl WeightFileLayout {
    /// Computes the file layout of the model in `source` without reading tensors.
    ///
    /// # Errors
    /// A tensor is missing.
    pub(super) fn of(source: &dyn WeightSource) -> Result<Self, WeightsError> {
        let config = source.config();
        let mut firsts = vec![0];
        let mut ids = Vec::new();
        for layer in 0..config.layers {
            ids.extend(block_weights(config, layer));
            firsts.push(ids.len());
        }
        let head = (!config.tied_head).then_some(TensorId::Weight(0, Target::LmHead));
        let ids = ids.into_iter().chain([TensorId::TokenEmbedding]).chain(head);
        let stored = ids.map(|id| stored(source, config, id));
        let mut matrices = stored.collect::<Result<Vec<FileMatrix>, WeightsError>>()?;
        let table: usize = matrices.iter().map(FileMatrix::table_bytes).sum();
        let mut end = (HEADER_BYTES + table).next_multiple_of(PAGE_BYTES) as u64;
        for matrix in &mut matrices {
            matrix.at = end;
            end = pages_of(&matrix.range(&(0..matrix.rows()))).end;
        }
        let (blocks, embedding) = (config.layers, firsts[config.layers]);
        let of_block = firsts.windows(2).map(|ends| ends[0]..ends[1]);
        let mut chunks: Vec<LayerChunk> = of_block.map(|own| block_chunk(&matrices, own)).collect();
        let largest = chunks.iter().map(LayerChunk::bytes).max().unwrap_or(0);
        let head = matrices.len() - 1;
        // The first and the last page of a piece may be partial.
        let cuts: Vec<_> = matrices[head].cuts(largest.saturating_sub(2 * PAGE_BYTES)).collect();
        let head_rows = cuts.first().map_or(1, Range::len);
        chunks.extend(cuts.into_iter().map(|rows| {
            let pages = pages_of(&matrices[head].range(&rows));
            LayerChunk { parts: vec![MatrixRows { matrix: head, rows }], pages }
        }));
        Ok(Self { matrices, chunks, blocks, embedding, head_rows, end })
    }

    /// Returns the bytes of the table, which stays in memory.
    pub(super) fn table_bytes(&self) -> usize {
        self.matrices.iter().map(FileMatrix::table_bytes).sum()
    }

    /// Returns the bytes of the largest chunk.
    pub(super) fn chunk_bytes(&self) -> usize {
        self.chunks.iter().map(LayerChunk::bytes).max().unwrap_or(0)
    }

    /// Returns the rows and pages to read and check for a row of the token embedding.
    pub(super) fn embedding_grain(&self, token: usize) -> (MatrixRows, Range<u64>) {
        let stored = &self.matrices[self.embedding];
        let first = token / GRAIN_ROWS * GRAIN_ROWS;
        let rows = first..stored.rows().min(first + GRAIN_ROWS);
        let pages = pages_of(&stored.range(&rows));
        (MatrixRows { matrix: self.embedding, rows }, pages)
    }

    /// Returns the bytes of memory for [`embedding_grain`](Self::embedding_grain).
    pub(super) fn grain_bytes(&self) -> usize {
        let stored = &self.matrices[self.embedding];
        bytes_of(&stored.range(&(0..GRAIN_ROWS.min(stored.rows())))) + 2 * PAGE_BYTES
    }
}

fn stored(source: &dyn WeightSource, config: &ModelConfig, id: TensorId) -> Result<FileMatrix, WeightsError> {
    let kind = source.kind(id).ok_or(WeightsError::Missing(id))?;
    let [rows, columns] = tensor_shape(config, id);
    let form = PackedLayout::known(kind, rows, columns, 1.0).ok_or(WeightsError::Missing(id))?;
    Ok(FileMatrix { id, kind, form, at: 0 })
}

fn block_chunk(matrices: &[FileMatrix], own: Range<usize>) -> LayerChunk {
    let (first, last) = (&matrices[own.start], &matrices[own.end - 1]);
    let pages = pages_of(&(first.at..last.range(&(0..last.rows())).end));
    let parts = own.map(|matrix| MatrixRows { matrix, rows: 0..matrices[matrix].rows() }).collect();
    LayerChunk { parts, pages }
}

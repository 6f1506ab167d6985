//! The adapter of each row of a batch.

use std::sync::Arc;

use kernels::lora::{LeadingSums, LoraMatrix, LoraSegment};

use crate::{
    adapter::EmbeddingChange,
    deltas::{assist::PartialSum, device_copy::DeviceCopy, prepared::PreparedAdapter},
    forward::SequenceSlice,
    shape::{config::ModelConfig, layout::LinearGroup, source::Target},
};

/// Consecutive rows of one adapter.
#[derive(Debug)]
pub(crate) struct AdapterRun {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) adapter: Arc<PreparedAdapter>,
    /// Device copy at the start of the pass.
    pub(crate) device: Option<Arc<DeviceCopy>>,
}

impl AdapterRun {
    /// Returns the request for the run's partial sums at a linear layer with the adapter matrices `matrix`.
    pub(crate) fn ask<'a>(
        &'a self,
        layer: usize,
        target: Target,
        matrix: &'a LoraMatrix,
        ranks: usize,
        offset: usize,
    ) -> PartialSum<'a> {
        let (adapter, first_row, rows) = (&self.adapter, self.first_row, self.rows);
        PartialSum { adapter, layer, target, matrix, first_row, rows, ranks, offset }
    }
}

#[derive(Debug)]
pub(crate) struct VirtualRows {
    pub(crate) first_row: usize,
    /// Index of the first virtual token.
    pub(crate) token: usize,
    pub(crate) rows: usize,
    pub(crate) adapter: Arc<PreparedAdapter>,
}

#[derive(Debug, Default)]
pub(crate) struct EmbeddingRows {
    /// Values that are added to the base's embeddings.
    pub(crate) added: RowValues,
    /// Values that replace the base's embeddings.
    pub(crate) replaced: RowValues,
}

#[derive(Debug, Default)]
pub(crate) struct RowValues {
    /// Row numbers; virtual tokens follow the others.
    pub(crate) rows: Vec<u32>,
    /// Values of shape `[rows, hidden]`.
    pub(crate) values: Vec<f32>,
}

impl RowValues {
    fn push(&mut self, row: u32, values: &[f32], factor: Option<f32>) {
        self.rows.push(row);
        let factor = factor.unwrap_or(1.0);
        self.values.extend(values.iter().map(|value| value * factor));
    }

    /// Returns each row with its values, `[hidden]`.
    pub(crate) fn iter(&self, hidden: usize) -> impl Iterator<Item = (usize, &[f32])> {
        self.rows.iter().map(|&row| row as usize).zip(self.values.chunks_exact(hidden))
    }
}

/// The adapters of a batch's rows. Rows of the base model are in no run.
#[derive(Debug)]
pub struct AdapterRows {
    pub(crate) rows: Vec<AdapterRun>,
    /// Runs of the rows whose logits are wanted.
    pub(crate) head_rows: Vec<AdapterRun>,
    pub(crate) virtual_rows: Vec<VirtualRows>,
}

impl AdapterRows {
    /// Finds the runs of `batch`.
    #[must_use]
    pub fn of(batch: &[SequenceSlice<'_, PreparedAdapter>]) -> Self {
        Self {
            rows: runs(batch, |slice| slice.tokens.len()),
            head_rows: runs(batch, |slice| slice.logit_rows()),
            virtual_rows: virtual_rows(batch),
        }
    }

    pub(crate) fn of_head(adapter: &Arc<PreparedAdapter>, rows: usize) -> Self {
        let run =
            || AdapterRun { first_row: 0, rows, adapter: Arc::clone(adapter), device: adapter.device() };
        Self { rows: vec![run()], head_rows: vec![run()], virtual_rows: Vec::new() }
    }

    pub(crate) fn of_group(&self, group: LinearGroup) -> &[AdapterRun] {
        if group == LinearGroup::Head { &self.head_rows } else { &self.rows }
    }

    pub(crate) fn have_vocabularies(&self) -> bool {
        self.rows.iter().any(|run| run.adapter.vocabulary().is_some())
    }

    fn have_prompts(&self) -> bool {
        self.virtual_rows.iter().any(|rows| rows.adapter.prompt().is_some())
    }

    /// Returns the adapters' changes of the embeddings of `tokens`; these are few, so the host computes them.
    pub(crate) fn embedding_rows(
        &self,
        config: &ModelConfig,
        tokens: &mut dyn Iterator<Item = u32>,
    ) -> EmbeddingRows {
        let mut found = EmbeddingRows::default();
        if !self.have_vocabularies() && !self.have_prompts() {
            return found;
        }
        let scale = config.traits.embedding_scale;
        let rows: Vec<(u32, u32)> = (0..).zip(tokens).collect();
        for run in &self.rows {
            let change = run.adapter.vocabulary().and_then(|changes| changes.embedding.as_ref());
            let Some(change) = change else { continue };
            for &(row, token) in &rows[run.first_row..][..run.rows] {
                match change {
                    EmbeddingChange::Factors(factors) => found.added.push(row, &factors.delta(token), scale),
                    EmbeddingChange::Saved(matrix) => found.replaced.push(row, &matrix.row(token), scale),
                    EmbeddingChange::Rows(own) => {
                        own.row(token).into_iter().for_each(|own| found.replaced.push(row, own, scale));
                    }
                }
            }
        }
        for VirtualRows { first_row, token, rows: count, adapter } in &self.virtual_rows {
            let Some(prompt) = adapter.prompt() else { continue };
            for (&(row, _), token) in rows[*first_row..][..*count].iter().zip(*token..) {
                found.replaced.push(row, prompt.row(token), scale.filter(|_| prompt.is_scaled));
            }
        }
        found
    }

    pub(crate) fn have_experts(&self) -> bool {
        self.rows.iter().any(|run| !run.adapter.experts().is_empty())
    }

    /// Returns the deltas of an expert for its rows, which are numbered `rows` in the batch, ascending. The
    /// rows of a run are adjacent among them, too.
    pub(crate) fn expert_segments(
        &self,
        layer: usize,
        targets: &[(Target, usize)],
        rows: &[u32],
    ) -> Vec<LoraSegment<'_>> {
        let mut segments = Vec::new();
        for run in &self.rows {
            let experts = run.adapter.experts();
            let before = |end: usize| rows.partition_point(|&row| (row as usize) < end);
            let (first_row, behind) = (before(run.first_row), before(run.first_row + run.rows));
            if experts.is_empty() || first_row == behind {
                continue;
            }
            for &(target, column) in targets {
                let Some(matrix) = experts.get(layer, target) else { continue };
                let rows = behind - first_row;
                run.adapter.tally().executor((rows * matrix.rank()) as u64);
                let head = LeadingSums::None;
                segments.push(LoraSegment { first_row, rows, matrix, column, staged: None, head });
            }
        }
        segments
    }

    pub(crate) fn have_scales(&self) -> bool {
        self.rows.iter().any(|run| run.adapter.scales().is_some())
    }
}

/// Joins neighbouring slices of one adapter.
fn runs(
    batch: &[SequenceSlice<'_, PreparedAdapter>],
    rows_of: impl Fn(&SequenceSlice<'_, PreparedAdapter>) -> usize,
) -> Vec<AdapterRun> {
    let mut runs: Vec<AdapterRun> = Vec::new();
    let mut row = 0;
    for slice in batch {
        let rows = rows_of(slice);
        if let Some(adapter) = slice.adapter {
            match runs.last_mut() {
                Some(run) if run.first_row + run.rows == row && Arc::ptr_eq(&run.adapter, adapter) => {
                    run.rows += rows;
                }
                _ => {
                    let (adapter, device) = (Arc::clone(adapter), adapter.device());
                    runs.push(AdapterRun { first_row: row, rows, adapter, device });
                }
            }
        }
        row += rows;
    }
    runs
}

/// Returns the rows of each slice that are virtual tokens of its adapter.
fn virtual_rows(batch: &[SequenceSlice<'_, PreparedAdapter>]) -> Vec<VirtualRows> {
    let mut found = Vec::new();
    let mut first_row = 0;
    for slice in batch {
        let (token, count) = (slice.start, slice.tokens.len());
        if let Some(adapter) = slice.adapter
            && token < adapter.virtual_tokens()
        {
            let rows = count.min(adapter.virtual_tokens() - token);
            found.push(VirtualRows { first_row, token, rows, adapter: Arc::clone(adapter) });
        }
        first_row += count;
    }
    found
}

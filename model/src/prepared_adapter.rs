//! An adapter in the form the kernels take, and the deltas of a batch.

use std::{io, sync::Arc};

use kernels::{
    Activations, Arena,
    lora::{LoraMatrix, LoraPrecision, LoraSegment, add_deltas},
};

use crate::{
    adapter::Adapter,
    config::ModelConfig,
    forward::{Compute, Deltas, LinearGroup, LogitRows, SequenceSlice},
    generation::Generation,
    layout::linear_shape,
    source::Target,
    weights::group_targets,
};

/// An adapter ready to be computed, at its true ranks.
#[derive(Debug)]
pub struct PreparedAdapter {
    generation: Generation,
    /// `[layer][target]`.
    layers: Vec<[Option<LoraMatrix>; 7]>,
    head: Option<LoraMatrix>,
    rank: usize,
    bytes: usize,
}

impl PreparedAdapter {
    /// Copies `adapter`, which has been checked against `config`, into the kernels' layout.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(adapter: &Adapter, config: &ModelConfig, precision: LoraPrecision) -> io::Result<Self> {
        let mut prepared = Self {
            generation: adapter.generation,
            layers: (0..config.layers).map(|_| [const { None }; 7]).collect(),
            head: None,
            rank: 0,
            bytes: 0,
        };
        let elements: usize = adapter.modules.iter().map(|module| module.a.len() + module.b.len()).sum();
        // A piece that holds all of a 16-bit adapter; one of 32 bits takes two.
        let arena = Arena::new(2 * elements);
        for module in &adapter.modules {
            let [rows, columns] = linear_shape(config, module.target);
            let matrix = LoraMatrix::new(
                &arena,
                module.rank,
                columns,
                rows,
                module.scale,
                &module.a,
                &module.b,
                precision,
            )?;
            prepared.rank = prepared.rank.max(module.rank);
            prepared.bytes += matrix.bytes();
            match module.target {
                Target::LmHead => prepared.head = Some(matrix),
                target => prepared.layers[module.layer][target as usize] = Some(matrix),
            }
        }
        Ok(prepared)
    }

    /// What it is.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The largest rank of its layers.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn matrix(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        match target {
            Target::LmHead => self.head.as_ref(),
            target => self.layers[layer][target as usize].as_ref(),
        }
    }
}

/// Consecutive rows of one adapter.
#[derive(Debug)]
struct Run {
    first_row: usize,
    rows: usize,
    adapter: Arc<PreparedAdapter>,
}

/// The adapters of a batch's rows. Rows of the base model are in no run.
#[derive(Debug)]
pub struct BatchDeltas<'a> {
    config: &'a ModelConfig,
    /// Runs of the batch's rows.
    rows: Vec<Run>,
    /// Runs of the rows whose logits are wanted.
    head_rows: Vec<Run>,
}

impl<'a> BatchDeltas<'a> {
    /// Finds the runs of `batch`.
    #[must_use]
    pub fn new(config: &'a ModelConfig, batch: &[SequenceSlice<'_, PreparedAdapter>]) -> Self {
        let head_rows = |slice: &SequenceSlice<'_, PreparedAdapter>| match slice.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => slice.tokens.len(),
        };
        Self { config, rows: runs(batch, |slice| slice.tokens.len()), head_rows: runs(batch, head_rows) }
    }
}

/// Joins neighbouring slices of one adapter.
fn runs(
    batch: &[SequenceSlice<'_, PreparedAdapter>],
    rows_of: impl Fn(&SequenceSlice<'_, PreparedAdapter>) -> usize,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut row = 0;
    for slice in batch {
        let rows = rows_of(slice);
        if let Some(adapter) = slice.adapter {
            match runs.last_mut() {
                Some(run) if run.first_row + run.rows == row && Arc::ptr_eq(&run.adapter, adapter) => {
                    run.rows += rows
                }
                _ => runs.push(Run { first_row: row, rows, adapter: Arc::clone(adapter) }),
            }
        }
        row += rows;
    }
    runs
}

impl Deltas for BatchDeltas<'_> {
    fn add(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
        out: &mut [f32],
    ) {
        let runs = if group == LinearGroup::Head { &self.head_rows } else { &self.rows };
        if runs.is_empty() {
            return;
        }
        let targets = group_targets(self.config, group);
        let mut segments = Vec::with_capacity(runs.len() * targets.len());
        for run in runs {
            for &(target, column) in &targets {
                if let Some(matrix) = run.adapter.matrix(layer, target) {
                    segments.push(LoraSegment { first_row: run.first_row, rows: run.rows, matrix, column });
                }
            }
        }
        if !segments.is_empty() {
            let stride = targets.iter().map(|&(target, _)| linear_shape(self.config, target)[0]).sum();
            add_deltas(&mut compute.pool, compute.isa, x, &segments, out, stride);
        }
    }
}

//! Logits and log-probabilities of targets, computed in tiles of rows, and the reverse pass from them.
//!
//! The logits of a whole batch would be larger than everything else: 200 MB for 1,000 rows and a vocabulary
//! of 50,000. A tile holds complete sums, each over the targets among [`SUM_ROWS`] rows of a sequence. The
//! split into batches and other rows' targets without loss therefore change no sum.

use std::{
    cell::RefCell,
    ops::Range,
    sync::{Arc, OnceLock},
};

use kernels::backward::{
    SUM_ROWS,
    attention::SequenceRows,
    elementwise::cap_gradient,
    softmax::{LogProbability, log_probability_gradients},
};

use super::{
    dropout::{Dropping, RowDropouts},
    error::TrainError,
    pass::{GroupActivations, Reverse},
    saved_activations::{RecordingDeltas, TargetRow, place_residual},
    trainable_site::TrainableSite,
};
use crate::{
    adapter::MethodWeights,
    cpu::Compute,
    deltas::{
        adapter_rows::AdapterRows,
        batch::{BatchDeltas, DeltaScratch},
        prepared::PreparedAdapter,
    },
    forward::{LinearGroup, ModelContext, NormSite, ReverseLayers, Scratch, run_head},
    sampling::log_probability,
    shape::config::ModelConfig,
};

/// A loss as a function of the targets' log-probabilities.
pub trait Loss {
    /// Writes the gradients of the loss at the targets' log-probabilities to `gradients`. `targets` counts
    /// through the batch, example by example; each target is requested once, in ascending order.
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]);

    /// Returns further tokens and their log-probability gradients for the target `target`, for losses that
    /// compare with a distribution. `target` was among the last requested targets; the default is none.
    fn others(&self, target: usize) -> &[(u32, f32)] {
        let _ = target;
        &[]
    }
}

/// The model's prediction at a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Log-probability of the target token.
    pub log_probability: f32,
    /// Likeliest of the allowed tokens; of equal ones the first.
    pub likeliest: u32,
}

const TILE_ROWS: usize = 2 * SUM_ROWS;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeadTile {
    /// Range within all targets.
    pub(super) targets: Range<usize>,
    /// Rows of the tile that form one sum each.
    sums: Vec<SequenceRows>,
}

/// Splits targets, ascending by row, into tiles.
pub(super) fn tiles(targets: &[TargetRow], sequences: &[SequenceRows]) -> Vec<HeadTile> {
    let sum_of =
        |target: &TargetRow| (target.sequence, (target.row - sequences[target.sequence].first) / SUM_ROWS);
    let mut tiles: Vec<HeadTile> = Vec::new();
    let mut first = 0;
    for rows in targets.chunk_by(|a, b| sum_of(a) == sum_of(b)) {
        let count = rows.len();
        match tiles.last_mut() {
            Some(tile) if tile.targets.len() + count <= TILE_ROWS => {
                tile.sums.push(SequenceRows { first: tile.targets.len(), count });
                tile.targets.end += count;
            }
            _ => tiles.push(HeadTile {
                targets: first..first + count,
                sums: vec![SequenceRows { first: 0, count }],
            }),
        }
        first += count;
    }
    tiles
}

impl HeadScratch {
    /// Returns the prediction of each row of the tile among the tokens `allowed`; an empty list allows all.
    pub(super) fn predictions(
        &self,
        model: &ModelConfig,
        allowed: &[u32],
    ) -> impl Iterator<Item = Prediction> {
        let rows = self.logits.chunks_exact(model.vocab_size).zip(&self.log_probabilities);
        rows.map(|(logits, &log_probability)| Prediction {
            log_probability,
            likeliest: likeliest(logits, allowed),
        })
    }
}

/// Returns the token with the largest logit; of equal ones the first.
fn likeliest(logits: &[f32], allowed: &[u32]) -> u32 {
    let larger = |best: Option<(u32, f32)>, (token, logit): (u32, f32)| match best {
        Some((_, most)) if most >= logit => best,
        _ => Some((token, logit)),
    };
    let best = if allowed.is_empty() {
        (0u32..).zip(logits.iter().copied()).fold(None, larger)
    } else {
        allowed.iter().map(|&token| (token, logits[token as usize])).fold(None, larger)
    };
    best.map_or(0, |(token, _)| token)
}

pub(super) struct LmHeadPass<'a, B> {
    pub(super) model: &'a ModelContext,
    pub(super) base: &'a mut B,
    pub(super) device: &'a mut Compute,
    pub(super) scratch: &'a mut Scratch<Compute>,
    pub(super) deltas: &'a mut DeltaScratch,
    pub(super) adapter: &'a Arc<PreparedAdapter>,
    pub(super) method: &'a MethodWeights,
    pub(super) dropouts: &'a RowDropouts,
}

#[derive(Debug, Default)]
pub(super) struct HeadScratch {
    residual: Vec<f32>,
    logits: Vec<f32>,
    pub(super) log_probabilities: Vec<f32>,
    coefficients: Vec<f32>,
    of: Vec<LogProbability>,
}

impl<B: ReverseLayers<Compute>> LmHeadPass<'_, B> {
    /// Computes logits and log-probabilities of `targets`, whose rows are in `residual`, `[rows, hidden]`.
    pub(super) fn forward(
        &mut self,
        residual: &[f32],
        targets: &[TargetRow],
        buffers: &mut HeadScratch,
    ) -> Result<(), B::Error> {
        let hidden = self.model.config.hidden_size;
        buffers.residual.clear();
        for target in targets {
            buffers.residual.extend_from_slice(&residual[target.row * hidden..][..hidden]);
        }
        place_residual(self.scratch, &buffers.residual);
        let found = AdapterRows::of_head(self.adapter, targets.len());
        let deltas = BatchDeltas::new(&self.model.config, None, self.deltas, &found);
        let dropping = Dropping { dropouts: self.dropouts, method: self.method, config: &self.model.config };
        // Nothing of the head is saved.
        let mut deltas = RecordingDeltas { model: self.model, deltas, dropping, notes: &RefCell::default() };
        let parts = (&mut *self.base, &mut deltas);
        run_head(self.model, parts, self.device, self.scratch, targets.len(), &mut buffers.logits)?;
        let (logits, vocabulary) = (&buffers.logits, self.model.config.vocab_size);
        let found: Vec<_> = targets.iter().map(|_| OnceLock::new()).collect();
        self.device.pool.run(targets.len(), |row| {
            let logits = &logits[row * vocabulary..][..vocabulary];
            found[row].get_or_init(|| log_probability(logits, targets[row].token));
        });
        buffers.log_probabilities.clear();
        buffers.of.clear();
        for (found, target) in found.into_iter().zip(targets) {
            // The pool has computed each row.
            let (log_probability, log_sum) = found.into_inner().unwrap_or_default();
            buffers.log_probabilities.push(log_probability);
            buffers.of.push(LogProbability { token: target.token, log_sum, gradient: 0.0 });
        }
        Ok(())
    }
}

/// Moves the gradients of `others` away from the target, which held their sum until now.
fn share(row: &mut [f32], target: u32, others: &[(u32, f32)]) {
    for &(token, gradient) in others {
        row[target as usize] -= gradient;
        row[token as usize] += gradient;
    }
}

impl<B: ReverseLayers<Compute>> Reverse<'_, '_, B> {
    /// Reverses a tile's log-probabilities from [`LmHeadPass::forward`] to the residual stream of its rows.
    pub(super) fn head(
        &mut self,
        targets: &[TargetRow],
        tile: &HeadTile,
        loss: &mut dyn Loss,
        buffers: &mut HeadScratch,
    ) -> Result<(), TrainError<B::Error>> {
        let (hidden, vocabulary) = (self.model.config.hidden_size, self.model.config.vocab_size);
        buffers.coefficients.clear();
        buffers.coefficients.resize(targets.len(), 0.0);
        loss.gradients(tile.targets.clone(), &buffers.log_probabilities, &mut buffers.coefficients);
        let is_idle = |(&own, target): (&f32, usize)| own == 0.0 && loss.others(target).is_empty();
        if buffers.coefficients.iter().zip(tile.targets.clone()).all(is_idle) {
            return Ok(());
        }
        for ((of, &gradient), target) in
            buffers.of.iter_mut().zip(&buffers.coefficients).zip(tile.targets.clone())
        {
            of.gradient = loss.others(target).iter().fold(gradient, |sum, (_, more)| sum + more);
        }
        let Compute { pool, isa } = &mut *self.device;
        let capped = self.model.config.traits.logit_cap.map(|cap| (cap, buffers.logits.clone()));
        log_probability_gradients(pool, *isa, &mut buffers.logits, vocabulary, &buffers.of);
        for ((of, row), target) in
            buffers.of.iter().zip(buffers.logits.chunks_exact_mut(vocabulary)).zip(tile.targets.clone())
        {
            share(row, of.token, loss.others(target));
        }
        if let Some((cap, capped)) = capped {
            let Compute { pool, isa } = &mut *self.device;
            cap_gradient(pool, *isa, &capped, &mut buffers.logits, cap);
        }
        self.buffers.outputs.reshape(targets.len(), vocabulary);
        self.buffers.outputs.values_mut().copy_from_slice(&buffers.logits);
        let mut x = std::mem::take(&mut self.buffers.x);
        self.normed(NormSite::Output, &buffers.residual, &mut x);
        let notes =
            GroupActivations { layer: 0, group: LinearGroup::Head, x: &x, out: &[], sequences: &tile.sums };
        if self.group(notes)? && self.goes_below(TrainableSite::of(0, LinearGroup::Head)) {
            let mut g = std::mem::take(&mut self.buffers.residual);
            self.buffers.residual.resize(buffers.residual.len(), 0.0);
            self.buffers.residual.fill(0.0);
            self.through_norm(NormSite::Output, &buffers.residual);
            for (from, target) in self.buffers.residual.chunks_exact(hidden).zip(targets) {
                g[target.row * hidden..][..hidden].copy_from_slice(from);
            }
            self.buffers.residual = g;
        }
        self.buffers.x = x;
        Ok(())
    }
}

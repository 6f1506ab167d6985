//! Logits a tile of rows at a time, their log-probabilities, and back from these.
//!
//! Logits of a whole batch would be larger than everything else: a vocabulary of 50,000 for 1,000 rows is 200 MB. A tile
//! holds whole sums, each of the targets among [`SUM_ROWS`] rows of a sequence: neither how batches are cut nor which other
//! rows have targets that count nothing changes a sum.

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

/// What is to become smaller, by the log-probabilities of the targets.
pub trait Loss {
    /// Writes the loss' gradients at some targets' log-probabilities to `gradients`. `targets` are counted through the batch,
    /// example after example; each is asked for once, in ascending order.
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]);

    /// Tokens besides the targets that count, for a loss that compares with a distribution: the gradient at the log-probability
    /// of each, for the target `target`, which was among those last asked for. None, unless a loss says otherwise.
    fn others(&self, target: usize) -> &[(u32, f32)] {
        let _ = target;
        &[]
    }
}

/// What the model says where a target is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Of the target.
    pub log_probability: f32,
    /// The token that is likeliest, of those that may be said; of equal ones the first.
    pub likeliest: u32,
}

/// Rows of logits at a time.
const TILE_ROWS: usize = 2 * SUM_ROWS;

/// Rows whose logits are computed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeadTile {
    /// Among all targets.
    pub(super) targets: Range<usize>,
    /// Which of its rows make one sum.
    sums: Vec<SequenceRows>,
}

/// Cuts targets, which ascend by row, into tiles.
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
    /// What each row of the tile says, if it may say only the tokens `allowed`, or all of none.
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

/// The token with the largest logit; of equal ones the first.
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

/// What logits are computed with.
pub(super) struct LmHeadPass<'a, B> {
    pub(super) model: &'a ModelContext,
    pub(super) base: &'a mut B,
    pub(super) device: &'a mut Compute,
    pub(super) scratch: &'a mut Scratch<Compute>,
    pub(super) deltas: &'a mut DeltaScratch,
    pub(super) adapter: &'a Arc<PreparedAdapter>,
    pub(super) method: &'a MethodWeights,
    /// Of the rows whose logits are computed.
    pub(super) dropouts: &'a RowDropouts,
}

/// A tile's numbers.
#[derive(Debug, Default)]
pub(super) struct HeadScratch {
    /// The residual stream of the tile's rows.
    residual: Vec<f32>,
    logits: Vec<f32>,
    pub(super) log_probabilities: Vec<f32>,
    coefficients: Vec<f32>,
    of: Vec<LogProbability>,
}

impl<B: ReverseLayers<Compute>> LmHeadPass<'_, B> {
    /// Logits and log-probabilities of some targets, whose rows are in `residual`, `[rows, hidden]`.
    pub(super) fn forward(
        &mut self,
        residual: &[f32],
        targets: &[TargetRow],
        room: &mut HeadScratch,
    ) -> Result<(), B::Error> {
        let hidden = self.model.config.hidden_size;
        room.residual.clear();
        for target in targets {
            room.residual.extend_from_slice(&residual[target.row * hidden..][..hidden]);
        }
        place_residual(self.scratch, &room.residual);
        let found = AdapterRows::of_head(self.adapter, targets.len());
        let deltas = BatchDeltas::new(&self.model.config, None, self.deltas, &found);
        let dropping = Dropping { dropouts: self.dropouts, method: self.method, config: &self.model.config };
        // Of the head nothing needs to be noted.
        let mut deltas = RecordingDeltas { model: self.model, deltas, dropping, notes: &RefCell::default() };
        let parts = (&mut *self.base, &mut deltas);
        run_head(self.model, parts, self.device, self.scratch, targets.len(), &mut room.logits)?;
        let (logits, vocabulary) = (&room.logits, self.model.config.vocab_size);
        let found: Vec<_> = targets.iter().map(|_| OnceLock::new()).collect();
        self.device.pool.run(targets.len(), |row| {
            let logits = &logits[row * vocabulary..][..vocabulary];
            found[row].get_or_init(|| log_probability(logits, targets[row].token));
        });
        room.log_probabilities.clear();
        room.of.clear();
        for (found, target) in found.into_iter().zip(targets) {
            // The pool has done each row.
            let (log_probability, log_sum) = found.into_inner().unwrap_or_default();
            room.log_probabilities.push(log_probability);
            room.of.push(LogProbability { token: target.token, log_sum, gradient: 0.0 });
        }
        Ok(())
    }
}

/// Gives the part of a row's gradient that belongs to `others` to them: until now all of it stood at its target.
fn share(row: &mut [f32], target: u32, others: &[(u32, f32)]) {
    for &(token, gradient) in others {
        row[target as usize] -= gradient;
        row[token as usize] += gradient;
    }
}

impl<B: ReverseLayers<Compute>> Reverse<'_, '_, B> {
    /// Back from the log-probabilities of a tile, which [`LmHeadPass::forward`] has just computed, to the residual stream of its rows.
    pub(super) fn head(
        &mut self,
        targets: &[TargetRow],
        tile: &HeadTile,
        loss: &mut dyn Loss,
        room: &mut HeadScratch,
    ) -> Result<(), TrainError<B::Error>> {
        let (hidden, vocabulary) = (self.model.config.hidden_size, self.model.config.vocab_size);
        room.coefficients.clear();
        room.coefficients.resize(targets.len(), 0.0);
        loss.gradients(tile.targets.clone(), &room.log_probabilities, &mut room.coefficients);
        let is_idle = |(&own, target): (&f32, usize)| own == 0.0 && loss.others(target).is_empty();
        if room.coefficients.iter().zip(tile.targets.clone()).all(is_idle) {
            return Ok(());
        }
        for ((of, &gradient), target) in room.of.iter_mut().zip(&room.coefficients).zip(tile.targets.clone())
        {
            of.gradient = loss.others(target).iter().fold(gradient, |sum, (_, more)| sum + more);
        }
        let Compute { pool, isa } = &mut *self.device;
        let capped = self.model.config.traits.logit_cap.map(|cap| (cap, room.logits.clone()));
        log_probability_gradients(pool, *isa, &mut room.logits, vocabulary, &room.of);
        for ((of, row), target) in
            room.of.iter().zip(room.logits.chunks_exact_mut(vocabulary)).zip(tile.targets.clone())
        {
            share(row, of.token, loss.others(target));
        }
        if let Some((cap, capped)) = capped {
            let Compute { pool, isa } = &mut *self.device;
            cap_gradient(pool, *isa, &capped, &mut room.logits, cap);
        }
        self.room.outputs.reshape(targets.len(), vocabulary);
        self.room.outputs.values_mut().copy_from_slice(&room.logits);
        let mut x = std::mem::take(&mut self.room.x);
        self.normed(NormSite::Output, &room.residual, &mut x);
        let notes =
            GroupActivations { layer: 0, group: LinearGroup::Head, x: &x, out: &[], sequences: &tile.sums };
        if self.group(notes)? && self.goes_below(TrainableSite::of(0, LinearGroup::Head)) {
            let mut g = std::mem::take(&mut self.room.residual);
            self.room.residual.resize(room.residual.len(), 0.0);
            self.room.residual.fill(0.0);
            self.through_norm(NormSite::Output, &room.residual);
            for (from, target) in self.room.residual.chunks_exact(hidden).zip(targets) {
                g[target.row * hidden..][..hidden].copy_from_slice(from);
            }
            self.room.residual = g;
        }
        self.room.x = x;
        Ok(())
    }
}

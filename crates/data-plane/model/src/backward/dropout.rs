//! Dropout on inputs of low-rank matrices (PEFT's `lora_dropout`). Modules with common rows share a mask.
//!
//! A mask is drawn from keys and never stored, so a repeated computation of a row drops the same elements.

use std::sync::Mutex;

use kernels::{Activations, backward::attention::SequenceRows};
use scheduling::random::Rng;

use crate::{
    adapter::MethodWeights,
    cpu::Compute,
    forward::LinearGroup,
    shape::{config::ModelConfig, layout::group_targets},
};

/// Dropout of one training example.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of dropped elements, below 1; the remaining elements are scaled up to keep the mean.
    pub rate: f64,
    /// Key that selects the dropped elements.
    pub key: u64,
}

const VALUES: f64 = 65536.0;
/// Rows that a thread takes at a time.
const ROWS_A_CHUNK: usize = 32;

impl Dropout {
    /// Returns the dropout with a key derived from `number`.
    fn of(self, number: usize) -> Self {
        Self { key: Rng::keyed(self.key).bits(number as u64), ..self }
    }

    fn apply(self, row: &mut [f32]) {
        let dropped = (self.rate * VALUES).round();
        let kept = (VALUES / (VALUES - dropped)) as f32;
        let random = Rng::keyed(self.key);
        for (number, four) in row.chunks_mut(4).enumerate() {
            let mut bits = random.bits(number as u64);
            for value in four {
                *value = if f64::from(bits as u16) < dropped { 0.0 } else { *value * kept };
                bits >>= 16;
            }
        }
    }
}

/// Dropout of each row, or an empty list without dropout.
#[derive(Debug, Default)]
pub(super) struct RowDropouts(Vec<Dropout>);

impl RowDropouts {
    /// Returns the dropout of a batch's rows; `dropouts` are those of its sequences.
    pub(super) fn of(sequences: &[SequenceRows], dropouts: &[Dropout]) -> Self {
        let rows = sequences.iter().zip(dropouts);
        Self(rows.flat_map(|(rows, dropout)| (0..rows.count).map(|row| dropout.of(row))).collect())
    }

    pub(super) fn of_rows(&self, rows: impl Iterator<Item = usize>) -> Self {
        Self(rows.filter_map(|row| self.0.get(row).copied()).collect())
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Applies the dropout of each row to `x`, the inputs of a group's low-rank matrices.
    pub(super) fn apply(&self, device: &mut Compute, layer: usize, group: LinearGroup, x: &mut [f32]) {
        let place = place(layer, group);
        let width = x.len() / self.0.len().max(1);
        let chunks = self.0.chunks(ROWS_A_CHUNK).zip(x.chunks_mut(ROWS_A_CHUNK * width));
        let chunks: Vec<_> = chunks.map(Mutex::new).collect();
        device.pool.run(chunks.len(), |chunk| {
            // Each chunk is used by one thread only, so its lock is never poisoned by another.
            let Ok(mut chunk) = chunks[chunk].lock() else { return };
            let (dropouts, x) = &mut *chunk;
            dropouts.iter().zip(x.chunks_mut(width)).for_each(|(dropout, row)| dropout.of(place).apply(row));
        });
    }
}

/// Returns the number of a group for the derivation of keys; experts have no low-rank matrices.
fn place(layer: usize, group: LinearGroup) -> usize {
    const STEPS: usize = 5;
    let step = match group {
        LinearGroup::Qkv => 0,
        LinearGroup::O => 1,
        LinearGroup::GateUp => 2,
        LinearGroup::Down => 3,
        LinearGroup::Head => 4,
        LinearGroup::ExpertGateUp(_) | LinearGroup::ExpertDown(_) => {
            unreachable!("nothing learns in an expert")
        }
    };
    layer * STEPS + step
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Dropping<'a> {
    pub(super) dropouts: &'a RowDropouts,
    pub(super) method: &'a MethodWeights,
    pub(super) config: &'a ModelConfig,
}

impl Dropping<'_> {
    /// Returns a copy of a group's inputs with dropout, or `None` if the group has no dropout.
    pub(super) fn dropped(
        &self,
        device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
    ) -> Option<Activations> {
        if self.dropouts.is_none() || !has_low_rank(self.method, self.config, layer, group) {
            return None;
        }
        let mut dropped = Activations::default();
        dropped.reshape(x.rows(), x.width());
        dropped.values_mut().copy_from_slice(x.values());
        self.dropouts.apply(device, layer, group, dropped.values_mut());
        Some(dropped)
    }
}

pub(super) fn has_low_rank(
    method: &MethodWeights,
    config: &ModelConfig,
    layer: usize,
    group: LinearGroup,
) -> bool {
    let modules = method.as_lora();
    let has = |target| modules.binary_search_by_key(&(layer, target), |of| (of.layer, of.target)).is_ok();
    group_targets(config, group).into_iter().any(|(target, _)| has(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_dropped_and_the_mean_stays() {
        for rate in [0.05, 0.5, 0.9] {
            let mut row = vec![1.0; 100_000];
            Dropout { rate, key: 3 }.apply(&mut row);
            let dropped = row.iter().filter(|value| **value == 0.0).count() as f64 / row.len() as f64;
            let mean = row.iter().copied().map(f64::from).sum::<f64>() / row.len() as f64;
            assert!((dropped - rate).abs() < 0.01, "{rate}: {dropped}");
            assert!((mean - 1.0).abs() < 0.05, "{rate}: {mean}");
        }
    }

    #[test]
    fn nothing_is_dropped_at_a_rate_of_nothing() {
        let mut row: Vec<f32> = (0..9).map(|value| value as f32).collect();
        let whole = row.clone();
        Dropout { rate: 0.0, key: 1 }.apply(&mut row);
        assert_eq!(row, whole);
    }
}

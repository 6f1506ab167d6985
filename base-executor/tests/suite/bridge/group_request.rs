//! Requests of the device in the bridge's tests, and their expected sums.

use std::sync::Arc;

use base_executor::workers::JobRows;
use kernels::{Isa, lora::sum_ranks};
use model::{
    deltas::{
        assist::{AssistJob, OwnedPartialSum},
        prepared::PreparedAdapter,
    },
    shape::{config::ModelConfig, source::Target},
};

use crate::worker::numbers;

pub(super) const ROWS: JobRows = JobRows { pass: 256, head: 8 };

pub(super) const GROUPS: [&[Target]; 5] = [
    &[Target::Q, Target::K, Target::V],
    &[Target::O],
    &[Target::Gate, Target::Up],
    &[Target::Down],
    &[Target::LmHead],
];

/// Request of the device at one linear group: packed rows of some of the adapters.
pub(super) struct GroupRequest {
    pub(super) salt: usize,
    asks: Vec<OwnedPartialSum>,
    width: usize,
    pub(super) x: Vec<f32>,
}

impl GroupRequest {
    pub(super) fn new(
        config: &ModelConfig,
        adapters: &[Arc<PreparedAdapter>],
        salt: usize,
        max_rows: usize,
    ) -> Self {
        let targets = GROUPS[salt % GROUPS.len()];
        let is_head = targets == [Target::LmHead];
        let layer = if is_head { 0 } else { salt / GROUPS.len() % config.layers };
        let max_rows = if is_head { max_rows.min(ROWS.head) } else { max_rows };
        let taking_part = 1 + salt % adapters.len();
        let (mut asks, mut first_row, mut offset, mut width) = (Vec::new(), 0, 0, 0);
        for (at, adapter) in adapters.iter().cycle().skip(salt).take(taking_part).enumerate() {
            let rows = (1 + (salt * 37 + at * 11) % max_rows).min(max_rows / taking_part).max(1);
            for &target in targets {
                let matrix = adapter.matrix(layer, target).unwrap();
                let ranks = 1 + salt % matrix.rank();
                let adapter = Arc::clone(adapter);
                asks.push(OwnedPartialSum { adapter, layer, target, first_row, rows, ranks, offset });
                offset += rows * matrix.rows();
                width = matrix.columns();
            }
            first_row += rows;
        }
        Self { salt, asks, width, x: numbers(salt, first_row * width) }
    }

    pub(super) fn job(&self) -> AssistJob {
        let (asks, width) = (self.asks.clone(), self.width);
        AssistJob { asks, width, x_rows: self.x.len() / width, sums: self.elements() }
    }

    pub(super) fn elements(&self) -> usize {
        self.asks.iter().map(|owned| owned.ask().unwrap().elements()).sum()
    }

    pub(super) fn rank_rows(&self) -> u64 {
        self.asks.iter().map(|owned| owned.ask().unwrap().rank_rows()).sum()
    }

    pub(super) fn sums(&self) -> Vec<f32> {
        let mut sums = vec![0.0; self.elements()];
        for owned in &self.asks {
            let ask = owned.ask().unwrap();
            let x = &self.x[ask.first_row * self.width..][..ask.rows * self.width];
            let sums = &mut sums[ask.offset..][..ask.elements()];
            sum_ranks(Isa::best(), x, ask.matrix, 0..ask.ranks, sums);
        }
        sums
    }
}

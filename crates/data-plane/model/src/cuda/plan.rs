//! Plan of a pass's adapter work on device and workers, before its upload to the device.

use std::sync::{Arc, Weak};

use kernels::cuda::{board::SumsTarget, lora::LoraSegment};

use crate::{
    deltas::{
        adapter_rows::{AdapterRows, AdapterRun},
        assist::{AssistJob, OwnedPartialSum},
        device_copy::DeviceCopy,
    },
    forward::LinearGroup,
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    weights::group_targets,
};

/// Rows of a plan for which all ranks were on the device.
#[derive(Debug)]
pub(super) struct PlanRows {
    rows: Vec<PlannedRun>,
    head_rows: Vec<PlannedRun>,
}

#[derive(Debug)]
struct PlannedRun {
    first_row: usize,
    rows: usize,
    /// Weak reference, which keeps the copy's address unique.
    copy: Weak<DeviceCopy>,
}

impl PlanRows {
    /// Returns `None` if a part of an adapter is missing, because the part may have arrived by the next pass.
    pub(super) fn of(found: &AdapterRows) -> Option<Self> {
        let run = |run: &AdapterRun| {
            let copy = run.device.as_ref().filter(|copy| copy.is_complete())?;
            let AdapterRun { first_row, rows, .. } = *run;
            Some(PlannedRun { first_row, rows, copy: Arc::downgrade(copy) })
        };
        let runs = |runs: &[AdapterRun]| runs.iter().map(run).collect::<Option<Vec<_>>>();
        Some(Self { rows: runs(&found.rows)?, head_rows: runs(&found.head_rows)? })
    }

    /// Whether the plan is valid for these rows. A plan for a revoked copy never is.
    pub(super) fn is_of(&self, found: &AdapterRows) -> bool {
        let same = |(planned, run): (&PlannedRun, &AdapterRun)| {
            let copy = run.device.as_ref().filter(|copy| copy.is_complete()).map(Arc::as_ptr);
            (planned.first_row, planned.rows, Some(planned.copy.as_ptr())) == (run.first_row, run.rows, copy)
        };
        let all = |planned: &[PlannedRun], runs: &[AdapterRun]| {
            planned.len() == runs.len() && planned.iter().zip(runs).all(same)
        };
        all(&self.rows, &found.rows) && all(&self.head_rows, &found.head_rows)
    }
}

/// Partial sums that workers compute for one group.
#[derive(Debug)]
pub(super) struct AssistedGroup {
    pub(super) job: AssistJob,
    /// Rows of the group's inputs to send, as first row and number of rows, in the order of the slab.
    pub(super) spans: Vec<(usize, usize)>,
    /// Index of the table with these spans.
    pub(super) table: usize,
    pub(super) answers: Vec<SumsTarget>,
}

impl AssistedGroup {
    /// Requests a run's leading `ranks` at a linear layer; `columns` is the first output and their number.
    fn ask(
        &mut self,
        run: &AdapterRun,
        slab_row: usize,
        place: (usize, Target),
        ranks: usize,
        columns: (usize, usize),
    ) {
        if self.job.x_rows == slab_row {
            // The linear layers of a group share their rows.
            self.spans.push((run.first_row, run.rows));
            self.job.x_rows += run.rows;
        }
        let (offset, (layer, target), (column, width)) = (self.job.sums, place, columns);
        let (first_row, rows) = (run.first_row, run.rows);
        let adapter = Arc::clone(&run.adapter);
        self.job.asks.push(OwnedPartialSum {
            adapter,
            layer,
            target,
            first_row: slab_row,
            rows,
            ranks,
            offset,
        });
        self.answers.push(SumsTarget { at: offset, rows, width, first_row, column });
        self.job.sums += rows * width;
    }
}

/// Splits the work of a group between the device and workers.
pub(super) fn parts<'a>(
    config: &ModelConfig,
    found: &'a AdapterRows,
    layer: usize,
    group: LinearGroup,
) -> (Vec<LoraSegment<'a>>, Option<AssistedGroup>) {
    let targets = group_targets(config, group);
    let width = targets.first().map_or(0, |&(target, _)| linear_shape(config, target)[1]);
    let job = AssistJob { asks: Vec::new(), width, x_rows: 0, sums: 0 };
    let (mut segments, mut help) =
        (Vec::new(), AssistedGroup { job, spans: Vec::new(), table: 0, answers: Vec::new() });
    for run in found.of_group(group).iter().filter(|run| run.rows > 0) {
        let slab_row = help.job.x_rows;
        for &(target, column) in &targets {
            let Some(host) = run.adapter.matrix(layer, target) else { continue };
            let device = run.device.as_ref().and_then(|copy| copy.cuda(layer, target));
            let missing = device.map_or(host.rank(), |matrix| matrix.first_rank());
            if let Some(matrix) = device.filter(|_| missing < host.rank()) {
                let (first_row, rows) = (run.first_row, run.rows);
                segments.push(LoraSegment { first_row, rows, matrix, first_rank: missing, column });
            }
            if missing > 0 {
                help.ask(run, slab_row, (layer, target), missing, (column, host.rows()));
            }
        }
    }
    (segments, (!help.spans.is_empty()).then_some(help))
}

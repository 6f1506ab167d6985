//! Cost of adapters in a decode step: the same streams with an adapter each, and on the base.

use anyhow::Result;

use super::{
    adapters,
    lab::{GpuBenchContext, GpuMeasurement, map, own},
    streams::Streams,
};
use crate::report::{BenchTarget, Better};

/// Benchmark name of this module and of [`super::ranks`].
pub(super) const BENCH: &str = "cuda-lora";
/// Rank with a target, and the maximum ratio of a step to one without adapters.
const RANK: usize = 16;
const MAX_SHARE_OF_BASE: f64 = 1.1;

/// Prints a row for every rank.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn run(lab: &GpuBenchContext, streams: &mut Streams) -> Result<()> {
    let count = lab.sizes.adapters;
    let base = lab.samples(|| streams.step_s(lab, &vec![None; count]))?;
    let base = map(&base, |step_s| step_s * 1e3)?;
    for &rank in lab.sizes.ranks {
        let adapters = adapters::on_device(lab.config(), &streams.copy_lane(), rank, count)?;
        let who: Vec<_> = adapters.into_iter().map(Some).collect();
        let step_s = lab.samples(|| streams.step_s(lab, &who))?;
        let figure = GpuMeasurement {
            bench: BENCH,
            case: format!("a step of {count} streams on {count} adapters of rank {rank}"),
            unit: "ms",
            better: Better::Lower,
            ours: map(&step_s, |step_s| step_s * 1e3)?,
        };
        let goal = (rank == RANK).then_some(BenchTarget::ShareAtMost(MAX_SHARE_OF_BASE));
        lab.report(figure, own(format!("holobiont, {count} base streams"), base.clone()), goal)?;
    }
    Ok(())
}

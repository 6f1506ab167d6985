//! A long prompt, in one pass and in chunks, beside the rate of the matrix unit.

use anyhow::Result;

use super::{
    lab::{GpuBenchContext, GpuMeasurement, map},
    roofline,
    streams::Streams,
    work,
};
use crate::report::{BenchTarget, Better};

const BENCH: &str = "cuda-prefill";
/// Minimum share of the matrix unit's rate, in one pass.
const LEAST_OF_RATE: f64 = 0.7;

/// Prints every row of this benchmark.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn run(lab: &GpuBenchContext, streams: &mut Streams) -> Result<()> {
    let (tokens, chunk) = (lab.sizes.prompt, lab.sizes.chunk);
    let flops = work::prompt_flops(lab.config(), tokens);
    let unit = roofline::matrix_rate(lab)?;
    let goal = unit.is_ceiling.then_some(BenchTarget::RatioAtLeast(LEAST_OF_RATE));
    for (case, chunk, target) in
        [("in one pass".to_owned(), tokens, goal), (format!("in chunks of {chunk}"), chunk, None)]
    {
        let seconds = lab.samples(|| Ok(streams.prefill(tokens, chunk)?.as_secs_f64()))?;
        let figure = |unit, ours| GpuMeasurement {
            bench: BENCH,
            case: format!("{tokens} tokens {case}"),
            unit,
            better: Better::Higher,
            ours,
        };
        let rate = map(&seconds, |seconds| flops / seconds / 1e12)?;
        lab.report(figure("TFLOP/s", rate), unit.rival.clone(), target)?;
        if let Some(peer) = lab.peers.rival("prefill-2048")? {
            let rate = map(&seconds, |seconds| tokens as f64 / seconds)?;
            lab.report(figure("tokens/s", rate), peer, None)?;
        }
    }
    Ok(())
}

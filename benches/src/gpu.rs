//! The base on an NVIDIA GPU: distance to the device's limits, and cost of adapters.
//!
//! Weights are random ([`model::sources::random`]), so any shape is measured without a download: that of
//! Llama-2-7B, or a tiny one where a CPU stands in for the GPU and the results mean nothing. Rows are printed
//! at once and name shape, device and driver.
//!
//! # Layout
//!
//! - [`lab`]: device, shape and rows, which all benchmarks share. [`sizes`]: extent of the measurements.
//! - [`roofline`]: measured limits of the device. [`work`]: bytes and operations of a shape. [`peer`]:
//!   PyTorch's measurements, written by `scripts/gpu-peer.py`. [`fit`]: a straight line and its quality of
//!   fit.
//! - [`streams`], [`adapters`]: a model in this process, and adapters on its device.
//! - [`decode`], [`prefill`], [`overhead`], [`ranks`], [`link`]: benchmarks in this process.
//! - [`executors`], [`fused`], [`cold`]: benchmarks of the real executor with real workers.
//!
//! `docs/performance/gpu.md` gives the expected values and their reasons.

mod adapters;
mod cold;
mod decode;
mod executors;
mod fit;
mod fused;
mod lab;
mod link;
mod overhead;
mod peer;
mod prefill;
mod ranks;
mod roofline;
mod sizes;
mod streams;
mod work;

use anyhow::Result;
use model::cuda::Graphs;

use self::{lab::GpuBenchContext, streams::Streams};
use crate::{
    config::{Name, SuiteConfig},
    report::SuiteOutcome,
};

/// Runs the GPU benchmarks `names`. A failed benchmark does not stop the others.
///
/// # Errors
/// If there is no such device, or the shape cannot be read.
pub(crate) fn run(config: &SuiteConfig, names: &[Name]) -> Result<SuiteOutcome> {
    let lab = GpuBenchContext::open(config)?;
    let mut outcome = SuiteOutcome::Complete;
    // Consecutive benchmarks share one model: 13 GB take seconds to generate.
    let mut streams = None;
    for &name in names {
        eprintln!("holobiont-bench: {name:?} on {}", lab.cuda.info().name);
        if !name.shares_model() {
            streams = None;
        }
        if let Err(error) = measure(&lab, name, &mut streams) {
            eprintln!("holobiont-bench: {name:?} could not be measured: {error:#}");
            outcome = SuiteOutcome::Partial;
        }
    }
    Ok(outcome)
}

fn measure(lab: &GpuBenchContext, name: Name, streams: &mut Option<Streams>) -> Result<()> {
    match name {
        Name::CudaLink => link::run(lab),
        Name::CudaFused => fused::run(lab),
        Name::CudaCold => cold::run(lab),
        _ => {
            let streams = match streams {
                Some(streams) => streams,
                none => none.insert(Streams::load(lab, Graphs::Use)?),
            };
            match name {
                Name::CudaDecode => decode::run(lab, streams),
                Name::CudaPrefill => prefill::run(lab, streams),
                Name::CudaLora => {
                    overhead::run(lab, streams)?;
                    ranks::run(lab)
                }
                _ => Ok(()),
            }
        }
    }
}

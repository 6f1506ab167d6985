//! Decode: one stream beside the limit of the memory bandwidth, eight beside PyTorch, and the gain of CUDA
//! graphs.

use anyhow::Result;
use model::cuda::Graphs;

use super::{
    adapters,
    lab::{GpuBenchContext, GpuMeasurement, map, own},
    roofline,
    streams::{StreamAdapters, Streams},
    work,
};
use crate::{
    measure::Samples,
    report::{BenchTarget, Better},
};

const BENCH: &str = "cuda-decode";
/// Simultaneous streams, each on its own adapter, and rank of the adapters.
const STREAMS: usize = 8;
const RANK: usize = 16;
/// Minimum shares of the bandwidth's limit and of the peer's rate.
const LEAST_OF_LIMIT: f64 = 0.85;
const LEAST_OF_PEER: f64 = 1.3;

/// Prints every row of this benchmark.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn run(lab: &GpuBenchContext, streams: &mut Streams) -> Result<()> {
    let one = rate(lab, streams, &[None])?;
    let limit = limit(lab)?;
    let goal = Some(BenchTarget::RatioAtLeast(LEAST_OF_LIMIT));
    lab.report(figure(lab, "1 stream", &one), limit, goal)?;
    beside_peer(lab, "1 stream", &one, "decode-1", None)?;

    let adapters = adapters::on_device(lab.config(), &streams.copy_lane(), RANK, STREAMS)?;
    let who: Vec<_> = adapters.into_iter().map(Some).collect();
    let ways = [&[const { None }; STREAMS][..], &who];
    let [base, adapted] = lab.alternating(|way| Ok(STREAMS as f64 / streams.step_s(lab, ways[way])?))?;
    beside_peer(lab, "8 base streams", &base, "decode-8", None)?;
    let case = format!("8 streams on 8 adapters of rank {RANK}");
    let goal = Some(BenchTarget::RatioAtLeast(LEAST_OF_PEER));
    beside_peer(lab, &case, &adapted, "decode-8-adapters", goal)?;
    lab.report(figure(lab, &case, &adapted), own("holobiont, 8 base streams", base), None)?;
    without_records(lab, streams, &case, &who)
}

/// Compares with steps that are enqueued launch by launch, on a second model, in turns.
fn without_records(
    lab: &GpuBenchContext,
    recorded: &mut Streams,
    case: &str,
    who: &StreamAdapters,
) -> Result<()> {
    let mut models = [recorded, &mut Streams::load(lab, Graphs::Avoid)?];
    for (case, who) in [("1 stream", &[None][..]), (case, who)] {
        let [with, without] = lab.alternating(|way| Ok(who.len() as f64 / models[way].step_s(lab, who)?))?;
        let case = format!("{case}, steps recorded as graphs");
        lab.report(figure(lab, &case, &with), own("holobiont, launch by launch", without), None)?;
    }
    Ok(())
}

fn rate(lab: &GpuBenchContext, streams: &mut Streams, who: &StreamAdapters) -> Result<Samples> {
    let step_s = lab.samples(|| streams.step_s(lab, who))?;
    map(&step_s, |step_s| who.len() as f64 / step_s)
}

fn figure(lab: &GpuBenchContext, case: &str, rate: &Samples) -> GpuMeasurement {
    let (context, tokens) = (lab.sizes.context, lab.sizes.decoded);
    GpuMeasurement {
        bench: BENCH,
        case: format!("{case}, {tokens} tokens behind {context}"),
        unit: "tokens/s",
        better: Better::Higher,
        ours: rate.clone(),
    }
}

/// Tokens per second of one stream that reads every byte at the rate of a copy.
fn limit(lab: &GpuBenchContext) -> Result<crate::report::PeerSamples> {
    let sizes = &lab.sizes;
    let context = sizes.context as f64 + sizes.warm_up as f64 + sizes.decoded as f64 / 2.0;
    let bytes = work::step_bytes(lab.config(), 1, context);
    let copied = roofline::copy_gbps(lab)?;
    let name = format!("{:.3} GB a token at the {:.0} GB/s of a copy", bytes / 1e9, copied.median());
    Ok(own(name, map(&copied, |gbps| gbps * 1e9 / bytes)?))
}

fn beside_peer(
    lab: &GpuBenchContext,
    case: &str,
    rate: &Samples,
    peer: &str,
    target: Option<BenchTarget>,
) -> Result<()> {
    match lab.peers.rival(peer)? {
        Some(rival) => lab.report(figure(lab, case, rate), rival, target),
        None => {
            eprintln!(
                "holobiont-bench: {case}: the peer's {peer} was not measured, so nothing is compared with it"
            );
            Ok(())
        }
    }
}

//! What the pool and the pass would do on more cores than there are.
//!
//! The pass is rehearsed: the kernels cut it as for so many threads, and one thread computes all chunks in turn and times
//! each. What threads cost each other is measured between two. A simulation has as many threads as one likes claim those
//! chunks at that cost. What it leaves out, and what its figures mean: `docs/performance/many-cores.md`.
//!
//! - [`pass`]: the pass, rehearsed and for real
//! - [`costs`]: what a claim costs, and a helper that comes
//! - [`simulation`]: threads that claim chunks

mod costs;
mod pass;
mod simulation;

use anyhow::Result;

use self::{
    costs::PoolCosts,
    pass::{Pass, PassLoad},
    simulation::seconds,
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const LOADS: [PassLoad; 4] = [
    PassLoad { name: "decode, 1 stream", streams: 1, tokens: 1 },
    PassLoad { name: "decode, 8 streams", streams: 8, tokens: 1 },
    PassLoad { name: "decode, 16 streams", streams: 16, tokens: 1 },
    PassLoad { name: "prefill of 512", streams: 1, tokens: 512 },
];
/// How near the forecast is to be where it can be checked.
const NEAR: f64 = 0.15;

/// Every comparison of this benchmark: first those that are measured, then those that are forecast.
///
/// # Errors
/// If there are no two cores, or the model cannot be read.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let costs = PoolCosts::measure(cores.numbers(), config.runs)?;
    let mut pass = Pass::open(&config.model, cores.numbers())?;
    let mut rows = costs.rows()?;
    for load in &LOADS {
        let mut forecast = |threads| -> Result<[f64; 2]> {
            let regions = pass.rehearse(load, threads, config.runs)?;
            Ok([costs, PoolCosts::NONE].map(|costs| seconds(&regions, threads, &costs)))
        };
        let times = THREADS.map(&mut forecast).into_iter().collect::<Result<Vec<_>>>()?;
        let one = times[0][0];
        let [alone, both] = pass.time(load, config.runs)?;
        rows.push(checked(load, alone.median() / both.median(), one / times[1][0])?);
        for (threads, [time, free]) in THREADS.into_iter().zip(times) {
            rows.push(foretold(format!("{}, {threads} threads", load.name), one / time, one / free)?);
        }
    }
    Ok(rows)
}

/// Two threads, for real, beside what is foretold of them.
fn checked(load: &PassLoad, measured: f64, forecast: f64) -> Result<Comparison> {
    let case = format!("{}, 2 threads for real", load.name);
    row(case, "times one thread", measured, ("the forecast", forecast), Some(BenchTarget::Near(NEAR)))
}

/// How much faster than one thread; beside it, if claims and waking cost nothing: what serial parts and few chunks leave.
fn foretold(case: String, speedup: f64, free: f64) -> Result<Comparison> {
    row(case, "times one thread", speedup, ("free claims", free), None)
}

fn row(
    case: String,
    unit: &'static str,
    ours: f64,
    (name, rival): (&str, f64),
    target: Option<BenchTarget>,
) -> Result<Comparison> {
    let rival =
        PeerSamples { name: name.to_owned(), format: String::new(), samples: Samples::new(vec![rival])? };
    let better = if unit == "ns" { Better::Lower } else { Better::Higher };
    Ok(Comparison { bench: "many-cores", case, unit, better, ours: Samples::new(vec![ours])?, rival, target })
}

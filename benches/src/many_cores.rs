//! Forecast of the pool and the pass on more cores than the machine has.
//!
//! The kernels divide the pass as for `n` threads; one thread computes and times all chunks in turn. The cost
//! of threads to each other is measured between two. A simulation lets any number of threads claim those
//! chunks at that cost. The limits of the simulation and the meaning of the results are in
//! `docs/performance/many-cores.md`.
//!
//! - [`pass`]: the pass, chunk by chunk and for real
//! - [`costs`]: cost of a claim, and of waking a helper
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
/// Maximum relative error of a forecast that can be checked.
const NEAR: f64 = 0.15;

/// Measures every comparison of this benchmark: first the measured, then the forecast ones.
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

fn checked(load: &PassLoad, measured: f64, forecast: f64) -> Result<Comparison> {
    let case = format!("{}, 2 threads for real", load.name);
    row(case, "times one thread", measured, ("the forecast", forecast), Some(BenchTarget::Near(NEAR)))
}

/// Speedup over one thread, beside `free`: the speedup if claims and waking cost nothing, which serial parts
/// and few chunks limit.
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

//! Parts of a fleet, each beside a baseline: Envoy and the picker, propagation of an adapter, the first cold
//! adapter of a new host, and the start of a gateway that knows ten thousand adapters.
//!
//! - [`envoy`]: Envoy and the picker. [`hosts`]: deployments that share a PostgreSQL and a bucket.
//! - [`via_envoy`], [`propagation`], [`cold`], [`registered`]: the measurements, in that order.

mod cold;
mod envoy;
mod hosts;
mod propagation;
mod registered;
mod via_envoy;

use anyhow::Result;

use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

type FleetBench = fn(&SuiteConfig, &Cores) -> Result<Vec<Comparison>>;

const PARTS: [(&str, FleetBench); 4] = [
    ("through Envoy", via_envoy::run),
    ("known everywhere", propagation::run),
    ("a new host", cold::run),
    ("10,000 adapters", registered::run),
];

/// Measures every comparison of this benchmark.
///
/// # Errors
/// If Envoy, PostgreSQL or moto is missing, or a request fails.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut rows = Vec::new();
    for (name, part) in PARTS {
        eprintln!("holobiont-bench: fleet, {name}");
        rows.extend(part(config, cores)?);
    }
    Ok(rows)
}

fn row(
    case: &str,
    unit: &'static str,
    ours: Samples,
    (name, samples): (&str, Samples),
    target: Option<BenchTarget>,
) -> Comparison {
    let rival = PeerSamples { name: name.to_owned(), format: "Q4_1".to_owned(), samples };
    Comparison { bench: "fleet", case: case.to_owned(), unit, better: Better::Lower, ours, rival, target }
}

/// Smallest sample that at most a `share` of all samples does not exceed.
fn at(samples: &[f64], share: f64) -> Result<f64> {
    Ok(Samples::new(samples.to_vec())?.quantile(share))
}

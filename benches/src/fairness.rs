//! Several tenants on one executor: four moderate tenants beside one that floods, two whose requests always
//! wait, and a burst of one tenant.
//!
//! [`tenants`]: a deployment with API keys, and its clients. [`hostile`]: seven tenants beside one that sends
//! [`attacks`].

mod attacks;
pub(crate) mod hostile;
pub(crate) mod tenants;

use std::time::Duration;

use anyhow::{Result, ensure};

use self::tenants::{LoadWindow, TenantAttempts, Tenants};
use crate::{
    config::SuiteConfig,
    holobiont_runner::EnvSetting,
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Tenants with moderate load, and the tenant that floods.
const MODERATE: [&str; 4] = ["ann", "bob", "cleo", "dan"];
const FLOODING: &str = "flo";
/// Load of the four together as a share of the capacity; load of the fifth as a multiple of one of the four.
const MODERATE_LOAD: f64 = 0.5;
const FLOOD: f64 = 10.0;
/// Targets for the four beside the flood: share of their goodput, and multiple of their 99th percentile time
/// to first token.
const GOODPUT: f64 = 0.95;
const FIRST_TOKEN: f64 = 1.2;

/// Two tenants whose requests always wait: clients of each, batch slots, and weight of the second tenant.
const WAITING: [&str; 2] = ["ann", "bob"];
const CLIENTS: usize = 32;
const RUNNING: usize = 8;
const WEIGHT: u64 = 3;
/// Maximum relative deviation from the share by weight.
const NEAR: f64 = 0.05;

const BURST: usize = 500;

/// Time before the measurement, so that requests admitted at the start have ended.
const SETTLE: Duration = Duration::from_secs(10);
const LENGTH: Duration = Duration::from_secs(60);

/// Measures every comparison of this benchmark.
///
/// # Errors
/// If a deployment does not start, or a request fails for another reason than a full queue.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut comparisons = beside_a_flood(config, cores)?;
    comparisons.push(burst(config, cores)?);
    comparisons.push(weighted(config, cores)?);
    Ok(comparisons)
}

/// Tokens per second of the four tenants, and 99th percentile of their time to first token in milliseconds.
type FairnessSample = [f64; 2];

fn beside_a_flood(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let names = [&MODERATE[..], &[FLOODING]].concat();
    let tenants = Tenants::start(config, cores, &names, "", &[])?;
    let peak =
        tenants.closed(&[(MODERATE[0], CLIENTS)], LoadWindow { settle: SETTLE / 2, length: LENGTH / 4 })?;
    let per_s = peak[0].served_per_s(LENGTH / 4);
    ensure!(per_s > 0.0, "nothing was served");
    let each = MODERATE_LOAD * per_s / MODERATE.len() as f64;
    eprintln!("holobiont-bench: {each:.2} requests a second of each, {:.2} of the flood", FLOOD * each);
    let moderate: Vec<(&str, f64)> = MODERATE.map(|name| (name, each)).to_vec();
    let flooded = [moderate.clone(), vec![(FLOODING, FLOOD * each)]].concat();
    let measure = |asking: &[(&str, f64)], round| -> Result<FairnessSample> {
        let tries = tenants.open(asking, LoadWindow { settle: SETTLE, length: LENGTH }, round)?;
        samples(&tries[..MODERATE.len()], LENGTH)
    };
    let [beside, alone] = alternate(
        config.runs,
        [Box::new(|round| measure(&flooded, round)), Box::new(|round| measure(&moderate, round))],
    )?;
    let row = |index: usize, what: &str, (unit, better), target| -> Result<Comparison> {
        Ok(Comparison {
            bench: "fairness",
            case: format!("four tenants beside one that asks ten times as much: {what}"),
            unit,
            better,
            ours: Samples::of(&beside, |samples| samples[index])?,
            rival: rival("the four alone", Samples::of(&alone, |samples| samples[index])?),
            target: Some(target),
        })
    };
    Ok(vec![
        row(0, "goodput", ("tokens/s", Better::Higher), BenchTarget::ShareAtLeast(GOODPUT))?,
        row(1, "p99 first token", ("ms", Better::Lower), BenchTarget::ShareAtMost(FIRST_TOKEN))?,
    ])
}

fn samples(tries: &[TenantAttempts], length: Duration) -> Result<FairnessSample> {
    let tokens: usize = tries.iter().map(TenantAttempts::tokens).sum();
    let first_ms = tries.iter().flat_map(TenantAttempts::first_tokens_ms).collect();
    Ok([tokens as f64 / length.as_secs_f64(), Samples::new(first_ms)?.quantile(0.99)])
}

fn burst(config: &SuiteConfig, cores: &Cores) -> Result<Comparison> {
    let tenants = Tenants::start(config, cores, &MODERATE[..1], "", &[])?;
    let served = (0..config.runs).map(|round| Ok(tenants.burst(MODERATE[0], BURST, round)? as f64));
    Ok(Comparison {
        bench: "fairness",
        case: format!("served of {BURST} short requests of one tenant at once"),
        unit: "requests",
        better: Better::Higher,
        ours: Samples::new(served.collect::<Result<_>>()?)?,
        rival: rival("asked", Samples::new(vec![BURST as f64])?),
        target: Some(BenchTarget::OursAtLeast(BURST as f64)),
    })
}

/// Measures two tenants whose requests always wait, so that only the weights decide the shares.
fn weighted(config: &SuiteConfig, cores: &Cores) -> Result<Comparison> {
    let class = |(name, weight): (&str, u64)| {
        format!("[[class]]\nname = \"{name}s\"\ntenants = [\"{name}\"]\nweight = {weight}\n\n")
    };
    let classes: String = WAITING.into_iter().zip([1, WEIGHT]).map(class).collect();
    let settings: [EnvSetting; 2] = [
        ("HOLOBIONT_MAX_RUNNING", RUNNING.to_string()),
        // A standing queue is intended here, so CoDel must not reject requests.
        ("HOLOBIONT_CODEL_INTERVAL_MS", (10 * LENGTH).as_millis().to_string()),
    ];
    let tenants = Tenants::start(config, cores, &WAITING, &classes, &settings)?;
    let mut ratios = Vec::new();
    for _ in 0..config.runs {
        let clients = WAITING.map(|name| (name, CLIENTS));
        let tries = tenants.closed(&clients, LoadWindow { settle: SETTLE, length: LENGTH })?;
        ensure!(tries[0].tokens() > 0, "'{}' got nothing", WAITING[0]);
        ratios.push(tries[1].tokens() as f64 / tries[0].tokens() as f64);
    }
    Ok(Comparison {
        bench: "fairness",
        case: format!("two tenants of weights 1 and {WEIGHT} with everything always waiting: tokens"),
        unit: "times",
        better: Better::Higher,
        ours: Samples::new(ratios)?,
        rival: rival("the weights", Samples::new(vec![WEIGHT as f64])?),
        target: Some(BenchTarget::Near(NEAR)),
    })
}

fn rival(name: &str, samples: Samples) -> PeerSamples {
    PeerSamples { name: name.to_owned(), format: "Q4_1".to_owned(), samples }
}

//! Two executors behind one gateway, each on a core, beside one executor on a core: throughput, and cost of
//! the routing decision.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, Holobiont, Installation},
    machine::Cores,
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{BenchRequest, BurstMix, burst, first_token},
};

/// Targets: ratio of tokens per second, two executors over one, and ratio of a lone request's time.
const TOKENS_RATIO: f64 = 1.7;
const TIME_SHARE: f64 = 1.03;

const LONE: usize = 40;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let [first, second] = cores.numbers()[..] else {
        bail!("two executors need two cores, and are compared on two: give --threads 2");
    };
    let folder = tempfile::tempdir().context("no folder for deployments")?;
    let two = start(config, &folder.path().join("two"), &[first, second])?;
    let one = start(config, &folder.path().join("one"), &[first])?;
    for server in [&two, &one] {
        server.warm_up(&together(usize::MAX / 64))?;
    }
    let tokens =
        alternate(config.runs, [Box::new(|round| rate(&two, round)), Box::new(|round| rate(&one, round))])?;
    let times = alternate(
        config.runs,
        [Box::new(|round| lone_ms(&two, round)), Box::new(|round| lone_ms(&one, round))],
    )?;
    let goal = BenchTarget::RatioAtLeast(TOKENS_RATIO);
    let case = "16 streams: tokens a second";
    let rate = comparison(case, ("tokens/s", Better::Higher), tokens, goal)?;
    let goal = BenchTarget::ShareAtMost(TIME_SHARE);
    let case = "a lone request for one token";
    Ok(vec![rate, comparison(case, ("ms", Better::Lower), times, goal)?])
}

fn start(config: &SuiteConfig, folder: &Path, cores: &[usize]) -> Result<Holobiont> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let section = |core: &usize| format!("[[executor]]\nname = \"core-{core}\"\ncores = \"{core}\"\n\n");
    let file = folder.join("deployment.toml");
    fs::write(&file, cores.iter().map(section).collect::<String>())
        .with_context(|| format!("cannot write {}", file.display()))?;
    let (binaries, model) = (config.ours.clone(), config.model.clone());
    let installation =
        Installation { binaries, model, placement: DeploymentPlacement::Described(file), key: None };
    Holobiont::start(&installation, &[], &folder.join("up"))
}

fn together(round: usize) -> Vec<BenchRequest> {
    [2 * round, 2 * round + 1].into_iter().flat_map(|round| burst(BurstMix::Base, round)).collect()
}

fn rate(server: &Holobiont, round: usize) -> Result<f64> {
    Ok(server.burst(&together(round))?.aggregate_tokens_per_s())
}

fn lone_ms(server: &Holobiont, round: usize) -> Result<f64> {
    let each = (0..LONE).map(|number| {
        let timeline = server.ask(&first_token(round * LONE + number))?;
        Ok((timeline.last - timeline.sent).as_secs_f64() * 1e3)
    });
    Ok(Samples::new(each.collect::<Result<_>>()?)?.median())
}

fn comparison(
    case: &str,
    (unit, better): (&'static str, Better),
    [two, one]: [Vec<f64>; 2],
    target: BenchTarget,
) -> Result<Comparison> {
    let name = "holobiont, one executor on one core".to_owned();
    Ok(Comparison {
        bench: "executors",
        case: case.to_owned(),
        unit,
        better,
        ours: Samples::new(two)?,
        rival: PeerSamples { name, format: "Q4_1".to_owned(), samples: Samples::new(one)? },
        target: Some(target),
    })
}

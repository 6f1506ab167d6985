//! Time until all of three hosts list and serve an adapter that one of them has registered.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{at, hosts, hosts::Servers, row};
use crate::{
    config::SuiteConfig,
    holobiont_runner::Holobiont,
    http::get,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Comparison},
};

const HOSTS: usize = 3;
const LOADS: usize = 25;
/// Maximum time until all hosts list an adapter.
const VISIBLE_MS: f64 = 1_000.0;
const LIMIT: Duration = Duration::from_secs(60);

struct PropagationTimes {
    load: Vec<f64>,
    /// From the answer to the load until all hosts list the adapter.
    listed: Vec<f64>,
    /// From the answer to the load until all hosts have served it.
    answered: Vec<f64>,
}

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (folder, servers) = (tempfile::tempdir()?, Servers::start()?);
    let adapters = hosts::adapters(config, config.runs * LOADS, &folder.path().join("adapters"))?;
    let hosts: Vec<Holobiont> = (0..HOSTS)
        .map(|index| servers.host(config, cores, &folder.path().join(index.to_string())))
        .collect::<Result<_>>()?;
    let mut spread = PropagationTimes { load: Vec::new(), listed: Vec::new(), answered: Vec::new() };
    for (index, path) in adapters.iter().enumerate() {
        let name = format!("spread-{index}");
        let begun = Instant::now();
        hosts::load(&hosts[index % HOSTS], &name, path)?;
        let loaded = Instant::now();
        hosts.iter().try_for_each(|host| until_listed(host, &name))?;
        let listed = loaded.elapsed();
        hosts.iter().try_for_each(|host| hosts::ask(host, &name))?;
        spread.load.push((loaded - begun).as_secs_f64() * 1e3);
        spread.listed.push(listed.as_secs_f64() * 1e3);
        spread.answered.push(loaded.elapsed().as_secs_f64() * 1e3);
    }
    let mut rows = Vec::new();
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let figure = |samples: &[f64]| Samples::new(vec![at(samples, share)?]);
        let load = || Ok::<_, anyhow::Error>(("the load itself", figure(&spread.load)?));
        let case = format!("registered on one host: until all three know it, {name}");
        let target = Some(BenchTarget::OursAtMost(VISIBLE_MS));
        rows.push(row(&case, "ms", figure(&spread.listed)?, load()?, target));
        let case = format!("registered on one host: until all three have answered, one by one, {name}");
        rows.push(row(&case, "ms", figure(&spread.answered)?, load()?, None));
    }
    Ok(rows)
}

fn until_listed(host: &Holobiont, name: &str) -> Result<()> {
    let (started, quoted) = (Instant::now(), format!("\"{name}\""));
    while !get(host.port(), "/v1/lora_adapters")?.contains(&quoted) {
        ensure!(started.elapsed() < LIMIT, "{name} is not known everywhere after {LIMIT:?}");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

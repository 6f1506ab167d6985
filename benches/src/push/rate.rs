//! Short-lived adapters, pushed as fast as they are taken, and the memory of the processes meanwhile.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use super::{PushClient, start};
use crate::{
    config::SuiteConfig,
    holobiont_runner::Holobiont,
    lora::{AdapterShape, RandomAdapter, write_peft},
    machine::Cores,
    measure::Samples,
    process::{child_called, memory_of},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const RANK: usize = 8;
const CLIENTS: usize = 4;
/// Names of a client, each replaced in turn.
const NAMES: usize = 16;
const GOAL_PER_MINUTE: f64 = 10_000.0;
/// Memory may grow by this share after the first fifth of the time.
const GROWTH_SHARE: f64 = 1.05;

pub(super) fn run(
    config: &SuiteConfig,
    cores: &Cores,
    folder: &Path,
    shape: &AdapterShape,
) -> Result<Vec<Comparison>> {
    let adapter = folder.join("short-lived");
    write_peft(&RandomAdapter::random(shape, RANK, 2), &adapter)?;
    let server = start(config, cores, &folder.join("rate"), &adapter)?;
    let length = Duration::from_secs(config.seconds);
    let begun = Instant::now();
    let (pushes, [settled, ended]) = thread::scope(|scope| {
        let clients = (0..CLIENTS).map(|index| {
            let (adapter, port) = (&adapter, server.port());
            scope.spawn(move || push_until(port, adapter, index, begun + length))
        });
        let clients: Vec<_> = clients.collect();
        thread::sleep(length / 5);
        let settled = memory_mib(&server);
        thread::sleep((length * 9 / 10).saturating_sub(begun.elapsed()));
        let ended = memory_mib(&server);
        let joined = clients.into_iter().map(|client| client.join());
        let pushes = joined.map(|pushes| pushes.unwrap_or_else(|_| Err(anyhow!("a client panicked"))));
        Ok::<_, anyhow::Error>((pushes.sum::<Result<usize>>()?, [settled?, ended?]))
    })?;
    let per_minute = pushes as f64 * 60.0 / begun.elapsed().as_secs_f64();
    let goal = BenchTarget::OursAtLeast(GOAL_PER_MINUTE);
    let rate = row(
        "short-lived adapters of rank 8",
        ("pushes/min", Better::Higher),
        (per_minute, GOAL_PER_MINUTE, "the goal"),
        goal,
    )?;
    let goal = BenchTarget::ShareAtMost(GROWTH_SHARE);
    let case = "memory of gateway and executor at nine tenths of the time";
    Ok(vec![rate, row(case, ("MiB", Better::Lower), (ended, settled, "at one fifth"), goal)?])
}

fn push_until(port: u16, adapter: &Path, index: usize, until: Instant) -> Result<usize> {
    let mut client = PushClient::new(port, adapter)?;
    client.begin_at(index << 20);
    let mut count = 0;
    while Instant::now() < until {
        client.push(&format!("short-{index}-{}", count % NAMES))?;
        count += 1;
    }
    Ok(count)
}

fn memory_mib(server: &Holobiont) -> Result<f64> {
    let programs = ["gateway", "base-executor"];
    let bytes =
        programs.iter().map(|name| Ok(memory_of(child_called(server.process_id(), name)?)?.resident_bytes));
    Ok(bytes.sum::<Result<u64>>()? as f64 / f64::from(1 << 20))
}

fn row(
    case: &str,
    (unit, better): (&'static str, Better),
    (ours, peer, name): (f64, f64, &str),
    target: BenchTarget,
) -> Result<Comparison> {
    let samples = Samples::new(vec![peer])?;
    let rival = PeerSamples { name: name.to_owned(), format: "as ours".to_owned(), samples };
    let (ours, target) = (Samples::new(vec![ours])?, Some(target));
    Ok(Comparison { bench: "push", case: case.to_owned(), unit, better, ours, rival, target })
}

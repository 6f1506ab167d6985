//! Time from the command to the first token with the model in the page cache, and the executor's memory.

use std::time::Instant;

use anyhow::{Context, Result};

use super::{
    peer_compare::{ContestantResults, PeerComparison},
    servers::{Adapters, warmed_up},
    setup::Setup,
};
use crate::{
    holobiont_runner::Holobiont,
    http::{Dialect, DialectServer},
    measure::Samples,
    peer::{LlamaServer, PeerWeights},
    process::{ProcessMemory, child_called, memory_of},
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{STREAMS, first_token},
};

/// KV pool of the executor in the memory measurement: more than 8 streams of 192 tokens need.
const KV_POOL_BYTES: u64 = 128 << 20;
/// Memory budget beside weights, KV pool and adapters.
const OVERHEAD_BYTES: f64 = 64.0 * MIB;
/// Memory budget of the weights: their file and a third for packing.
const WEIGHTS_FACTOR: f64 = 1.3;
const MIB: f64 = 1024.0 * 1024.0;

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let mut comparisons = time_to_first_token(setup)?;
    comparisons.extend(memory(setup)?);
    Ok(comparisons)
}

fn time_to_first_token(setup: &Setup) -> Result<Vec<Comparison>> {
    let ours = || Holobiont::start(&setup.holobiont, &[], &setup.temporary("startup-ours"));
    let theirs = |weights: &PeerWeights| {
        LlamaServer::start(&setup.peer, weights, &[], &setup.temporary("startup-peer"))
    };
    // Warm-up: the first start reads the files into the page cache and writes one-time files.
    ms_to_first_token(0, ours)?;
    ms_to_first_token(0, || theirs(&setup.peer.shipped))?;
    ms_to_first_token(0, || theirs(&setup.peer.q4_0))?;
    let entries = ContestantResults::measure(
        setup,
        |round| ms_to_first_token(round + 1, ours),
        |weights, round| ms_to_first_token(round + 1, || theirs(weights)),
    )?;
    let contest = PeerComparison {
        bench: "startup",
        case: "start to first token".to_owned(),
        unit: "ms",
        better: Better::Lower,
        rival: "llama-server",
        targets: [Some(BenchTarget::OursAtMost(2000.0)), None],
    };
    entries.compare(setup, &contest, |ms| *ms)
}

fn ms_to_first_token<D: Dialect>(
    round: usize,
    start: impl FnOnce() -> Result<DialectServer<D>>,
) -> Result<f64> {
    let started = Instant::now();
    let first = start()?.ask(&first_token(round))?.first;
    Ok((first - started).as_secs_f64() * 1000.0)
}

/// Memory after a burst on 8 adapters, beside its budget and beside the peer's.
fn memory(setup: &Setup) -> Result<Vec<Comparison>> {
    let adapters = Adapters::generate(setup)?;
    let folder = setup.temporary("memory-ours");
    let pool = [("HOLOBIONT_KV_BYTES", KV_POOL_BYTES.to_string())];
    let ours = Holobiont::start_with(&setup.holobiont, &adapters.ours[..STREAMS], &folder, &pool)
        .and_then(warmed_up)?;
    let executor = memory_of(child_called(ours.process_id(), "base-executor")?)?;
    let most = allowed_mib(setup, &adapters)?;
    drop(ours);
    let theirs = LlamaServer::start(
        &setup.peer,
        &setup.peer.shipped,
        &adapters.peers,
        &setup.temporary("memory-peer"),
    )
    .and_then(warmed_up)?;
    let theirs = memory_of(theirs.process_id())?;
    let comparison = |case: &str, bytes: fn(&ProcessMemory) -> u64| -> Result<Comparison> {
        let mib = |memory| Samples::new(vec![bytes(memory) as f64 / MIB]);
        Ok(Comparison {
            bench: "startup",
            case: case.to_owned(),
            unit: "MiB",
            better: Better::Lower,
            ours: mib(&executor)?,
            rival: PeerSamples {
                name: "llama-server".to_owned(),
                format: setup.peer.shipped.format.clone(),
                samples: mib(&theirs)?,
            },
            target: Some(BenchTarget::OursAtMost(most)),
        })
    };
    Ok(vec![
        comparison("executor memory, 8 adapters, resident", |memory| memory.resident_bytes)?,
        comparison("executor memory, 8 adapters, peak", |memory| memory.peak_bytes)?,
    ])
}

fn allowed_mib(setup: &Setup, adapters: &Adapters) -> Result<f64> {
    let file = std::fs::metadata(&setup.config.model).context("cannot read the size of the model")?.len();
    let adapters = STREAMS as f64 * adapters.bytes as f64;
    Ok(((WEIGHTS_FACTOR * file as f64 + KV_POOL_BYTES as f64 + adapters + OVERHEAD_BYTES) / MIB).floor())
}

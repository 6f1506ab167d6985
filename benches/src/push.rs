//! Adapters pushed as the body of a request with `durable=false`, on one deployment:
//!
//! 1. eight streams, alone and while an adapter is pushed again and again: time from the last byte of a push
//!    until its answer, beside a load of the same files by path; first token of the pushed adapter, beside a
//!    resident one; longest gaps of the streams;
//! 2. short-lived adapters as fast as they are taken, by four clients ([`rate`]).
//!
//! [`client`] sends the weights and takes the time. All pushes send the same weights with another scale,
//! which makes each one an adapter version of its own.

mod client;
mod rate;

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use serde_json::json;

use self::client::PushClient;
use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, Holobiont, Installation, NamedAdapter},
    http::post_json,
    lora::{AdapterShape, RandomAdapter, write_peft},
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{BenchRequest, BurstMix, burst, prompt},
};

/// Rank of the adapter beside streams.
const RANK: usize = 16;
const PAUSE: Duration = Duration::from_millis(250);
const STREAM_TOKENS: usize = 192;
/// Targets: the 99th percentile until an adapter is usable, and shares of first token and gap.
const USABLE_MS: f64 = 20.0;
const SHARE: f64 = 1.1;

/// Times of the pushes beside one burst of streams, in milliseconds.
#[derive(Debug, Default)]
struct PushTimes {
    usable: Vec<f64>,
    by_path: Vec<f64>,
    first_token: Vec<f64>,
    resident_token: Vec<f64>,
    gaps: Vec<f64>,
}

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for a deployment")?;
    let adapter = folder.path().join("adapter");
    let shape = AdapterShape::of(&config.model)?;
    write_peft(&RandomAdapter::random(&shape, RANK, 1), &adapter)?;
    let server = start(config, cores, folder.path(), &adapter)?;
    let mut client = PushClient::new(server.port(), &adapter)?;
    let (mut quiet, mut busy) = (Vec::new(), PushTimes::default());
    server.warm_up(&streams(usize::MAX / 64))?;
    for round in 0..config.runs {
        quiet.extend(gaps_ms(&server, round * 2)?);
        measure(&server, &mut client, &adapter, round * 2 + 1, &mut busy)?;
    }
    let mut rows = beside_streams(quiet, busy)?;
    drop(server);
    rows.extend(rate::run(config, cores, folder.path(), &shape)?);
    Ok(rows)
}

fn start(config: &SuiteConfig, cores: &Cores, folder: &Path, adapter: &Path) -> Result<Holobiont> {
    let installation = Installation {
        binaries: config.ours.clone(),
        model: config.model.clone(),
        placement: DeploymentPlacement::Cores(cores.list()),
        key: None,
    };
    let settings =
        [("HOLOBIONT_WORKERS", "0".to_owned()), ("HOLOBIONT_ADAPTER_ROOT", folder.display().to_string())];
    let resident = [NamedAdapter { name: "resident".to_owned(), folder: adapter.to_owned() }];
    Holobiont::start_with(&installation, &resident, &folder.join("up"), &settings)
}

fn streams(round: usize) -> Vec<BenchRequest> {
    let jobs = burst(BurstMix::Base, round);
    jobs.into_iter().map(|job| BenchRequest { generate: STREAM_TOKENS, ..job }).collect()
}

fn gaps_ms(server: &Holobiont, round: usize) -> Result<Vec<f64>> {
    let streams = server.burst(&streams(round))?;
    Ok(streams.0.iter().map(|stream| stream.longest_gap.as_secs_f64() * 1e3).collect())
}

/// Runs one burst of streams, and pushes adapters until it ends.
fn measure(
    server: &Holobiont,
    client: &mut PushClient,
    adapter: &Path,
    round: usize,
    times: &mut PushTimes,
) -> Result<()> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let pusher = scope.spawn(|| {
            let mut pushed = PushTimes::default();
            while !is_over.load(Ordering::Relaxed) {
                push_once(server.port(), client, adapter, &mut pushed)?;
                thread::sleep(PAUSE);
            }
            Ok::<_, anyhow::Error>(pushed)
        });
        let gaps = gaps_ms(server, round);
        is_over.store(true, Ordering::Relaxed);
        let pushed = pusher.join().unwrap_or_else(|_| Err(anyhow!("the pushing thread panicked")))?;
        times.gaps.extend(gaps?);
        times.usable.extend(pushed.usable);
        times.by_path.extend(pushed.by_path);
        times.first_token.extend(pushed.first_token);
        times.resident_token.extend(pushed.resident_token);
        Ok(())
    })
}

/// Pushes a new version and asks it, then asks the resident adapter, then loads the files by path.
fn push_once(port: u16, client: &mut PushClient, adapter: &Path, times: &mut PushTimes) -> Result<()> {
    times.usable.push(client.push("pushed")?);
    times.first_token.push(ask_ms(port, "pushed", client.pushed())?);
    times.resident_token.push(ask_ms(port, "resident", client.pushed())?);
    let begun = Instant::now();
    let name = format!("path-{}", client.pushed());
    post_json(port, "/v1/load_lora_adapter", &json!({ "lora_name": name, "lora_path": adapter }))?;
    times.by_path.push(begun.elapsed().as_secs_f64() * 1e3);
    post_json(port, "/v1/unload_lora_adapter", &json!({ "lora_name": name })).map(drop)
}

/// Time of a request for one token, with a prompt that no other request has.
fn ask_ms(port: u16, model: &str, number: usize) -> Result<f64> {
    let prompt = prompt((1 << 50) + 2 * number as u64 + u64::from(model == "pushed"), 8);
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": true });
    let begun = Instant::now();
    post_json(port, "/v1/completions", &body)?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

fn beside_streams(quiet: Vec<f64>, busy: PushTimes) -> Result<Vec<Comparison>> {
    let by_path = Samples::new(busy.by_path)?;
    let usable = Samples::new(busy.usable)?;
    let at = |samples: &Samples, share| Samples::new(vec![samples.quantile(share)]);
    let load = "a durable load by path";
    let goal = Some(BenchTarget::OursAtMost(USABLE_MS));
    let share = Some(BenchTarget::ShareAtMost(SHARE));
    let (first, resident) = (Samples::new(busy.first_token)?, Samples::new(busy.resident_token)?);
    let (gaps, quiet) = (Samples::new(busy.gaps)?, Samples::new(quiet)?);
    Ok(vec![
        row(
            "beside 8 streams: last byte to usable, p50",
            at(&usable, 0.5)?,
            (load, at(&by_path, 0.5)?),
            None,
        ),
        row(
            "beside 8 streams: last byte to usable, p99",
            at(&usable, 0.99)?,
            (load, at(&by_path, 0.99)?),
            goal,
        ),
        row("first token of a pushed adapter", first, ("a resident adapter", resident), share),
        row("longest gap of a stream beside pushes", gaps, ("without pushes", quiet), share),
    ])
}

fn row(
    case: &str,
    ours: Samples,
    (name, samples): (&str, Samples),
    target: Option<BenchTarget>,
) -> Comparison {
    let rival = PeerSamples { name: name.to_owned(), format: "as ours".to_owned(), samples };
    Comparison {
        bench: "push",
        case: case.to_owned(),
        unit: "ms",
        better: Better::Lower,
        ours,
        rival,
        target,
    }
}

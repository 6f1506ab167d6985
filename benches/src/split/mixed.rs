//! `split-mixed`: four split clients and four resident requests together, beside the same eight in sequence.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use client::masking::Masking;
use shmproto::{layer::SitePath, message::LayerStats};
use tokio::runtime::{Builder, Runtime};

use super::{
    SplitRow,
    executor::{channel, open},
    model::Decoder,
};
use crate::{
    cold::{ColdCompute, ColdExecutor, ExecutorPlacement, Mode, RequestArrival},
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison},
};

const CLIENTS: usize = 4;
const PROMPT: usize = 16;
const TOKENS: usize = 64;
/// Minimum ratio of the speed together to that in sequence.
const LEAST: f64 = 1.5;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let mut mixed = MixedLoad::new(config, cores)?;
    let (mut together, mut apart) = (Vec::new(), Vec::new());
    mixed.together(0)?;
    for round in 1..=config.runs as u64 {
        if round % 2 == 1 {
            together.push(mixed.together(2 * round)?);
            apart.push(mixed.apart(2 * round + 1)?);
        } else {
            apart.push(mixed.apart(2 * round)?);
            together.push(mixed.together(2 * round + 1)?);
        }
    }
    let row = SplitRow {
        bench: "split-mixed",
        case: format!("{CLIENTS} split clients and {CLIENTS} resident requests together"),
        unit: "tokens/s",
        better: Better::Higher,
        target: Some(BenchTarget::RatioAtLeast(LEAST)),
    };
    Ok(vec![row.beside(&Samples::new(together)?, "one after the other", &Samples::new(apart)?)])
}

struct MixedLoad {
    runtime: Runtime,
    executor: ColdExecutor,
    clients: Vec<Decoder>,
}

impl MixedLoad {
    fn new(config: &SuiteConfig, cores: &Cores) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
        let place = ExecutorPlacement {
            base_cores: cores.numbers(),
            helper: ColdCompute::Nobody,
            ..ExecutorPlacement::on(config, cores)?
        };
        let executor = runtime.block_on(ColdExecutor::start(place, Mode::Cached))?;
        let off = Masking::Off { path: SitePath::Fast };
        let client = |_| {
            Decoder::new(
                &config.model,
                open(channel(&executor.run_folder()), off.as_str(), None)?,
                off.clone(),
            )
        };
        let clients: Result<_> = (0..CLIENTS).map(client).collect();
        Ok(Self { runtime, clients: clients?, executor })
    }

    /// Tokens per second of all eight at once, until the last has ended.
    fn together(&mut self, round: u64) -> Result<f64> {
        let before = self.layers()?;
        let rate = self.at_once(round)?;
        let after = self.layers()?;
        eprintln!(
            "holobiont-bench: together: {} calls in {} batches, {} rows in resident passes",
            after.used.calls - before.used.calls,
            after.batches - before.batches,
            after.joined_rows - before.joined_rows
        );
        Ok(rate)
    }

    fn layers(&mut self) -> Result<LayerStats> {
        Ok(self.runtime.block_on(self.executor.stats())?.layers)
    }

    fn at_once(&mut self, round: u64) -> Result<f64> {
        let Self { runtime, executor, clients } = self;
        let begun = Instant::now();
        let (ended, endings) = mpsc::channel();
        thread::scope(|scope| {
            for (client, decoder) in clients.iter_mut().enumerate() {
                let ended = ended.clone();
                let mut answer = move || decoder.generate(seed(round, client), PROMPT, TOKENS);
                scope.spawn(move || ended.send(answer()).is_ok());
            }
            let arrivals: Vec<RequestArrival> =
                (CLIENTS..2 * CLIENTS).map(|client| arrival(round, client)).collect();
            runtime.block_on(executor.serve(&arrivals)).map(drop)
        })?;
        drop(ended);
        let generated: Vec<_> = endings.iter().collect::<Result<_>>()?;
        if generated.len() < CLIENTS {
            return Err(anyhow!("a client's thread panicked"));
        }
        Ok(rate(begun.elapsed()))
    }

    /// Tokens per second of all eight in sequence, over the total time.
    fn apart(&mut self, round: u64) -> Result<f64> {
        let begun = Instant::now();
        for (client, decoder) in self.clients.iter_mut().enumerate() {
            decoder.generate(seed(round, client), PROMPT, TOKENS)?;
        }
        let split = begun.elapsed();
        for client in CLIENTS..2 * CLIENTS {
            self.runtime.block_on(self.executor.serve(&[arrival(round, client)]))?;
        }
        let resident = begun.elapsed() - split;
        eprintln!("holobiont-bench: one after the other: split {split:.2?}, resident {resident:.2?}");
        Ok(rate(begun.elapsed()))
    }
}

fn rate(took: Duration) -> f64 {
    (2 * CLIENTS * TOKENS) as f64 / took.as_secs_f64()
}

fn seed(round: u64, client: usize) -> u64 {
    (1 << 20) + round * 2 * CLIENTS as u64 + client as u64
}

fn arrival(round: u64, client: usize) -> RequestArrival {
    RequestArrival {
        at: Duration::ZERO,
        adapter: None,
        prompt: PROMPT,
        answer: TOKENS,
        seed: seed(round, client),
    }
}

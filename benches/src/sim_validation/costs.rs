//! Times of steps and copies in a running deployment, measured over HTTP, and the cost model fitted to them.

use std::{fs, path::Path, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use simulator::cost::{ComputedWork, CostModel, fit::TimedObservation};

use super::{
    SAID,
    deployment::{self, Deployment, ExecutorMemory},
    probe::{StepProbe, first_s, prompted},
};
use crate::{
    cold::adapters::ADAPTED,
    config::SuiteConfig,
    lora::AdapterShape,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{AdapterChoice, AnswerKind, BenchRequest, prompt},
};

const ALONE: [usize; 12] = [1, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1800];
/// Sequences that decode together, and context tokens of each.
const TOGETHER: [(usize, usize); 10] =
    [(1, 32), (2, 32), (3, 32), (4, 32), (6, 32), (8, 32), (12, 32), (16, 32), (1, 1024), (6, 1024)];
/// Prompts that are cached except for their last block.
const KNOWN: [usize; 6] = [18, 25, 201, 409, 424, 1209];
/// Prompts per step, and tokens of each.
const AT_ONCE: [(usize, usize); 5] = [(2, 16), (4, 16), (8, 16), (4, 64), (8, 64)];
/// Prompt tokens, and number of sequences that decode beside.
const BESIDE: [(usize, usize); 7] = [(16, 1), (16, 2), (16, 6), (64, 2), (128, 2), (128, 6), (512, 4)];
const ROOMY: ExecutorMemory = ExecutorMemory { device: 512 << 20, host: 0, disk: 0 };
/// Memory for two conversations on the device, and for all in the tiers below.
const NARROW: u64 = 64 << 20;
const BELOW: u64 = 1 << 30;
const LONG_TOKENS: usize = 1000;
const LONG_PROMPTS: u64 = 6;
/// Blocks that are not offloaded after this time never will be.
const KEEPING: Duration = Duration::from_secs(2);

const BLOCK_TOKENS: usize = 16;
/// Maximum relative error of the model at each measurement.
const NEAR: f64 = 0.15;

type NamedObservation = (String, TimedObservation);

/// Fits a model of steps to `observed`, with blocks of `block_bytes` bytes.
///
/// # Errors
/// If the observations do not suffice.
pub(crate) fn fitted(
    model: &Path,
    block_bytes: u64,
    observed: impl Iterator<Item = TimedObservation>,
) -> Result<CostModel> {
    let (layers, sides) = AdapterShape::of(model)?.layers_and_sides(&ADAPTED);
    let sizes = CostModel {
        block_tokens: BLOCK_TOKENS,
        block_bytes,
        // Two bytes per value.
        rank_bytes: 2 * (layers * sides) as u64,
        ..CostModel::CPU
    };
    Ok(sizes.fitted(&observed.collect::<Vec<_>>())?)
}

/// Fits the model, writes it to `path`, and compares its predictions with the measurements.
pub(super) fn run(config: &SuiteConfig, cores: &Cores, path: &Path) -> Result<Vec<Comparison>> {
    let (observed, block_bytes) = observe(config, cores)?;
    let fitted = fitted(&config.model, block_bytes, observed.iter().map(|(_, observed)| observed.clone()))?;
    let link_bytes_per_s =
        copy_rate(config, cores, &fitted, ExecutorMemory { device: NARROW, host: BELOW, disk: 0 })?;
    let model = CostModel {
        link_bytes_per_s,
        // On a CPU the computing thread does the copies.
        block_copy_s: block_bytes as f64 / link_bytes_per_s,
        disk_bytes_per_s: copy_rate(
            config,
            cores,
            &fitted,
            ExecutorMemory { device: NARROW, host: 0, disk: BELOW },
        )?,
        ..fitted
    };
    write(&model, path)?;
    observed.into_iter().map(|(case, observed)| compare(case, &observed, &model)).collect()
}

/// Writes the model in the simulator's format.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn write(model: &CostModel, path: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(model).context("a cost model is not JSON")?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn compare(case: String, observed: &TimedObservation, model: &CostModel) -> Result<Comparison> {
    let ms = |seconds: f64| Samples::new(vec![seconds * 1e3]);
    Ok(Comparison {
        bench: "costs",
        case,
        unit: "ms",
        better: Better::Lower,
        ours: ms(observed.seconds)?,
        rival: PeerSamples {
            name: "cost model".to_owned(),
            format: "Q4_1".to_owned(),
            samples: ms(observed.predicted(model))?,
        },
        target: Some(BenchTarget::Near(NEAR)),
    })
}

/// Returns all measurements of step times, and the bytes of a block.
fn observe(config: &SuiteConfig, cores: &Cores) -> Result<(Vec<NamedObservation>, u64)> {
    let adapters = TOGETHER.iter().map(|(sequences, _)| *sequences).max().unwrap_or(1);
    let deployment = Deployment::start(config, cores, adapters, ROOMY)?;
    let ranks = deployment::ranks(adapters);
    let mut probe = StepProbe::new(&deployment.server, &ranks);
    let mut observed = Vec::new();
    for tokens in ALONE {
        observed.push((format!("first token of {tokens}"), probe.alone(tokens)?));
    }
    for tokens in KNOWN {
        observed.push((format!("first token of {tokens} that are known"), probe.known(tokens)?));
    }
    for (sequences, context) in TOGETHER {
        let name = format!("step of {sequences} that decode after {context}");
        observed.push((name, probe.together(sequences, context)?));
    }
    for (prompts, tokens) in AT_ONCE {
        let name = format!("step of {prompts} prompts of {tokens}");
        observed.push((name, probe.at_once(prompts, tokens)?));
    }
    for (tokens, sequences) in BESIDE {
        let name = format!("first token of {tokens} beside {sequences} that decode");
        observed.push((name, probe.beside(tokens, sequences)?));
    }
    Ok((observed, ROOMY.device / u64::from(deployment.blocks.device)))
}

fn copy_rate(config: &SuiteConfig, cores: &Cores, model: &CostModel, memory: ExecutorMemory) -> Result<f64> {
    let deployment = Deployment::start(config, cores, 1, memory)?;
    let job = |seed| BenchRequest {
        prompt: prompt(seed, LONG_TOKENS),
        who: AdapterChoice::Adapter(0),
        generate: 1,
        says: AnswerKind::Token(SAID),
    };
    for seed in 0..LONG_PROMPTS {
        deployment.server.ask(&job(seed))?;
    }
    thread::sleep(KEEPING);
    let mut rates = Vec::new();
    for seed in 0..LONG_PROMPTS {
        let timeline = deployment.server.ask(&job(seed))?;
        let computed = prompted(timeline.cached..LONG_TOKENS, deployment::RANK, ComputedWork::default())
            .predicted(model);
        let bytes = (timeline.cached / BLOCK_TOKENS) as f64 * model.block_bytes as f64;
        ensure!(bytes > 0.0, "a prompt that left the device was lost");
        rates.push(bytes / (first_s(timeline) - computed).max(1e-4));
        thread::sleep(KEEPING / 4);
    }
    Ok(Samples::new(rates)?.median())
}

//! What steps and copies take in a running deployment, asked over HTTP as everybody asks, and the cost model that fits it.

use std::{fs, ops::Range, path::Path, thread, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use simulator::cost::{CostModel, Work, fit::Observed};

use super::{
    SAID,
    deployment::{Deployment, Memory},
};
use crate::{
    cold::adapters::ADAPTED,
    config::Config,
    http::{Burst, Timeline},
    lora::Shape,
    machine::Cores,
    measure::Samples,
    ours::Holobiont,
    report::{Better, Comparison, Rival, Target},
    workload::{Job, Use, prompt},
};

/// Prompts that have the executor for themselves.
const ALONE: [usize; 12] = [1, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1800];
/// Sequences that decode together, and tokens that each has before.
const TOGETHER: [(usize, usize); 10] =
    [(1, 32), (2, 32), (3, 32), (4, 32), (6, 32), (8, 32), (12, 32), (16, 32), (1, 1024), (6, 1024)];
/// Prompts that are known but for their last block.
const KNOWN: [usize; 6] = [18, 25, 201, 409, 424, 1209];
/// So many prompts in one step, and tokens of each.
const AT_ONCE: [(usize, usize); 5] = [(2, 16), (4, 16), (8, 16), (4, 64), (8, 64)];
/// How long they may take to reach the executor, in the time that a step of a full chunk leaves them.
const REACHING: Duration = Duration::from_millis(40);
/// Prompts beside so many that decode.
const BESIDE: [(usize, usize); 7] = [(16, 1), (16, 2), (16, 6), (64, 2), (128, 2), (128, 6), (512, 4)];
/// Tokens that sequences generate which decode together, and beside prompts.
const GENERATED: usize = 64;
const GENERATED_BESIDE: usize = 400;
/// What those beside prompts look back at, about.
const CONTEXT_BESIDE: usize = 100;
/// Milliseconds between prompts beside others, at most: they are to come at any point of a step.
const PAUSE_MS: u64 = 25;
/// Every prompt is sent so often, every batch decodes so often.
const REPEATS: (usize, usize) = (7, 3);
/// Prompt tokens of a step in a deployment that is told nothing else.
pub(super) const CHUNK_TOKENS: usize = 512;
/// Room for all of this.
const ROOMY: Memory = Memory { device: 512 << 20, host: 0, disk: 0 };
/// Room for two conversations on the device, and for all below it.
const NARROW: u64 = 64 << 20;
const BELOW: u64 = 1 << 30;
const LONG_TOKENS: usize = 1000;
const LONG_PROMPTS: u64 = 6;
/// What is not kept by then never is.
const KEEPING: Duration = Duration::from_secs(2);

/// Tokens of a block.
const BLOCK_TOKENS: usize = 16;
/// How near the model is to be to each thing measured.
const NEAR: f64 = 0.15;

/// One thing measured, and its name.
type Named = (String, Observed);

/// Fits, writes the model to `path`, and sets what it says beside what was measured.
pub(super) fn run(config: &Config, cores: &Cores, path: &Path) -> Result<Vec<Comparison>> {
    let (observed, block_bytes) = observe(config, cores)?;
    let (layers, sides) = Shape::of(&config.model)?.layers_and_sides(&ADAPTED);
    let sizes = CostModel {
        block_tokens: BLOCK_TOKENS,
        block_bytes,
        // Two bytes a number.
        rank_bytes: 2 * (layers * sides) as u64,
        ..CostModel::CPU
    };
    let times: Vec<Observed> = observed.iter().map(|(_, observed)| observed.clone()).collect();
    let fitted = sizes.fitted(&times)?;
    let model = CostModel {
        link_bytes_per_s: copy_rate(config, cores, &fitted, Memory { device: NARROW, host: BELOW, disk: 0 })?,
        disk_bytes_per_s: copy_rate(config, cores, &fitted, Memory { device: NARROW, host: 0, disk: BELOW })?,
        ..fitted
    };
    let text = serde_json::to_string_pretty(&model).context("a cost model is not JSON")?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    observed.into_iter().map(|(case, observed)| compare(case, &observed, &model)).collect()
}

fn compare(case: String, observed: &Observed, model: &CostModel) -> Result<Comparison> {
    let ms = |seconds: f64| Samples::new(vec![seconds * 1e3]);
    Ok(Comparison {
        bench: "costs",
        case,
        unit: "ms",
        better: Better::Lower,
        ours: ms(observed.seconds)?,
        rival: Rival {
            name: "cost model".to_owned(),
            format: "Q4_1".to_owned(),
            samples: ms(observed.predicted(model))?,
        },
        target: Some(Target::Near(NEAR)),
    })
}

/// Everything that the times of steps are fitted to, and bytes of a block.
fn observe(config: &Config, cores: &Cores) -> Result<(Vec<Named>, u64)> {
    let adapters = TOGETHER.iter().map(|(sequences, _)| *sequences).max().unwrap_or(1);
    let deployment = Deployment::start(config, cores, adapters, ROOMY)?;
    let mut probe = Probe { server: &deployment.server, adapters, prompts: 0 };
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

/// Asks, with prompts that nobody has sent before.
struct Probe<'a> {
    server: &'a Holobiont,
    adapters: usize,
    prompts: u64,
}

impl Probe<'_> {
    fn job(&mut self, tokens: usize, generate: usize) -> Job {
        self.prompts += 1;
        let who = Use::Adapter(self.prompts as usize % self.adapters);
        Job { prompt: prompt(self.prompts, tokens), who, generate, says: Some(SAID) }
    }

    fn alone(&mut self, tokens: usize) -> Result<Observed> {
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.0 {
            let job = self.job(tokens, 1);
            seconds.push(first_s(self.server.ask(&job)?));
        }
        Ok(Observed { seconds: Samples::new(seconds)?.median(), ..prompted(0..tokens, 0) })
    }

    /// A prompt that was asked for before: its last few tokens look back at all the others.
    fn known(&mut self, tokens: usize) -> Result<Observed> {
        let job = self.job(tokens, 1);
        self.server.ask(&job)?;
        let (mut seconds, mut found) = (Vec::new(), 0);
        for _ in 0..REPEATS.0 {
            let timeline = self.server.ask(&job)?;
            found = timeline.cached;
            seconds.push(first_s(timeline));
        }
        Ok(Observed { seconds: Samples::new(seconds)?.median(), ..prompted(found..tokens, 0) })
    }

    fn together(&mut self, sequences: usize, context: usize) -> Result<Observed> {
        let jobs: Vec<Job> = (0..sequences).map(|_| self.job(context, GENERATED)).collect();
        // Their prompts are known then, and all decode from the first step on, or nearly.
        jobs.iter().try_for_each(|job| self.server.ask(&Job { generate: 1, ..job.clone() }).map(drop))?;
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.1 {
            let Burst(timelines) = self.server.burst(&jobs)?;
            seconds.extend(timelines.into_iter().map(step_s));
        }
        let steps = vec![(1.0, decode(sequences, context + GENERATED / 2))];
        Ok(Observed { seconds: Samples::new(seconds)?.mean(), requests: 0.0, steps })
    }

    /// Prompts that come while a long one is computed are computed together, from its first token to theirs.
    fn at_once(&mut self, prompts: usize, tokens: usize) -> Result<Observed> {
        let server = self.server;
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.0 {
            let long = self.job(CHUNK_TOKENS, 1);
            let jobs: Vec<Job> = (0..prompts).map(|_| self.job(tokens, 1)).collect();
            let (before, Burst(timelines)) = thread::scope(|scope| {
                let before = scope.spawn(|| server.ask(&long));
                thread::sleep(REACHING);
                let burst = server.burst(&jobs)?;
                let before = before.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))?;
                Ok::<_, anyhow::Error>((before, burst))
            })?;
            let took = timelines.iter().map(|timeline| (timeline.first - before.first).as_secs_f64());
            seconds.push(Samples::new(took.collect())?.mean());
        }
        let prefill_pairs = prompts * tokens * tokens / 2;
        let work = Work { prefill_tokens: prompts * tokens, prefill_pairs, ..Work::default() };
        Ok(Observed { seconds: Samples::new(seconds)?.median(), requests: 0.0, steps: vec![(1.0, work)] })
    }

    /// A prompt that comes while others decode waits for half a step, on average, before its own.
    fn beside(&mut self, tokens: usize, sequences: usize) -> Result<Observed> {
        let others: Vec<Job> = (0..sequences).map(|_| self.job(32, GENERATED_BESIDE)).collect();
        let prompts: Vec<Job> = (0..REPEATS.0).map(|_| self.job(tokens, 1)).collect();
        let server = self.server;
        let seconds = thread::scope(|scope| {
            let others: Vec<_> = others.iter().map(|job| scope.spawn(move || server.ask(job))).collect();
            thread::sleep(Duration::from_millis(300));
            let mut seconds = Vec::new();
            for (index, job) in (0..).zip(&prompts) {
                thread::sleep(Duration::from_millis(index * PAUSE_MS / REPEATS.0 as u64));
                let first = server.ask(job).map(first_s)?;
                ensure!(others.iter().all(|other| !other.is_finished()), "those beside have ended too early");
                seconds.push(first);
            }
            Samples::new(seconds)
        })?;
        let mut observed = prompted(0..tokens, sequences);
        observed.steps.push((0.5, decode(sequences, CONTEXT_BESIDE)));
        Ok(Observed { seconds: seconds.mean(), ..observed })
    }
}

/// A step of sequences that decode after so many tokens each.
fn decode(decode_sequences: usize, context: usize) -> Work {
    Work { decode_sequences, context_tokens: decode_sequences * context, ..Work::default() }
}

/// What is computed of a prompt of which `tokens` are not known, beside sequences that decode, but for the time.
fn prompted(tokens: Range<usize>, beside: usize) -> Observed {
    let step = |start: usize| {
        let count = CHUNK_TOKENS.min(tokens.end - start);
        let decoding = decode(beside, CONTEXT_BESIDE);
        let work = Work {
            prefill_tokens: count,
            prefill_pairs: count * (start + count / 2),
            context_tokens: decoding.context_tokens + start,
            ..decoding
        };
        (1.0, work)
    };
    let steps = tokens.clone().step_by(CHUNK_TOKENS).map(step).collect();
    Observed { seconds: 0.0, requests: 1.0, steps }
}

fn first_s(timeline: Timeline) -> f64 {
    (timeline.first - timeline.sent).as_secs_f64()
}

/// A step, where nearly every one gave a token.
fn step_s(timeline: Timeline) -> f64 {
    (timeline.last - timeline.first).as_secs_f64() / (timeline.tokens - 1) as f64
}

/// Bytes a second at which a conversation comes back that has left the device.
fn copy_rate(config: &Config, cores: &Cores, model: &CostModel, memory: Memory) -> Result<f64> {
    let deployment = Deployment::start(config, cores, 1, memory)?;
    let job =
        |seed| Job { prompt: prompt(seed, LONG_TOKENS), who: Use::Adapter(0), generate: 1, says: Some(SAID) };
    for seed in 0..LONG_PROMPTS {
        deployment.server.ask(&job(seed))?;
    }
    thread::sleep(KEEPING);
    let mut rates = Vec::new();
    for seed in 0..LONG_PROMPTS {
        let timeline = deployment.server.ask(&job(seed))?;
        let computed = prompted(timeline.cached..LONG_TOKENS, 0).predicted(model);
        let bytes = (timeline.cached / BLOCK_TOKENS) as f64 * model.block_bytes as f64;
        ensure!(bytes > 0.0, "a prompt that left the device was lost");
        rates.push(bytes / (first_s(timeline) - computed).max(1e-4));
        thread::sleep(KEEPING / 4);
    }
    Ok(Samples::new(rates)?.median())
}

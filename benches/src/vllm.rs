//! Holobiont beside vLLM on a CPU: servers of one bf16 checkpoint, through HTTP.
//!
//! Ours also serves the model's GGUF file, and the checkpoint without drafts, all with the precision that
//! `auto` chooses. vLLM compiles the model only if it serves no adapters, so base and adapters have servers of
//! their own. Servers that are not measured are idle.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::{
    config::SuiteConfig,
    holobiont_runner::{DeploymentPlacement, Holobiont, Installation, NamedAdapter},
    http::Burst,
    lora::{AdapterShape, RandomAdapter, write_peft},
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    peer::{Vllm, VllmServer},
    report::{Better, Comparison, PeerSamples},
    workload::{AdapterChoice, AnswerKind, BenchRequest, BurstMix, STREAMS, WARM_UP_ROUND, prompt},
};

const RANK: usize = 16;
const MAX_STREAMS: usize = 2 * STREAMS;
const PROMPT_TOKENS: usize = 128;
const GENERATED_TOKENS: usize = 48;

/// A deployment of ours; drafts are on by default.
#[derive(Debug, Clone, Copy)]
struct Variant {
    name: &'static str,
    model: ServedModel,
    drafts: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServedModel {
    /// The bf16 checkpoint, which vLLM serves too.
    Checkpoint,
    /// The GGUF file that the checkpoint was made of.
    Gguf,
}

const VARIANTS: [Variant; 3] = [
    Variant { name: "checkpoint with drafts", model: ServedModel::Checkpoint, drafts: "auto" },
    Variant { name: "checkpoint", model: ServedModel::Checkpoint, drafts: "off" },
    Variant { name: "GGUF file", model: ServedModel::Gguf, drafts: "off" },
];

/// Requests that are sent at the same moment.
#[derive(Debug, Clone, Copy)]
struct ServedLoad {
    name: &'static str,
    mix: BurstMix,
    streams: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Values that the report compares.
    figures: &'static [Figure],
}

/// Value of a burst; prompts have the given number of tokens.
#[derive(Debug, Clone, Copy)]
struct Figure {
    name: &'static str,
    unit: &'static str,
    better: Better,
    of: fn(&Burst, usize) -> f64,
}

const PROMPT: Figure = Figure {
    name: "until the first token",
    unit: "tokens/s",
    better: Better::Higher,
    of: |burst, prompt_tokens| prompt_tokens as f64 / (burst.worst_first_token_ms() / 1000.0),
};
const DECODE: Figure = Figure {
    name: "decode",
    unit: "tokens/s",
    better: Better::Higher,
    of: |burst, _| burst.decode_tokens_per_s(),
};
const AGGREGATE: Figure = Figure {
    name: "prefill and decode",
    unit: "tokens/s",
    better: Better::Higher,
    of: |burst, _| burst.aggregate_tokens_per_s(),
};
const MEDIAN_FIRST_TOKEN: Figure = Figure {
    name: "median first token",
    unit: "ms",
    better: Better::Lower,
    of: |burst, _| burst.median_first_token_ms(),
};
const LAST_FIRST_TOKEN: Figure = Figure {
    name: "last first token",
    unit: "ms",
    better: Better::Lower,
    of: |burst, _| burst.worst_first_token_ms(),
};

const DECODING: ServedLoad = ServedLoad {
    name: "one stream",
    mix: BurstMix::Base,
    streams: 1,
    prompt_tokens: PROMPT_TOKENS,
    generated_tokens: GENERATED_TOKENS,
    figures: &[DECODE],
};

const BASE_LOADS: [ServedLoad; 4] = [
    ServedLoad {
        name: "a prompt of 512",
        prompt_tokens: 512,
        generated_tokens: 1,
        figures: &[PROMPT],
        ..DECODING
    },
    DECODING,
    ServedLoad {
        name: "8 base streams",
        streams: STREAMS,
        figures: &[DECODE, AGGREGATE, MEDIAN_FIRST_TOKEN, LAST_FIRST_TOKEN],
        ..DECODING
    },
    ServedLoad { name: "16 base streams", streams: MAX_STREAMS, figures: &[DECODE, AGGREGATE], ..DECODING },
];

const ADAPTER_LOADS: [ServedLoad; 1] = [ServedLoad {
    name: "8 adapters",
    mix: BurstMix::Adapters,
    streams: STREAMS,
    figures: &[DECODE, AGGREGATE, LAST_FIRST_TOKEN],
    ..DECODING
}];

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let environment = config.vllm.clone().context("give the environment of vLLM: --vllm")?;
    let checkpoint = config.checkpoint.clone().context("give the model's bf16 checkpoint: --checkpoint")?;
    let peer = Vllm { environment, checkpoint, streams: MAX_STREAMS, rank: RANK };
    let folder = tempfile::tempdir().context("no folder for the servers")?;
    let adapters = random_adapters(&config.model, &folder.path().join("adapters"))?;
    let mut comparisons = Vec::new();
    for (part, adapters, loads) in
        [("base", &[][..], &BASE_LOADS[..]), ("adapted", &adapters[..], &ADAPTER_LOADS[..])]
    {
        let servers = Servers::start(config, cores, &peer, adapters, &folder.path().join(part))?;
        for load in loads {
            comparisons.extend(servers.compare(config.runs, load)?);
        }
    }
    Ok(comparisons)
}

/// Writes random adapters of q, k, v and o for `model`, one for each stream.
fn random_adapters(model: &Path, folder: &Path) -> Result<Vec<NamedAdapter>> {
    let shape = AdapterShape::of(model)?;
    let write = |index: usize| {
        let name = format!("adapter-{index}");
        let adapter = NamedAdapter { folder: folder.join(&name), name };
        write_peft(&RandomAdapter::random(&shape, RANK, index as u64), &adapter.folder)?;
        Ok(adapter)
    };
    (0..STREAMS).map(write).collect()
}

struct Servers {
    /// In the order of [`VARIANTS`].
    ours: [Holobiont; VARIANTS.len()],
    peer: VllmServer,
}

impl Servers {
    fn start(
        config: &SuiteConfig,
        cores: &Cores,
        peer: &Vllm,
        adapters: &[NamedAdapter],
        folder: &Path,
    ) -> Result<Self> {
        let start = |index: usize| {
            let variant = VARIANTS[index];
            let model = match variant.model {
                ServedModel::Checkpoint => &peer.checkpoint,
                ServedModel::Gguf => &config.model,
            };
            let installation = Installation {
                binaries: config.ours.clone(),
                model: model.clone(),
                placement: DeploymentPlacement::Cores(cores.list()),
                key: None,
            };
            let settings = [("HOLOBIONT_DRAFT", variant.drafts.to_owned())];
            Holobiont::start_with(&installation, adapters, &folder.join(format!("ours-{index}")), &settings)
        };
        Ok(Self {
            ours: [start(0)?, start(1)?, start(2)?],
            peer: peer.serve(adapters, &folder.join("vllm"))?,
        })
    }

    /// Measures `load` on all servers in alternation; one row for each figure and variant.
    fn compare(&self, runs: usize, load: &ServedLoad) -> Result<Vec<Comparison>> {
        for server in self.ours.iter().chain([&self.peer]) {
            server.warm_up(&load.requests(WARM_UP_ROUND))?;
        }
        let [first, second, third] = &self.ours;
        let [ours @ .., peer] =
            alternate(runs, [first, second, third, &self.peer].map(|server| load.contestant(server)))?;
        let mut comparisons = Vec::new();
        for figure in load.figures {
            for (variant, ours) in VARIANTS.iter().zip(&ours) {
                comparisons.push(load.row(figure, variant.name, ours, &peer)?);
            }
        }
        Ok(comparisons)
    }
}

impl ServedLoad {
    fn contestant<'a>(&'a self, server: &'a Holobiont) -> Contestant<'a, Burst> {
        Box::new(|round| server.burst(&self.requests(round)))
    }

    /// Requests of a round; no prompt of a run repeats.
    fn requests(&self, round: usize) -> Vec<BenchRequest> {
        let request = |stream: usize| BenchRequest {
            prompt: prompt(self.seed(round, stream), self.prompt_tokens),
            who: match self.mix {
                BurstMix::Base => AdapterChoice::Base,
                BurstMix::Adapters => AdapterChoice::Adapter(stream),
            },
            generate: self.generated_tokens,
            says: AnswerKind::Anything,
        };
        (0..self.streams).map(request).collect()
    }

    fn seed(&self, round: usize, stream: usize) -> u64 {
        let kind = 2 * self.prompt_tokens + usize::from(self.mix == BurstMix::Adapters);
        (((round << 16) + kind * 64 + self.streams) * MAX_STREAMS + stream) as u64
    }

    fn row(&self, figure: &Figure, variant: &str, ours: &[Burst], peer: &[Burst]) -> Result<Comparison> {
        let samples = |bursts: &[Burst]| Samples::of(bursts, |burst| (figure.of)(burst, self.prompt_tokens));
        Ok(Comparison {
            bench: "vllm",
            case: format!("{}, {}, {variant}", self.name, figure.name),
            unit: figure.unit,
            better: figure.better,
            ours: samples(ours)?,
            rival: PeerSamples {
                name: "vllm".to_owned(),
                format: "BF16".to_owned(),
                samples: samples(peer)?,
            },
            target: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_prompts_of_a_run_begin_alike() {
        let loads = || BASE_LOADS.iter().chain(&ADAPTER_LOADS);
        let rounds = [0, 1, 2, 3, WARM_UP_ROUND];
        let requests = rounds.iter().flat_map(|round| loads().flat_map(|load| load.requests(*round)));
        let beginnings: HashSet<Vec<u32>> = requests.map(|request| request.prompt[..4].to_vec()).collect();
        let streams: usize = loads().map(|load| load.streams).sum();
        assert_eq!(beginnings.len(), rounds.len() * streams);
    }

    #[test]
    fn every_stream_of_adapters_asks_another_one() {
        let who: Vec<AdapterChoice> =
            ADAPTER_LOADS[0].requests(0).iter().map(|request| request.who).collect();
        assert_eq!(who, (0..STREAMS).map(AdapterChoice::Adapter).collect::<Vec<_>>());
    }
}

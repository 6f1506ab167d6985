//! Simulates several executors behind one gateway, with every policy on the same requests (C-23).

use std::{fs, io::Write, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use scheduling::{
    batch::BatchLimits,
    fairness::burst_limit::FLOOD_SHARE,
    perf::{
        linear_fit::LinearFit,
        linear_model::LinearModel,
        serving::{ColdStart, LoraForm, ServingModel},
    },
    routing::{RoutingPolicy, Slo},
};
use serde_json::{Map, Value, json};

use super::{
    CommandError,
    compare::{IntervalEstimate, Ratio},
    print, side_by_side,
};
use crate::{
    chart::{self, Bar},
    fleet::{
        self, FleetSetup, GatewayKnowledge, LowerTier, Prompts, SECOND, ServerSetup,
        load::{Arrivals, FleetLoad},
        summary::Summary,
    },
    workload::popularity::Popularity,
};

/// How a kernel computes deltas of different ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kernel {
    /// Punica's BGMV: every row is computed at the largest rank.
    Padded,
    /// MBGMV of S-LoRA and of this project: each row is computed at its own rank.
    TrueRank,
}

impl Kernel {
    /// Returns the model of Llama2-7B on an A10: decode passes through the two points of CaraServe's Fig.
    /// 5, 24 requests of rank 32 and 16 of rank 64. A pass over a short prompt reads the same weights as a
    /// step; 0.22 ms for a token are 14 GFLOP at half of 125 TFLOP/s.
    fn model(self, prompts: Prompts) -> ServingModel {
        const FREE: LinearFit = LinearFit { alpha: 0.0, beta: 0.0 };
        let (form, step_s, rank_s) = match self {
            Self::Padded => (LoraForm::Padded, 31.8e-3, 1.0e-3 / 256.0),
            Self::TrueRank => (LoraForm::TrueRank, 33.5e-3, 0.6e-3 / 256.0),
        };
        let pass_s = if prompts == Prompts::Preempt { step_s } else { 0.0 };
        ServingModel {
            form,
            decode: LinearModel { seconds_each: [step_s, 0.0, 0.0, rank_s] },
            // A rank costs a prompt token a third of its cost for a decode row, because its factors are
            // read once.
            prefill: LinearModel { seconds_each: [pass_s, 0.22e-3, rank_s / 3.0] },
            link: FREE,
            store: FREE,
            cold: ColdStart::Assisted,
        }
    }
}

/// Simulates several executors behind one gateway, with every policy on the same requests (C-23).
#[derive(Debug, Args)]
pub(super) struct FleetCommand {
    /// Number of simulated executors.
    #[arg(long, default_value_t = 60)]
    executors: usize,
    /// Mean number of requests per second.
    #[arg(long, default_value_t = 340.0, value_name = "PER_S")]
    rate: f64,
    /// Seconds in which requests arrive.
    #[arg(long, default_value_t = 300.0, value_name = "S")]
    duration: f64,
    /// Warm-up seconds whose requests are not measured.
    #[arg(long, default_value_t = 30.0, value_name = "S")]
    warmup: f64,
    /// Maximum number of requests.
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    max_requests: usize,
    /// Number of adapters in the load.
    #[arg(long, default_value_t = 40_000)]
    adapters: usize,
    /// Distribution of requests over adapters: uniform, zipf:S or maf.
    #[arg(long, default_value = "maf")]
    popularity: Popularity,
    /// Arrival process of requests.
    #[arg(long, value_enum, default_value = "minutes")]
    arrivals: Arrivals,
    /// Ranks of adapters, all equally frequent.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128])]
    ranks: Vec<u32>,
    /// Time per token of a single request in HF-PEFT, in milliseconds.
    #[arg(long, default_value_t = 35.0, value_name = "MS")]
    peft_ms: f64,
    /// SLO target, as a multiple of that time.
    #[arg(long, default_value_t = 1.5)]
    slo: f64,
    /// Maximum number of requests that an executor runs together.
    #[arg(long, default_value_t = 32)]
    places: usize,
    /// Whether prompts have separate passes or are computed beside decoding sequences.
    #[arg(long, value_enum, default_value = "preempt")]
    prompts: Prompts,
    /// How deltas of different ranks are computed.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kernel::TrueRank, Kernel::Padded])]
    kernels: Vec<Kernel>,
    /// Policies to compare; all by default. The first is the reference.
    #[arg(long, value_delimiter = ',', default_values_t = RoutingPolicy::ALL)]
    policies: Vec<RoutingPolicy>,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds, from --seed on.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Draws the mean time per token of each policy with the first kernel.
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

/// Name of a metric, and its accessor.
type SummaryMetric = (&'static str, fn(&Summary) -> f64);

const FIGURES: [SummaryMetric; 10] = [
    ("attainment", |summary| summary.attainment),
    ("attainment_8", |summary| summary.attainment_8),
    ("tpot_ms", |summary| summary.tpot_ms),
    ("tpot_p50_ms", |summary| summary.tpot_p50_ms),
    ("tpot_p99_ms", |summary| summary.tpot_p99_ms),
    ("ttft_ms", |summary| summary.ttft_ms),
    ("ttft_p99_ms", |summary| summary.ttft_p99_ms),
    ("latency_ms", |summary| summary.latency_ms),
    ("unanswered", |summary| summary.unanswered as f64),
    ("requests", |summary| summary.requests as f64),
];

#[derive(Debug, Clone, Copy)]
struct FleetRun {
    kernel: Kernel,
    policy: RoutingPolicy,
    seed: u64,
}

impl FleetCommand {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        self.validate()?;
        print(out, &json!({ "settings": self.header(), "seeds": self.seeds }))?;
        for (index, &kernel) in self.kernels.iter().enumerate() {
            let seeds = self.seed..self.seed + self.seeds;
            let of =
                |&policy: &RoutingPolicy| seeds.clone().map(move |seed| FleetRun { kernel, policy, seed });
            let jobs: Vec<FleetRun> = self.policies.iter().flat_map(of).collect();
            let summaries = side_by_side::all(&jobs, |job| Ok(self.summary(*job)))?;
            let by_policy: Vec<&[Summary]> = summaries.chunks(self.seeds as usize).collect();
            for (policy, of_policy) in self.policies.iter().zip(&by_policy) {
                print(out, &line(kernel, *policy, of_policy, by_policy[0]))?;
            }
            if let Some(path) = self.chart.as_ref().filter(|_| index == 0) {
                fs::write(path, self.draw(kernel, &by_policy))?;
            }
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), CommandError> {
        let positive = [
            ("--executors", self.executors as f64),
            ("--rate", self.rate),
            ("--duration", self.duration),
            ("--adapters", self.adapters as f64),
            ("--peft-ms", self.peft_ms),
            ("--slo", self.slo),
            ("--places", self.places as f64),
            ("--seeds", self.seeds as f64),
            ("--ranks", self.ranks.len() as f64),
            ("--policies", self.policies.len() as f64),
        ];
        let bad = positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0);
        bad.map_or(Ok(()), |(name, _)| Err(CommandError::Option(name)))
    }

    fn slo(&self) -> Slo {
        Slo { ttft_us: None, tpot_us: Some((self.peft_ms * self.slo * 1e3) as u64) }
    }

    fn summary(&self, job: FleetRun) -> Summary {
        let load = FleetLoad {
            arrivals: self.arrivals,
            adapters: self.adapters,
            popularity: self.popularity,
            ranks: self.ranks.clone(),
            per_s: self.rate,
            length: Duration::from_secs_f64(self.duration),
            max_requests: self.max_requests,
            tenants: 1,
        };
        let requests = load.make(job.seed);
        let server = ServerSetup {
            model: job.kernel.model(self.prompts),
            costs: None,
            prompts: self.prompts,
            limits: BatchLimits { max_running: self.places, chunk_tokens: 2048, scored_tokens: 1 },
            adapter_slots: usize::MAX,
            below: LowerTier::Host,
            rank_bytes: 0,
            kv_tokens: u64::MAX,
        };
        let setup = FleetSetup {
            flood_share: FLOOD_SHARE,
            servers: vec![server; self.executors],
            knowledge: GatewayKnowledge::Given,
            policy: job.policy,
            slo: self.slo(),
            weights: Vec::new(),
            seed: job.seed,
        };
        let outcomes = fleet::run(&setup, &requests);
        Summary::of(&requests, &outcomes, (self.warmup * SECOND as f64) as u64, &self.slo(), 0.0)
    }

    fn header(&self) -> Value {
        json!({
            "executors": self.executors,
            "rate_per_s": self.rate,
            "duration_s": self.duration,
            "warmup_s": self.warmup,
            "adapters": self.adapters,
            "popularity": self.popularity.to_string(),
            "arrivals": self.arrivals,
            "ranks": self.ranks,
            "slo_ms": self.peft_ms * self.slo,
            "places": self.places,
            "prompts": self.prompts,
            "seed": self.seed,
        })
    }

    fn draw(&self, kernel: Kernel, by_policy: &[&[Summary]]) -> String {
        let bar = |(policy, summaries): (&RoutingPolicy, &&[Summary])| {
            let values: Vec<f64> = summaries.iter().map(|summary| summary.tpot_ms).collect();
            let IntervalEstimate { mean, half_interval } = IntervalEstimate::of(&values);
            Bar { name: policy.name().to_owned(), value: mean, half_interval }
        };
        let bars: Vec<Bar> = self.policies.iter().zip(by_policy).map(bar).collect();
        let title = format!(
            "{} executors, {} requests/s, {} kernel, {} seeds",
            self.executors,
            self.rate,
            if kernel == Kernel::Padded { "padded" } else { "true-rank" },
            self.seeds
        );
        chart::bars(&title, "mean time for a token, ms", &bars)
    }
}

/// Returns the metrics of a policy, and their ratios to the first policy's.
fn line(kernel: Kernel, policy: RoutingPolicy, summaries: &[Summary], first: &[Summary]) -> Value {
    let values =
        |of: &[Summary], figure: fn(&Summary) -> f64| -> Vec<f64> { of.iter().map(figure).collect() };
    let mut line = Map::new();
    line.insert("kernel".to_owned(), json!(kernel));
    line.insert("policy".to_owned(), json!(policy.name()));
    for (name, figure) in FIGURES {
        line.insert(name.to_owned(), json!(IntervalEstimate::of(&values(summaries, figure))));
    }
    let tpot = |of| values(of, |summary| summary.tpot_ms);
    line.insert("tpot_ratio".to_owned(), json!(Ratio::of(&tpot(summaries), &tpot(first))));
    line.into()
}

//! What a load would see on a number of executors, and how many it needs (`holobiont simulate`).

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use policy::{
    batch::BatchLimits,
    perf::serving::{ColdStart, Load, LoraForm, ServingFit, ServingModel},
    routing::{Policy, Slo},
};
use serde_json::json;

use super::{CommandError, print};
use crate::{
    cost::{CostModel, Work},
    fleet::{self, FleetSetup, Prompts, Request, ServerSetup, load::of_workload, summary::Summary},
    workload::{
        Shares,
        popularity::Popularity,
        replay,
        scenario::{Recipe, Scenario},
    },
};

/// What a load would see on a number of executors, and how many it needs.
#[derive(Debug, Args)]
pub(super) struct Forecast {
    /// The load: a trace (CSV) as Azure's of 2023.
    #[arg(long, value_name = "PATH")]
    trace: PathBuf,
    /// What steps take on one executor, as `scripts/bench costs` finds it.
    #[arg(long, value_name = "PATH")]
    costs: PathBuf,
    /// Executors.
    #[arg(long, default_value_t = 1)]
    executors: usize,
    /// The most that it looks at for the number that is needed.
    #[arg(long, default_value_t = 256)]
    max_executors: usize,
    /// Requests a second; as in the trace without it.
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,
    /// Seconds of it.
    #[arg(long, default_value_t = 600.0, value_name = "S")]
    duration: f64,
    /// How soon first tokens are to come.
    #[arg(long, default_value_t = 1000.0, value_name = "MS")]
    ttft_ms: f64,
    /// How long each token after it may take.
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    tpot_ms: f64,
    /// For what part of requests both are to hold.
    #[arg(long, default_value_t = 0.95)]
    share: f64,
    /// Adapters that requests are of.
    #[arg(long, default_value_t = 50)]
    adapters: usize,
    /// Their rank.
    #[arg(long, default_value_t = 16)]
    rank: u32,
    /// How often each is asked for: uniform, zipf:S or maf.
    #[arg(long, default_value = "zipf:0.9")]
    popularity: Popularity,
    /// All lengths of the trace are divided by it.
    #[arg(long, default_value_t = 1.0)]
    length_divisor: f64,
    /// Sequences that an executor computes together.
    #[arg(long, default_value_t = 64)]
    max_running: usize,
    /// Prompt tokens of a step.
    #[arg(long, default_value_t = 512)]
    chunk_tokens: usize,
    /// Tokens whose keys and values an executor holds; without it, all.
    #[arg(long)]
    kv_tokens: Option<u64>,
    /// How an executor is chosen.
    #[arg(long, default_value = "rank-aware")]
    policy: Policy,
    /// Where random choices come from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What an executor takes, and what the gateway knows of that.
type Costs = (CostModel, ServingModel);

impl Forecast {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        self.validate()?;
        let costs = CostModel::read(&self.costs)?;
        let model = believed(&costs).ok_or(CommandError::Option("--costs"))?;
        let rate = self.rate.map_or_else(|| replay::rate(&self.trace), Ok)?;
        let requests = self.requests(rate)?;
        print(out, &json!({ "settings": self.header(rate, costs), "requests": requests.len() }))?;
        let asked = self.summary(&requests, (costs, model), self.executors);
        print(
            out,
            &json!({ "executors": self.executors, "is_enough": self.is_enough(&asked), "sees": asked }),
        )?;
        let needed = self.needed(&requests, (costs, model));
        let sees = needed.map(|executors| self.summary(&requests, (costs, model), executors));
        print(out, &json!({ "needed_executors": needed, "looked_at": self.max_executors, "sees": sees }))
    }

    fn validate(&self) -> Result<(), CommandError> {
        let positive = [
            ("--executors", self.executors as f64),
            ("--max-executors", self.max_executors as f64),
            ("--rate", self.rate.unwrap_or(1.0)),
            ("--duration", self.duration),
            ("--ttft-ms", self.ttft_ms),
            ("--tpot-ms", self.tpot_ms),
            ("--share", self.share),
            ("--adapters", self.adapters as f64),
            ("--length-divisor", self.length_divisor),
            ("--max-running", self.max_running as f64),
            ("--chunk-tokens", self.chunk_tokens as f64),
        ];
        let bad = positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0);
        bad.map_or(Ok(()), |(name, _)| Err(CommandError::Option(name)))
    }

    fn requests(&self, per_s: f64) -> Result<Vec<Request>, CommandError> {
        let recipe = Recipe {
            scenario: Scenario::Chat,
            adapters: self.adapters,
            popularity: self.popularity,
            drift: 0.0,
            rank: self.rank,
            tenants: 1,
            shares: Shares::None,
            hostile_per_s: 0.0,
            per_s,
            length_divisor: self.length_divisor,
            end: Duration::from_secs_f64(self.duration),
        };
        Ok(of_workload(&replay::replay(&self.trace, &recipe, self.seed)?))
    }

    fn slo(&self) -> Slo {
        let us = |ms: f64| Some((ms * 1e3) as u64);
        Slo { ttft_us: us(self.ttft_ms), tpot_us: us(self.tpot_ms) }
    }

    fn summary(&self, requests: &[Request], (costs, model): Costs, executors: usize) -> Summary {
        let server = ServerSetup {
            model,
            costs: Some(costs),
            prompts: Prompts::Beside,
            limits: BatchLimits {
                max_running: self.max_running,
                chunk_tokens: self.chunk_tokens,
                scored_tokens: 1,
            },
            adapter_slots: usize::MAX,
            rank_bytes: costs.rank_bytes,
            kv_tokens: self.kv_tokens.unwrap_or(u64::MAX),
        };
        let setup = FleetSetup {
            servers: vec![server; executors],
            policy: self.policy,
            slo: self.slo(),
            weights: Vec::new(),
            seed: self.seed,
        };
        let outcomes = fleet::run(&setup, requests);
        Summary::of(requests, &outcomes, 0, &self.slo(), costs.request_s)
    }

    fn is_enough(&self, summary: &Summary) -> bool {
        summary.attainment >= self.share && summary.ttft_attainment >= self.share
    }

    /// The least number that is enough: more are never worse.
    fn needed(&self, requests: &[Request], costs: Costs) -> Option<usize> {
        let is_enough = |executors| self.is_enough(&self.summary(requests, costs, executors));
        let mut high = 1;
        while !is_enough(high) {
            if high == self.max_executors {
                return None;
            }
            high = (2 * high).min(self.max_executors);
        }
        let mut low = high / 2;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if is_enough(middle) { high = middle } else { low = middle }
        }
        Some(high)
    }

    fn header(&self, rate: f64, costs: CostModel) -> serde_json::Value {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        json!({
            "trace": name(&self.trace),
            "rate_per_s": rate,
            "duration_s": self.duration,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "share": self.share,
            "adapters": self.adapters,
            "rank": self.rank,
            "popularity": self.popularity.to_string(),
            "length_divisor": self.length_divisor,
            "max_running": self.max_running,
            "chunk_tokens": self.chunk_tokens,
            "kv_tokens": self.kv_tokens,
            "policy": self.policy.name(),
            "seed": self.seed,
            "costs": costs,
        })
    }
}

/// What a gateway would know of an executor with these costs: planes through timings of steps, and of what prompts add to them.
fn believed(costs: &CostModel) -> Option<ServingModel> {
    let mut fit = ServingFit::new(LoraForm::TrueRank, ColdStart::Assisted);
    for sequences in [1, 2, 4, 8, 16, 32, 64] {
        for context in [16, 128, 1024] {
            let decode =
                Work { decode_sequences: sequences, context_tokens: sequences * context, ..Work::default() };
            let load =
                |tokens: usize| Load { requests: sequences as u64, tokens: tokens as u64, ..Load::default() };
            fit.observe_decode(load(decode.context_tokens), costs.step(decode));
            let both = Work { prefill_tokens: context, prefill_pairs: context * context / 2, ..decode };
            let prompt = Load::of(0, context as u64);
            fit.observe_prefill(prompt, costs.step(both).saturating_sub(costs.step(decode)));
        }
    }
    fit.model()
}

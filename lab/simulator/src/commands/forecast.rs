//! Forecasts the latencies of a load on a number of executors, and the number needed (`holobiont simulate`).

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use scheduling::{
    batch::BatchLimits,
    routing::{RoutingPolicy, Slo},
};
use serde_json::json;

use super::{CommandError, print};
use crate::{
    cost::CostModel,
    fleet::{self, FleetRequest, load::of_workload, measured::MeasuredFleet, summary::Summary},
    workload::{
        ShareAccounting,
        arrivals::ArrivalHistory,
        popularity::Popularity,
        replay,
        scenario::{Scenario, WorkloadSpec},
    },
};

/// Forecasts the latencies of a load on a number of executors, and the number that it needs.
#[derive(Debug, Args)]
pub(super) struct Forecast {
    /// Load: a trace (CSV) in the format of Azure's of 2023.
    #[arg(long, value_name = "PATH")]
    trace: PathBuf,
    /// Step costs of an executor, as `scripts/bench costs` measures them: one file for all, or one for each
    /// in turn.
    #[arg(long, value_name = "PATH,PATH", value_delimiter = ',', required = true)]
    costs: Vec<PathBuf>,
    /// Number of executors to forecast for.
    #[arg(long, default_value_t = 1)]
    executors: usize,
    /// Maximum number of executors in the search for the number needed.
    #[arg(long, default_value_t = 256)]
    max_executors: usize,
    /// Requests per second; by default as in the trace.
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,
    /// Length of the load in seconds.
    #[arg(long, default_value_t = 600.0, value_name = "S")]
    duration: f64,
    /// SLO target for the time to first token.
    #[arg(long, default_value_t = 1000.0, value_name = "MS")]
    ttft_ms: f64,
    /// SLO target for the time per output token.
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    tpot_ms: f64,
    /// Share of requests for which both targets must hold.
    #[arg(long, default_value_t = 0.95)]
    share: f64,
    /// Number of adapters in the load.
    #[arg(long, default_value_t = 50)]
    adapters: usize,
    /// Ranks of the adapters, in turn.
    #[arg(long, value_delimiter = ',', default_values_t = [16])]
    ranks: Vec<u32>,
    /// Number of adapters that an executor holds; by default all that were requested.
    #[arg(long)]
    adapter_slots: Option<usize>,
    /// Distribution of requests over adapters: uniform, zipf:S or maf.
    #[arg(long, default_value = "zipf:0.9")]
    popularity: Popularity,
    /// Divisor of all lengths in the trace.
    #[arg(long, default_value_t = 1.0)]
    length_divisor: f64,
    /// Maximum number of sequences per step.
    #[arg(long, default_value_t = 64)]
    max_running: usize,
    /// Maximum number of prompt tokens per step.
    #[arg(long, default_value_t = 512)]
    chunk_tokens: usize,
    /// Capacity of an executor's KV cache in tokens; unlimited by default.
    #[arg(long)]
    kv_tokens: Option<u64>,
    /// Policy that chooses an executor.
    #[arg(long, default_value = "rank-aware")]
    policy: RoutingPolicy,
    /// Seed of random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Forecast {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        self.validate()?;
        let costs: Vec<CostModel> =
            self.costs.iter().map(|path| CostModel::read(path)).collect::<Result<_, _>>()?;
        self.measured().fleet(&costs, 1).ok_or(CommandError::Option("--costs"))?;
        let rate = self.rate.map_or_else(|| replay::rate(&self.trace), Ok)?;
        let requests = self.requests(rate)?;
        print(out, &json!({ "settings": self.header(rate, &costs), "requests": requests.len() }))?;
        let asked = self.summary(&requests, &costs, self.executors);
        print(
            out,
            &json!({ "executors": self.executors, "is_enough": self.is_enough(&asked), "sees": asked }),
        )?;
        let needed = self.needed(&requests, &costs);
        let sees = needed.map(|executors| self.summary(&requests, &costs, executors));
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
            ("--adapter-slots", self.adapter_slots.unwrap_or(1) as f64),
            ("--ranks", self.ranks.len() as f64),
        ];
        let bad = positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0);
        bad.map_or(Ok(()), |(name, _)| Err(CommandError::Option(name)))
    }

    fn requests(&self, per_s: f64) -> Result<Vec<FleetRequest>, CommandError> {
        let recipe = WorkloadSpec {
            scenario: Scenario::Chat,
            adapters: self.adapters,
            popularity: self.popularity,
            drift: 0.0,
            rank: 0,
            tenants: 1,
            shares: ShareAccounting::None,
            hostile_per_s: 0.0,
            per_s,
            length_divisor: self.length_divisor,
            before: ArrivalHistory::Nothing,
            end: Duration::from_secs_f64(self.duration),
        };
        let mut requests = of_workload(&replay::replay(&self.trace, &recipe, self.seed)?);
        for request in &mut requests {
            request.rank = self.ranks[request.adapter as usize % self.ranks.len()];
        }
        Ok(requests)
    }

    fn slo(&self) -> Slo {
        let us = |ms: f64| Some((ms * 1e3) as u64);
        Slo { ttft_us: us(self.ttft_ms), tpot_us: us(self.tpot_ms) }
    }

    fn measured(&self) -> MeasuredFleet {
        let limits =
            BatchLimits { max_running: self.max_running, chunk_tokens: self.chunk_tokens, scored_tokens: 1 };
        MeasuredFleet {
            limits,
            adapter_slots: self.adapter_slots.unwrap_or(self.adapters),
            kv_tokens: self.kv_tokens.unwrap_or(u64::MAX),
            policy: self.policy,
            slo: self.slo(),
            seed: self.seed,
        }
    }

    fn summary(&self, requests: &[FleetRequest], costs: &[CostModel], executors: usize) -> Summary {
        let outcomes = self.measured().fleet(costs, executors).map(|setup| fleet::run(&setup, requests));
        let outside_s = costs.first().map_or(0.0, |costs| costs.request_s);
        Summary::of(requests, &outcomes.unwrap_or_default(), 0, &self.slo(), outside_s)
    }

    fn is_enough(&self, summary: &Summary) -> bool {
        summary.attainment >= self.share && summary.ttft_attainment >= self.share
    }

    /// Finds the smallest sufficient number of executors; more executors are never worse.
    fn needed(&self, requests: &[FleetRequest], costs: &[CostModel]) -> Option<usize> {
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

    fn header(&self, rate: f64, costs: &[CostModel]) -> serde_json::Value {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        json!({
            "trace": name(&self.trace),
            "rate_per_s": rate,
            "duration_s": self.duration,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "share": self.share,
            "adapters": self.adapters,
            "ranks": self.ranks,
            "adapter_slots": self.adapter_slots,
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

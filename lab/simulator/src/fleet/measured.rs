//! Fleets of measured executors: each has separate costs, and the gateway learns their models.

use std::iter;

use scheduling::{
    batch::BatchLimits,
    fairness::burst_limit::FLOOD_SHARE,
    perf::serving::{ColdStart, LoraForm, RequestLoad, ServingFit, ServingModel},
    routing::{RoutingPolicy, Slo},
};

use super::{FleetSetup, GatewayKnowledge, LowerTier, Prompts, ServerSetup};
use crate::cost::{ComputedWork, CostModel};

/// Limits of the executors, and the routing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredFleet {
    /// Bounds of each step.
    pub limits: BatchLimits,
    /// Number of adapters that an executor holds; at first it holds none.
    pub adapter_slots: usize,
    /// Capacity of an executor's KV cache in tokens.
    pub kv_tokens: u64,
    /// Policy that chooses an executor.
    pub policy: RoutingPolicy,
    /// SLO targets of all requests.
    pub slo: Slo,
    /// Seed of random choices.
    pub seed: u64,
}

impl MeasuredFleet {
    /// Returns a fleet of `count` executors whose costs are taken in turn. `None` if there are no costs, or
    /// no model fits them.
    #[must_use]
    pub fn fleet(&self, costs: &[CostModel], executors: usize) -> Option<FleetSetup> {
        // Before timings exist, the gateway assumes that all executors equal the first.
        let believed = believed(costs.first()?)?;
        let server = |costs: &CostModel| ServerSetup {
            model: ServingModel { store: costs.store(), ..believed },
            costs: Some(*costs),
            prompts: Prompts::Beside,
            limits: self.limits,
            adapter_slots: self.adapter_slots,
            below: LowerTier::Store,
            rank_bytes: costs.rank_bytes,
            kv_tokens: self.kv_tokens,
        };
        Some(FleetSetup {
            servers: iter::repeat(costs).flatten().take(executors).map(server).collect(),
            knowledge: GatewayKnowledge::Learnt,
            policy: self.policy,
            slo: self.slo,
            weights: Vec::new(),
            flood_share: FLOOD_SHARE,
            seed: self.seed,
        })
    }
}

/// Fits the gateway's model of an executor with these costs: planes through times of steps and of added
/// prompts.
fn believed(costs: &CostModel) -> Option<ServingModel> {
    let mut fit = ServingFit::new(LoraForm::TrueRank, ColdStart::Assisted);
    for sequences in [1, 2, 4, 8, 16, 32, 64] {
        for context in [16, 128, 1024] {
            let decode = ComputedWork {
                decode_sequences: sequences,
                context_tokens: sequences * context,
                ..ComputedWork::default()
            };
            let load = |tokens: usize| RequestLoad {
                requests: sequences as u64,
                tokens: tokens as u64,
                ..RequestLoad::default()
            };
            fit.observe_decode(load(decode.context_tokens), costs.step(decode));
            let both =
                ComputedWork { prefill_tokens: context, prefill_pairs: context * context / 2, ..decode };
            let prompt = RequestLoad::of(0, context as u64);
            fit.observe_prefill(prompt, costs.step(both).saturating_sub(costs.step(decode)));
        }
    }
    fit.model()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{self, FleetRequest, SECOND};

    const MEASURED: MeasuredFleet = MeasuredFleet {
        limits: BatchLimits { max_running: 64, chunk_tokens: 512, scored_tokens: 1 },
        adapter_slots: 4,
        kv_tokens: u64::MAX,
        policy: RoutingPolicy::RankAware,
        slo: Slo { ttft_us: None, tpot_us: None },
        seed: 1,
    };

    /// Creates ten requests a second for a minute.
    fn requests() -> Vec<FleetRequest> {
        let request = |n: u64| FleetRequest {
            at: n * SECOND / 10,
            tenant: 0,
            adapter: (n % 3) as u32,
            rank: 16,
            prompt: 20,
            answer: 30,
            patience: None,
        };
        (0..600).map(request).collect()
    }

    #[test]
    fn a_gateway_learns_which_executor_is_slow_and_a_cold_adapter_is_waited_for_once() {
        let fast = CostModel { load_s: 0.5, ..CostModel::CPU };
        let slow =
            CostModel { step_s: 4.0 * fast.step_s, decode_sequence_s: 4.0 * fast.decode_sequence_s, ..fast };
        let setup = MEASURED.fleet(&[fast, slow], 2).unwrap();
        let outcomes = fleet::run(&setup, &requests());
        let share = |skipped: usize| {
            let at: Vec<_> = outcomes.iter().skip(skipped).map(|outcome| outcome.server).collect();
            at.iter().filter(|server| **server == Some(0)).count() as f64 / at.len() as f64
        };
        assert!(share(300) > 0.7, "the fast one has most of the work: {}", share(300));
        let first_ms =
            |index: usize| (outcomes[index].first_token.unwrap() - requests()[index].at) / (SECOND / 1000);
        assert!((500..600).contains(&first_ms(0)), "{}", first_ms(0));
        assert!((300..600).all(|index| first_ms(index) < 500));
        assert!(MEASURED.fleet(&[], 2).is_none());
    }
}

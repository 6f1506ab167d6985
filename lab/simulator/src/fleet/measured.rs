//! Executors as they were measured: each with costs of its own, and a gateway that learns what they are.

use std::iter;

use scheduling::{
    batch::BatchLimits,
    fairness::burst_limit::FLOOD_SHARE,
    perf::serving::{ColdStart, LoraForm, RequestLoad, ServingFit, ServingModel},
    routing::{RoutingPolicy, Slo},
};

use super::{FleetSetup, GatewayKnowledge, LowerTier, Prompts, ServerSetup};
use crate::cost::{ComputedWork, CostModel};

/// What executors are held to, and how one is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredFleet {
    /// Bounds of steps.
    pub limits: BatchLimits,
    /// Adapters that an executor holds; it has none at first.
    pub adapter_slots: usize,
    /// Tokens whose keys and values it holds.
    pub kv_tokens: u64,
    /// How it is chosen.
    pub policy: RoutingPolicy,
    /// What requests are promised.
    pub slo: Slo,
    /// Where random choices come from.
    pub seed: u64,
}

impl MeasuredFleet {
    /// So many executors with these costs, which are repeated in turn. `None` if there are no costs, or nothing could be
    /// learnt of them.
    #[must_use]
    pub fn fleet(&self, costs: &[CostModel], executors: usize) -> Option<FleetSetup> {
        // Before it has seen them, the gateway takes all to be like the first.
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

/// What a gateway would know of an executor with these costs: planes through timings of steps, and of what prompts add to them.
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

    /// Ten requests a second for a minute.
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

//! Cost model: cost of a copy, probability of a visit, recency, and number of needed adapters (Eq. 4 to 6).

use std::time::Duration;

use super::{AdapterDemand, Candidate, EvictionRules, ReplacementPolicy};

/// Lower bound of `(Now - 1) / Low`, so that its logarithm exists and even the last adapter can leave.
const LEAST_COVERAGE: f64 = 1e-3;

/// Time in which a visit's weight decays by a factor e.
const VISIT_MEMORY: Duration = Duration::from_secs(600);

/// Variant of Eq. 4, the term for adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterFactor {
    /// Corrected sign: adapters are worth more if too few are on the device (E-13).
    #[default]
    Mended,
    /// As printed: adapters leave even sooner if too few are on the device.
    Printed,
    /// No adapter term (ablation WOL).
    None,
}

/// Variant of the cost in Eq. 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CostTerm {
    /// Cost of recovering one block. A larger node costs more, but frees more blocks in proportion.
    #[default]
    PerBlock,
    /// As printed: cost of copying the whole node.
    Printed,
    /// No cost term (ablation WOC).
    None,
}

/// Terms of the cost model that count; leaving one out gives an ablation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Cost of recovering the node (Eq. 5).
    pub cost: CostTerm,
    /// Whether the number of visits counts (Eq. 5).
    pub visits: bool,
    /// Whether the time since the last use counts (Eq. 5).
    pub recency: bool,
    /// Effect of the number of needed adapters (Eq. 4).
    pub adapters: AdapterFactor,
}

impl Default for Terms {
    fn default() -> Self {
        Self { cost: CostTerm::PerBlock, visits: true, recency: true, adapters: AdapterFactor::Mended }
    }
}

/// Cost model `cost * visits * (1 - sigmoid(t / tau))`, in logarithms: in f32 the product is 0 after 90 s,
/// its logarithm never (E-12).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Terms of the model that count.
    pub terms: Terms,
    /// Time unit of the recency term, which the paper leaves open.
    pub tau: Duration,
    /// Rules for the eviction of nodes.
    pub rules: EvictionRules,
}

impl ReplacementPolicy for CostModel {
    fn worth(&self, candidate: &Candidate, now: Duration) -> f64 {
        let Terms { cost, visits, recency, .. } = self.terms;
        let Candidate { blocks, block_cost, visits: visited, last_use } = *candidate;
        let mut worth = match cost {
            CostTerm::PerBlock => f64::from(block_cost).max(f64::MIN_POSITIVE).ln(),
            CostTerm::Printed => f64::from(blocks.max(1)).ln(),
            CostTerm::None => 0.0,
        };
        if visits {
            // All visits decay alike, so the decay is a shift by the elapsed time.
            worth += f64::from(visited).max(f64::MIN_POSITIVE).ln() + ratio(last_use, VISIT_MEMORY);
        }
        if recency {
            // Computes -softplus(t / tau), shifted by now / tau.
            let idle = ratio(now.saturating_sub(last_use), self.tau);
            worth += ratio(last_use, self.tau) - (-idle).exp().ln_1p();
        }
        worth
    }

    fn adapter_bonus(&self, AdapterDemand { now, required }: AdapterDemand) -> f64 {
        let after = coverage(now - 1.0, required);
        match self.terms.adapters {
            AdapterFactor::Mended => -after.ln(),
            AdapterFactor::Printed => after.ln() - coverage(now, required).ln(),
            AdapterFactor::None => 0.0,
        }
    }

    fn rules(&self) -> EvictionRules {
        self.rules
    }
}

/// Returns the decayed visits as of `now` plus one; `visits` are as of `since`.
pub(crate) fn visited_again(visits: f32, since: Duration, now: Duration) -> f32 {
    let faded = (-ratio(now.saturating_sub(since), VISIT_MEMORY)).exp();
    // Single precision suffices for a decaying count.
    visits * faded as f32 + 1.0
}

/// Returns `min(1, adapters / required)`, but never 0.
fn coverage(adapters: f64, required: f64) -> f64 {
    if required <= 0.0 { 1.0 } else { (adapters / required).clamp(LEAST_COVERAGE, 1.0) }
}

fn ratio(time: Duration, unit: Duration) -> f64 {
    time.as_secs_f64() / unit.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAU: Duration = Duration::from_secs(10);
    const ELORA: CostModel = CostModel {
        terms: Terms {
            cost: CostTerm::PerBlock,
            visits: true,
            recency: true,
            adapters: AdapterFactor::Mended,
        },
        tau: TAU,
        rules: EvictionRules {
            keeps_dependencies: true,
            keeps_history: true,
            by_branch: false,
            adapter_share: None,
        },
    };

    fn seconds(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    /// Computes Eq. 5 per freed block, with decayed visits.
    fn product(candidate: &Candidate, now: Duration) -> f64 {
        let idle = (now - candidate.last_use).as_secs_f64();
        let visits = f64::from(candidate.visits) * (-idle / VISIT_MEMORY.as_secs_f64()).exp();
        f64::from(candidate.block_cost) * visits * (1.0 - 1.0 / (1.0 + (-idle / TAU.as_secs_f64()).exp()))
    }

    fn used(block_cost: f32, visits: f32, last_use: f64) -> Candidate {
        Candidate { blocks: 1, block_cost, visits, last_use: seconds(last_use) }
    }

    proptest! {
        #[test]
        fn the_order_is_that_of_the_product_where_it_is_a_number(
            costs in prop::array::uniform2(0.1_f32..100.0),
            visits in prop::array::uniform2(0.1_f32..1000.0),
            uses in prop::array::uniform2(0.0_f64..100.0),
        ) {
            let now = seconds(100.0);
            let [a, b] = [0, 1].map(|i| used(costs[i], visits[i], uses[i]));
            let (by_product, by_worth) = (product(&a, now) / product(&b, now), ELORA.worth(&a, now) - ELORA.worth(&b, now));
            prop_assert!((by_product.ln() - by_worth).abs() < 1e-6, "{} {}", by_product.ln(), by_worth);
        }

        #[test]
        fn what_nobody_asks_for_keeps_its_worth_but_for_ln_2(visits in 0.1_f32..1000.0, age in 0.0_f64..1e6) {
            let candidate = used(1.0, visits, 5.0);
            let (then, later) = (ELORA.worth(&candidate, seconds(5.0)), ELORA.worth(&candidate, seconds(5.0 + age)));
            prop_assert!((0.0..=2_f64.ln() + 1e-9).contains(&(later - then)));
        }
    }

    #[test]
    fn an_hour_apart_nothing_is_equal_and_nothing_infinite() {
        let at = |last_use| ELORA.worth(&used(1.0, 1.0, last_use), seconds(7200.0));
        let (old, older) = (at(3600.0), at(3599.0));
        assert!(old.is_finite() && older.is_finite() && older < old);
    }

    #[test]
    fn what_is_large_stays_longer_only_as_printed() {
        let printed = CostModel { terms: Terms { cost: CostTerm::Printed, ..ELORA.terms }, ..ELORA };
        let small = used(1.0, 1.0, 5.0);
        let large = Candidate { blocks: 12, ..small };
        let now = seconds(6.0);
        assert_eq!(ELORA.worth(&large, now), ELORA.worth(&small, now));
        assert!(printed.worth(&large, now) > printed.worth(&small, now));
    }

    #[test]
    fn below_what_is_required_a_block_leaves_before_an_adapter_and_as_printed_after_it() {
        let short = AdapterDemand { now: 3.0, required: 10.0 };
        let printed = CostModel { terms: Terms { adapters: AdapterFactor::Printed, ..ELORA.terms }, ..ELORA };
        assert!(ELORA.adapter_bonus(short) > 0.0 && printed.adapter_bonus(short) < 0.0);
        let enough = AdapterDemand { now: 11.0, required: 10.0 };
        assert_eq!((ELORA.adapter_bonus(enough), printed.adapter_bonus(enough)), (0.0, 0.0));
        assert!(ELORA.adapter_bonus(AdapterDemand { now: 1.0, required: 5.0 }).is_finite());
    }
}

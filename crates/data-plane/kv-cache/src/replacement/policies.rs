//! Policies with which the cost model is compared, by name.

use std::{collections::VecDeque, fmt, str::FromStr, time::Duration};

use super::{AdapterFactor, Candidate, CostModel, CostTerm, EvictionRules, ReplacementPolicy, Terms};

/// Share of the device that vLLM's default gives to adapters (E-18).
const STATIC_ADAPTER_SHARE: f64 = 0.2;

/// Policy that evicts the least recently used node first.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Lru {
    /// Rules for the eviction of nodes.
    pub rules: EvictionRules,
}

impl ReplacementPolicy for Lru {
    fn worth(&self, candidate: &Candidate, _: Duration) -> f64 {
        candidate.last_use.as_secs_f64()
    }

    fn rules(&self) -> EvictionRules {
        self.rules
    }
}

/// Re-reference interval prediction with two bits: new nodes leave before nodes that were hit. All intervals
/// would grow alike, so an epoch counter grows instead; only the epoch of a candidate's last use counts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rrip {
    /// Start time and number of each epoch, except the first, 0.
    epochs: VecDeque<(Duration, f64)>,
}

/// Maximum number of stored epochs; an earlier use counts for the oldest of them.
const MAX_EPOCHS: usize = 1024;

impl Rrip {
    fn epoch_at(&self, time: Duration) -> f64 {
        let begun = self.epochs.partition_point(|(began, _)| *began <= time);
        let earlier = if self.epochs.len() < MAX_EPOCHS { 0.0 } else { self.epochs[0].1 };
        begun.checked_sub(1).map_or(earlier, |last| self.epochs[last].1)
    }
}

impl ReplacementPolicy for Rrip {
    fn worth(&self, candidate: &Candidate, _: Duration) -> f64 {
        // The prediction is 2 after one request and 0 after a hit; ties are in order of use.
        let predicted = if candidate.visits > 1.5 { 0.0 } else { 2.0 };
        self.epoch_at(candidate.last_use) - predicted + candidate.last_use.as_secs_f64() * 1e-9
    }

    fn note_eviction(&mut self, worth: f64, now: Duration) {
        // The evicted node had the longest interval, 3; later uses are compared with the nodes that stay.
        let epoch = worth.floor() + 3.0;
        if epoch > self.epoch_at(now) {
            self.epochs.push_back((now, epoch));
        }
        if self.epochs.len() > MAX_EPOCHS {
            self.epochs.pop_front();
        }
    }
}

macro_rules! variants {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// Replacement policy, selected by name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
        pub enum Variant {
            $($(#[$doc])* $variant),+
        }

        impl Variant {
            /// All policies, in the order of their description.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the policy's name in settings.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }
    };
}

variants! {
    /// Cost model with corrected equations.
    #[default]
    Elora = "elora",
    /// Cost model with Eq. 4 as printed.
    Eq4Printed = "eq4-printed",
    /// Cost model with the cost of Eq. 5 as printed: larger nodes stay longer.
    Eq5Printed = "eq5-printed",
    /// Least recently used, in one pool with dependencies (WOS).
    Lru = "lru",
    /// Re-reference interval prediction with dependencies.
    Rrip = "rrip",
    /// Fixed share for adapters, each kind least recently used, without dependencies (vLLM-like).
    Static = "static",
    /// One pool, in which no block outlives its sequence (S-LoRA-like).
    NoHistory = "no-history",
    /// Cost model without dependencies (WOM).
    NoDependencies = "wom",
    /// Cost model without the number of needed adapters (WOL).
    NoAdapterFactor = "wol",
    /// Cost model without cost (WOC).
    NoCost = "woc",
    /// Cost model without visits (WOV).
    NoVisits = "wov",
    /// Cost model without recency (WOU).
    NoRecency = "wou",
    /// Cost model that evicts whole branches.
    Branches = "bfs",
}

impl Variant {
    /// Creates the policy, with `tau` as its time unit.
    #[must_use]
    pub fn policy(self, tau: Duration) -> Box<dyn ReplacementPolicy> {
        let (terms, rules) = (Terms::default(), EvictionRules::default());
        let model =
            |terms, rules| -> Box<dyn ReplacementPolicy> { Box::new(CostModel { terms, tau, rules }) };
        match self {
            Self::Elora => model(terms, rules),
            Self::Eq4Printed => model(Terms { adapters: AdapterFactor::Printed, ..terms }, rules),
            Self::Eq5Printed => model(Terms { cost: CostTerm::Printed, ..terms }, rules),
            Self::NoDependencies => model(terms, EvictionRules { keeps_dependencies: false, ..rules }),
            Self::NoAdapterFactor => model(Terms { adapters: AdapterFactor::None, ..terms }, rules),
            Self::NoCost => model(Terms { cost: CostTerm::None, ..terms }, rules),
            Self::NoVisits => model(Terms { visits: false, ..terms }, rules),
            Self::NoRecency => model(Terms { recency: false, ..terms }, rules),
            Self::Branches => model(terms, EvictionRules { by_branch: true, ..rules }),
            Self::Lru => Box::new(Lru { rules }),
            Self::Rrip => Box::new(Rrip::default()),
            Self::NoHistory => Box::new(Lru { rules: EvictionRules { keeps_history: false, ..rules } }),
            Self::Static => {
                let adapter_share = Some(STATIC_ADAPTER_SHARE);
                Box::new(Lru { rules: EvictionRules { keeps_dependencies: false, adapter_share, ..rules } })
            }
        }
    }
}

/// Error of a name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no such policy; the policies are {}", names())]
pub struct UnknownVariant;

fn names() -> String {
    Variant::ALL.iter().map(|variant| variant.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Variant {
    type Err = UnknownVariant;

    fn from_str(name: &str) -> Result<Self, UnknownVariant> {
        Self::ALL.iter().copied().find(|variant| variant.name() == name).ok_or(UnknownVariant)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_as_long_however_often_it_is_looked_at() {
        let mut rrip = Rrip::default();
        let used =
            |visits, s| Candidate { blocks: 1, block_cost: 1.0, visits, last_use: Duration::from_secs(s) };
        let (old, hit) = (used(1.0, 1), used(2.0, 1));
        let before = rrip.worth(&old, Duration::from_secs(1));
        assert!(before < rrip.worth(&hit, Duration::from_secs(1)));
        rrip.note_eviction(before, Duration::from_secs(2));
        assert_eq!(rrip.worth(&old, Duration::from_secs(9)), before, "no use, no new epoch");
        let new = used(1.0, 3);
        assert!(before < rrip.worth(&new, Duration::from_secs(3)));
        assert!(rrip.worth(&new, Duration::from_secs(3)) < rrip.worth(&hit, Duration::from_secs(3)));
    }
}

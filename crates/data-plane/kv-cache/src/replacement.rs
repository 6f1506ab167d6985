//! Replacement policies: ELORA's cost model, and the policies compared with it (E-08 to E-13, E-19).
//!
//! A policy gives each candidate a worth. The numbers are logarithms, shifted by what all candidates share at
//! a time. So the worth of a node without requests stays nearly constant: it changes by at most ln 2, in the
//! first minute. Candidates can therefore stay sorted. When a block gains or loses a place in a second tier,
//! its cost changes at once, and it is sorted again.

mod adapter_usage;
mod cost_model;
mod policies;

use std::{fmt, time::Duration};

pub(crate) use self::cost_model::visited_again;

pub use self::{
    adapter_usage::AdapterUsage,
    cost_model::{AdapterFactor, CostModel, CostTerm, Terms},
    policies::{Lru, Rrip, UnknownVariant, Variant},
};

/// Maximum number of nodes updated in one turn, which bounds its time for every size of the tree (E-17).
pub const REVIEWED_AT_ONCE: u32 = 1024;

/// Properties of a node that a policy uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Number of blocks that its eviction frees.
    pub blocks: u32,
    /// Cost of recovering one of the blocks, in block copies.
    pub block_cost: f32,
    /// Decayed number of requests for the node, as of its last use.
    pub visits: f32,
    /// Time of the node's last use.
    pub last_use: Duration,
}

/// Number of adapters on the device, and the number that a batch needs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AdapterDemand {
    /// Number of adapters on the device: `Now`.
    pub now: f64,
    /// Expected number of adapters that a batch uses: `Low` (Eq. 3).
    pub required: f64,
}

/// Rules of a policy beyond the order: how blocks may leave, and whether they stay at all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionRules {
    /// Whether a node may leave a tier only after all nodes that depend on it (E-05).
    pub keeps_dependencies: bool,
    /// Whether blocks stay cached after their sequences end.
    pub keeps_history: bool,
    /// Whether a whole branch leaves at once.
    pub by_branch: bool,
    /// Fixed share of the device for adapters; `None` shares one pool with KV blocks.
    pub adapter_share: Option<f64>,
}

impl Default for EvictionRules {
    fn default() -> Self {
        Self { keeps_dependencies: true, keeps_history: true, by_branch: false, adapter_share: None }
    }
}

/// Policy that values eviction candidates.
pub trait ReplacementPolicy: fmt::Debug + Send {
    /// Returns the worth of a node at time `now`; the node with the least worth leaves first.
    fn worth(&self, candidate: &Candidate, now: Duration) -> f64;

    /// Returns a value to add to the worth of an adapter that would leave.
    fn adapter_bonus(&self, demand: AdapterDemand) -> f64 {
        let _ = demand;
        0.0
    }

    /// Records that a candidate of this worth has left.
    fn note_eviction(&mut self, worth: f64, now: Duration) {
        let _ = (worth, now);
    }

    /// Returns the policy's rules beyond the order.
    fn rules(&self) -> EvictionRules {
        EvictionRules::default()
    }
}

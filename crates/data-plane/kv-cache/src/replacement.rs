//! Who leaves a tier first: the cost model of ELORA, and what it is compared with (E-08 to E-13, E-19).
//!
//! A policy says what a candidate is worth as a number that grows with it. The numbers are logarithms, shifted by what all
//! candidates have in common at a time, so that what nobody asks for keeps its number while time passes: it moves by ln 2 at
//! most, in the first minute. That is what lets candidates stay sorted. Where a block gets a second place, or loses it, its cost changes
//! at once, and it is sorted again.

mod ablations;
mod adapter_usage;
mod cost_model;

use std::{fmt, time::Duration};

pub(crate) use self::cost_model::visited_again;

pub use self::{
    ablations::{Lru, Rrip, UnknownVariant, Variant},
    adapter_usage::AdapterUsage,
    cost_model::{AdapterFactor, CostModel, CostTerm, Terms},
};

/// Nodes whose worth is looked at again in one turn: what that takes is bounded however large the tree is (E-17).
pub const REVIEWED_AT_ONCE: u32 = 1024;

/// What a policy sees of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Blocks that are freed with it.
    pub blocks: u32,
    /// What it takes to have one of them back, in copies of a block.
    pub block_cost: f32,
    /// How often it was asked for, as of its last use, earlier visits counting less.
    pub visits: f32,
    /// When it was last used.
    pub last_use: Duration,
}

/// How many adapters there are on the device, and how many there should be.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AdapterDemand {
    /// Adapters on the device: `Now`.
    pub now: f64,
    /// How many a batch uses, by expectation: `Low` (Eq. 3).
    pub required: f64,
}

/// What else a policy decides: how blocks may leave, and whether they stay at all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionRules {
    /// Only what nothing in the tier depends on may leave it (E-05).
    pub keeps_dependencies: bool,
    /// Blocks outlive their sequences.
    pub keeps_history: bool,
    /// A whole branch leaves at once.
    pub by_branch: bool,
    /// Adapters have this share of the device to themselves, and no more; else one pool is shared.
    pub adapter_share: Option<f64>,
}

impl Default for EvictionRules {
    fn default() -> Self {
        Self { keeps_dependencies: true, keeps_history: true, by_branch: false, adapter_share: None }
    }
}

/// Says what candidates are worth.
pub trait ReplacementPolicy: fmt::Debug + Send {
    /// What a node is worth at a time; the least valuable leaves first.
    fn worth(&self, candidate: &Candidate, now: Duration) -> f64;

    /// What is added to the worth of an adapter that would leave.
    fn adapter_bonus(&self, demand: AdapterDemand) -> f64 {
        let _ = demand;
        0.0
    }

    /// A candidate of this worth has left.
    fn note_eviction(&mut self, worth: f64, now: Duration) {
        let _ = (worth, now);
    }

    /// What else it decides.
    fn rules(&self) -> EvictionRules {
        EvictionRules::default()
    }
}

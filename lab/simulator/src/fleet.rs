//! Several executors behind one gateway, on a virtual clock (CaraServe §7.5).
//!
//! Whose turn it is and where a request goes is decided by `scheduling::fairness` and `scheduling::routing`, as in the gateway; who takes
//! part in a step by `scheduling::batch`, as in the executor. What a step takes is the executor's performance model. Time is in
//! whole nanoseconds and every event has a place in one order, so a seed gives the same run to the byte.
//!
//! # Layout
//!
//! - here: requests, and what they came to.
//! - `load`: requests made from a seed. `server`: an executor. `gateway`: what is before them.
//! - `measured`: executors as they were measured.
//! - `run`: the clock, and messages between both, which may be lost. `fault_scenario`: what may happen to them, and what must hold.
//! - `summary`: the figures of a run.

pub mod fault_scenario;
pub mod gateway;
pub mod load;
pub mod measured;
mod run;
mod server;
pub mod summary;

use scheduling::{
    batch::BatchLimits,
    perf::serving::ServingModel,
    routing::{RoutingPolicy, Slo},
};

pub use self::run::run;
use crate::cost::CostModel;

/// Virtual time in nanoseconds.
pub type Nanos = u64;

/// One second of it.
pub const SECOND: Nanos = 1_000_000_000;

/// A request, as it is made before anything runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetRequest {
    /// When it comes.
    pub at: Nanos,
    /// Whose it is.
    pub tenant: u16,
    /// Its adapter.
    pub adapter: u32,
    /// The rank of that.
    pub rank: u32,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of its answer, at least one.
    pub answer: u32,
    /// How long after its arrival it is worth beginning.
    pub patience: Option<Nanos>,
}

/// How an executor treats prompts beside sequences that decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prompts {
    /// A pass of their own, for which everybody waits (C-02).
    Preempt,
    /// One pass for both, as this project's executor computes.
    Beside,
}

/// Where adapters are that an executor's device does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LowerTier {
    /// In its host's memory.
    Host,
    /// In the store alone.
    Store,
}

/// What the gateway knows of its executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayKnowledge {
    /// Their models.
    Given,
    /// What it has timed, as the gateway that serves: until all were seen to work, their models, which are alike.
    Learnt,
}

/// An executor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerSetup {
    /// What it takes for batches, as the gateway knows it.
    pub model: ServingModel,
    /// What it really takes, where that is known better.
    pub costs: Option<CostModel>,
    /// How it treats prompts.
    pub prompts: Prompts,
    /// Bounds of its steps.
    pub limits: BatchLimits,
    /// Adapters that its device holds.
    pub adapter_slots: usize,
    /// Where the others are.
    pub below: LowerTier,
    /// Bytes that a rank of an adapter takes.
    pub rank_bytes: u64,
    /// Tokens whose keys and values fit.
    pub kv_tokens: u64,
}

/// A fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetSetup {
    /// Its executors.
    pub servers: Vec<ServerSetup>,
    /// What the gateway knows of them.
    pub knowledge: GatewayKnowledge,
    /// How it chooses among them.
    pub policy: RoutingPolicy,
    /// What requests are promised.
    pub slo: Slo,
    /// Of each tenant; 1 for those that are not named.
    pub weights: Vec<u64>,
    /// Of an executor's places, those that tenants have together that want more than their part.
    pub flood_share: f64,
    /// Where random choices come from.
    pub seed: u64,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestEnd {
    /// With all its tokens.
    Answered,
    /// It was too late to begin.
    Expired,
    /// The queue was full.
    Refused,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestOutcome {
    /// How it ended.
    pub end: RequestEnd,
    /// When it did.
    pub ended: Nanos,
    /// When its first token came.
    pub first_token: Option<Nanos>,
    /// Where it was answered.
    pub server: Option<usize>,
    /// How often it was sent to an executor.
    pub sent: u32,
}

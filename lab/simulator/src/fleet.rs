//! Several executors behind one gateway, on a virtual clock (CaraServe §7.5).
//!
//! The gateway uses `scheduling::fairness` and `scheduling::routing`, and an executor uses
//! `scheduling::batch`, as the real ones do. The time of a step comes from the executor's performance
//! model. Time is in integer nanoseconds and all events have one order, so a seed gives the same run to the
//! byte.
//!
//! # Layout
//!
//! - here: requests and their results.
//! - `load`: requests made from a seed. `server`: an executor. `gateway`: the queue and routing.
//! - `measured`: executors with measured costs.
//! - `run`: the clock, and messages between gateway and executors, which may be lost. `fault_scenario`:
//!   injected faults and checked invariants.
//! - `summary`: metrics of a run.

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

/// One second of virtual time.
pub const SECOND: Nanos = 1_000_000_000;

/// A request, created before the simulation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetRequest {
    /// Arrival time of the request.
    pub at: Nanos,
    /// Number of the request's tenant.
    pub tenant: u16,
    /// Number of the request's adapter.
    pub adapter: u32,
    /// Rank of the request's adapter.
    pub rank: u32,
    /// Number of tokens of the prompt.
    pub prompt: u32,
    /// Number of tokens of the answer, at least one.
    pub answer: u32,
    /// Maximum time from arrival to the start; `None` for no limit.
    pub patience: Option<Nanos>,
}

/// How an executor schedules prompts beside decoding sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prompts {
    /// A prompt has a separate pass, during which all decoding waits (C-02).
    Preempt,
    /// One pass computes both, as in this project's executor.
    Beside,
}

/// Location of adapters that an executor's device does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LowerTier {
    /// Adapters are in host memory.
    Host,
    /// Adapters are only in the store.
    Store,
}

/// Source of the gateway's performance models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayKnowledge {
    /// The gateway knows each executor's model.
    Given,
    /// The gateway learns the models from timings, as the real one does, and uses equal models until all
    /// executors have run.
    Learnt,
}

/// Parameters of an executor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerSetup {
    /// Performance model of the executor as the gateway knows it.
    pub model: ServingModel,
    /// Actual costs, if they are known better.
    pub costs: Option<CostModel>,
    /// How the executor schedules prompts.
    pub prompts: Prompts,
    /// Bounds of each step.
    pub limits: BatchLimits,
    /// Number of adapters that the device holds.
    pub adapter_slots: usize,
    /// Location of all other adapters.
    pub below: LowerTier,
    /// Bytes per rank of an adapter.
    pub rank_bytes: u64,
    /// Capacity of the KV cache in tokens.
    pub kv_tokens: u64,
}

/// Parameters of a fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetSetup {
    /// Parameters of each executor.
    pub servers: Vec<ServerSetup>,
    /// Source of the gateway's performance models.
    pub knowledge: GatewayKnowledge,
    /// Policy that chooses an executor.
    pub policy: RoutingPolicy,
    /// SLO targets of all requests.
    pub slo: Slo,
    /// Weight of each tenant; 1 for tenants beyond the list.
    pub weights: Vec<u64>,
    /// Share of an executor's batch slots that all over-quota tenants may use together.
    pub flood_share: f64,
    /// Seed of random choices.
    pub seed: u64,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestEnd {
    /// The request received all its tokens.
    Answered,
    /// The request expired in the queue.
    Expired,
    /// The queue was full.
    Refused,
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestOutcome {
    /// How the request ended.
    pub end: RequestEnd,
    /// Time at which the request ended.
    pub ended: Nanos,
    /// Time of the first token, if any.
    pub first_token: Option<Nanos>,
    /// Index of the executor that answered.
    pub server: Option<usize>,
    /// Number of times that the request was sent.
    pub sent: u32,
}

//! The state of a deployment, as a gateway reports it to operators (`GET /v1/status`).
//!
//! The commands `status`, `ps`, `top`, `slo` and `drain` read the same records that the gateway writes. A
//! field that an older gateway lacks takes its default. The order of fields is the order in the JSON text.
//!
//! # Layout
//!
//! - [`DeploymentStatus`]: the report; [`ExecutorStatus`]: one of several executors.
//! - [`ExecutorStats`]: load, memory and device of an executor, or the sums over several.
//! - [`layers`]: split clients; [`shared`]: registry and store; [`training`]: jobs and models in training.
//! - [`classes`]: service classes and their SLO targets.

#![expect(missing_docs, reason = "a field has the name and the meaning that it has in the JSON")]

pub mod classes;
pub mod layers;
pub mod shared;
pub mod training;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::{
    classes::ClassStatus,
    layers::LayerServiceStatus,
    shared::{RegistryStatus, StoreStatus},
    training::TrainingStatus,
};

/// The report about the whole deployment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeploymentStatus {
    /// The only executor, or the sums over several.
    #[serde(flatten)]
    pub stats: ExecutorStats,
    /// Executors, if there are several; empty for a single one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub executors: Vec<ExecutorStatus>,
    /// Name of the base; `None` until the gateway serves one.
    pub model: Option<String>,
    pub model_path: Option<String>,
    /// Directory from which adapters are loaded.
    pub adapter_root: String,
    pub version: String,
    pub uptime_s: u64,
    /// Whether requests are served.
    pub ready: bool,
    pub registry: RegistryStatus,
    pub store: StoreStatus,
    pub training: TrainingStatus,
    pub classes: Vec<ClassStatus>,
    /// Bases, as `GET /v1/bases` lists them.
    pub bases: Vec<Value>,
}

/// One of several executors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecutorStatus {
    #[serde(flatten)]
    pub stats: ExecutorStats,
    pub name: String,
    /// `ready`, `drained`, `loading`, `lost`, `refused` or `asleep`.
    pub state: Option<String>,
    /// Number of the connection; greater than all earlier ones.
    pub connection: Option<u64>,
    /// Progress of the start, or the reason why the executor is not used.
    pub detail: Option<String>,
    /// Address of an executor on another host.
    pub address: Option<String>,
    pub drained: bool,
    pub sequences: SequenceCounts,
    /// Name of the executor's base, if there are several bases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SequenceCounts {
    pub under_way: usize,
    pub sent: u64,
    /// Number of sequences that the executor resumed after another executor lost them.
    pub taken_over: u64,
}

/// Load and resources of an executor. Sums over several executors lack the parts that cannot be added.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecutorStats {
    pub requests: RequestCounts,
    pub tokens_per_s: TokenRates,
    pub kv_blocks: KvBlockCounts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStatus>,
    pub adapters: AdapterCounts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_starts: Option<ColdStartCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkerPoolStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerServiceStatus>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestCounts {
    pub running: u64,
    pub waiting: u64,
}

/// Tokens per second since the previous report of the executor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenRates {
    pub prompt: f64,
    pub generated: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KvBlockCounts {
    pub total: u64,
    pub used: u64,
    pub cached: u64,
}

/// Adapters of the deployment, and the adapters in an executor's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdapterCounts {
    pub resident: usize,
    pub bytes: u64,
    pub budget_bytes: Option<u64>,
    /// Number of adapters that requests can name; only for the whole deployment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered: Option<usize>,
}

/// The device, its adapter tier, and the copies of adapters to it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceStatus {
    pub kind: Option<String>,
    pub name: Option<String>,
    pub memory_bytes: Option<u64>,
    pub memory_free_bytes: u64,
    /// Bytes of weights on each device of a group, the leader's first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub group_weight_bytes: Vec<u64>,
    /// Data types and roundings of the base, on which output bits depend.
    pub numbers: Option<String>,
    pub bytes: u64,
    pub budget_bytes: Option<u64>,
    pub cold_start: Option<String>,
    /// Speed of the link, if it is emulated.
    pub emulated_link_bytes_per_s: Option<u64>,
    pub copied_bytes: u64,
    pub copy_ms: f64,
}

/// How often and how long requests waited because their adapter was not on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdStartCounts {
    pub count: u64,
    pub load_wait_ms: f64,
    pub mean_load_wait_ms: f64,
}

/// The drafter, the drafted tokens, and the mean number of accepted tokens per verification.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpeculationStatus {
    /// `ngram`, `model` or `self`; `None` without a drafter.
    pub by: Option<String>,
    pub adapter_id: Option<String>,
    pub verifications: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    pub mean_accepted_tokens: f64,
    pub model_drafted_tokens: u64,
    pub model_accepted_tokens: u64,
    pub drafting_ms: f64,
    /// Acceptance probability from which one more draft token is worth its row.
    pub least_confidence: f64,
    /// Number of tokens that were drafted while streamed weights were read.
    pub ahead_tokens: u64,
    pub kept_tokens: u64,
    pub hidden_ms: f64,
}

/// Expected, attached and lost LoRA workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerPoolStatus {
    pub expected: u32,
    pub lost: u64,
    pub wait_ms: f64,
    pub seated: Vec<WorkerStatus>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStatus {
    pub core: u32,
    pub pid: u32,
    pub slices: u64,
    pub rank_rows: u64,
    /// Fraction of the rank rows of all workers that this worker computed.
    pub share: f64,
    pub taken_back: u64,
}

/// Tiers of the block pool of KV cache and adapters, and the host memory of the executor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStatus {
    pub block_bytes: u64,
    pub device: BlockPoolStatus,
    pub host: TierSlotStatus,
    pub disk: TierSlotStatus,
    pub blocks: BlockMoves,
    pub kv_wait_ms: f64,
    pub held: HostMemoryStatus,
    pub weights: StreamedWeightStatus,
    /// Tenants with the most device blocks.
    pub shares: Vec<BlockShare>,
}

/// Blocks of the device by use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockPoolStatus {
    pub total: u64,
    pub running: u64,
    pub history: u64,
    pub adapters: u64,
    pub free: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TierSlotStatus {
    pub total: u64,
    pub used: u64,
}

/// Blocks that moved between the tiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockMoves {
    pub fetched_host: u64,
    pub fetched_disk: u64,
    pub prefetched: u64,
    pub spilled: u64,
    pub evicted: u64,
    pub lost: u64,
    pub failed: u64,
}

/// Host memory of the executor in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostMemoryStatus {
    pub limit_bytes: u64,
    pub weights_bytes: u64,
    pub blocks_bytes: u64,
    pub adapters_bytes: u64,
    pub history_bytes: u64,
    pub workers_bytes: u64,
    pub clients_bytes: u64,
    pub drafts_bytes: u64,
}

impl HostMemoryStatus {
    /// Returns the uses of the memory with their bytes.
    #[must_use]
    pub const fn uses(&self) -> [(&'static str, u64); 7] {
        [
            ("weights", self.weights_bytes),
            ("blocks", self.blocks_bytes),
            ("adapters", self.adapters_bytes),
            ("history", self.history_bytes),
            ("workers", self.workers_bytes),
            ("clients", self.clients_bytes),
            ("drafts", self.drafts_bytes),
        ]
    }
}

/// Weights that the executor reads from its disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamedWeightStatus {
    pub read_bytes: u64,
    pub read_ms: f64,
    pub waited_ms: f64,
    pub bytes_per_token: Option<u64>,
}

/// Device blocks of one tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockShare {
    /// The beginning of the tenant's id.
    pub tenant: String,
    pub blocks: u32,
}

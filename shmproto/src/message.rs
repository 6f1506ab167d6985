//! Messages between the gateway and the base-executor.
//!
//! The gateway connects a DEALER to the executor's ROUTER on an `ipc://` socket in a private directory. One
//! ZeroMQ message holds one [`ToExecutor`] or one [`ToGateway`]. Messages carry token ids, never text.
//!
//! Submodule `generation` defines requests and their outputs, `stats` defines statistics, `blocks` defines
//! changes of cached KV blocks.

mod blocks;
mod generation;
mod stats;

pub use self::{
    blocks::{AddedBlock, BlockTier, BlockUpdate, ChainBytes, RemovedBlock},
    generation::{Finish, Generate, Output, Pooling, Precision, ProvisionalMode, Sampling, TokenOutput},
    stats::{
        ACCEPTED_BOUNDS, AdapterStats, DraftKind, LayerRoute, LayerSession, LayerStats, MemoryAccountStats,
        MemoryStats, ShareStats, SpeculationStats, Stats, TenantUse, WeightStats, WorkerStats,
    },
};
use crate::{codec::Wire as _, wire_enum, wire_struct};

/// Version of the protocol; it changes with every message, and both sides refuse a peer with another version.
pub const PROTOCOL_VERSION: u32 = 19;

/// Maximum number of split client sessions that [`Stats`] lists.
pub const MAX_LAYER_SESSIONS: usize = 64;

/// Maximum number of tenants whose use of the layer service [`Stats`] lists.
pub const MAX_LAYER_TENANTS: usize = 256;

/// 256-bit content hash of an adapter's weights and configuration.
pub type GenerationBytes = [u8; 32];

/// Id of an adapter inside an executor: its adapter version under its owner. Equal bytes under two owners are
/// two adapters that share neither memory nor KV cache, so no tenant can detect what others have loaded.
pub type AdapterIdBytes = [u8; 32];

/// Hash of the tenant that owns an adapter; zeros for an adapter that every tenant may use.
pub type OwnerBytes = [u8; 32];

/// Request number that the gateway chooses, unique on its connection.
pub type RequestId = u64;

wire_enum! {
    /// Message from the gateway to the base-executor.
    #[derive(Debug, Clone, PartialEq)]
    #[allow(clippy::large_enum_variant, reason = "a message is made, sent and forgotten")]
    pub enum ToExecutor {
        /// First message of a connection; answered by [`ToGateway::Welcome`] or [`ToGateway::Refused`].
        Hello(Hello) = 0,
        /// Starts a generation; answered by [`ToGateway::Outputs`] until one output has a finish or an error.
        Generate(Generate) = 1,
        /// The caller is gone: the executor frees all resources of this request. Not answered.
        Cancel(RequestId) = 2,
        /// Loads an adapter; answered by [`ToGateway::AdapterLoaded`] or `Failed`.
        LoadAdapter(LoadAdapter) = 3,
        /// Drains and frees an adapter; answered by [`ToGateway::AdapterUnloaded`] or `Failed`.
        UnloadAdapter(UnloadAdapter) = 4,
        /// Requests statistics; answered by [`ToGateway::Stats`].
        GetStats(RequestId) = 5,
        /// Requests the KV blocks in the cache, and all later changes, on this connection; answered by any
        /// number of [`ToGateway::Blocks`]. A repeated request begins again with all blocks.
        WatchBlocks = 6,
    }
}

/// How the executor answers a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    /// By [`ToGateway::Outputs`], the last of which has a finish or an error.
    Outputs,
    /// By one message, or [`ToGateway::Failed`].
    Reply,
}

impl ToExecutor {
    /// Returns the request that undecodable bytes name, and how it is answered; `None` if nothing answers
    /// such a message.
    #[must_use]
    pub fn request_in(bytes: &[u8]) -> Option<(RequestId, AnswerKind)> {
        let kind = match bytes.first()? {
            1 => AnswerKind::Outputs,
            3..=5 => AnswerKind::Reply,
            _ => return None,
        };
        Some((RequestId::from_bytes(bytes.get(1..9)?).ok()?, kind))
    }
}

wire_enum! {
    /// Message from the base-executor to the gateway.
    #[derive(Debug, Clone, PartialEq)]
    #[allow(clippy::large_enum_variant, reason = "a message is made, sent and forgotten")]
    pub enum ToGateway {
        /// The executor is ready to serve.
        Welcome(Welcome) = 0,
        /// The hello was refused; the text says why and what to do.
        Refused(String) = 1,
        /// Outputs of one engine step, for any number of requests.
        Outputs(Vec<Output>) = 2,
        /// The adapter is ready for requests.
        AdapterLoaded(AdapterLoaded) = 3,
        /// The adapter is unloaded: no request uses it and its bytes are free.
        AdapterUnloaded(AdapterUnloaded) = 4,
        /// A load, unload or stats call failed.
        Failed(Failed) = 5,
        /// Statistics, in answer to [`ToExecutor::GetStats`].
        Stats(Stats) = 6,
        /// Progress of loading the weights; any number of these messages may precede the welcome.
        Loading(Loading) = 7,
        /// Changes of cached KV blocks, in order, after [`ToExecutor::WatchBlocks`]. The first one is
        /// [`BlockUpdate::Cleared`], and a block is added after the block before it.
        Blocks(Vec<BlockUpdate>) = 8,
    }
}

wire_struct! {
    /// Identity of a gateway.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Hello {
        /// [`PROTOCOL_VERSION`] of the gateway.
        pub version: u32,
        /// Random number of the gateway process; a restarted gateway is another peer.
        pub instance: u64,
    }
}

wire_struct! {
    /// Description of a ready executor and its base.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Welcome {
        /// [`PROTOCOL_VERSION`] of the executor.
        pub version: u32,
        /// Random number of the executor process.
        pub instance: u64,
        /// Path of the model file or directory, from which the gateway reads tokenizer and template.
        pub model_path: String,
        /// Content hash of the base: its configuration, all its tensors and `text_hash`.
        pub base_hash: [u8; 32],
        /// Hash of the files of tokenizer, chat template and sampling defaults that the executor found beside
        /// the weights. A gateway that reads other files at `model_path` must not serve the executor.
        pub text_hash: [u8; 32],
        /// Device that computes the base.
        pub device: DeviceFacts,
        /// Rounding and storage that the base leaves open: executors that differ here compute different bits.
        pub numbers: String,
        /// Maximum number of tokens in a sequence, prompt and completion together.
        pub context_length: u32,
        /// Size of the vocabulary in tokens.
        pub vocab_size: u32,
        /// Maximum size of the adapters in the host tier, in bytes.
        pub adapter_budget_bytes: u64,
        /// Maximum size of the adapters on the device, in bytes, which share its memory with the KV cache.
        pub device_budget_bytes: u64,
        /// How a request starts whose adapter is not on the device.
        pub cold_start: ColdStart,
        /// Maximum number of KV blocks of one sequence, independent of other content of the device.
        pub kv_blocks: u32,
        /// Number of tokens in a KV block.
        pub block_tokens: u32,
        /// Maximum number of concurrent requests.
        pub max_running: u32,
        /// Maximum number of waiting requests; further ones are refused.
        pub max_waiting: u32,
        /// Maximum number of prompt tokens per step.
        pub chunk_tokens: u32,
        /// Adapters that are already resident (after a gateway restart).
        pub adapters: Vec<AdapterIdBytes>,
    }
}

wire_enum! {
    /// Kind of the computing device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum DeviceKind {
        /// The host's own CPU cores.
        #[default]
        Cpu = 0,
        /// An NVIDIA GPU with CUDA.
        Cuda = 1,
    }
}

wire_struct! {
    /// Device that computes the base.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct DeviceFacts {
        /// Kind of the device.
        pub kind: DeviceKind,
        /// Product name of the device; empty if unknown.
        pub name: String,
        /// Total memory of the device in bytes, for a CPU that of the host; 0 if unknown.
        pub memory_bytes: u64,
        /// Bytes of weights on each device of a group, the leader's first; empty without a group.
        pub group_weight_bytes: Vec<u64>,
    }
}

wire_enum! {
    /// How a request starts whose adapter is not on the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ColdStart {
        /// The request starts at once: CPU workers compute what has not arrived.
        #[default]
        CpuAssist = 0,
        /// The request waits until the adapter is on the device.
        OnDemand = 1,
        /// No request is cold: every adapter is on the device before its load is answered.
        Cached = 2,
    }
}

wire_struct! {
    /// Progress of an executor that does not serve yet.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Loading {
        /// Current activity, for a person: `reading weights`.
        pub stage: String,
        /// Progress from 0 to 100; never lower than in an earlier message of the same stage.
        pub percent: u32,
    }
}

wire_enum! {
    /// Stable code of an error.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum ErrorCode {
        /// The adapter version is not loaded or is being unloaded.
        AdapterNotFound = 0,
        /// Prompt and `max_tokens` do not fit the context or the block pool.
        ContextLengthExceeded = 1,
        /// The admission queue is full.
        QueueFull = 2,
        /// The deadline of the request has passed.
        DeadlineExceeded = 3,
        /// A field has a value that cannot be honoured.
        InvalidRequest = 4,
        /// The adapter's files are not usable.
        InvalidAdapter = 5,
        /// The adapter does not fit the adapter budget.
        AdapterBudgetExceeded = 6,
        /// The executor is shutting down.
        ShuttingDown = 7,
        /// An internal fault of the executor.
        Internal = 8,
        /// The model computed values that are not finite: an adapter's weights overflow.
        NotFinite = 9,
        /// The device lacks memory for the request now.
        NoMemory = 10,
    }
}

wire_struct! {
    /// Error with a stable code.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WireError {
        /// Stable code, for programs.
        pub code: ErrorCode,
        /// Cause and next step, for a person.
        pub message: String,
    }
}

wire_struct! {
    /// Request to load an adapter, or a sum of adapters.
    #[derive(Debug, Clone, PartialEq)]
    pub struct LoadAdapter {
        /// Number of the call, which its answer repeats.
        pub request: RequestId,
        /// One adapter of weight 1, or the parts of a merged adapter.
        pub parts: Vec<AdapterPart>,
        /// Hash of the owning tenant.
        pub owner: OwnerBytes,
    }
}

impl LoadAdapter {
    /// Creates a request to load the one adapter at `path`.
    #[must_use]
    pub fn of_one(request: RequestId, path: impl Into<String>, owner: OwnerBytes) -> Self {
        Self { request, parts: vec![AdapterPart { path: path.into(), weight: 1.0 }], owner }
    }
}

wire_struct! {
    /// Adapter in files, with its weight in a sum.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AdapterPart {
        /// Directory with `adapter_config.json` and `adapter_model.safetensors`, or a GGUF adapter file.
        pub path: String,
        /// Factor of the adapter in the sum.
        pub weight: f32,
    }
}

wire_struct! {
    /// Adapter that is ready for requests.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterLoaded {
        /// Number of the call.
        pub request: RequestId,
        /// Adapter version, independent of names and owners.
        pub generation: GenerationBytes,
        /// Adapter id, which requests use.
        pub adapter: AdapterIdBytes,
        /// Largest rank of its modules.
        pub rank: u32,
        /// Size of the adapter in the executor, in bytes.
        pub bytes: u64,
        /// Number of linear layers that the adapter changes.
        pub modules: u32,
        /// Number of base layers that a draft adapter computes; 0 for every other adapter.
        pub draft_layers: u32,
        /// Labels of the adapter's classification head; empty for every other adapter.
        pub labels: Vec<String>,
        /// Warnings about the adapter's files, for a person.
        pub warnings: Vec<String>,
    }
}

wire_struct! {
    /// Request to free an adapter.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct UnloadAdapter {
        /// Number of the call, which its answer repeats.
        pub request: RequestId,
        /// Id of the adapter.
        pub adapter: AdapterIdBytes,
    }
}

wire_struct! {
    /// Adapter that was unloaded.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterUnloaded {
        /// Number of the call.
        pub request: RequestId,
        /// Id of the adapter.
        pub adapter: AdapterIdBytes,
        /// Number of bytes that were freed.
        pub freed_bytes: u64,
    }
}

wire_struct! {
    /// Call that failed, with its error.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Failed {
        /// Number of the call.
        pub request: RequestId,
        /// Error for programs and for people.
        pub error: WireError,
    }
}

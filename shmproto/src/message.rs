//! What the gateway and the base-executor say to each other.
//!
//! The gateway connects a DEALER to the executor's ROUTER on an `ipc://` socket in a private directory.
//! One ZeroMQ message holds one [`ToExecutor`] or one [`ToGateway`]. Token ids travel, text never does.
//!
//! What is said of requests is in `generation`, figures are in `stats`.

mod generation;
mod stats;

pub use self::{
    generation::{Finish, Generate, Output, Pooling, Precision, ProvisionalMode, Sampling, TokenOutput},
    stats::{
        ACCEPTED_BOUNDS, AdapterStats, DraftKind, LayerRoute, LayerSession, LayerStats, MemoryAccountStats,
        MemoryStats, ShareStats, SpeculationStats, Stats, TenantUse, WeightStats, WorkerStats,
    },
};
use crate::{wire_enum, wire_struct};

/// Changes whenever a message changes; both sides refuse a peer that has another one.
pub const PROTOCOL_VERSION: u32 = 16;

/// Most sessions of split clients that [`Stats`] tells one by one.
pub const MAX_LAYER_SESSIONS: usize = 64;

/// Most tenants whose use of base layers [`Stats`] tells.
pub const MAX_LAYER_TENANTS: usize = 256;

/// 256-bit content hash of an adapter's weights and configuration.
pub type GenerationBytes = [u8; 32];

/// What an adapter is called inside an executor: its generation under its owner. The same bytes under two owners are
/// two adapters that share neither memory nor keys and values, so that nobody can tell what others have loaded.
pub type AdapterIdBytes = [u8; 32];

/// Hash of the tenant an adapter belongs to; zeros for one that everybody may use.
pub type OwnerBytes = [u8; 32];

/// Chosen by the gateway, unique for its connection.
pub type RequestId = u64;

wire_enum! {
    /// From the gateway to the base-executor.
    #[derive(Debug, Clone, PartialEq)]
    #[allow(clippy::large_enum_variant, reason = "a message is made, sent and forgotten")]
    pub enum ToExecutor {
        /// First message of a connection; answered by [`ToGateway::Welcome`] or [`ToGateway::Refused`].
        Hello(Hello) = 0,
        /// Starts a generation; answered by [`ToGateway::Outputs`] until one output has a finish or an error.
        Generate(Generate) = 1,
        /// The caller went away: free everything of this request. Not answered.
        Cancel(RequestId) = 2,
        /// Brings an adapter into the executor; answered by [`ToGateway::AdapterLoaded`] or `Failed`.
        LoadAdapter(LoadAdapter) = 3,
        /// Drains and frees an adapter; answered by [`ToGateway::AdapterUnloaded`] or `Failed`.
        UnloadAdapter(UnloadAdapter) = 4,
        /// Asks for [`ToGateway::Stats`].
        GetStats(RequestId) = 5,
    }
}

wire_enum! {
    /// From the base-executor to the gateway.
    #[derive(Debug, Clone, PartialEq)]
    #[allow(clippy::large_enum_variant, reason = "a message is made, sent and forgotten")]
    pub enum ToGateway {
        /// The executor is ready to serve.
        Welcome(Welcome) = 0,
        /// The hello was not acceptable; the text says why and what to do.
        Refused(String) = 1,
        /// What one engine step produced, for any number of requests.
        Outputs(Vec<Output>) = 2,
        /// An adapter is ready.
        AdapterLoaded(AdapterLoaded) = 3,
        /// An adapter is gone: no request holds it and its bytes are free.
        AdapterUnloaded(AdapterUnloaded) = 4,
        /// A load, unload or stats call failed.
        Failed(Failed) = 5,
        /// Answer to [`ToExecutor::GetStats`].
        Stats(Stats) = 6,
        /// How far the executor is with its weights; any number of them may precede the welcome.
        Loading(Loading) = 7,
    }
}

wire_struct! {
    /// Who is calling.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Hello {
        /// [`PROTOCOL_VERSION`] of the gateway.
        pub version: u32,
        /// Chosen at random when the gateway process starts; a restarted gateway is another peer.
        pub instance: u64,
    }
}

wire_struct! {
    /// What the executor serves.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Welcome {
        /// [`PROTOCOL_VERSION`] of the executor.
        pub version: u32,
        /// Chosen at random when the executor process starts.
        pub instance: u64,
        /// Path of the model file or directory, from which the gateway reads tokenizer and template.
        pub model_path: String,
        /// Content identity of the base: hash of its configuration, of all its tensors and of `text_hash`.
        pub base_hash: [u8; 32],
        /// Hash of what tokenizer, chat template and sampling defaults are made of, as the executor found it beside the
        /// weights: a gateway that reads anything else at `model_path` must not serve it.
        pub text_hash: [u8; 32],
        /// What the base is computed on.
        pub device: DeviceFacts,
        /// How numbers are rounded and kept that a base does not decide: where they differ, so do bits.
        pub numbers: String,
        /// Most tokens, prompt and completion together, a sequence may hold.
        pub context_length: u32,
        /// Size of the vocabulary in tokens.
        pub vocab_size: u32,
        /// Most bytes of adapters the executor will hold in the host tier.
        pub adapter_budget_bytes: u64,
        /// Most bytes of adapters the device will hold, in one memory with keys and values.
        pub device_budget_bytes: u64,
        /// What a request does whose adapter the device does not hold.
        pub cold_start: ColdStart,
        /// KV blocks that one sequence can have, whatever else the device holds.
        pub kv_blocks: u32,
        /// Tokens a KV block holds.
        pub block_tokens: u32,
        /// Requests computed together.
        pub max_running: u32,
        /// Requests that may wait; more are refused.
        pub max_waiting: u32,
        /// Prompt tokens of a step.
        pub chunk_tokens: u32,
        /// Adapters already resident (after a gateway restart).
        pub adapters: Vec<AdapterIdBytes>,
    }
}

wire_enum! {
    /// What kind of device computes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum DeviceKind {
        /// The host's own cores.
        #[default]
        Cpu = 0,
        /// An NVIDIA GPU.
        Cuda = 1,
    }
}

wire_struct! {
    /// What the base is computed on.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct DeviceFacts {
        /// Its kind.
        pub kind: DeviceKind,
        /// What its maker calls it; empty if it does not say.
        pub name: String,
        /// All of its memory; of a CPU, the host's. 0 if it does not say.
        pub memory_bytes: u64,
    }
}

wire_enum! {
    /// What a request does whose adapter the device does not hold.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ColdStart {
        /// It starts at once: CPU workers compute what has not arrived.
        #[default]
        CpuAssist = 0,
        /// It waits until the adapter is there.
        OnDemand = 1,
        /// There are none: every adapter is on the device before its load is answered.
        Cached = 2,
    }
}

wire_struct! {
    /// How far an executor is that does not serve yet.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Loading {
        /// What it is doing, for a person: `reading weights`.
        pub stage: String,
        /// How much of it is done, 0 to 100; never less than in an earlier message of the same stage.
        pub percent: u32,
    }
}

wire_enum! {
    /// What went wrong, as a stable code.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum ErrorCode {
        /// The adapter's generation is not loaded or is being unloaded.
        AdapterNotFound = 0,
        /// Prompt and `max_tokens` do not fit the context or the KV pool.
        ContextLengthExceeded = 1,
        /// The admission queue is full.
        QueueFull = 2,
        /// The deadline passed.
        DeadlineExceeded = 3,
        /// A field has a value that cannot be honoured.
        InvalidRequest = 4,
        /// The adapter's files are not usable.
        InvalidAdapter = 5,
        /// The adapter does not fit the adapter budget.
        AdapterBudgetExceeded = 6,
        /// The executor is shutting down.
        ShuttingDown = 7,
        /// A fault of the executor.
        Internal = 8,
        /// What the model computed are no numbers: an adapter's weights overflow.
        NotFinite = 9,
        /// The device has no memory for it now.
        NoMemory = 10,
    }
}

wire_struct! {
    /// A typed error.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WireError {
        /// Stable code.
        pub code: ErrorCode,
        /// Cause and next step, for a person.
        pub message: String,
    }
}

wire_struct! {
    /// Where an adapter's files are.
    #[derive(Debug, Clone, PartialEq)]
    pub struct LoadAdapter {
        /// Names the call in its answer.
        pub request: RequestId,
        /// One adapter of weight 1, or several that are added up.
        pub parts: Vec<AdapterPart>,
        /// Whose it is.
        pub owner: OwnerBytes,
    }
}

impl LoadAdapter {
    /// A load of the one adapter at `path`.
    #[must_use]
    pub fn of_one(request: RequestId, path: impl Into<String>, owner: OwnerBytes) -> Self {
        Self { request, parts: vec![AdapterPart { path: path.into(), weight: 1.0 }], owner }
    }
}

wire_struct! {
    /// An adapter in files, and how much of it there is to be.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AdapterPart {
        /// Directory with `adapter_config.json` and `adapter_model.safetensors`, or a GGUF adapter file.
        pub path: String,
        /// What it is multiplied with.
        pub weight: f32,
    }
}

wire_struct! {
    /// An adapter that is ready to be used.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterLoaded {
        /// The call.
        pub request: RequestId,
        /// What it is, whatever it is called and whoever owns it.
        pub generation: GenerationBytes,
        /// What it is called in requests.
        pub adapter: AdapterIdBytes,
        /// Largest rank of its modules.
        pub rank: u32,
        /// Bytes it takes in the executor.
        pub bytes: u64,
        /// Linear layers it changes.
        pub modules: u32,
        /// Of a draft, which answers nobody, the layers of the base that it computes; 0 of all others.
        pub draft_layers: u32,
    }
}

wire_struct! {
    /// Which adapter to free.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct UnloadAdapter {
        /// Names the call in its answer.
        pub request: RequestId,
        /// The adapter.
        pub adapter: AdapterIdBytes,
    }
}

wire_struct! {
    /// An adapter that is gone.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AdapterUnloaded {
        /// The call.
        pub request: RequestId,
        /// The adapter.
        pub adapter: AdapterIdBytes,
        /// Bytes given back.
        pub freed_bytes: u64,
    }
}

wire_struct! {
    /// A call that failed.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Failed {
        /// The call.
        pub request: RequestId,
        /// What went wrong, for a program and for a person.
        pub error: WireError,
    }
}

//! Statistics of an executor.

use super::{AdapterIdBytes, OwnerBytes, RequestId};
use crate::{layer::control::SessionStats, wire_enum, wire_struct};

wire_struct! {
    /// Statistics of an executor at one moment; counters count from its start.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct Stats {
        /// Number of the call.
        pub request: RequestId,
        /// Number of requests waiting for admission.
        pub waiting: u32,
        /// Number of running requests.
        pub running: u32,
        /// Number of KV blocks in the block pool.
        pub kv_blocks_total: u32,
        /// Number of KV blocks that running requests hold.
        pub kv_blocks_used: u32,
        /// Number of KV blocks that only the prefix cache holds.
        pub kv_blocks_cached: u32,
        /// Memory of all tiers.
        pub memory: MemoryStats,
        /// Size of the adapters in the host tier, in bytes.
        pub adapter_bytes: u64,
        /// Adapters in the host tier.
        pub adapters: Vec<AdapterStats>,
        /// Number of prompt tokens computed.
        pub prompt_tokens: u64,
        /// Number of prompt tokens from the prefix cache.
        pub cached_tokens: u64,
        /// Number of tokens generated.
        pub generated_tokens: u64,
        /// Number of preempted requests, which returned to the queue because KV blocks ran out.
        pub preemptions: u64,
        /// Number of requests that their callers cancelled.
        pub cancelled: u64,
        /// Number of engine steps.
        pub steps: u64,
        /// Free bytes of the device's memory; 0 if unknown.
        pub device_free_bytes: u64,
        /// Bytes of adapters on the device, or on their way there.
        pub device_bytes: u64,
        /// Number of requests whose adapter was not completely on the device.
        pub cold_starts: u64,
        /// Total time that requests waited for adapters to reach the device, in microseconds.
        pub load_wait_us: u64,
        /// Total time that the engine waited for workers after its own part was done, in microseconds.
        pub worker_wait_us: u64,
        /// Bytes copied from the host tier to the device.
        pub copied_bytes: u64,
        /// Duration of these copies in microseconds, including delays of an emulated link.
        pub copy_us: u64,
        /// Bandwidth of an emulated link in bytes per second; 0 for a real link.
        pub link_bytes_per_s: u64,
        /// Number of lost workers: ended, stopped, or fenced for a violation of the protocol.
        pub workers_lost: u64,
        /// Statistics of speculative decoding.
        pub speculation: SpeculationStats,
        /// Statistics of the current workers.
        pub workers: Vec<WorkerStats>,
        /// Statistics of the layer service for split clients.
        pub layers: LayerStats,
    }
}

/// Upper bounds of the histogram classes for accepted tokens.
pub const ACCEPTED_BOUNDS: [u64; 6] = [0, 1, 2, 4, 8, 16];

wire_struct! {
    /// Statistics of draft tokens and their verification.
    #[derive(Debug, Clone, Copy, Default, PartialEq)]
    pub struct SpeculationStats {
        /// Current kind of drafter.
        pub kind: DraftKind,
        /// Draft adapter of the base's own drafting; zeros without one.
        pub adapter: AdapterIdBytes,
        /// Number of times that a sequence's draft tokens were verified.
        pub verifications: u64,
        /// Number of draft tokens.
        pub drafted: u64,
        /// Number of accepted draft tokens.
        pub accepted: u64,
        /// Histogram of accepted tokens per verification: class `i` holds counts up to
        /// [`ACCEPTED_BOUNDS`]`[i]` and above the previous bound; the last class holds the rest.
        pub accepted_counts: [u64; ACCEPTED_BOUNDS.len() + 1],
        /// Number of draft tokens from a model, not from the n-gram drafter.
        pub model_drafted: u64,
        /// Number of accepted draft tokens among these.
        pub model_accepted: u64,
        /// Time that draft models took to read their context and to draft, in microseconds.
        pub drafting_us: u64,
        /// Acceptance probability that one more draft token needed in the last step to be worth its row.
        pub least_confidence: f32,
        /// Number of tokens drafted while a step waited for its weights.
        pub ahead: u64,
        /// Number of these tokens that matched the step's result and stayed valid.
        pub kept: u64,
        /// Time of that drafting in microseconds, hidden in the wait.
        pub hidden_us: u64,
    }
}

wire_enum! {
    /// Kind of drafter that an executor uses.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub enum DraftKind {
        /// No drafter is active.
        #[default]
        Nobody = 0,
        /// Earlier text of the sequence: the n-gram drafter.
        Ngram = 1,
        /// The n-gram drafter and a smaller model.
        Model = 2,
        /// The n-gram drafter and the base's own first layers with a draft adapter.
        Itself = 3,
    }
}

wire_struct! {
    /// Usage of the layer service by split clients, in total and each.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct LayerStats {
        /// Number of open sessions.
        pub open: u32,
        /// Number of refused sessions.
        pub refused: u64,
        /// Number of sessions ended for a violation, or because the client did not take its answers.
        pub broken: u64,
        /// Number of batches computed for split clients only.
        pub batches: u64,
        /// Number of rows computed in passes of the resident engine.
        pub joined_rows: u64,
        /// Usage of all sessions, ended ones included.
        pub used: SessionStats,
        /// Usage by tenant, the busiest first, at most
        /// [`MAX_LAYER_TENANTS`](crate::message::MAX_LAYER_TENANTS) tenants.
        pub tenants: Vec<TenantUse>,
        /// Open sessions, the busiest first, at most
        /// [`MAX_LAYER_SESSIONS`](crate::message::MAX_LAYER_SESSIONS) of them.
        pub sessions: Vec<LayerSession>,
    }
}

wire_struct! {
    /// Usage of one tenant's sessions, ended ones included.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct TenantUse {
        /// Name of the tenant.
        pub tenant: String,
        /// Usage of all its sessions.
        pub used: SessionStats,
        /// Number of rows waiting in the queue.
        pub waiting_rows: u32,
    }
}

wire_struct! {
    /// Session of one split client.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct LayerSession {
        /// Number of the session.
        pub session: u64,
        /// Tenant that owns the session.
        pub tenant: String,
        /// Name that the client gives itself.
        pub name: String,
        /// Masking mode that the client states.
        pub masking: String,
        /// Transport of the session's calls.
        pub route: LayerRoute,
        /// Usage of the session.
        pub used: SessionStats,
        /// Number of rows waiting in the queue.
        pub waiting_rows: u32,
        /// Size of the session's slab in bytes; 0 without one.
        pub slab_bytes: u64,
    }
}

wire_enum! {
    /// Transport of a split client's calls.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum LayerRoute {
        /// Shared memory, through a channel.
        SharedMemory = 0,
        /// ZeroMQ over a Unix socket of this host.
        Ipc = 1,
        /// ZeroMQ over TLS, from any host.
        Tls = 2,
    }
}

wire_struct! {
    /// Statistics of one LoRA worker.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WorkerStats {
        /// Core to which the worker is pinned.
        pub core: u32,
        /// Id of the worker's process.
        pub pid: u32,
        /// Number of slices that the worker computed.
        pub slices: u64,
        /// Sum of rows x ranks that the worker computed.
        pub rank_rows: u64,
        /// Number of claimed slices that took too long, so that the executor computed them.
        pub taken_back: u64,
    }
}

wire_struct! {
    /// Statistics of one resident adapter.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AdapterStats {
        /// Id of the adapter.
        pub adapter: AdapterIdBytes,
        /// Largest rank of its modules.
        pub rank: u32,
        /// Size of the adapter in bytes.
        pub bytes: u64,
        /// Number of its running requests.
        pub running: u32,
        /// Number of its waiting requests.
        pub waiting: u32,
        /// Bytes of the adapter that are on the device.
        pub device_bytes: u64,
        /// Number of its requests that did not find it completely on the device.
        pub cold_starts: u64,
        /// Total time that requests waited for it to reach the device, in microseconds.
        pub load_wait_us: u64,
        /// Sum of rows x ranks computed on the device.
        pub rank_rows_device: u64,
        /// Sum of rows x ranks computed by workers.
        pub rank_rows_workers: u64,
        /// Sum of rows x ranks that the executor computed from the host tier, because no worker did.
        pub rank_rows_executor: u64,
        /// Number of draft tokens for its requests.
        pub drafted: u64,
        /// Number of accepted draft tokens.
        pub accepted: u64,
        /// Acceptance probability that one more of its draft tokens last needed to be worth its row, or 0.
        pub least_confidence: f32,
    }
}

wire_struct! {
    /// KV blocks of one tenant on the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ShareStats {
        /// Hash of the tenant.
        pub owner: OwnerBytes,
        /// Number of KV blocks, of running and of cached sequences.
        pub blocks: u32,
    }
}

wire_struct! {
    /// Host memory of the process in bytes, by purpose.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct MemoryAccountStats {
        /// Upper limit of the sum of all purposes.
        pub limit_bytes: u64,
        /// Weights of the base; 0 if a GPU holds them.
        pub weights_bytes: u64,
        /// Blocks of the device's pool; 0 if a GPU holds them.
        pub blocks_bytes: u64,
        /// Adapters of the host tier.
        pub adapters_bytes: u64,
        /// Offloaded KV blocks in host memory, and those on their way to or from the disk.
        pub history_bytes: u64,
        /// The board, and the workers' memory for sums.
        pub workers_bytes: u64,
        /// Channels and messages of split clients.
        pub clients_bytes: u64,
        /// Draft models: their weights and KV cache.
        pub drafts_bytes: u64,
    }
}

wire_struct! {
    /// Contents of the memory tiers; counters count from the executor's start.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct MemoryStats {
        /// Size of a block in bytes.
        pub block_bytes: u64,
        /// Number of device blocks that adapters hold.
        pub adapter_blocks: u32,
        /// Number of block slots in the host tier.
        pub host_blocks_total: u32,
        /// Number of used block slots in the host tier.
        pub host_blocks_used: u32,
        /// Number of block slots in the disk tier.
        pub disk_blocks_total: u32,
        /// Number of used block slots in the disk tier.
        pub disk_blocks_used: u32,
        /// Number of blocks fetched from the host tier on demand.
        pub fetched_host_blocks: u64,
        /// Number of blocks fetched from the disk tier on demand.
        pub fetched_disk_blocks: u64,
        /// Number of blocks prefetched before a request needed them.
        pub prefetched_blocks: u64,
        /// Number of blocks copied to lower tiers.
        pub spilled_blocks: u64,
        /// Number of blocks evicted from the device.
        pub evicted_blocks: u64,
        /// Number of evicted blocks for which the existing lower tiers had no capacity.
        pub lost_blocks: u64,
        /// Number of failed copies from and to lower tiers.
        pub failed_copies: u64,
        /// Total time that requests waited for offloaded KV blocks, in microseconds.
        pub kv_wait_us: u64,
        /// Expected number of adapters that should be on the device (ELORA Eq. 3).
        pub adapters_required: f32,
        /// Tenants with the most blocks on the device, the largest first.
        pub shares: Vec<ShareStats>,
        /// Host memory of the whole process.
        pub held: MemoryAccountStats,
        /// Statistics of streamed weights.
        pub weights: WeightStats,
    }
}

wire_struct! {
    /// Statistics of reading streamed weights since the executor's start; zeros if all are in memory.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct WeightStats {
        /// Number of bytes that were read.
        pub read_bytes: u64,
        /// Duration of the reads in microseconds.
        pub read_us: u64,
        /// Time in microseconds that passes waited for reads; computing hid the rest.
        pub waited_us: u64,
    }
}

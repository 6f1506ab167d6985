//! The executor's figures.

use super::{AdapterIdBytes, OwnerBytes, RequestId};
use crate::{layer::control::SessionStats, wire_enum, wire_struct};

wire_struct! {
    /// The executor's figures at one moment; counters count from its start.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct Stats {
        /// The call.
        pub request: RequestId,
        /// Requests waiting for admission.
        pub waiting: u32,
        /// Requests being computed.
        pub running: u32,
        /// KV blocks in the pool.
        pub kv_blocks_total: u32,
        /// KV blocks a running request holds.
        pub kv_blocks_used: u32,
        /// KV blocks that only the prefix cache holds.
        pub kv_blocks_cached: u32,
        /// All tiers.
        pub memory: MemoryStats,
        /// Bytes of adapters of the host tier.
        pub adapter_bytes: u64,
        /// Adapters of the host tier.
        pub adapters: Vec<AdapterStats>,
        /// Prompt tokens computed.
        pub prompt_tokens: u64,
        /// Prompt tokens served from the prefix cache.
        pub cached_tokens: u64,
        /// Tokens generated.
        pub generated_tokens: u64,
        /// Requests put back into the queue because KV blocks ran out.
        pub preemptions: u64,
        /// Requests cancelled by their callers.
        pub cancelled: u64,
        /// Engine steps.
        pub steps: u64,
        /// Bytes of the device's memory that nobody uses; 0 if it does not say.
        pub device_free_bytes: u64,
        /// Bytes of adapters that are on the device, or on their way there.
        pub device_bytes: u64,
        /// Requests that found their adapter not, or not wholly, on the device.
        pub cold_starts: u64,
        /// Microseconds that requests waited for adapters to reach the device.
        pub load_wait_us: u64,
        /// Microseconds that the engine waited for workers after its own part was done.
        pub worker_wait_us: u64,
        /// Bytes moved from the host tier to the device.
        pub copied_bytes: u64,
        /// Microseconds that took, an emulated link's delays included.
        pub copy_us: u64,
        /// Bytes a second that an emulated link lets through; 0 for a real one.
        pub link_bytes_per_s: u64,
        /// Workers that were lost: dead, stopped or in breach of the protocol.
        pub workers_lost: u64,
        /// Tokens that were drafted and verified.
        pub speculation: SpeculationStats,
        /// The workers there are.
        pub workers: Vec<WorkerStats>,
        /// Base layers rented to split clients.
        pub layers: LayerStats,
    }
}

/// Tokens that a verification accepted, in classes: their upper bounds.
pub const ACCEPTED_BOUNDS: [u64; 6] = [0, 1, 2, 4, 8, 16];

wire_struct! {
    /// Tokens that were drafted, and verified several in one step.
    #[derive(Debug, Clone, Copy, Default, PartialEq)]
    pub struct SpeculationStats {
        /// Who drafts now.
        pub kind: DraftKind,
        /// The draft adapter by which the base drafts for itself; zeroes where it does not.
        pub adapter: AdapterIdBytes,
        /// Times a sequence had drafted tokens verified.
        pub verifications: u64,
        /// Tokens that were drafted.
        pub drafted: u64,
        /// Of them those that were the model's own.
        pub accepted: u64,
        /// Verifications by how many tokens they accepted: at most so many as each of [`ACCEPTED_BOUNDS`] and more than the one
        /// before, and then those that accepted more.
        pub accepted_counts: [u64; ACCEPTED_BOUNDS.len() + 1],
        /// Of those drafted the ones that a model guessed, not the text's own past.
        pub model_drafted: u64,
        /// Of them those that were the model's own.
        pub model_accepted: u64,
        /// Microseconds that models took to guess, and to read what they guess behind.
        pub drafting_us: u64,
        /// The chance that one more drafted token would have had to have in the last step to be worth its row.
        pub least_confidence: f32,
        /// Tokens that were drafted while a step waited for its weights.
        pub ahead: u64,
        /// Of them those that stood behind what the model said then.
        pub kept: u64,
        /// Microseconds that took, hidden behind the waiting.
        pub hidden_us: u64,
    }
}

wire_enum! {
    /// Who drafts.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub enum DraftKind {
        /// Nobody.
        #[default]
        Nobody = 0,
        /// What a text said before.
        Ngram = 1,
        /// That, and a smaller model.
        Model = 2,
        /// That, and the base's own first layers with a draft adapter.
        Itself = 3,
    }
}

wire_struct! {
    /// What split clients have used, all together and each.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct LayerStats {
        /// Sessions that are open.
        pub open: u32,
        /// Sessions that were refused.
        pub refused: u64,
        /// Sessions that were ended for a breach of the protocol, or because the client did not take its answers.
        pub broken: u64,
        /// Batches computed for split clients alone.
        pub batches: u64,
        /// Rows that were computed in the course of a resident pass.
        pub joined_rows: u64,
        /// What all sessions have used, those that have ended among them.
        pub used: SessionStats,
        /// The same by tenant, at most [`MAX_LAYER_TENANTS`](crate::message::MAX_LAYER_TENANTS) of them, the busiest first.
        pub tenants: Vec<TenantUse>,
        /// The sessions that are open, at most [`MAX_LAYER_SESSIONS`](crate::message::MAX_LAYER_SESSIONS) of them, the busiest first.
        pub sessions: Vec<LayerSession>,
    }
}

wire_struct! {
    /// What the sessions of one tenant have used, those that have ended among them.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct TenantUse {
        /// The name of the tenant.
        pub tenant: String,
        /// What they have used.
        pub used: SessionStats,
        /// Rows that wait for their turn.
        pub waiting_rows: u32,
    }
}

wire_struct! {
    /// One split client's session.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct LayerSession {
        /// Its number.
        pub session: u64,
        /// Whose it is.
        pub tenant: String,
        /// What the client calls itself.
        pub name: String,
        /// How it says that it protects its activations.
        pub masking: String,
        /// Which way its calls come.
        pub route: LayerRoute,
        /// What it has used.
        pub used: SessionStats,
        /// Rows that wait for their turn.
        pub waiting_rows: u32,
        /// Bytes of its slab; 0 without one.
        pub slab_bytes: u64,
    }
}

wire_enum! {
    /// Which way a split client's calls come.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum LayerRoute {
        /// Through shared memory.
        SharedMemory = 0,
        /// ZeroMQ over a socket of this host.
        Ipc = 1,
        /// ZeroMQ over TLS.
        Tls = 2,
    }
}

wire_struct! {
    /// One CPU worker that computes adapters.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct WorkerStats {
        /// The core it is pinned to.
        pub core: u32,
        /// Its process.
        pub pid: u32,
        /// Slices it has computed.
        pub slices: u64,
        /// Rows times ranks it has computed.
        pub rank_rows: u64,
        /// Slices it had begun and the executor computed, because they took too long.
        pub taken_back: u64,
    }
}

wire_struct! {
    /// One resident adapter.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AdapterStats {
        /// The adapter.
        pub adapter: AdapterIdBytes,
        /// Largest rank.
        pub rank: u32,
        /// Bytes it takes.
        pub bytes: u64,
        /// Requests of it that are computed now.
        pub running: u32,
        /// Requests of it that wait.
        pub waiting: u32,
        /// Bytes of it that are on the device.
        pub device_bytes: u64,
        /// Requests that found it not, or not wholly, on the device.
        pub cold_starts: u64,
        /// Microseconds that requests waited for it to reach the device.
        pub load_wait_us: u64,
        /// Rows times ranks computed on the device.
        pub rank_rows_device: u64,
        /// Rows times ranks computed by workers.
        pub rank_rows_workers: u64,
        /// Rows times ranks that the executor computed from the host tier, because no worker did.
        pub rank_rows_executor: u64,
        /// Tokens that were drafted for requests of it and verified.
        pub drafted: u64,
        /// Of them those that were its own.
        pub accepted: u64,
        /// The chance that one more token drafted for it would have had to have to be worth its row, when last asked; 0 before.
        pub least_confidence: f32,
    }
}

wire_struct! {
    /// What a tenant has of the device.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ShareStats {
        /// Whose.
        pub owner: OwnerBytes,
        /// Blocks of keys and values, running or of the past.
        pub blocks: u32,
    }
}

wire_struct! {
    /// Bytes of its host's memory that the process holds, by what they are for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct MemoryAccountStats {
        /// The most that all of them may be together.
        pub limit_bytes: u64,
        /// Weights; none where a GPU has them.
        pub weights_bytes: u64,
        /// Blocks of the device's pool; none where a GPU has them.
        pub blocks_bytes: u64,
        /// Adapters of the host tier.
        pub adapters_bytes: u64,
        /// Keys and values below the device, and those on their way to or from the disk.
        pub history_bytes: u64,
        /// The workers' board, and what each of them sums in.
        pub workers_bytes: u64,
        /// Channels and messages of split clients.
        pub clients_bytes: u64,
        /// Drafts that are models: weights, keys and values.
        pub drafts_bytes: u64,
    }
}

wire_struct! {
    /// Where keys, values and adapters are, tier by tier; counters count from the executor's start.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct MemoryStats {
        /// Bytes of a block.
        pub block_bytes: u64,
        /// Blocks of the device that adapters have.
        pub adapter_blocks: u32,
        /// Slots of the host tier.
        pub host_blocks_total: u32,
        /// Of them, those in use.
        pub host_blocks_used: u32,
        /// Slots of the disk tier.
        pub disk_blocks_total: u32,
        /// Of them, those in use.
        pub disk_blocks_used: u32,
        /// Blocks brought back from the host tier because somebody asked.
        pub fetched_host_blocks: u64,
        /// Blocks brought back from the disk tier because somebody asked.
        pub fetched_disk_blocks: u64,
        /// Blocks brought back before anybody asked.
        pub prefetched_blocks: u64,
        /// Blocks copied to lower tiers.
        pub spilled_blocks: u64,
        /// Blocks that left the device to make room.
        pub evicted_blocks: u64,
        /// Of them, those that no lower tier had room for, though there is one.
        pub lost_blocks: u64,
        /// Copies from and to lower tiers that came to nothing.
        pub failed_copies: u64,
        /// Microseconds that requests waited for keys and values to be brought back.
        pub kv_wait_us: u64,
        /// How many adapters should be on the device, by expectation (ELORA Eq. 3).
        pub adapters_required: f32,
        /// Who has most of the device, the greatest first.
        pub shares: Vec<ShareStats>,
        /// What all of it, and the rest of the process, holds in the host's memory.
        pub held: MemoryAccountStats,
        /// Weights that come from a disk.
        pub weights: WeightStats,
    }
}

wire_struct! {
    /// Reading of weights that are not in memory; nothing where all are. Counters count from the executor's start.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct WeightStats {
        /// Bytes that were read.
        pub read_bytes: u64,
        /// Microseconds that reading them took.
        pub read_us: u64,
        /// Microseconds of it that a pass waited; the rest was hidden behind computing.
        pub waited_us: u64,
    }
}

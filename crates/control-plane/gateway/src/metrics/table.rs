//! The table of all metrics, from which registration, rendering, documentation and tests are derived.
//!
//! Names follow Prometheus: a prefix, base units (seconds, bytes, ratios from 0 to 1), `_total` for counters,
//! `_info` for facts. Metrics of the process have the standard names of Prometheus clients (`process_`). No
//! label names tenants, and callers cannot invent label values: the number of adapters is capped
//! ([`super::labels`]), all other values come from closed sets. Only the name of an adapter that a job made
//! contains its tenant.

use crate::adapters::stats::LOAD_BOUNDS_S;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricKind {
    /// A value that only grows.
    Counter,
    /// A value that rises and falls.
    Gauge,
    /// Counts in buckets with these upper bounds.
    Histogram(&'static [f64]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Count,
    /// Times in seconds; names end in `_seconds`.
    Seconds,
    /// Memory or traffic in bytes; names end in `_bytes`.
    Bytes,
    /// Ratios from 0 to 1.
    Ratio,
    /// Facts: the value is 1, the labels hold the information.
    Info,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    pub unit: Unit,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident = $kind:expr, $unit:ident, $name:literal, [$($label:literal),*], $help:literal;)*) => {
        /// Identifies a row of [`TABLE`]; the discriminant is the row's index.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Id {
            $(#[doc = $help] $id,)*
        }

        pub const TABLE: &[Metric] = &[
            $(Metric { name: $name, kind: $kind, unit: Unit::$unit, labels: &[$($label),*], help: $help },)*
        ];

        pub const IDS: &[Id] = &[$(Id::$id,)*];
    };
}

/// Bucket bounds for the duration of a request, in seconds.
const LONG_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Bucket bounds for the time per token, in seconds.
const TOKEN_S: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Bucket bounds for accepted draft tokens per verification, as executors count them.
pub(super) const ACCEPTED: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0];

use MetricKind::{Counter, Gauge, Histogram};

metrics! {
    // Traffic.
    HttpRequests = Counter, Count, "holobiont_http_requests_total", ["route", "status"],
        "Requests answered, by route of the table and status; 499 is a caller who went away before the answer began";
    Errors = Counter, Count, "holobiont_errors_total", ["code"],
        "Answers and streams that ended in an error, by its stable code";
    Refusals = Counter, Count, "holobiont_refusals_total", ["reason"],
        "Requests that were turned away before any work was done for them, by the error's code";
    InFlight = Gauge, Count, "holobiont_requests_in_flight", [],
        "Generation requests being answered";
    Waiting = Gauge, Count, "holobiont_requests_waiting", [],
        "Sequences waiting for their turn in the gateway, or for admission in an executor";
    Running = Gauge, Count, "holobiont_requests_running", [],
        "Sequences being computed by the executor";
    Finished = Counter, Count, "holobiont_choices_finished_total", ["reason"],
        "Choices that ended, by reason: stop, length, cancelled, error";
    PromptTokens = Counter, Count, "holobiont_prompt_tokens_total", [],
        "Prompt tokens of answers, as their usage reports them";
    GeneratedTokens = Counter, Count, "holobiont_generated_tokens_total", [],
        "Tokens generated for answers, as their usage reports them";
    CachedTokens = Counter, Count, "holobiont_cached_tokens_total", [],
        "Prompt tokens served from the prefix cache, as usage reports them";
    // Service classes.
    ClassWaiting = Gauge, Count, "holobiont_class_waiting", ["class"],
        "Sequences without a token, in the gateway and in executors, by service class";
    ClassRequests = Counter, Count, "holobiont_class_requests_total", ["class"],
        "Requests that were let in, by service class";
    ClassThrottled = Counter, Count, "holobiont_class_throttled_total", ["class"],
        "Requests refused because a tenant had used up what its service class has in a minute";
    ClassTokens = Counter, Count, "holobiont_class_tokens_total", ["class"],
        "Tokens computed for prompts and answers, by service class";
    Promises = Counter, Count, "holobiont_slo_requests_total", ["class", "objective", "outcome"],
        "Promises of a service class, by objective (ttft, tpot) and outcome: met, missed, or refused early";
    // Latency.
    TimeToFirstToken = Histogram(LONG_S), Seconds, "holobiont_time_to_first_token_seconds", [],
        "From a request's start to its first token";
    TimePerOutputToken = Histogram(TOKEN_S), Seconds, "holobiont_time_per_output_token_seconds", [],
        "Time between a choice's first and last token, divided by the tokens after the first";
    InterToken = Histogram(TOKEN_S), Seconds, "holobiont_inter_token_seconds", [],
        "From one output of a choice to the next, divided by its tokens";
    QueueTime = Histogram(LONG_S), Seconds, "holobiont_queue_seconds", [],
        "From a request's arrival to the admission of each of its sequences: for its turn, and in the executor";
    RequestDuration = Histogram(LONG_S), Seconds, "holobiont_request_duration_seconds", [],
        "From a generation request's start to its end, however it ended";
    // Adapters in use; `adapter` is a name, `base`, or `other` beyond the cap.
    AdapterTimeToFirstToken = Histogram(LONG_S), Seconds, "holobiont_adapter_time_to_first_token_seconds", ["adapter"],
        "From a request's start to its first token, by adapter";
    AdapterTimePerOutputToken = Histogram(TOKEN_S), Seconds, "holobiont_adapter_time_per_output_token_seconds", ["adapter"],
        "Time per token after the first, by adapter";
    AdapterQueueTime = Histogram(LONG_S), Seconds, "holobiont_adapter_queue_seconds", ["adapter"],
        "From a sequence's arrival in the executor to its admission, by adapter";
    AdapterRequestDuration = Histogram(LONG_S), Seconds, "holobiont_adapter_request_duration_seconds", ["adapter"],
        "From a generation request's start to its end, by adapter";
    AdapterPromptTokens = Counter, Count, "holobiont_adapter_prompt_tokens_total", ["adapter"],
        "Prompt tokens of answers, by adapter";
    AdapterGeneratedTokens = Counter, Count, "holobiont_adapter_generated_tokens_total", ["adapter"],
        "Tokens generated for answers, by adapter";
    AdapterCachedTokens = Counter, Count, "holobiont_adapter_cached_tokens_total", ["adapter"],
        "Prompt tokens served from the prefix cache, by adapter";
    // Registered and resident adapters.
    AdaptersRegistered = Gauge, Count, "holobiont_adapters_registered", [],
        "Adapters that have a name";
    Adapters = Gauge, Count, "holobiont_adapters", ["tier"],
        "Registered adapters by where they are: host is the executor's memory, disk its files alone";
    AdaptersPinned = Gauge, Count, "holobiont_adapters_pinned", [],
        "Adapters that are never evicted";
    AdapterLoaded = Gauge, Info, "holobiont_adapter_info", ["adapter", "generation", "tier", "rank", "pinned"],
        "What a name stands for, and where it is; at most as many adapters as have labels";
    AdapterBytes = Gauge, Bytes, "holobiont_adapter_bytes", [],
        "Bytes of adapters in the executor's memory";
    AdapterBudget = Gauge, Bytes, "holobiont_adapter_budget_bytes", [],
        "Most bytes of adapters the executor will hold";
    AdapterLoadTime = Histogram(&LOAD_BOUNDS_S), Seconds, "holobiont_adapter_load_seconds", [],
        "From the executor being asked for an adapter to the adapter being usable";
    AdapterLoads = Counter, Count, "holobiont_adapter_loads_total", ["outcome"],
        "Loads of adapters into the executor, by outcome: loaded, failed";
    AdapterEvictions = Counter, Count, "holobiont_adapter_evictions_total", [],
        "Adapters taken out of the executor's memory to make room for others";
    AdapterLookups = Counter, Count, "holobiont_adapter_lookups_total", ["outcome"],
        "Requests for an adapter, by outcome: hit if it was in the executor's memory, miss if it had to be brought there";
    // Shared registry and adapter store; absent without a fleet.
    RegistryAge = Gauge, Seconds, "holobiont_registry_age_seconds", [],
        "Since the registry of many hosts was read last, which is done each second";
    StoreFetches = Counter, Count, "holobiont_store_fetches_total", ["outcome"],
        "Adapters whose files were fetched from the bucket, by outcome: fetched, failed";
    StoreDamaged = Counter, Count, "holobiont_store_damaged_total", [],
        "Adapters' files that came from the bucket and were not what they are called";
    StoreCacheBytes = Gauge, Bytes, "holobiont_store_cache_bytes", [],
        "Files of the bucket that lie on this host";
    StoreEvictions = Counter, Count, "holobiont_store_evictions_total", [],
        "Adapters whose files left this host to make room for others";
    // Fine-tuning.
    Jobs = Gauge, Count, "holobiont_training_jobs", ["state"],
        "Fine-tuning jobs that have not ended, by state: queued, training, paused";
    JobsEnded = Counter, Count, "holobiont_training_jobs_ended_total", ["outcome"],
        "Fine-tuning jobs that ended, by outcome: succeeded, failed, cancelled";
    TrainersLost = Counter, Count, "holobiont_trainers_lost_total", [],
        "Trainers that ended without having said why; another goes on";
    TrainingSteps = Counter, Count, "holobiont_training_steps_total", [],
        "Steps of the optimizers of all jobs";
    TrainedTokens = Counter, Count, "holobiont_trained_tokens_total", [],
        "Tokens that jobs have learned from, each as often as it was seen";
    // Device, adapters on the device, and cold starts.
    Device = Gauge, Info, "holobiont_device_info", ["kind", "name"],
        "What the base is computed on: kind is cpu or cuda, name what its maker calls it";
    DeviceMemory = Gauge, Bytes, "holobiont_device_memory_bytes", [],
        "All of the device's memory; of a CPU, the host's";
    DeviceMemoryFree = Gauge, Bytes, "holobiont_device_memory_free_bytes", [],
        "What nobody uses of the device's memory";
    ColdStart = Gauge, Info, "holobiont_cold_start_info", ["mode", "link"],
        "What a request does whose adapter the device does not hold; link is emulated where copies are slowed down for experiments";
    DeviceBytes = Gauge, Bytes, "holobiont_device_adapter_bytes", [],
        "Bytes of adapters that are on the device or on their way there";
    DeviceBudget = Gauge, Bytes, "holobiont_device_adapter_budget_bytes", [],
        "Most bytes of adapters the device will hold";
    ColdStarts = Counter, Count, "holobiont_cold_starts_total", [],
        "Requests that found their adapter not, or not wholly, on the device";
    AdapterLoadWait = Histogram(LONG_S), Seconds, "holobiont_adapter_load_wait_seconds", [],
        "How long a sequence that names an adapter waited for it to reach the device before it was admitted";
    CopiedBytes = Counter, Bytes, "holobiont_adapter_copied_bytes_total", [],
        "Bytes of adapters moved from the executor's memory to the device";
    CopyTime = Counter, Seconds, "holobiont_adapter_copy_seconds_total", [],
        "Time that took, with the delays of an emulated link";
    AdapterRankRows = Counter, Count, "holobiont_adapter_rank_rows_total", ["adapter", "place"],
        "Rows times ranks of an adapter computed, by place: device, workers, executor (from the executor's memory, because no worker did)";
    AdapterDraftedTokens = Counter, Count, "holobiont_adapter_drafted_tokens_total", ["adapter", "verdict"],
        "Tokens that were drafted for an adapter and verified, by verdict: accepted, rejected";
    AdapterDraftLeastConfidence = Gauge, Ratio, "holobiont_adapter_draft_least_confidence_ratio", ["adapter"],
        "The chance that one more token drafted for an adapter would have had to have, in the last step with some, to be worth its row";
    Workers = Gauge, Count, "holobiont_workers", [],
        "Workers that compute adapters";
    WorkersExpected = Gauge, Count, "holobiont_workers_expected", [],
        "Workers that there should be";
    WorkersLost = Counter, Count, "holobiont_workers_lost_total", [],
        "Workers that died, stopped or broke the protocol";
    WorkerSlices = Counter, Count, "holobiont_worker_slices_total", ["core"],
        "Slices computed by workers, by the core they are pinned to";
    WorkerTakenBack = Counter, Count, "holobiont_worker_taken_back_total", ["core"],
        "Slices workers had begun and the executor computed, because they took too long";
    WorkerWait = Counter, Seconds, "holobiont_worker_wait_seconds_total", [],
        "How long the engine waited for workers after its own part was done";
    // Layer service for split clients.
    LayerSessions = Gauge, Count, "holobiont_layer_sessions", [],
        "Sessions of split clients that are open";
    LayerSessionsRefused = Counter, Count, "holobiont_layer_sessions_refused_total", [],
        "Sessions that were refused: no key, another version, or a quota used up";
    LayerSessionsBroken = Counter, Count, "holobiont_layer_sessions_broken_total", [],
        "Sessions ended for a breach of the protocol, or because the client did not take its answers";
    LayerCalls = Counter, Count, "holobiont_layer_calls_total", ["outcome"],
        "Calls of base layers, by outcome: done, refused";
    LayerRows = Counter, Count, "holobiont_layer_rows_total", ["class"],
        "Rows computed for split clients, by what they are for: decode, verify, prefill, training, noise";
    LayerBytes = Counter, Bytes, "holobiont_layer_bytes_total", ["direction"],
        "Bytes of activations, by direction: in, out";
    LayerWait = Counter, Seconds, "holobiont_layer_wait_seconds_total", [],
        "How long calls waited for their turn";
    LayerCompute = Counter, Seconds, "holobiont_layer_compute_seconds_total", [],
        "Computing time, shared among the calls of a batch in proportion to their rows";
    LayerWaitingRows = Gauge, Count, "holobiont_layer_waiting_rows", [],
        "Rows that wait for their turn";
    LayerBatches = Counter, Count, "holobiont_layer_batches_total", [],
        "Batches computed for split clients alone";
    LayerJoinedRows = Counter, Count, "holobiont_layer_joined_rows_total", [],
        "Rows of split clients computed in the course of a resident pass";
    // Executor.
    ExecutorUp = Gauge, Count, "holobiont_executor_up", [],
        "1 while the base-executor answers, 0 while it does not";
    ExecutorRestarts = Counter, Count, "holobiont_executor_restarts_total", [],
        "Times that another executor process took the place of the one before";
    RedoneSequences = Counter, Count, "holobiont_sequences_redone_total", [],
        "Sequences gone on with after their executor was lost";
    EngineSteps = Counter, Count, "holobiont_engine_steps_total", [],
        "Steps of the engine";
    ComputedPromptTokens = Counter, Count, "holobiont_executor_prompt_tokens_total", [],
        "Prompt tokens the executor computed; what it found in its cache is not among them";
    ComputedTokens = Counter, Count, "holobiont_executor_generated_tokens_total", [],
        "Tokens the executor generated, also those nobody waited for";
    ReusedTokens = Counter, Count, "holobiont_executor_cached_tokens_total", [],
        "Prompt tokens the executor found in its prefix cache";
    DraftVerifications = Counter, Count, "holobiont_draft_verifications_total", [],
        "Times a sequence had drafted tokens verified, several in one step";
    DraftedTokens = Counter, Count, "holobiont_drafted_tokens_total", ["by", "verdict"],
        "Drafted tokens that were verified, by who drafted them (text, what it said before, or model) and verdict: accepted, rejected";
    DraftAccepted = Histogram(ACCEPTED), Count, "holobiont_draft_accepted_tokens", [],
        "Drafted tokens that a verification of a sequence accepted";
    AheadTokens = Counter, Count, "holobiont_ahead_tokens_total", ["what"],
        "Tokens drafted while a step waited for its weights, and those of them that were kept";
    DraftHidden = Counter, Seconds, "holobiont_draft_hidden_seconds_total", [],
        "How long was drafted while a step waited for its weights";
    Drafting = Counter, Seconds, "holobiont_drafting_seconds_total", [],
        "Time that models took to draft, and to read what they draft behind";
    DraftLeastConfidence = Gauge, Ratio, "holobiont_draft_least_confidence_ratio", [],
        "The chance that one more drafted token would have had to have in the last step to be worth its row";
    Preemptions = Counter, Count, "holobiont_preemptions_total", [],
        "Sequences put back into the queue for want of KV blocks";
    Cancelled = Counter, Count, "holobiont_cancelled_total", [],
        "Sequences the executor gave up because their callers went away";
    KvBlocks = Gauge, Count, "holobiont_kv_blocks", ["state"],
        "Blocks of the executor's pool: total, used by running sequences, cached (held by the prefix cache alone), adapters";
    TierBlocks = Gauge, Count, "holobiont_tier_blocks", ["tier", "state"],
        "Blocks of keys and values below the device, by tier (host, disk) and state: total, used";
    MovedBlocks = Counter, Count, "holobiont_kv_moved_blocks_total", ["way"],
        "KV blocks by way: fetched_host and fetched_disk for those who asked, prefetched before anybody did, spilled to lower tiers, evicted from the device, of these lost because no tier had room, failed copies";
    HeldBytes = Gauge, Bytes, "holobiont_executor_held_bytes", ["what"],
        "Bytes of its host's memory that the executor holds: weights and blocks (none where a GPU has them), adapters, history (keys and values below the device), workers, clients (split ones), drafts (that are models)";
    WeightReadBytes = Counter, Bytes, "holobiont_weight_read_bytes_total", [],
        "Bytes of weights that the executor read from its disk, of a base that is not in memory";
    WeightRead = Counter, Seconds, "holobiont_weight_read_seconds_total", [],
        "How long reading them took";
    WeightWait = Counter, Seconds, "holobiont_weight_wait_seconds_total", [],
        "How long of that a pass waited; the rest was hidden behind computing";
    MemoryLimit = Gauge, Bytes, "holobiont_executor_held_limit_bytes", [],
        "Most that all of it may be together: the machine's memory, or that of its control group";
    AdaptersRequired = Gauge, Count, "holobiont_adapters_required", [],
        "How many different adapters a batch uses, by expectation from what was asked for of late";
    KvWait = Histogram(LONG_S), Seconds, "holobiont_kv_wait_seconds", [],
        "How long a sequence waited for keys and values to come back from a lower tier before it was admitted";
    KvUsage = Gauge, Ratio, "holobiont_kv_usage_ratio", [],
        "KV blocks used by running sequences, as a part of all";
    // Gateway process.
    ResidentMemory = Gauge, Bytes, "process_resident_memory_bytes", [],
        "Memory of the gateway process that is resident";
    OpenFds = Gauge, Count, "process_open_fds", [],
        "File descriptors the gateway process has open";
    MaxFds = Gauge, Count, "process_max_fds", [],
        "File descriptors the gateway process may have open";
    CpuTime = Counter, Seconds, "process_cpu_seconds_total", [],
        "Processor time the gateway process has used";
    StartTime = Gauge, Seconds, "process_start_time_seconds", [],
        "When the gateway process began, in seconds since 1970";
    Build = Gauge, Info, "holobiont_build_info", ["version", "base_model"],
        "The gateway's version and what its base model is called";
}

impl Id {
    #[must_use]
    pub fn metric(self) -> &'static Metric {
        &TABLE[self as usize]
    }
}

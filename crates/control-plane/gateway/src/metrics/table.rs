//! The table of all metrics, from which registration, rendering, documentation and tests are derived.
//!
//! Names follow Prometheus: a prefix, base units (seconds, bytes, ratios from 0 to 1), `_total` for counters,
//! `_info` for facts. Metrics of the process have the standard names of Prometheus clients (`process_`). No
//! label names tenants, and callers cannot invent label values: the number of adapters is capped
//! ([`super::labels`]), all other values come from closed sets. Only names of
//! adapters that a job made or that a tenant's request loaded by URI contain a tenant.

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
        "Requests answered, by route of the table and status; 499 is a client that disconnected before \
         the answer began";
    Errors = Counter, Count, "holobiont_errors_total", ["code"],
        "Answers and streams that ended in an error, by its stable code";
    Refusals = Counter, Count, "holobiont_refusals_total", ["reason"],
        "Requests refused before any work, by the error's code";
    InFlight = Gauge, Count, "holobiont_requests_in_flight", [],
        "Generation requests being answered";
    Waiting = Gauge, Count, "holobiont_requests_waiting", [],
        "Sequences waiting in the gateway's admission queue, or for admission in an executor";
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
        "Sequences that have no token yet, in the gateway and in executors, by service class";
    ClassRequests = Counter, Count, "holobiont_class_requests_total", ["class"],
        "Requests admitted, by service class";
    ClassThrottled = Counter, Count, "holobiont_class_throttled_total", ["class"],
        "Requests refused because a tenant used up its limit per minute, by service class";
    ClassTokens = Counter, Count, "holobiont_class_tokens_total", ["class"],
        "Tokens computed for prompts and answers, by service class";
    Promises = Counter, Count, "holobiont_slo_requests_total", ["class", "objective", "outcome"],
        "SLO targets of a service class, by objective (ttft, tpot) and outcome: met, missed, or refused \
         early";
    // Sleep of bases.
    BaseAsleep = Gauge, Count, "holobiont_base_asleep", ["base"],
        "1 while the executors of a base do not run because nobody uses the base";
    BaseSleeps = Counter, Count, "holobiont_base_sleeps_total", ["base"],
        "How often a base fell asleep";
    BaseWakes = Counter, Count, "holobiont_base_wakes_total", ["base"],
        "How often a base served again after a sleep";
    BaseWakeTime = Counter, Seconds, "holobiont_base_wake_seconds_total", ["base"],
        "Time from the requests that woke a base until the base served";
    // Latency.
    TimeToFirstToken = Histogram(LONG_S), Seconds, "holobiont_time_to_first_token_seconds", [],
        "Time from a request's start to its first token";
    TimePerOutputToken = Histogram(TOKEN_S), Seconds, "holobiont_time_per_output_token_seconds", [],
        "Time between a choice's first and last token, divided by the tokens after the first";
    InterToken = Histogram(TOKEN_S), Seconds, "holobiont_inter_token_seconds", [],
        "Time from one output of a choice to the next, divided by its tokens";
    QueueTime = Histogram(LONG_S), Seconds, "holobiont_queue_seconds", [],
        "Time from a request's arrival to the admission of each sequence: in the admission queue and in \
         the executor";
    RequestDuration = Histogram(LONG_S), Seconds, "holobiont_request_duration_seconds", [],
        "Time from a generation request's start to its end, with any outcome";
    // Adapters in use; `adapter` is a name, `base`, or `other` beyond the cap.
    AdapterTimeToFirstToken = Histogram(LONG_S), Seconds, "holobiont_adapter_time_to_first_token_seconds", ["adapter"],
        "Time from a request's start to its first token, by adapter";
    AdapterTimePerOutputToken = Histogram(TOKEN_S), Seconds, "holobiont_adapter_time_per_output_token_seconds", ["adapter"],
        "Time per token after the first, by adapter";
    AdapterQueueTime = Histogram(LONG_S), Seconds, "holobiont_adapter_queue_seconds", ["adapter"],
        "Time from a sequence's arrival in the executor to its admission, by adapter";
    AdapterRequestDuration = Histogram(LONG_S), Seconds, "holobiont_adapter_request_duration_seconds", ["adapter"],
        "Time from a generation request's start to its end, by adapter";
    AdapterPromptTokens = Counter, Count, "holobiont_adapter_prompt_tokens_total", ["adapter"],
        "Prompt tokens of answers, by adapter";
    AdapterGeneratedTokens = Counter, Count, "holobiont_adapter_generated_tokens_total", ["adapter"],
        "Tokens generated for answers, by adapter";
    AdapterCachedTokens = Counter, Count, "holobiont_adapter_cached_tokens_total", ["adapter"],
        "Prompt tokens served from the prefix cache, by adapter";
    // Registered and resident adapters.
    AdaptersRegistered = Gauge, Count, "holobiont_adapters_registered", [],
        "Registered adapters with a name";
    Adapters = Gauge, Count, "holobiont_adapters", ["tier"],
        "Registered adapters by tier: host is the executor's memory, disk is files only, memory is files of \
         ephemeral adapters only";
    AdaptersPinned = Gauge, Count, "holobiont_adapters_pinned", [],
        "Adapters that are never evicted";
    AdapterLoaded = Gauge, Info, "holobiont_adapter_info", ["adapter", "generation", "tier", "rank", "pinned"],
        "Generation and tier of an adapter; at most as many adapters as have labels";
    AdapterBytes = Gauge, Bytes, "holobiont_adapter_bytes", [],
        "Bytes of adapters in the executor's memory";
    AdapterBudget = Gauge, Bytes, "holobiont_adapter_budget_bytes", [],
        "Maximum bytes of adapters in the executor's memory";
    AdapterLoadTime = Histogram(&LOAD_BOUNDS_S), Seconds, "holobiont_adapter_load_seconds", [],
        "Time from the load request of an adapter to the adapter being usable";
    AdapterLoads = Counter, Count, "holobiont_adapter_loads_total", ["outcome"],
        "Loads of adapters into the executor, by outcome: loaded, failed";
    AdapterEvictions = Counter, Count, "holobiont_adapter_evictions_total", [],
        "Adapters evicted from the executor's memory";
    AdapterLookups = Counter, Count, "holobiont_adapter_lookups_total", ["outcome"],
        "Requests for an adapter, by outcome: hit if it was in the executor's memory, miss if it had to \
         be loaded";
    // Adapters by URI.
    UriFetches = Counter, Count, "holobiont_uri_fetches_total", ["scheme", "outcome"],
        "Fetches of adapters by URI, by scheme (hf, s3, file) and outcome: fetched, failed, refused (not \
         allowed), remembered (a recent failure)";
    UriFetchedBytes = Counter, Bytes, "holobiont_uri_fetched_bytes_total", ["scheme"],
        "Bytes of adapters fetched by URI, by scheme";
    // Shared registry and adapter store; absent without a fleet.
    RegistryAge = Gauge, Seconds, "holobiont_registry_age_seconds", [],
        "Time since the shared registry was last read, which happens each second";
    StoreFetches = Counter, Count, "holobiont_store_fetches_total", ["outcome"],
        "Adapters whose files were fetched from the bucket, by outcome: fetched, failed";
    StoreDamaged = Counter, Count, "holobiont_store_damaged_total", [],
        "Adapter files from the bucket that did not match their hash";
    StoreCacheBytes = Gauge, Bytes, "holobiont_store_cache_bytes", [],
        "Local copies of the bucket's files on this host";
    StoreEvictions = Counter, Count, "holobiont_store_evictions_total", [],
        "Adapters whose local files were evicted";
    // Fine-tuning.
    Jobs = Gauge, Count, "holobiont_training_jobs", ["state"],
        "Fine-tuning jobs that have not ended, by state: queued, training, paused";
    JobsEnded = Counter, Count, "holobiont_training_jobs_ended_total", ["outcome"],
        "Fine-tuning jobs that ended, by outcome: succeeded, failed, cancelled";
    TrainersLost = Counter, Count, "holobiont_trainers_lost_total", [],
        "Trainers that ended without an error message; another one continues";
    TrainingSteps = Counter, Count, "holobiont_training_steps_total", [],
        "Steps of the optimizers of all jobs";
    TrainedTokens = Counter, Count, "holobiont_trained_tokens_total", [],
        "Tokens trained on, counted in each epoch";
    // Batches.
    Batches = Gauge, Count, "holobiont_batches", ["state"],
        "Batches that have not ended, by state: validating, in_progress, finalizing";
    BatchesEnded = Counter, Count, "holobiont_batches_ended_total", ["outcome"],
        "Batches that ended, by outcome: completed, failed, expired, cancelled";
    BatchLines = Counter, Count, "holobiont_batch_lines_total", ["outcome"],
        "Lines of batches with a result, by outcome: completed, failed";
    BatchLinesRunning = Gauge, Count, "holobiont_batch_lines_running", [],
        "Lines of batches being computed";
    BatchLinesPreempted = Counter, Count, "holobiont_batch_lines_preempted_total", [],
        "Lines of batches that stopped for online requests, and are computed again";
    // Device, adapters on the device, and cold starts.
    Device = Gauge, Info, "holobiont_device_info", ["kind", "name"],
        "Device of the base: kind is cpu or cuda, name is the maker's name";
    DeviceMemory = Gauge, Bytes, "holobiont_device_memory_bytes", [],
        "Total memory of the device; of a CPU, the host's";
    DeviceWeights = Gauge, Bytes, "holobiont_device_weight_bytes", ["device"],
        "Weights on each device of a device group; the leader is device 0";
    DeviceMemoryFree = Gauge, Bytes, "holobiont_device_memory_free_bytes", [],
        "Unused memory of the device";
    ColdStart = Gauge, Info, "holobiont_cold_start_info", ["mode", "link"],
        "Cold start mode of requests; link is emulated if copies are slowed down for experiments";
    DeviceBytes = Gauge, Bytes, "holobiont_device_adapter_bytes", [],
        "Bytes of adapters on the device or being copied to it";
    DeviceBudget = Gauge, Bytes, "holobiont_device_adapter_budget_bytes", [],
        "Maximum bytes of adapters on the device";
    ColdStarts = Counter, Count, "holobiont_cold_starts_total", [],
        "Requests whose adapter was not completely on the device";
    AdapterLoadWait = Histogram(LONG_S), Seconds, "holobiont_adapter_load_wait_seconds", [],
        "Time that a sequence waited for its adapter to reach the device before it was admitted";
    CopiedBytes = Counter, Bytes, "holobiont_adapter_copied_bytes_total", [],
        "Bytes of adapters copied from the executor's memory to the device";
    CopyTime = Counter, Seconds, "holobiont_adapter_copy_seconds_total", [],
        "Time of copying adapters to the device, with the delays of an emulated link";
    AdapterRankRows = Counter, Count, "holobiont_adapter_rank_rows_total", ["adapter", "place"],
        "Rows times ranks of an adapter computed, by place: device, workers, or executor (if no worker did)";
    AdapterDraftedTokens = Counter, Count, "holobiont_adapter_drafted_tokens_total", ["adapter", "verdict"],
        "Tokens that were drafted for an adapter and verified, by verdict: accepted, rejected";
    AdapterDraftLeastConfidence = Gauge, Ratio, "holobiont_adapter_draft_least_confidence_ratio", ["adapter"],
        "Least acceptance probability of a draft token worth its row, in the last step with draft tokens \
         for an adapter";
    Workers = Gauge, Count, "holobiont_workers", [],
        "Workers that compute adapters";
    WorkersExpected = Gauge, Count, "holobiont_workers_expected", [],
        "Expected number of workers";
    WorkersLost = Counter, Count, "holobiont_workers_lost_total", [],
        "Workers that died, stopped or broke the protocol";
    WorkerSlices = Counter, Count, "holobiont_worker_slices_total", ["core"],
        "Slices computed by workers, by the core they are pinned to";
    WorkerTakenBack = Counter, Count, "holobiont_worker_taken_back_total", ["core"],
        "Slices that a worker began and the executor computed, because the worker took too long";
    WorkerWait = Counter, Seconds, "holobiont_worker_wait_seconds_total", [],
        "Time that the engine waited for workers after its own part was done";
    // Layer service for split clients.
    LayerSessions = Gauge, Count, "holobiont_layer_sessions", [],
        "Sessions of split clients that are open";
    LayerSessionsRefused = Counter, Count, "holobiont_layer_sessions_refused_total", [],
        "Refused sessions of split clients: no key, another version, or a quota used up";
    LayerSessionsBroken = Counter, Count, "holobiont_layer_sessions_broken_total", [],
        "Sessions ended because the client broke the protocol or did not read its answers";
    LayerCalls = Counter, Count, "holobiont_layer_calls_total", ["outcome"],
        "Calls of base layers, by outcome: done, refused";
    LayerRows = Counter, Count, "holobiont_layer_rows_total", ["class"],
        "Rows computed for split clients, by purpose: decode, verify, prefill, training, noise";
    LayerBytes = Counter, Bytes, "holobiont_layer_bytes_total", ["direction"],
        "Bytes of activations, by direction: in, out";
    LayerWait = Counter, Seconds, "holobiont_layer_wait_seconds_total", [],
        "Time that calls waited in the queue";
    LayerCompute = Counter, Seconds, "holobiont_layer_compute_seconds_total", [],
        "Computing time, shared among the calls of a batch in proportion to their rows";
    LayerWaitingRows = Gauge, Count, "holobiont_layer_waiting_rows", [],
        "Rows that wait in the queue";
    LayerBatches = Counter, Count, "holobiont_layer_batches_total", [],
        "Batches computed for split clients only";
    LayerJoinedRows = Counter, Count, "holobiont_layer_joined_rows_total", [],
        "Rows of split clients computed in passes of the resident engine";
    // Executor.
    ExecutorUp = Gauge, Count, "holobiont_executor_up", [],
        "1 while the base-executor answers, 0 while it does not";
    ExecutorRestarts = Counter, Count, "holobiont_executor_restarts_total", [],
        "Number of times that a new executor process replaced the previous one";
    RedoneSequences = Counter, Count, "holobiont_sequences_redone_total", [],
        "Sequences resumed after their executor was lost";
    EngineSteps = Counter, Count, "holobiont_engine_steps_total", [],
        "Steps of the engine";
    ComputedPromptTokens = Counter, Count, "holobiont_executor_prompt_tokens_total", [],
        "Prompt tokens the executor computed, without those of its prefix cache";
    ComputedTokens = Counter, Count, "holobiont_executor_generated_tokens_total", [],
        "Tokens the executor generated, including those of cancelled requests";
    ReusedTokens = Counter, Count, "holobiont_executor_cached_tokens_total", [],
        "Prompt tokens the executor found in its prefix cache";
    DraftVerifications = Counter, Count, "holobiont_draft_verifications_total", [],
        "Verifications of a sequence's draft tokens, possibly several in one step";
    DraftedTokens = Counter, Count, "holobiont_drafted_tokens_total", ["by", "verdict"],
        "Verified draft tokens, by drafter (text: n-grams of the sequence, or model) and verdict: \
         accepted, rejected";
    DraftAccepted = Histogram(ACCEPTED), Count, "holobiont_draft_accepted_tokens", [],
        "Draft tokens accepted per verification of a sequence";
    AheadTokens = Counter, Count, "holobiont_ahead_tokens_total", ["what"],
        "Tokens drafted while a step waited for weights, and how many of them were kept";
    DraftHidden = Counter, Seconds, "holobiont_draft_hidden_seconds_total", [],
        "Time of drafting while a step waited for weights";
    Drafting = Counter, Seconds, "holobiont_drafting_seconds_total", [],
        "Time that draft models took to draft and to prefill";
    DraftLeastConfidence = Gauge, Ratio, "holobiont_draft_least_confidence_ratio", [],
        "Least acceptance probability of a draft token worth its row, in the last step";
    Preemptions = Counter, Count, "holobiont_preemptions_total", [],
        "Sequences preempted because KV blocks were exhausted";
    Cancelled = Counter, Count, "holobiont_cancelled_total", [],
        "Sequences cancelled because their clients disconnected";
    KvBlocks = Gauge, Count, "holobiont_kv_blocks", ["state"],
        "Blocks of the executor's pool: total, used by running sequences, cached (only in the prefix \
         cache), adapters";
    TierBlocks = Gauge, Count, "holobiont_tier_blocks", ["tier", "state"],
        "Offloaded KV blocks, by tier (host, disk) and state: total, used";
    MovedBlocks = Counter, Count, "holobiont_kv_moved_blocks_total", ["way"],
        "KV blocks by event: fetched_host and fetched_disk on demand, prefetched, spilled to lower \
         tiers, evicted from the device, lost because no tier had space, failed copies";
    HeldBytes = Gauge, Bytes, "holobiont_executor_held_bytes", ["what"],
        "Host memory of the executor by use: weights and blocks (not those on a GPU), adapters, history \
         (offloaded KV blocks), workers, clients (split clients), drafts (draft models)";
    WeightReadBytes = Counter, Bytes, "holobiont_weight_read_bytes_total", [],
        "Bytes of streamed weights that the executor read from its disk";
    WeightRead = Counter, Seconds, "holobiont_weight_read_seconds_total", [],
        "Time of reading streamed weights";
    WeightWait = Counter, Seconds, "holobiont_weight_wait_seconds_total", [],
        "Time that passes waited for streamed weights; other reads were hidden behind computation";
    MemoryLimit = Gauge, Bytes, "holobiont_executor_held_limit_bytes", [],
        "Maximum host memory of the executor";
    AdaptersRequired = Gauge, Count, "holobiont_adapters_required", [],
        "Expected number of different adapters in a batch, from recent requests";
    KvWait = Histogram(LONG_S), Seconds, "holobiont_kv_wait_seconds", [],
        "Time that a sequence waited for KV blocks from a lower tier before it was admitted";
    KvUsage = Gauge, Ratio, "holobiont_kv_usage_ratio", [],
        "KV blocks used by running sequences, as a share of all";
    // Gateway process.
    ResidentMemory = Gauge, Bytes, "process_resident_memory_bytes", [],
        "Resident memory of the gateway process";
    OpenFds = Gauge, Count, "process_open_fds", [],
        "File descriptors the gateway process has open";
    MaxFds = Gauge, Count, "process_max_fds", [],
        "File descriptors the gateway process may have open";
    CpuTime = Counter, Seconds, "process_cpu_seconds_total", [],
        "Processor time the gateway process has used";
    StartTime = Gauge, Seconds, "process_start_time_seconds", [],
        "Start time of the gateway process, in seconds since 1970";
    Build = Gauge, Info, "holobiont_build_info", ["version", "base_model"],
        "Version of the gateway and name of its base model";
}

impl Id {
    #[must_use]
    pub fn metric(self) -> &'static Metric {
        &TABLE[self as usize]
    }
}

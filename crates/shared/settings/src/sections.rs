//! Declarations of all settings of a deployment.
//!
//! Each is `field: type, --"flag" "VALUE", default, the process that takes it`, with its help text above it.
//! `was` names the section, field and flag of an older version.

use std::{
    ffi::OsString,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::PathBuf,
};

use serde::Deserialize;

use crate::{
    AdapterDtype, BatchingPolicy, ByteCount, CachePolicy, ColdStart, CoreList, DeviceChoice, DeviceGroup,
    DeviceSplit, DraftChoice, Fraction, Gbps, KvDtype, LogFormat, MemoryFraction, Precision, Preset,
    Preset::{Depends, Is},
    ProcessKind, ReasoningParser, Routing, Setting, ToolCallParser, Value, WaitFactor, WorkerCount,
    declaration::sections,
};

/// Returns every setting, in the order of the sections.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.iter())
}

sections! {
    /// `[model]`: the base model.
    ModelSection = "model" {
        /// Base model: a path, a name that `holobiont ls` shows, or ORG/NAME[@REVISION] of a hub
        name: String, --"model" "NAME_OR_PATH", Depends("the only model there is"), Up;
        /// Name of the base model in the API
        served_name: String, --"served-model-name" "NAME", Depends("the file's name"), Up;
        /// Maximum length of a sequence, if it is shorter than the model's own
        context_length: u32, --"context-length" "TOKENS", Depends("the model's"), Executor;
        /// Memory for weights on a CPU; weights beyond it are streamed from the disk in each pass
        resident_weight_bytes: ByteCount, --"resident-weight-bytes" "BYTES", Depends("all weights stay in memory"), Executor,
            was ["model"] "weight_bytes" --"weight-bytes";
        /// Time without requests after which the base sleeps: its processes end, and the next request starts
        /// them; 0 is never
        sleep_after_s: u64, --"sleep-after-s" "S", Is("0"), Gateway;
    }

    /// `[executor]`: the process that owns the weights.
    ExecutorSection = "executor" {
        /// Device that computes the base model: cpu, cuda, or cuda:1 for the second GPU
        device: DeviceChoice, --"device" "DEVICE", Is("cpu"), Executor;
        /// Cores that the executor computes on, as 0-3,8
        cores: CoreList, --"cores" "LIST", Depends("all cores; of four or more, those without workers"), Up;
        /// CPU devices that hold the base together, one process each, instead of `device` and `cores`: a list
        /// such as ["cpu:0-31", "cpu:32-63"], one device for each NUMA node
        devices: DeviceGroup, --"devices" "LIST", Preset::None, Executor;
        /// Division of the weights among `devices`: outputs (each device holds some outputs of every layer:
        /// tensor parallelism) or layers (each holds some blocks)
        device_split: DeviceSplit, --"device-split" "SPLIT", Is("outputs"), Executor;
        /// Arithmetic of linear layers on a CPU: auto (bf16 with AMX for models of 2^28 weights and more,
        /// unless these have f32 or f16; else mixed; a deployment keeps its choice), int8, mixed (activations
        /// of 15 bits where 8 bits matter), int15, bf16 (activations and weights of bf16), or exact
        /// (activations are never rounded: about half as fast)
        precision: Precision, --"precision" "PRECISION", Is("auto"), Executor;
        /// Maximum device memory for the KV cache
        kv_bytes: ByteCount, --"kv-bytes" "BYTES", Depends("all device memory"), Executor;
        /// Data type of the KV cache: auto (bf16 beside layers in bf16, else what suits the weights), f32,
        /// f16, bf16 (multiplied by AMX) or int8 (half the memory of f16); bf16 and int8 on a CPU only
        kv_dtype: KvDtype, --"kv-dtype" "DTYPE", Is("auto"), Executor;
        /// Host memory for adapters, which workers read too
        adapter_bytes: ByteCount, --"adapter-bytes" "BYTES", Is("1GiB"), Executor;
        /// Data type of adapters: auto (suits the weights), exact, f16, or bf16 (twice as fast with long
        /// prompts, 8 bits of precision)
        adapter_dtype: AdapterDtype, --"adapter-dtype" "DTYPE", Is("auto"), Executor;
        /// Maximum device memory for adapters
        device_adapter_bytes: ByteCount, --"device-adapter-bytes" "BYTES", Depends("device memory \
            without the KV cache of one longest sequence"), Executor;
        /// Maximum number of sequences per step
        max_running: u32, --"max-running" "N", Is("64"), Executor;
        /// Maximum number of requests that wait in the executor; all further ones wait in the gateway
        max_waiting: u32, --"max-waiting" "N", Is("512"), Executor;
        /// Maximum total number of prompt tokens of waiting requests; further requests are answered 429
        max_waiting_tokens: u32, --"max-waiting-tokens" "TOKENS", Is("4194304"), Executor;
        /// Maximum number of prompt tokens per step; a longer prompt is prefilled in chunks
        chunk_tokens: u32, --"chunk-tokens" "TOKENS", Is("512"), Executor;
    }

    /// `[memory]`: the memory of the device, and the offload tiers of the KV cache.
    MemorySection = "memory" {
        /// Device memory that the KV cache and adapters share
        device: ByteCount, --"device-bytes" "BYTES", Depends("on a CPU 1GiB, or the sum of kv_bytes and \
                              device_adapter_bytes; on a GPU 9/10 of its free memory"), Executor;
        /// Host memory for KV cache that is offloaded from a GPU; on a CPU raise `device` instead
        host: ByteCount, --"host-bytes" "BYTES", Is("0B"), Executor;
        /// Disk space for offloaded KV cache, which outlives a restart; 0B offloads none
        disk: ByteCount, --"disk-bytes" "BYTES", Is("0B"), Executor;
        /// Private directory of the file that holds the offloaded KV cache
        directory: PathBuf, --"disk-directory" "DIR", Depends("the directory `history` in the state \
                               directory"), Executor;
        /// Time in which the eviction value of an unused KV cache entry falls by a factor of e
        decay_ms: u64, --"cache-decay-ms" "MS", Is("10000"), Executor, was ["memory"] "tau_ms" --"cache-tau-ms";
        /// Maximum host memory of an executor with its weights, in bytes or as a fraction such as 1/2
        process: MemoryFraction, --"process-memory" "PART", Depends("15/16 of the memory of the machine \
                                    or control group; several executors share it evenly"), Executor;
    }

    /// `[speculation]`: speculative decoding, which changes no output.
    SpeculationSection = "speculation" {
        /// Drafter: off; auto (whichever helps); ngram (prompt lookup); early-exit (the first layers of the
        /// base with the draft adapter that was loaded last); or the path of a smaller model with the same
        /// tokenizer
        draft: DraftChoice, --"draft" "DRAFT", Is("auto"), Executor;
        /// Maximum number of draft tokens of a sequence that one step verifies
        draft_tokens: u32, --"draft-tokens" "N", Is("16"), Executor;
        /// Memory for the KV cache of a draft model and for the rows of its LM head
        draft_bytes: ByteCount, --"draft-bytes" "BYTES", Is("64MiB"), Executor;
    }

    /// `[workers]`: the CPU LoRA workers, which compute an adapter until the device holds it.
    WorkersSection = "workers" {
        /// Cores of the CPU LoRA workers, as 6-7
        cores: CoreList, --"workers-cores" "LIST", Depends("the last quarter of the cores; one core of \
                            two or three"), Up;
        /// Number of CPU LoRA workers; 0 starts none
        count: WorkerCount, --"workers" "N", Depends("one for each core"), Up;
        /// Time that a worker spins for the next task of a pass before it sleeps
        spin_us: u32, --"spin-us" "US", Depends("10000; 20 on a core of the executor"), Up;
    }

    /// `[layers]`: base-layer calls for split clients.
    LayersSection = "layers" {
        /// Serves base layers to split clients of this host
        local: bool, --"layer-local" "BOOL", Is("true"), Up;
        /// Address and port that serve base layers over TLS 1.3
        listen: SocketAddr, --"layer-listen" "ADDR:PORT", Preset::None, Executor;
        /// Certificate chain of the layer listener, in PEM; `holobiont cert` makes one
        cert: PathBuf, --"layer-cert" "PEM", Preset::None, Executor;
        /// Private key of that certificate, in PEM
        cert_key: PathBuf, --"layer-cert-key" "PEM", Preset::None, Executor;
        /// Certificate authority of clients: a certificate that it signed names the client's tenant and
        /// replaces a key
        client_ca: PathBuf, --"layer-client-ca" "PEM", Preset::None, Executor;
        /// Keys of tenants, made by `holobiont key add NAME --file FILE`; without the file, all clients of
        /// this host are one tenant
        key_file: PathBuf, --"layer-key-file" "FILE", Preset::None, Executor;
        /// Gateways of other hosts that may use the executor through the layer listener: names in their
        /// certificates, as `front,spare`
        gateways: String, --"layer-gateways" "A,B", Preset::None, Executor;
        /// Computing time of training as a share of that of requests; 0 allows one training call every 5 s
        training_share: Fraction, --"layer-training-share" "SHARE", Is("0.05"), Executor;
        /// Maximum number of sessions of split clients
        max_sessions: u32, --"layer-max-sessions" "N", Is("64"), Executor;
        /// Maximum number of sessions of one tenant
        tenant_sessions: u32, --"layer-tenant-sessions" "N", Is("32"), Executor;
        /// Maximum number of waiting rows of one tenant
        tenant_rows: u32, --"layer-tenant-rows" "ROWS", Is("16384"), Executor;
        /// Maximum number of bytes of one tenant in shared memory and in unfinished messages
        tenant_bytes: ByteCount, --"layer-tenant-bytes" "BYTES", Is("256MiB"), Executor;
        /// Maximum number of rows computed per second for one tenant
        rows_per_s: u32, --"layer-rows-per-s" "ROWS_PER_S", Preset::None, Executor;
        /// Offers exact modular arithmetic, which secret sharing and one-time pads need; the start reads and
        /// hashes all weights
        exact: bool, --"layer-exact" "BOOL", Is("false"), Executor;
    }

    /// `[gateway]`: the process that speaks HTTP.
    GatewaySection = "gateway" {
        /// Address and port of the HTTP server, beyond loopback only with keys; port 0 takes any free one
        listen: SocketAddr, --"listen" "ADDR:PORT", Is("127.0.0.1:8080"), Up;
        /// Directory below which adapters may be loaded over HTTP
        adapter_root: PathBuf, --"adapter-root" "DIR", Is("."), Gateway;
        /// Hashed API keys with their roles (admin, user, metrics), made by `holobiont key add NAME`
        api_key_file: PathBuf, --"api-key-file" "FILE", Preset::None, Gateway;
        /// Takes API keys from the shared registry and stores them in api_key_file, which executors read too
        shared_keys: bool, --"shared-keys" "BOOL", Is("false"), Gateway;
        /// Maximum size of a request's body
        max_body_bytes: ByteCount, --"max-body-bytes" "BYTES", Is("8MiB"), Gateway;
        /// Memory for what requests keep in the gateway (bodies, queued work, unread results), all tenants
        /// together
        memory_bytes: ByteCount, --"memory-bytes" "BYTES", Is("2GiB"), Gateway;
        /// Maximum memory for one tenant's requests in the gateway; further requests are answered 429
        tenant_memory_bytes: ByteCount, --"tenant-memory-bytes" "BYTES", Is("256MiB"), Gateway;
        /// Maximum number of sequences in the admission queue; more are answered 429
        max_sequences: u32, --"max-sequences" "N", Is("4096"), Gateway;
        /// CoDel target: queue delay of a tenant that is acceptable at all times
        codel_target_ms: u64, --"codel-target-ms" "MS", Is("250"), Gateway, was ["gateway"] "target_delay_ms" --"target-delay-ms";
        /// CoDel interval: a tenant above the target for this time gets 429 for new requests, with a forecast
        /// in `Retry-After`
        codel_interval_ms: u64, --"codel-interval-ms" "MS", Is("5000"), Gateway, was ["gateway"] "delay_interval_ms" --"delay-interval-ms";
        /// Share of an executor's batch slots that over-quota tenants hold together while others are under
        /// quota; 1 is no limit
        burst_share: Fraction, --"burst-share" "SHARE", Is("0.0625"), Gateway, was ["gateway"] "flood_share" --"flood-share";
        /// Share of an executor's batch slots for the lines of batches while there are no online requests
        background_share: Fraction, --"background-share" "SHARE", Is("0.5"), Gateway;
        /// Number of lines of batches per executor that run beside online requests; with 0, one line runs
        /// after a minute without any
        background_beside: u32, --"background-beside" "N", Is("0"), Gateway;
        /// Maximum number of batches of one tenant that wait or run
        tenant_batches: u32, --"tenant-batches" "N", Is("16"), Gateway;
        /// Number of threads for network I/O; text work has threads of its own
        threads: u32, --"threads" "N", Is("1"), Gateway;
        /// Allows any address and any host name without API keys; each client is an administrator
        insecure: bool, --"insecure" "BOOL", Is("false"), Gateway;
        /// Maximum number of requests per minute of a key without a limit of its own; 0 is no limit, more are
        /// answered 429
        requests_per_min_per_key: u32, --"requests-per-min-per-key" "N", Is("0"), Gateway;
        /// Maximum number of requests per minute for one adapter; 0 is no limit, more are answered 429
        requests_per_min_per_adapter: u32, --"requests-per-min-per-adapter" "N", Is("0"), Gateway;
        /// Maximum number of connections; more are answered 503
        max_connections: u32, --"max-connections" "N", Is("1024"), Gateway;
        /// Maximum time for the head of a request, and for an idle connection
        header_timeout_ms: u64, --"header-timeout-ms" "MS", Is("10000"), Gateway;
        /// Maximum time for the body of a request
        body_timeout_ms: u64, --"body-timeout-ms" "MS", Is("30000"), Gateway;
        /// Maximum time that a client reads slower than 4 KiB per second before its request is cancelled
        client_write_timeout_ms: u64, --"client-write-timeout-ms" "MS", Is("60000"), Gateway,
            was ["gateway"] "stall_timeout_ms" --"stall-timeout-ms";
        /// Origins of web pages that may call the API from a browser, as `https://a,https://b`
        cors_origins: String, --"cors-origins" "A,B", Preset::None, Gateway;
        /// Publishes metrics under vLLM's names too
        vllm_metrics: bool, --"vllm-metrics" "BOOL", Is("false"), Gateway;
        /// Maximum number of adapters with metrics of their own; all others share one label
        max_adapter_labels: u32, --"max-adapter-labels" "N", Is("64"), Gateway;
        /// Maximum number of adapters in the registry
        max_adapters: u32, --"max-adapters" "N", Is("10000"), Gateway;
        /// Maximum size of one file of an adapter
        max_adapter_file_bytes: ByteCount, --"max-adapter-file-bytes" "BYTES", Is("2GiB"), Gateway;
        /// Maximum bytes of ephemeral adapters, which are pushed with `durable=false` and kept in memory
        /// alone; one tenant may have half
        ephemeral_adapter_bytes: ByteCount, --"ephemeral-adapter-bytes" "BYTES", Is("2GiB"), Gateway;
        /// Memory file system for ephemeral adapters, which executors of this host read
        ephemeral_adapter_dir: PathBuf, --"ephemeral-adapter-dir" "DIR", Is("/dev/shm"), Gateway;
        /// Prefixes of URIs from which loads and requests may fetch adapters, as
        /// `hf://ORG,s3://BUCKET/PREFIX,file:///DIRECTORY`; {tenant} as a part is the tenant that asks
        allowed_adapter_uris: String, --"allowed-adapter-uris" "A,B", Preset::None, Gateway;
        /// Maximum bytes of the adapters that one tenant's requests loaded by URI; the least recently used
        /// are unloaded
        tenant_fetched_bytes: ByteCount, --"tenant-fetched-bytes" "BYTES", Is("16GiB"), Gateway;
        /// Maximum time of one fetch by URI
        fetch_timeout_ms: u64, --"fetch-timeout-ms" "MS", Is("300000"), Gateway;
        /// Time for which a failed fetch by URI is not tried again
        fetch_failure_ms: u64, --"fetch-failure-ms" "MS", Is("30000"), Gateway;
        /// PostgreSQL database that many hosts share as their registry, as `postgres://USER@HOST/DATABASE`;
        /// its password comes from PGPASSFILE or PGPASSWORD
        registry: String, --"registry" "URL", Depends("a file in the state directory, for this host \
                             only"), Gateway;
        /// Object store of the shared registry's adapters, as `s3://BUCKET/PREFIX` with the usual AWS_...
        /// variables, or a shared directory, as `file:///DIRECTORY`
        store: String, --"store" "URL", Depends("a folder in the state directory"), Gateway;
        /// Disk space for local copies of the store's adapters; the least recently used are evicted
        store_cache_bytes: ByteCount, --"store-cache-bytes" "BYTES", Is("16GiB"), Gateway;
        /// Maximum time without a message of an executor with running requests, before it counts as lost
        executor_timeout_ms: u64, --"executor-timeout-ms" "MS", Is("30000"), Gateway, was ["gateway"] "silence_ms" --"silence-ms";
        /// Maximum time that a request waits until a sleeping base serves
        wake_timeout_ms: u64, --"wake-timeout-ms" "MS", Is("120000"), Gateway;
        /// Certificate authority of executors on other hosts, in PEM
        executor_ca: PathBuf, --"executor-ca" "PEM", Preset::None, Gateway;
        /// Certificate of the gateway towards executors on other hosts, in PEM; `holobiont cert --client
        /// NAME` makes one
        executor_cert: PathBuf, --"executor-cert" "PEM", Preset::None, Gateway;
        /// Private key of that certificate, in PEM
        executor_cert_key: PathBuf, --"executor-cert-key" "PEM", Preset::None, Gateway;
        /// Tool-call format of the model: auto (from its chat template), hermes, llama3_json, mistral,
        /// pythonic, granite, qwen3_coder, harmony (vLLM's openai), or none, which refuses tools
        tool_call_parser: ToolCallParser, --"tool-call-parser" "FORMAT", Is("auto"), Gateway;
        /// Tags around the model's reasoning: auto (from its chat template), think, mistral, harmony (vLLM's
        /// openai_gptoss), or none, which leaves reasoning in the answer's text
        reasoning_parser: ReasoningParser, --"reasoning-parser" "TAGS", Is("auto"), Gateway;
        /// Tokens whose logits after a prompt classify or score texts, as `no,yes` for Qwen3-Reranker; none
        /// scores by embeddings, except for adapters with a classification head
        classifier_from_token: String, --"classifier-from-token" "TOKENS", Preset::None, Gateway;
        /// File with the prompt that scores a document for a query, with {query} and {document}, and
        /// optionally {instruction}
        score_template: PathBuf, --"score-template" "FILE", Depends("the prompt of Qwen3-Reranker"), Gateway;
        /// Endpoint of an OpenTelemetry collector for traces (OTLP over HTTP); none sends no traces
        otlp_endpoint: String, --"otlp-endpoint" "URL", Preset::None, Gateway;
        /// Address that publishes KV events for routers, as `tcp://127.0.0.1:5557` or `tcp://*:5557`; the
        /// events contain the token ids of all prompts, and ZeroMQ has no authentication
        kv_events_endpoint: String, --"kv-events-endpoint" "ADDRESS", Preset::None, Gateway;
        /// Address that repeats missed KV events, as `tcp://127.0.0.1:5558`
        kv_events_replay_endpoint: String, --"kv-events-replay-endpoint" "ADDRESS", Preset::None, Gateway;
        /// Topic of KV events; llm-d expects `kv@HOST:PORT@MODEL`
        kv_events_topic: String, --"kv-events-topic" "TOPIC", Is(""), Gateway;
    }

    /// `[training]`: the processes that train adapters.
    TrainingSection = "training" {
        /// Maximum number of trainer processes; 0 starts none
        trainers: u32, --"max-trainers" "N", Is("4"), Up;
        /// Cores of the trainers, as 6-7
        cores: CoreList, --"trainer-cores" "LIST", Depends("no pinning; any core"), Up;
        /// Maximum number of fine-tuning jobs of one tenant that wait or run
        tenant_jobs: u32, --"tenant-jobs" "N", Is("16"), Gateway;
        /// Number of steps between two checkpoints of a fine-tuning job, from which it resumes when a process
        /// or host is lost
        checkpoint_steps: u32, --"checkpoint-steps" "N", Is("50"), Gateway;
        /// Maximum size of one file of training data
        max_training_file_bytes: ByteCount, --"max-training-file-bytes" "BYTES", Is("512MiB"), Gateway;
        /// Maximum total size of one tenant's training files
        tenant_training_bytes: ByteCount, --"tenant-training-bytes" "BYTES", Is("4GiB"), Gateway;
        /// Maximum total size of one tenant's Tinker training states and of the adapters published from them
        tenant_state_bytes: ByteCount, --"tenant-state-bytes" "BYTES", Is("16GiB"), Gateway;
    }

    /// `[deployment]`: the processes together.
    DeploymentSection = "deployment" {
        /// Directory of the deployment's persistent state; each deployment needs its own
        state: PathBuf, --"state" "DIR", Depends("`~/.local/share/holobiont/state`"), Up;
        /// Format of the logs: human or json
        log_format: LogFormat, --"log-format" "FORMAT", Depends("human on a terminal, else json"), Up;
        /// Time for running requests to end when the deployment stops
        grace_ms: u64, --"grace-ms" "MS", Is("10000"), Up;
        /// Number of crashes of one process within a minute after which the deployment ends
        max_crashes_per_min: NonZeroU32, --"max-crashes-per-min" "N", Is("5"), Up, was ["deployment"] "max_deaths" --"max-deaths";
        /// Delay before a crashed process is restarted; each crash within a minute doubles it
        restart_delay_ms: u64, --"restart-delay-ms" "MS", Is("100"), Up;
        /// Maximum time without a heartbeat before a process is killed and restarted; it must exceed the
        /// longest step of an executor
        watchdog_ms: NonZeroU64, --"watchdog-ms" "MS", Is("120000"), Up;
    }

    /// `[lab]`: experiments: ablations and baselines of the papers, and emulated hardware. No deployment
    /// needs it.
    LabSection = "lab" {
        /// Seed of random weights, for measurements: the model needs config.json and a tokenizer only
        random_weights: u64, --"random-weights" "SEED", Preset::None, Executor, was ["model"] "random_weights" --"random-weights";
        /// Emulated bandwidth of the link to the device
        link_gbps: Gbps, --"link-gbps" "GBIT_PER_S", Preset::None, Executor, was ["executor"] "link_gbps" --"link-gbps";
        /// Start of a request whose adapter the device lacks: cpu-assist (at once, on CPU workers), on-demand
        /// (after the load), or cached (as if the device held each adapter)
        cold_start: ColdStart, --"cold-start" "MODE", Is("cpu-assist"), Executor, was ["executor"] "cold_start" --"cold-start";
        /// Eviction policy of a full tier: elora (ELORA's cost model), lru, rrip, or a variant of the paper's
        /// ablation
        cache_policy: CachePolicy, --"cache-policy" "POLICY", Is("elora"), Executor, was ["memory"] "policy" --"cache-policy";
        /// Batching of layer calls: opportunistic, none or lockstep
        layer_batching: BatchingPolicy, --"layer-batching" "POLICY", Is("opportunistic"), Executor,
            was ["layers"] "batching" --"layer-batching";
        /// Factor of the time that a layer call waits to be batched with others
        layer_batch_wait_factor: WaitFactor, --"layer-batch-wait-factor" "FACTOR", Is("1"), Executor,
            was ["layers"] "wait_factor" --"layer-wait-factor";
        /// Routing of a request to one of several executors: rank-aware (least cost), most-idle, first-fit,
        /// random, or algo1-printed (the paper's algorithm as printed)
        routing: Routing, --"routing" "POLICY", Is("rank-aware"), Gateway, was ["gateway"] "routing" --"routing";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_a_value_of_its_setting() {
        let presets = [
            ModelSection::presets().set().count(),
            ExecutorSection::presets().set().count(),
            MemorySection::presets().set().count(),
            SpeculationSection::presets().set().count(),
            WorkersSection::presets().set().count(),
            LayersSection::presets().set().count(),
            GatewaySection::presets().set().count(),
            TrainingSection::presets().set().count(),
            DeploymentSection::presets().set().count(),
            LabSection::presets().set().count(),
        ];
        let declared =
            |section: &&[Setting]| section.iter().filter(|setting| matches!(setting.preset, Is(_))).count();
        assert_eq!(presets.as_slice(), SECTIONS.iter().map(declared).collect::<Vec<_>>());
    }

    #[test]
    fn a_help_text_is_a_line_that_says_something() {
        for setting in all() {
            let help = setting.help;
            assert!(
                help.len() > 10 && !help.ends_with('.') && !help.contains("  "),
                "{}: {help}",
                setting.flag
            );
        }
    }
}

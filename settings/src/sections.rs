//! The declarations.
//!
//! Each is `field: type, --"flag" "VALUE", what holds without it, whom it is handed on to`, and its help text above it.

use std::{
    ffi::OsString,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::PathBuf,
};

use serde::Deserialize;

use crate::{
    AdapterDtype, Batching, ByteCount, CachePolicy, ColdStart, CoreList, DeviceChoice, Draft, Gbps, KvDtype,
    LogFormat, MemoryPart, Precision, Preset,
    Preset::{Depends, Is},
    Process, ReasoningParser, Routing, Setting, Share, ToolCallParser, Value, WaitFactor, WorkerCount,
    declaration::sections,
};

/// Every setting, in the order of the sections.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.iter())
}

sections! {
    /// `[model]`: what is served.
    ModelSection = "model" {
        /// The base model: a path, a name that `holobiont ls` shows, or ORG/NAME[@REVISION] of a hub
        name: String, --"model" "NAME_OR_PATH", Depends("the only model there is"), Up;
        /// What clients call the base
        served_name: String, --"served-model-name" "NAME", Depends("the file's name"), Up;
        /// Longest sequence, if shorter than the model's own
        context_length: u32, --"context-length" "TOKENS", Depends("the model's"), Executor;
        /// Memory for weights on a CPU: those that do not fit are read from the disk whenever they are needed
        weight_bytes: ByteCount, --"weight-bytes" "BYTES", Depends("all of them are in memory"), Executor;
        /// Makes the weights of this number, for measurements: the model needs config.json and a tokenizer only
        random_weights: u64, --"random-weights" "SEED", Preset::None, Executor;
    }

    /// `[executor]`: the process that owns the weights.
    ExecutorSection = "executor" {
        /// What computes: cpu, cuda, or cuda:1 for another GPU than the first
        device: DeviceChoice, --"device" "DEVICE", Is("cpu"), Executor;
        /// Cores to compute on, as 0-3,8
        cores: CoreList, --"cores" "LIST", Depends("all; of four or more, those without workers"), Up;
        /// How finely a CPU rounds activations for integer weights: auto (mixed), int8, mixed (15 bits where it matters), int15, or
        /// exact (not at all, for whatever weights: about half as fast)
        precision: Precision, --"precision" "PRECISION", Is("auto"), Executor;
        /// Of the device's memory, keys and values take no more than this
        kv_bytes: ByteCount, --"kv-bytes" "BYTES", Depends("all of it"), Executor;
        /// How keys and values are stored: auto, which suits the weights, f32, f16, or int8 (half the memory of f16, on a CPU alone)
        kv_dtype: KvDtype, --"kv-dtype" "DTYPE", Is("auto"), Executor;
        /// Memory for adapters in the host tier, where workers read them too
        adapter_bytes: ByteCount, --"adapter-bytes" "BYTES", Is("1GiB"), Executor;
        /// How adapters are stored and multiplied: auto, which suits the weights, exact, f16, or bf16 (twice as fast
        /// with long prompts, 8 bits of precision)
        adapter_dtype: AdapterDtype, --"adapter-dtype" "DTYPE", Is("auto"), Executor;
        /// Of the device's memory, adapters take no more than this
        device_adapter_bytes: ByteCount, --"device-adapter-bytes" "BYTES", Depends("what one longest sequence leaves"), Executor;
        /// What a request does whose adapter the device does not hold: cpu-assist, it starts at once; on-demand, it
        /// waits; cached, there are none
        cold_start: ColdStart, --"cold-start" "MODE", Is("cpu-assist"), Executor;
        /// Emulates a link of so many gigabits a second to the device, for experiments
        link_gbps: Gbps, --"link-gbps" "GBIT_PER_S", Preset::None, Executor;
        /// Sequences computed together
        max_running: u32, --"max-running" "N", Is("64"), Executor;
        /// Requests that may wait beside them; what waits for its turn does so in the gateway
        max_waiting: u32, --"max-waiting" "N", Is("512"), Executor;
        /// Prompt tokens of those that wait, together; more are answered 429
        max_waiting_tokens: u32, --"max-waiting-tokens" "TOKENS", Is("4194304"), Executor;
        /// Prompt tokens of one step; longer prompts take several
        chunk_tokens: u32, --"chunk-tokens" "TOKENS", Is("512"), Executor;
    }

    /// `[memory]`: the device, and the tiers of keys and values below it.
    MemorySection = "memory" {
        /// Memory of the device for keys, values and adapters, which share it as the load wants it
        device: ByteCount, --"device-bytes" "BYTES", Depends("1GiB, or what kv_bytes and device_adapter_bytes add up to; nine tenths of what a GPU has left"), Executor;
        /// Memory of the host for keys and values that leave a GPU; on a CPU, where all is one memory, raise device instead
        host: ByteCount, --"host-bytes" "BYTES", Is("0B"), Executor;
        /// Room on the disk for keys and values of the past, which are there after a restart, too; 0B keeps none
        disk: ByteCount, --"disk-bytes" "BYTES", Is("0B"), Executor;
        /// Private directory of the file that holds them
        directory: PathBuf, --"disk-directory" "DIR", Depends("history below the state directory"), Executor;
        /// Who leaves a full tier first: elora, ELORA's cost model, lru, rrip, or a variant of the paper's ablation
        policy: CachePolicy, --"cache-policy" "POLICY", Is("elora"), Executor;
        /// The cost model's unit of time: what nobody asked for that much longer is worth e times less
        tau_ms: u64, --"cache-tau-ms" "MS", Is("10000"), Executor;
        /// Memory of this host that an executor may hold in all, its weights too: bytes, or a part, as 1/2
        process: MemoryPart, --"process-memory" "PART", Depends("fifteen sixteenths of the machine or of its control group; of several executors, an even part each"), Executor;
    }

    /// `[speculation]`: tokens that are drafted, and then verified several at once. No answer is another for it.
    SpeculationSection = "speculation" {
        /// Who drafts: off, nobody; auto, whatever helps here; ngram, what followed the same words before; self, the base's
        /// first layers with the draft adapter that was loaded last; or the path of a smaller model with the same tokens
        draft: Draft, --"draft" "DRAFT", Is("auto"), Executor;
        /// Most drafted tokens of a sequence that a step verifies
        draft_tokens: u32, --"draft-tokens" "N", Is("16"), Executor;
        /// Memory for keys and values of a draft that is a model, and for the rows of the head that it has of its own
        draft_bytes: ByteCount, --"draft-bytes" "BYTES", Is("64MiB"), Executor;
    }

    /// `[workers]`: the processes that compute adapters while they travel to the device.
    WorkersSection = "workers" {
        /// Cores that compute adapters while they travel to the device, as 6-7
        cores: CoreList, --"workers-cores" "LIST", Depends("the last quarter, one of two or three"), Up;
        /// How many workers there are; 0 for none
        count: WorkerCount, --"workers" "N", Depends("one for each core"), Up;
        /// How many microseconds a worker looks out for the next job of a pass before it sleeps
        spin_us: u32, --"spin-us" "US", Depends("10000; 20 on a core of the executor"), Up;
    }

    /// `[layers]`: base layers for split clients.
    LayersSection = "layers" {
        /// Serves base layers to split clients of this host
        local: bool, --"layer-local" "BOOL", Is("true"), Up;
        /// Serves them over TLS 1.3 on this address and port
        listen: SocketAddr, --"layer-listen" "ADDR:PORT", Preset::None, Executor;
        /// Certificate chain of that listener, in PEM; `holobiont cert` makes one
        cert: PathBuf, --"layer-cert" "PEM", Preset::None, Executor;
        /// The certificate's private key, in PEM
        cert_key: PathBuf, --"layer-cert-key" "PEM", Preset::None, Executor;
        /// Clients whose certificate this authority has signed are the tenant it names, and need no key
        client_ca: PathBuf, --"layer-client-ca" "PEM", Preset::None, Executor;
        /// Keys of tenants, made by `holobiont key add NAME --file FILE`; without it, everybody on this host is one
        /// tenant
        key_file: PathBuf, --"layer-key-file" "FILE", Preset::None, Executor;
        /// Gateways of other hosts that may drive the executor through that listener: the names in their certificates, as
        /// `front,spare`
        gateways: String, --"layer-gateways" "A,B", Preset::None, Executor;
        /// How calls are put together; none and lockstep for comparison
        batching: Batching, --"layer-batching" "POLICY", Is("opportunistic"), Executor;
        /// Calls wait for company so many times as long as by default
        wait_factor: WaitFactor, --"layer-wait-factor" "FACTOR", Is("1"), Executor;
        /// Beside requests that are answered, training gets this share of the time that they take; with 0 a call every 5 s
        training_share: Share, --"layer-training-share" "SHARE", Is("0.05"), Executor;
        /// Sessions of split clients at once
        max_sessions: u32, --"layer-max-sessions" "N", Is("64"), Executor;
        /// Sessions of a tenant
        tenant_sessions: u32, --"layer-tenant-sessions" "N", Is("32"), Executor;
        /// Rows of a tenant that wait
        tenant_rows: u32, --"layer-tenant-rows" "ROWS", Is("16384"), Executor;
        /// Bytes of a tenant in shared memory and in messages on their way
        tenant_bytes: ByteCount, --"layer-tenant-bytes" "BYTES", Is("256MiB"), Executor;
        /// Rows a tenant may have computed in a second
        rows_per_s: u32, --"layer-rows-per-s" "ROWS_PER_S", Preset::None, Executor;
        /// Offers exact arithmetic, which sound masking takes: all weights are read and hashed at the start
        exact: bool, --"layer-exact" "BOOL", Is("false"), Executor;
    }

    /// `[gateway]`: the process that speaks HTTP.
    GatewaySection = "gateway" {
        /// Address and port to serve HTTP on, beyond loopback only with keys; port 0 takes any free one
        listen: SocketAddr, --"listen" "ADDR:PORT", Is("127.0.0.1:8080"), Up;
        /// Adapters are loaded over HTTP only from below this directory
        adapter_root: PathBuf, --"adapter-root" "DIR", Is("."), Gateway;
        /// Hashed API keys with their roles (admin, user, metrics), made by `holobiont key add NAME`
        api_key_file: PathBuf, --"api-key-file" "FILE", Preset::None, Gateway;
        /// Takes API keys from the registry of many hosts, and keeps them in api_key_file, where executors find them, too
        shared_keys: bool, --"shared-keys" "BOOL", Is("false"), Gateway;
        /// Longest body of a request
        max_body_bytes: ByteCount, --"max-body-bytes" "BYTES", Is("8MiB"), Gateway;
        /// Memory for what requests keep in the gateway (bodies, queued work, results nobody has fetched), all tenants together
        memory_bytes: ByteCount, --"memory-bytes" "BYTES", Is("2GiB"), Gateway;
        /// The part of it that one tenant may have; more is answered 429
        tenant_memory_bytes: ByteCount, --"tenant-memory-bytes" "BYTES", Is("256MiB"), Gateway;
        /// Sequences that wait for their turn, the longest burst; more are answered 429
        max_sequences: u32, --"max-sequences" "N", Is("4096"), Gateway;
        /// How long the requests of a tenant may wait for their turn for any length of time
        target_delay_ms: u64, --"target-delay-ms" "MS", Is("250"), Gateway;
        /// How long they may wait longer than that, as in a burst; then new ones are answered 429 with a forecast in `Retry-After`
        delay_interval_ms: u64, --"delay-interval-ms" "MS", Is("5000"), Gateway;
        /// Of an executor's places, those that tenants have together that want more than their part, as long as others
        /// are served as they ask; 1 for all
        flood_share: Share, --"flood-share" "SHARE", Is("0.0625"), Gateway;
        /// Threads that move messages; text work has its own
        threads: u32, --"threads" "N", Is("1"), Gateway;
        /// Listens beyond loopback without keys and under any host name: whoever reaches the port is an administrator
        insecure: bool, --"insecure" "BOOL", Is("false"), Gateway;
        /// Most requests in a minute of a key that has no limit of its own, 0 for any number; more are answered 429
        requests_per_min_per_key: u32, --"requests-per-min-per-key" "N", Is("0"), Gateway;
        /// Most requests in a minute for an adapter, 0 for any number; more are answered 429
        requests_per_min_per_adapter: u32, --"requests-per-min-per-adapter" "N", Is("0"), Gateway;
        /// Connections at once; more are answered 503
        max_connections: u32, --"max-connections" "N", Is("1024"), Gateway;
        /// How long a request's head may take, and a connection be idle
        header_timeout_ms: u64, --"header-timeout-ms" "MS", Is("10000"), Gateway;
        /// How long a request's body may take
        body_timeout_ms: u64, --"body-timeout-ms" "MS", Is("30000"), Gateway;
        /// How long a reader may lag behind 4 KiB a second of its answer; then its request is cancelled
        stall_timeout_ms: u64, --"stall-timeout-ms" "MS", Is("60000"), Gateway;
        /// Web pages of these origins may ask from a browser, as `https://a,https://b`
        cors_origins: String, --"cors-origins" "A,B", Preset::None, Gateway;
        /// Publishes vLLM's metric names beside our own
        vllm_metrics: bool, --"vllm-metrics" "BOOL", Is("false"), Gateway;
        /// Adapters with metrics of their own; the rest share one label
        max_adapter_labels: u32, --"max-adapter-labels" "N", Is("64"), Gateway;
        /// Adapters in the registry
        max_adapters: u32, --"max-adapters" "N", Is("10000"), Gateway;
        /// Longest file of an adapter
        max_adapter_file_bytes: ByteCount, --"max-adapter-file-bytes" "BYTES", Is("2GiB"), Gateway;
        /// A PostgreSQL that many hosts have as their registry, as `postgres://USER@HOST/DATABASE`; its password comes from
        /// PGPASSFILE or PGPASSWORD
        registry: String, --"registry" "URL", Depends("a file in the state directory, of this host alone"), Gateway;
        /// A bucket that these hosts keep adapters in, as `s3://BUCKET/PREFIX`; endpoint and keys come from the usual
        /// AWS_... variables. Or a directory that all of them have, as `file:///DIRECTORY`
        store: String, --"store" "URL", Depends("a folder in the state directory"), Gateway;
        /// Adapters of that bucket that lie on this host; those used least recently make room
        store_cache_bytes: ByteCount, --"store-cache-bytes" "BYTES", Is("16GiB"), Gateway;
        /// How long an executor may owe an answer before it counts as lost
        silence_ms: u64, --"silence-ms" "MS", Is("30000"), Gateway;
        /// Certificate authority of executors on other hosts, in PEM
        executor_ca: PathBuf, --"executor-ca" "PEM", Preset::None, Gateway;
        /// Certificate that the gateway shows them, in PEM; `holobiont cert --client NAME` makes one
        executor_cert: PathBuf, --"executor-cert" "PEM", Preset::None, Gateway;
        /// The certificate's private key, in PEM
        executor_cert_key: PathBuf, --"executor-cert-key" "PEM", Preset::None, Gateway;
        /// Which of several executors gets a request: rank-aware, where it costs least, most-idle, first-fit, random, or
        /// algo1-printed, as the paper prints it
        routing: Routing, --"routing" "POLICY", Is("rank-aware"), Gateway;
        /// How the model writes calls of tools: auto, as its chat template shows, hermes, llama3_json, mistral, pythonic,
        /// granite, qwen3_coder, or none, which refuses tools
        tool_call_parser: ToolCallParser, --"tool-call-parser" "FORMAT", Is("auto"), Gateway;
        /// What stands around the model's thoughts: auto, the tags that its chat template shows, think, mistral, or none, which
        /// leaves them in the answer's text
        reasoning_parser: ReasoningParser, --"reasoning-parser" "TAGS", Is("auto"), Gateway;
        /// Where traces go (OTLP over HTTP), in builds with the feature `otel`
        otlp_endpoint: String, --"otlp-endpoint" "URL", Preset::None, Gateway;
    }

    /// `[training]`: the processes that train adapters.
    TrainingSection = "training" {
        /// Trainers at once, each a process of its own; 0 for none
        trainers: u32, --"max-trainers" "N", Is("4"), Up;
        /// Cores that trainers compute on, as 6-7
        cores: CoreList, --"trainer-cores" "LIST", Depends("wherever there is room"), Up;
        /// Fine-tuning jobs that a tenant may have waiting or under way
        tenant_jobs: u32, --"tenant-jobs" "N", Is("16"), Gateway;
        /// Steps of a fine-tuning job between two checkpoints, from which it goes on when a process or a host is lost
        checkpoint_steps: u32, --"checkpoint-steps" "N", Is("50"), Gateway;
        /// Longest file of training data
        max_training_file_bytes: ByteCount, --"max-training-file-bytes" "BYTES", Is("512MiB"), Gateway;
        /// Files of training data of a tenant, together
        tenant_training_bytes: ByteCount, --"tenant-training-bytes" "BYTES", Is("4GiB"), Gateway;
        /// States of a tenant's training step by step, together; and as much again for the adapters that the tenant publishes
        tenant_state_bytes: ByteCount, --"tenant-state-bytes" "BYTES", Is("16GiB"), Gateway;
    }

    /// `[deployment]`: the processes together.
    DeploymentSection = "deployment" {
        /// Directory for what outlives the processes, one deployment each
        state: PathBuf, --"state" "DIR", Depends("`~/.local/share/holobiont/state`"), Up;
        /// Form of the logs: human or json
        log_format: LogFormat, --"log-format" "FORMAT", Depends("human on a terminal, else json"), Up;
        /// How long running requests get at a stop
        grace_ms: u64, --"grace-ms" "MS", Is("10000"), Up;
        /// So many deaths of a process within a minute end the deployment
        max_deaths: NonZeroU32, --"max-deaths" "N", Is("5"), Up;
        /// Wait before a dead process is started again; doubled for each death within a minute
        restart_delay_ms: u64, --"restart-delay-ms" "MS", Is("100"), Up;
        /// A process that gave no sign of life for so long is killed and started again: the executor says nothing within
        /// a step, and those of large models on few cores are long
        watchdog_ms: NonZeroU64, --"watchdog-ms" "MS", Is("120000"), Up;
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

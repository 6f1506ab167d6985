//! Converts command line and environment to one checked [`GatewayConfig`].

mod args;
pub(crate) mod bases;
mod scoring;
mod sockets;
mod telemetry;
mod values;

use std::{
    net::SocketAddr,
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

use model_files::hub_access::HubAccess;
use security::{address::HostPort, tls_client::CredentialsError};
use settings::{ClassError, LogFormat, MAX_BASES, ServiceClass};
use text::{pair_template::PairTemplateError, sandbox::OWN_PROGRAM};

pub use self::{
    args::{
        AdapterArgs, AdmissionArgs, Args, BasesArgs, CallerArgs, ConnectionArgs, ExecutorArgs, KvEventArgs,
        ScoringArgs, TelemetryArgs, TrainingArgs,
    },
    bases::{BaseConfig, BasesConfig},
    scoring::{MAX_CLASSES, ScoringDefaults},
    telemetry::{MetricNames, TelemetryConfig},
    values::{
        AllowedHosts, BatchLimits, ConnectionLimits, ExecutorEndpoint, KvEventsConfig, NamedEndpoint,
        OutputParsers, RateLimits, ShutdownTrigger, StartAdapter, TrainingLimits,
    },
};
use scheduling::{admission::DelayLimits, routing::RoutingPolicy};

use self::sockets::{MAX_SOCKET_BYTES, addresses, check_sockets};
use crate::{
    adapters::{
        AllowList, AllowListError, BucketAccess, BucketAddress, EphemeralStorage, FleetStorage,
        PostgresAddress, RemoteOptions, records::address::AddressError, store::address::environment,
    },
    admission_queue::AdmissionLimits,
    executor::LinkSettings,
    executors::{Address, MAX_EXECUTORS},
    keys::{KeyFileError, Keys},
};

/// Name of the credential in which systemd passes the key file (`LoadCredential=api-keys:...`).
const KEY_CREDENTIAL: &str = "api-keys";
/// Maximum number of origins in `--cors-origins`, because each request is compared with all of them.
const MAX_ORIGINS: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum GatewayConfigError {
    #[error(
        "--listen {0} is reachable from other hosts without API keys; set --api-key-file, listen on \
         127.0.0.1, or set --insecure"
    )]
    OpenPort(SocketAddr),
    #[error("--{name} '{}' is longer than {MAX_SOCKET_BYTES} bytes, the limit of the system; use a \
             shorter path", path.display())]
    SocketPath { name: &'static str, path: PathBuf },
    #[error("--executor is set more than {MAX_EXECUTORS} times; remove some")]
    TooManyExecutors,
    #[error("--expected-workers has {given} numbers for {executors} executors; give one, or one for each")]
    ExpectedWorkers { given: usize, executors: usize },
    #[error("--executor {0} has the name or socket of another executor; use a different one")]
    SameExecutor(String),
    #[error("--executor {name} is on another host, which requires --{flag}; set it")]
    FarExecutor { name: String, flag: &'static str },
    #[error("'{0}' is not a valid host of a certificate; use a name or an address")]
    NoHostName(HostPort),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("cannot open --adapter-root '{}': {reason}; create it or set another", path.display())]
    AdapterRoot { path: PathBuf, reason: std::io::Error },
    #[error("--api-key-file: {0}")]
    Keys(#[source] KeyFileError),
    #[error("--shared-keys needs --registry and --api-key-file; set --{missing}")]
    SharedKeys { missing: &'static str },
    #[error("--{name} must be at least {least}")]
    TooSmall { name: &'static str, least: u64 },
    /// The name is empty, or could be confused with `base:adapter`.
    #[error(
        "--served-model-name '{0}' is not a valid name; use 1 to 256 characters without ':' and control \
         characters"
    )]
    ModelName(String),
    #[error("--{given} needs --{missing}, so that both are shared between hosts; set both, or neither")]
    Alone { given: &'static str, missing: &'static str },
    #[error("--registry: {0}")]
    Registry(#[from] AddressError),
    #[error(
        "--store: '{0}' is neither a bucket nor a directory; write s3://BUCKET/PREFIX with AWS_... \
         variables, or file:///DIRECTORY"
    )]
    Store(String),
    #[error("--allowed-adapter-uris: {0}")]
    AllowedUris(#[from] AllowListError),
    #[error("--class: {0}")]
    Classes(#[from] ClassError),
    #[error(
        "--cors-origins: '{0}' is not an origin; write 'https://host' or 'http://host:port', without a path"
    )]
    Origin(String),
    #[error("--cors-origins has more than {MAX_ORIGINS} origins; remove some")]
    Origins,
    #[error("cannot read --score-template '{}': {reason}; check the path", path.display())]
    ScoreTemplateFile { path: PathBuf, reason: std::io::Error },
    #[error("--score-template: {0}")]
    ScoreTemplate(#[from] PairTemplateError),
    #[error("--classifier-from-token has {0} tokens, and the limit is {MAX_CLASSES}; remove some")]
    TooManyTokens(usize),
    #[error("two bases are called '{0}', or are served under one name; rename one")]
    SameBase(String),
    #[error("the gateway has more than {MAX_BASES} bases; remove some")]
    TooManyBases,
    #[error("several bases need --served-model-name for the first one")]
    UnnamedBase,
    #[error("several bases need --executor NAME=PATH in place of --socket")]
    UnnamedExecutor,
    #[error("several bases cannot share --registry with other hosts; start a deployment for each base")]
    SharedBases,
    #[error("--asleep names the base '{0}', which --base and --base-name do not have")]
    UnknownBase(String),
    #[error(
        "--sleep-after-s and --asleep need --supervised, because nobody could start the executors of a \
         sleeping base otherwise; start the deployment with 'holobiont up', or remove both"
    )]
    Unsupervised,
}

#[derive(Debug)]
pub struct GatewayConfig {
    /// Addresses of the executors; at least one.
    pub executors: Vec<Address>,
    /// Model that executors are expected to have. The gateway reads this model for executors on other hosts.
    pub model: Option<String>,
    pub listen: SocketAddr,
    pub state: PathBuf,
    /// Name of the base model; `None` takes the name from the file name.
    pub served_model_name: Option<String>,
    /// Formats of tool calls and reasoning content in the model's output.
    pub parsers: OutputParsers,
    /// Tokens and prompt of scoring requests that name none.
    pub scoring: ScoringDefaults,
    pub adapters: Vec<StartAdapter>,
    /// Absolute path without links.
    pub adapter_root: PathBuf,
    pub max_adapters: usize,
    pub max_adapter_file_bytes: u64,
    /// Storage of adapters that end with the gateway.
    pub ephemeral: EphemeralStorage,
    /// Fetches of adapters by URI.
    pub remote: RemoteOptions,
    pub fleet: Option<FleetStorage>,
    pub keys: Keys,
    /// Host names under which a gateway without keys answers.
    pub hosts: AllowedHosts,
    /// Origins whose web pages may send requests from a browser, without a final slash.
    pub cors_origins: Vec<String>,
    pub rates: RateLimits,
    pub connections: ConnectionLimits,
    /// Program that compiles grammars, started by `text::sandbox`.
    pub helper_program: PathBuf,
    /// Policy that chooses the executor of a request.
    pub routing: RoutingPolicy,
    pub classes: Vec<ServiceClass>,
    pub admission: AdmissionLimits,
    pub executor: LinkSettings,
    pub training: TrainingLimits,
    pub batches: BatchLimits,
    /// How long running requests may continue after shutdown begins.
    pub grace: Duration,
    /// Number of threads for network I/O.
    pub threads: usize,
    pub telemetry: TelemetryConfig,
    /// Bases beside the first, and the sleep of all.
    pub bases: BasesConfig,
    /// Sockets of KV events; `None` publishes none.
    pub kv_events: Option<KvEventsConfig>,
    pub log_format: LogFormat,
    /// Event that shuts the process down.
    pub lifeline: ShutdownTrigger,
}

impl TryFrom<Args> for GatewayConfig {
    type Error = GatewayConfigError;

    fn try_from(args: Args) -> Result<Self, GatewayConfigError> {
        check_sizes(&args)?;
        let addresses = addresses(&args)?;
        check_sockets(&addresses, args.training.trainer_socket.as_ref())?;
        check_names(&args)?;
        ServiceClass::check(&args.callers.classes)?;
        let bases = BasesConfig::of(&args)?;
        let telemetry = TelemetryConfig::of(&args.telemetry, addresses.len())?;
        let key_file =
            args.callers.api_key_file.or_else(|| credential(std::env::var_os("CREDENTIALS_DIRECTORY")));
        let rates = RateLimits {
            per_key: NonZeroU32::new(args.callers.requests_per_min_per_key),
            per_adapter: NonZeroU32::new(args.callers.requests_per_min_per_adapter),
        };
        let shared_keys = shared_keys(args.callers.shared_keys, key_file.as_deref(), &args.adapters)?;
        let keys = match &key_file {
            None => Keys::none(rates.per_key),
            Some(path) if shared_keys.is_some() => Keys::brought(path, rates.per_key),
            Some(path) => Keys::read(path, rates.per_key).map_err(GatewayConfigError::Keys)?,
        };
        if key_file.is_none() && !args.listen.ip().is_loopback() && !args.callers.insecure {
            return Err(GatewayConfigError::OpenPort(args.listen));
        }
        let fleet = fleet(&args.adapters, shared_keys)?;
        let remote = remote(&args.adapters)?;
        Ok(Self {
            executors: addresses,
            model: args.executors.model,
            listen: args.listen,
            state: args.state,
            served_model_name: args.served_model_name,
            parsers: OutputParsers { calls: args.tool_call_parser, reasoning: args.reasoning_parser },
            scoring: ScoringDefaults::read(&args.scoring)?,
            adapters: args.adapters.start_adapters,
            adapter_root: adapter_root(&args.adapters.adapter_root)?,
            max_adapters: args.adapters.max_adapters,
            max_adapter_file_bytes: args.adapters.max_adapter_file_bytes.0,
            ephemeral: EphemeralStorage {
                memory: args.adapters.ephemeral_adapter_dir,
                bytes: args.adapters.ephemeral_adapter_bytes.0,
            },
            remote,
            fleet,
            keys,
            hosts: if args.callers.insecure { AllowedHosts::Any } else { AllowedHosts::Local },
            cors_origins: origins(&args.callers.cors_origins)?,
            rates,
            connections: (&args.connections).into(),
            helper_program: OWN_PROGRAM.into(),
            routing: args.executors.routing,
            classes: args.callers.classes,
            admission: admission_limits(&args.admission),
            executor: LinkSettings {
                max_sequences: args.admission.max_sequences,
                silence: Duration::from_millis(args.executor_timeout_ms),
            },
            training: args.training.into(),
            batches: BatchLimits { tenant_batches: args.admission.tenant_batches, ..BatchLimits::default() },
            grace: Duration::from_millis(args.grace_ms),
            threads: args.threads,
            telemetry,
            bases,
            kv_events: kv_events(args.kv_events),
            log_format: args.log_format,
            lifeline: if args.exit_with_stdin { ShutdownTrigger::Stdin } else { ShutdownTrigger::Signals },
        })
    }
}

fn check_sizes(args: &Args) -> Result<(), GatewayConfigError> {
    let (connections, adapters) = (&args.connections, &args.adapters);
    let sizes = [
        ("threads", args.threads as u64, 1),
        ("max-sequences", args.admission.max_sequences as u64, 1),
        ("codel-target-ms", args.admission.codel_target_ms, 1),
        ("codel-interval-ms", args.admission.codel_interval_ms, 1),
        ("max-body-bytes", connections.max_body_bytes.0, 1024),
        ("memory-bytes", connections.memory_bytes.0, 1024),
        ("tenant-memory-bytes", connections.tenant_memory_bytes.0, 1024),
        ("max-connections", connections.max_connections as u64, 1),
        ("header-timeout-ms", connections.header_timeout_ms, 1),
        ("body-timeout-ms", connections.body_timeout_ms, 1),
        ("client-write-timeout-ms", connections.client_write_timeout_ms, 1),
        ("executor-timeout-ms", args.executor_timeout_ms, 1),
        ("max-adapters", adapters.max_adapters as u64, 1),
        ("max-adapter-file-bytes", adapters.max_adapter_file_bytes.0, 1),
        ("tenant-fetched-bytes", adapters.tenant_fetched_bytes.0, 1),
        ("fetch-timeout-ms", adapters.fetch_timeout_ms, 1),
        ("tenant-batches", args.admission.tenant_batches as u64, 1),
        ("tenant-jobs", args.training.tenant_jobs as u64, 1),
        ("checkpoint-steps", args.training.checkpoint_steps.into(), 1),
        ("max-training-file-bytes", args.training.max_training_file_bytes.0, 1),
        ("tenant-training-bytes", args.training.tenant_training_bytes.0, 1),
        ("tenant-state-bytes", args.training.tenant_state_bytes.0, 1),
    ];
    match sizes.into_iter().find(|(_, value, least)| value < least) {
        None => Ok(()),
        Some((name, _, least)) => Err(GatewayConfigError::TooSmall { name, least }),
    }
}

fn check_names(args: &Args) -> Result<(), GatewayConfigError> {
    match &args.served_model_name {
        Some(name) if is_no_model_name(name) => Err(GatewayConfigError::ModelName(name.clone())),
        _ => Ok(()),
    }
}

fn is_no_model_name(name: &str) -> bool {
    name.is_empty() || name.len() > 256 || name.chars().any(|c| c == ':' || c.is_control())
}

/// Storage shared with other hosts. Registry and store are useless without each other.
fn fleet(args: &AdapterArgs, key_file: Option<PathBuf>) -> Result<Option<FleetStorage>, GatewayConfigError> {
    let (registry, store) = match (&args.registry, &args.store) {
        (None, None) => return Ok(None),
        (Some(registry), Some(store)) => (registry, store),
        (Some(_), None) => return Err(GatewayConfigError::Alone { given: "registry", missing: "store" }),
        (None, Some(_)) => return Err(GatewayConfigError::Alone { given: "store", missing: "registry" }),
    };
    Ok(Some(FleetStorage {
        registry: PostgresAddress::parse(registry)?,
        store: BucketAddress::parse(store, environment())
            .ok_or_else(|| GatewayConfigError::Store(store.clone()))?,
        cache_bytes: args.store_cache_bytes.0,
        key_file,
    }))
}

/// Fetches of adapters by URI, with the hub and the buckets of the environment.
fn remote(args: &AdapterArgs) -> Result<RemoteOptions, GatewayConfigError> {
    Ok(RemoteOptions {
        allowed: AllowList::parse(&args.allowed_adapter_uris)?,
        tenant_bytes: args.tenant_fetched_bytes.0,
        timeout: Duration::from_millis(args.fetch_timeout_ms),
        failure_time: Duration::from_millis(args.fetch_failure_ms),
        hub: HubAccess::from_env(),
        bucket: BucketAccess::of(environment()),
    })
}

/// Returns the file that receives the registry's API keys, if `--shared-keys` is given.
fn shared_keys(
    asked: bool,
    key_file: Option<&Path>,
    args: &AdapterArgs,
) -> Result<Option<PathBuf>, GatewayConfigError> {
    let needs = |missing| Err(GatewayConfigError::SharedKeys { missing });
    match (asked, &args.registry, key_file) {
        (false, ..) => Ok(None),
        (true, None, _) => needs("registry"),
        (true, _, None) => needs("api-key-file"),
        (true, Some(_), Some(path)) => Ok(Some(path.to_owned())),
    }
}

fn kv_events(args: KvEventArgs) -> Option<KvEventsConfig> {
    Some(KvEventsConfig {
        endpoint: args.kv_events_endpoint?,
        replay_endpoint: args.kv_events_replay_endpoint,
        topic: args.kv_events_topic,
    })
}

fn admission_limits(args: &AdmissionArgs) -> AdmissionLimits {
    let delays = DelayLimits {
        target: Duration::from_millis(args.codel_target_ms),
        interval: Duration::from_millis(args.codel_interval_ms),
    };
    AdmissionLimits {
        max_sequences: args.max_sequences,
        delays,
        burst_share: args.burst_share.0,
        background_share: args.background_share.0,
        background_beside: args.background_beside,
    }
}

/// Returns the key file that systemd passed, if there is one.
fn credential(directory: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let path = Path::new(&directory?).join(KEY_CREDENTIAL);
    // An unreadable key file must fail later, and never leave the gateway without keys.
    path.try_exists().unwrap_or(true).then_some(path)
}

fn origins(given: &[String]) -> Result<Vec<String>, GatewayConfigError> {
    if given.len() > MAX_ORIGINS {
        return Err(GatewayConfigError::Origins);
    }
    let checked =
        |given: &String| origin(given.trim()).ok_or_else(|| GatewayConfigError::Origin(given.clone()));
    given.iter().map(checked).collect()
}

/// Normalizes `scheme://host[:port]`, as browsers write it; `None` for anything else.
fn origin(given: &str) -> Option<String> {
    let host = given.strip_prefix("https://").or_else(|| given.strip_prefix("http://"))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-.:[]".contains(c);
    (!host.is_empty() && host.chars().all(plain)).then(|| given.to_ascii_lowercase())
}

fn adapter_root(path: &Path) -> Result<PathBuf, GatewayConfigError> {
    path.canonicalize().map_err(|reason| GatewayConfigError::AdapterRoot { path: path.to_owned(), reason })
}

#[cfg(test)]
mod tests;

//! Settings of the process: command line, then environment, then defaults.

mod devices;
mod layers;
mod sockets;
mod weights;

use std::{num::NonZeroU64, path::PathBuf};

use clap::{Parser, ValueEnum};
use model::{cuda::assist::Invocation, forward::BLOCK_TOKENS};
use settings::{
    AdapterDtype, ByteCount, CachePolicy, CacheWeight, ColdStart, CoreList, DeviceChoice, DraftChoice, Gbps,
    KvDtype, LogFormat, MAX_WORKERS, MemoryFraction, Precision,
};
use shmproto::{board::MAX_SEATS, message};

pub use self::{
    devices::DeviceFlags,
    layers::{LayerFlags, LayerSocket},
    weights::{WeightFlags, WeightReads},
};
use crate::engine::drafts::MAX_DRAFT_TOKENS;

const _: () = assert!(MAX_SEATS == MAX_WORKERS as usize, "every worker of a deployment has a seat");

/// The process that owns the frozen base weights and runs the resident engine.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "base-executor", version, mut_args(settings::described))]
pub struct ExecutorConfig {
    /// Base model: a GGUF file, a directory, or a hub name (org/name@revision).
    #[arg(long, value_name = "NAME_OR_PATH")]
    pub model: String,
    /// Seed of random weights instead of read ones, for measurements. The model needs only a config.json, and
    /// its answers are meaningless.
    #[arg(long, value_name = "SEED")]
    pub random_weights: Option<u64>,
    #[command(flatten)]
    pub weights: WeightFlags,
    /// Device that computes: cpu, cuda, or cuda:1 for another GPU than the first.
    #[arg(long, value_name = "DEVICE")]
    pub device: DeviceChoice,
    #[command(flatten)]
    pub group: DeviceFlags,
    /// Socket for gateways, in a directory that only this user may enter. Without an engine it only gives the
    /// place of `layers.sock`.
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_SOCKET", required_unless_present = "place")]
    pub socket: Option<PathBuf>,
    /// Engine for requests, or none to serve only the linear layers of the base.
    #[arg(long, value_name = "ENGINE", env = "HOLOBIONT_ENGINE", default_value = "resident")]
    pub engine: EngineKind,
    /// Cores to run on, such as 0,1 or 0-3 [default: all that are allowed].
    #[arg(long, value_name = "LIST")]
    pub cores: Option<CoreList>,
    /// Arithmetic of linear layers on a CPU.
    #[arg(long, value_name = "PRECISION")]
    pub precision: Precision,
    /// Maximum device memory of the KV cache [default: all of it].
    #[arg(long, value_name = "BYTES")]
    pub kv_bytes: Option<ByteCount>,
    /// Data type of the KV cache.
    #[arg(long, value_name = "DTYPE")]
    pub kv_dtype: KvDtype,
    /// Memory of the host tier for adapters, which workers read too.
    #[arg(long, value_name = "BYTES")]
    pub adapter_bytes: ByteCount,
    /// Data type of adapters in memory and in products.
    #[arg(long, value_name = "DTYPE")]
    pub adapter_dtype: AdapterDtype,
    /// Maximum device memory of adapters [default: device memory without the KV cache of one longest
    /// sequence].
    #[arg(long, value_name = "BYTES")]
    pub device_adapter_bytes: Option<ByteCount>,
    /// Device memory that the KV cache and adapters share by load [default: 1GiB, or the sum of their limits;
    /// nine tenths of a GPU's free memory].
    #[arg(long, value_name = "BYTES")]
    pub device_bytes: Option<ByteCount>,
    /// Host memory for offloaded KV blocks.
    #[arg(long, value_name = "BYTES")]
    pub host_bytes: ByteCount,
    /// Disk space for offloaded KV blocks.
    #[arg(long, value_name = "BYTES")]
    pub disk_bytes: ByteCount,
    /// Private directory of the file with offloaded KV blocks [default: history beside the gateways' socket].
    #[arg(long, value_name = "DIR")]
    pub disk_directory: Option<PathBuf>,
    /// Eviction policy of a full tier.
    #[arg(long, value_name = "POLICY")]
    pub cache_policy: CachePolicy,
    /// Unit of time of the eviction cost model, in milliseconds.
    #[arg(long, value_name = "MS")]
    pub cache_decay_ms: u64,
    /// Host memory of the process with its weights: bytes, or a fraction such as 1/2 [default: 15/16 of the
    /// machine or control group].
    #[arg(long, value_name = "PART")]
    pub process_memory: Option<MemoryFraction>,
    /// Memory share of a tenant, where other tenants have 1, such as alice=2; may be given many times.
    #[arg(long = "cache-weight", value_name = "TENANT=N")]
    pub cache_weights: Vec<CacheWeight>,
    /// Drafter of tokens that one step verifies: off, auto, ngram, early-exit, or the path of a smaller
    /// model. Answers do not depend on it.
    #[arg(long, value_name = "DRAFT")]
    pub draft: DraftChoice,
    /// Maximum number of draft tokens per sequence and step.
    #[arg(long, value_name = "N")]
    pub draft_tokens: usize,
    /// Memory for a drafter model's KV cache and its own rows of the head.
    #[arg(long, value_name = "BYTES")]
    pub draft_bytes: ByteCount,
    /// Mode of requests whose adapter is not on the device.
    #[arg(long, value_name = "MODE")]
    pub cold_start: ColdStart,
    /// Bandwidth of an emulated link between host tier and device, in gigabits per second, for experiments.
    #[arg(long, value_name = "GBIT_PER_S")]
    pub link_gbps: Option<Gbps>,
    /// Socket for workers [default: workers.sock beside the gateways' socket].
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_WORKER_SOCKET")]
    pub worker_socket: Option<PathBuf>,
    /// Signal from GPU to workers: in the GPU's own stream, or through the host, for comparison.
    #[arg(long, value_name = "WAY", env = "HOLOBIONT_WORKER_INVOCATION", default_value = "fused")]
    pub worker_invocation: WorkerInvocation,
    /// Maximum number of workers; 0 opens no socket for them.
    #[arg(long, value_name = "COUNT", env = "HOLOBIONT_MAX_WORKERS", default_value_t = 16)]
    pub max_workers: usize,
    /// Maximum number of sequences per step.
    #[arg(long, value_name = "COUNT")]
    pub max_running: usize,
    /// Maximum number of waiting requests, which is the longest burst; more are refused at once.
    ///
    /// The limit bounds memory. Gateways bound the waiting time under a lasting load.
    #[arg(long, value_name = "COUNT")]
    pub max_waiting: usize,
    /// Maximum number of prompt tokens of all waiting requests; a single waiting request may have more.
    #[arg(long, value_name = "TOKENS")]
    pub max_waiting_tokens: usize,
    /// Maximum number of prompt tokens per step; longer prompts take several steps.
    #[arg(long, value_name = "TOKENS")]
    pub chunk_tokens: usize,
    /// Maximum sequence length [default: the model's].
    #[arg(long, value_name = "TOKENS")]
    pub context_length: Option<usize>,
    /// Time for running requests to finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "MS")]
    pub grace_ms: u64,
    /// File that keeps the precision that auto chose, so that it stays with a deployment on any processor.
    #[arg(long, value_name = "PATH")]
    pub precision_file: Option<PathBuf>,
    /// Exit at the end of standard input, as on SIGTERM, because the supervisor is gone.
    #[arg(long)]
    pub exit_with_stdin: bool,
    #[command(flatten)]
    pub layers: LayerFlags,
    /// Format of the log on stderr.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub log_format: LogFormat,
}

/// The engine that runs the model's forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// The resident engine, for gateways; split clients run their own.
    Resident,
    /// No engine: the linear layers of any architecture, for split clients only.
    None,
}

/// The way in which a GPU signals workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkerInvocation {
    /// The GPU copies, signals and waits in its own stream (CaraServe §4.2).
    Fused,
    /// The host copies, waits for the copy, and signals.
    Native,
}

impl From<WorkerInvocation> for Invocation {
    fn from(way: WorkerInvocation) -> Self {
        match way {
            WorkerInvocation::Fused => Self::Fused,
            WorkerInvocation::Native => Self::Native,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorConfigError {
    #[error("--cores or --devices names core {0}, on which this process may not run; remove it")]
    Core(usize),
    #[error("{flag} is {value}, but must be at least {least}; raise or remove it")]
    TooSmall { flag: &'static str, value: usize, least: usize },
    #[error("{flag} is {value}, but must be at most {most}; lower it")]
    TooLarge { flag: &'static str, value: usize, most: usize },
    /// TLS is set without a certificate.
    #[error("--layer-listen needs --layer-cert and --layer-cert-key; set all three, or none")]
    LayerCertificate,
    /// A certificate is set without TLS.
    #[error(
        "--layer-cert, --layer-cert-key and --layer-client-ca have no effect without --layer-listen; set \
         it too"
    )]
    LayerListen,
    /// Remote gateways are allowed without the port or the authority that identifies them.
    #[error("--layer-gateways needs --layer-listen and --layer-client-ca; set both")]
    LayerGateways,
    /// Remote gateways are allowed without an engine.
    #[error("--layer-gateways has no effect with --engine none; remove one of them")]
    NothingToDrive,
    /// The resident engine has no socket.
    #[error("--engine resident needs --socket for gateways; set it, or use --engine none")]
    NoSocket,
    /// Both the engine and the layer service are off.
    #[error("--engine none with --layers off serves nothing; remove one of them")]
    NothingToServe,
    /// Split clients would need model files, which random weights do not have.
    #[error("--engine none serves a model's files, which --random-weights does not have; remove one of them")]
    NothingToLend,
    /// Streamed weights are set for a GPU.
    #[error("--resident-weight-bytes has no effect on a GPU; remove it, or use --device cpu")]
    StreamedToGpu,
    /// The CPU's activation precision is set for a GPU.
    #[error("--precision has no effect on a GPU; remove it, or use --device cpu")]
    PrecisionOfGpu,
    /// The KV cache data type is not available on GPUs.
    #[error("--kv-dtype int8 and bf16 work only with --device cpu; remove it, or use f16")]
    KvOfGpu,
    /// A device group is set beside cores.
    #[error("--devices name the cores of each device; remove --cores")]
    GroupCores,
    /// A device group is set for a GPU.
    #[error("--devices are CPU devices and do not go with --device cuda; remove one of them")]
    GroupOfGpu,
    /// A device group is set for streamed weights.
    #[error(
        "--devices hold all weights in memory and do not go with --resident-weight-bytes; remove one of them"
    )]
    GroupStreams,
    /// A device group is set without an engine.
    #[error("--devices need --engine resident; remove them, or name --cores")]
    GroupWithoutEngine,
    /// A drafter would need the base's layers in one process.
    #[error(
        "--draft early-exit needs whole layers in one process; with --devices use auto, ngram or a model"
    )]
    GroupDrafts,
    /// Drafting needs verification with the bits of a decode step, which GPUs lack.
    #[error("with a GPU, --draft must be off or auto; remove it, or use --device cpu")]
    DraftDevice,
    /// Remote split clients are allowed without the layer service.
    #[error("--layer-listen has no effect with --layers off; remove one of them")]
    LayersOff,
}

impl ExecutorConfig {
    /// Checks settings against each other and against limits.
    ///
    /// # Errors
    /// If a value cannot work; the error names the setting.
    pub fn validated(self) -> Result<Self, ExecutorConfigError> {
        let at_least = |flag, value, least| {
            if value < least { Err(ExecutorConfigError::TooSmall { flag, value, least }) } else { Ok(()) }
        };
        at_least("--max-running", self.max_running, 1)?;
        at_least("--max-waiting", self.max_waiting, 1)?;
        at_least("--max-waiting-tokens", self.max_waiting_tokens, 1)?;
        at_least("--chunk-tokens", self.chunk_tokens, BLOCK_TOKENS)?;
        at_least("--context-length", self.context_length.unwrap_or(2), 2)?;
        at_least("--cache-decay-ms", usize::try_from(self.cache_decay_ms).unwrap_or(usize::MAX), 1)?;
        at_least("--draft-tokens", self.draft_tokens, 1)?;
        if self.draft_tokens > MAX_DRAFT_TOKENS {
            let (flag, value) = ("--draft-tokens", self.draft_tokens);
            return Err(ExecutorConfigError::TooLarge { flag, value, most: MAX_DRAFT_TOKENS });
        }
        let drafts = !matches!(self.draft, DraftChoice::Off | DraftChoice::Auto);
        if drafts && self.device != DeviceChoice::Cpu {
            return Err(ExecutorConfigError::DraftDevice);
        }
        if matches!(self.kv_dtype, KvDtype::Int8 | KvDtype::Bf16) && self.device != DeviceChoice::Cpu {
            return Err(ExecutorConfigError::KvOfGpu);
        }
        if self.precision != Precision::Auto && self.device != DeviceChoice::Cpu {
            return Err(ExecutorConfigError::PrecisionOfGpu);
        }
        self.group.check(&self)?;
        if self.max_workers > MAX_SEATS {
            let (flag, value) = ("--max-workers", self.max_workers);
            return Err(ExecutorConfigError::TooLarge { flag, value, most: MAX_SEATS });
        }
        self.layers.check()?;
        self.weights.check(self.device)?;
        let is_off = self.layers.place == Some(LayerSocket::Off);
        match (self.engine, &self.socket) {
            (EngineKind::Resident, None) => return Err(ExecutorConfigError::NoSocket),
            (EngineKind::None, _) if is_off => return Err(ExecutorConfigError::NothingToServe),
            (EngineKind::None, _) if self.random_weights.is_some() => {
                return Err(ExecutorConfigError::NothingToLend);
            }
            (EngineKind::None, _) if !self.layers.gateways.is_empty() => {
                return Err(ExecutorConfigError::NothingToDrive);
            }
            _ if is_off && self.layers.listen.is_some() => return Err(ExecutorConfigError::LayersOff),
            _ => {}
        }
        Ok(self)
    }

    /// Returns the cores of this process: of a group's first device, or as set; `None` allows all.
    #[must_use]
    pub fn own_cores(&self) -> Option<&CoreList> {
        self.group.own_cores().or(self.cores.as_ref())
    }

    /// Returns the bytes per second of the emulated link.
    #[must_use]
    pub(crate) fn link_bytes_per_s(&self) -> Option<NonZeroU64> {
        self.link_gbps.and_then(|gbps| NonZeroU64::new(gbps.bytes_per_s()))
    }

    /// Returns the cold start mode as a message value.
    #[must_use]
    pub fn cold_start(&self) -> message::ColdStart {
        match self.cold_start {
            ColdStart::CpuAssist => message::ColdStart::CpuAssist,
            ColdStart::OnDemand => message::ColdStart::OnDemand,
            ColdStart::Cached => message::ColdStart::Cached,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer_service::settings::LayerSettings;

    fn parse(arguments: &[&str]) -> Result<ExecutorConfig, clap::Error> {
        let required = ["base-executor", "--model", "m", "--socket", "s"];
        ExecutorConfig::try_parse_from(required.iter().chain(arguments))
    }

    #[test]
    fn every_setting_but_model_and_socket_has_a_default() {
        let config = parse(&[]).unwrap().validated().unwrap();
        assert_eq!((config.device, config.kv_bytes), (DeviceChoice::Cpu, None));
        assert_eq!(config.random_weights, None);
        assert_eq!(config.adapter_bytes, ByteCount(1 << 30));
        assert_eq!((config.max_running, config.max_waiting, config.chunk_tokens), (64, 512, 512));
        assert_eq!((config.device_adapter_bytes, config.max_workers), (None, 16));
        assert_eq!((config.cold_start, config.link_bytes_per_s()), (ColdStart::CpuAssist, None));
        assert_eq!(config.worker_socket(), PathBuf::from("workers.sock"));
        assert_eq!(config.layer_socket(), Some(PathBuf::from("layers.sock")));
        assert_eq!(
            (config.engine, config.layers.settings()),
            (EngineKind::Resident, LayerSettings::default())
        );
        assert_eq!((config.cores, config.context_length, config.grace_ms), (None, None, 10_000));
    }

    #[test]
    fn a_value_that_cannot_work_is_named() {
        let refused = parse(&["--chunk-tokens", "1"]).unwrap().validated().unwrap_err();
        assert!(refused.to_string().contains("--chunk-tokens is 1"), "{refused}");
        assert!(parse(&["--max-waiting", "0"]).unwrap().validated().is_err());
    }

    #[test]
    fn what_split_clients_are_served_is_checked_as_a_whole() {
        let checked = |arguments: &[&str]| parse(arguments).unwrap().validated();
        assert_eq!(checked(&["--layers", "off"]).unwrap().layer_socket(), None);
        assert_eq!(checked(&["--layers", "a/b", "--random-weights", "1"]).unwrap().layer_socket(), None);
        assert_eq!(checked(&["--layers", "a/b"]).unwrap().layer_socket(), Some(PathBuf::from("a/b")));
        let refused = [
            (vec!["--engine", "none", "--layers", "off"], ExecutorConfigError::NothingToServe),
            (vec!["--engine", "none", "--random-weights", "1"], ExecutorConfigError::NothingToLend),
            (vec!["--layer-listen", "127.0.0.1:1"], ExecutorConfigError::LayerCertificate),
            (vec!["--device", "cuda", "--resident-weight-bytes", "1MiB"], ExecutorConfigError::StreamedToGpu),
            (vec!["--device", "cuda", "--precision", "int8"], ExecutorConfigError::PrecisionOfGpu),
            (vec!["--device", "cuda", "--kv-dtype", "int8"], ExecutorConfigError::KvOfGpu),
            (vec!["--device", "cuda", "--kv-dtype", "bf16"], ExecutorConfigError::KvOfGpu),
            (vec!["--layer-cert", "c", "--layer-cert-key", "k"], ExecutorConfigError::LayerListen),
            (vec!["--layer-gateways", "front"], ExecutorConfigError::LayerGateways),
            (vec!["--devices", "cpu:0 cpu:1", "--device", "cuda"], ExecutorConfigError::GroupOfGpu),
            (
                vec!["--devices", "cpu:0 cpu:1", "--resident-weight-bytes", "1GiB"],
                ExecutorConfigError::GroupStreams,
            ),
            (vec!["--devices", "cpu:0 cpu:1", "--cores", "0"], ExecutorConfigError::GroupCores),
            (vec!["--devices", "cpu:0 cpu:1", "--engine", "none"], ExecutorConfigError::GroupWithoutEngine),
            (vec!["--devices", "cpu:0 cpu:1", "--draft", "early-exit"], ExecutorConfigError::GroupDrafts),
        ];
        for (arguments, error) in refused {
            assert_eq!(checked(&arguments), Err(error), "{arguments:?}");
        }
        assert_eq!(checked(&["--devices", "cpu:1 cpu:0"]).unwrap().own_cores(), Some(&"1".parse().unwrap()));
        for wrong in ["--layer-max-sessions=0", "--layer-tenant-rows=0", "--layer-rows-per-s=0"] {
            assert!(checked(&[wrong]).is_err(), "{wrong}");
        }
        for wrong in ["--layer-batch-wait-factor=nan", "--layer-batch-wait-factor=-1", "--link-gbps=0"] {
            assert!(parse(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn without_an_engine_a_place_for_split_clients_is_enough() {
        let parse = |arguments: &[&str]| {
            let required = ["base-executor", "--model", "m"];
            ExecutorConfig::try_parse_from(required.iter().chain(arguments)).map(ExecutorConfig::validated)
        };
        let config = parse(&["--engine", "none", "--layers", "l"]).unwrap().unwrap();
        assert_eq!((config.socket.as_deref(), config.layer_socket()), (None, Some(PathBuf::from("l"))));
        assert_eq!(parse(&["--layers", "l"]).unwrap(), Err(ExecutorConfigError::NoSocket));
        assert!(parse(&["--engine", "none"]).is_err());
    }
}

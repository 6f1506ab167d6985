//! Settings of the process: from the command line, else from the environment, else their defaults.

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
    layers::{LayerFlags, LayerSocket},
    weights::{WeightFlags, WeightReads},
};
use crate::engine::drafts::MAX_DRAFT_TOKENS;

const _: () = assert!(MAX_SEATS == MAX_WORKERS as usize, "every worker of a deployment has a seat");

/// The process that owns the frozen base weights and runs the resident engine.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "base-executor", version, mut_args(settings::described))]
pub struct ExecutorConfig {
    /// The base model: a GGUF file, a directory, or a hub name (org/name@revision).
    #[arg(long, value_name = "NAME_OR_PATH")]
    pub model: String,
    /// Make the weights of this number instead of reading them: the model needs a config.json only. Answers mean
    /// nothing; how long they take does.
    #[arg(long, value_name = "SEED")]
    pub random_weights: Option<u64>,
    /// Where the weights are.
    #[command(flatten)]
    pub weights: WeightFlags,
    /// What computes: cpu, cuda, or cuda:1 for another GPU than the first.
    #[arg(long, value_name = "DEVICE")]
    pub device: DeviceChoice,
    /// Where gateways connect: a socket in a directory that only this user may enter. Without an engine no gateway
    /// connects, and it says where `layers.sock` is.
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_SOCKET", required_unless_present = "place")]
    pub socket: Option<PathBuf>,
    /// Whether requests are answered here, or only the linear layers of the base are served.
    #[arg(long, value_name = "ENGINE", env = "HOLOBIONT_ENGINE", default_value = "resident")]
    pub engine: EngineKind,
    /// Cores to run on, such as 0,1 or 0-3 [default: all that are allowed].
    #[arg(long, value_name = "LIST")]
    pub cores: Option<CoreList>,
    /// How finely a CPU rounds activations where they meet integer weights.
    #[arg(long, value_name = "PRECISION")]
    pub precision: Precision,
    /// Of the device's memory, keys and values take no more than this [default: all of it].
    #[arg(long, value_name = "BYTES")]
    pub kv_bytes: Option<ByteCount>,
    /// How keys and values are stored.
    #[arg(long, value_name = "DTYPE")]
    pub kv_dtype: KvDtype,
    /// Memory for adapters in the host tier, where workers read them too.
    #[arg(long, value_name = "BYTES")]
    pub adapter_bytes: ByteCount,
    /// How adapters are stored and multiplied.
    #[arg(long, value_name = "DTYPE")]
    pub adapter_dtype: AdapterDtype,
    /// Of the device's memory, adapters take no more than this [default: what one longest sequence leaves].
    #[arg(long, value_name = "BYTES")]
    pub device_adapter_bytes: Option<ByteCount>,
    /// Memory of the device for keys, values and adapters, which share it as the load wants it [default: 1GiB, or what their
    /// bounds add up to; nine tenths of what a GPU has left].
    #[arg(long, value_name = "BYTES")]
    pub device_bytes: Option<ByteCount>,
    /// Memory of the host for keys and values that leave the device.
    #[arg(long, value_name = "BYTES")]
    pub host_bytes: ByteCount,
    /// Room on the disk for keys and values of the past.
    #[arg(long, value_name = "BYTES")]
    pub disk_bytes: ByteCount,
    /// Private directory of the file that holds them [default: history beside the gateways' socket].
    #[arg(long, value_name = "DIR")]
    pub disk_directory: Option<PathBuf>,
    /// Who leaves a full tier first.
    #[arg(long, value_name = "POLICY")]
    pub cache_policy: CachePolicy,
    /// The cost model's unit of time, in milliseconds.
    #[arg(long, value_name = "MS")]
    pub cache_decay_ms: u64,
    /// Memory of this host that the process may hold in all, its weights too: bytes, or a part, as 1/2 [default: fifteen
    /// sixteenths of the machine or of its control group].
    #[arg(long, value_name = "PART")]
    pub process_memory: Option<MemoryFraction>,
    /// A tenant's part of memory beside others, whose part is 1: alice=2; may be given many times.
    #[arg(long = "cache-weight", value_name = "TENANT=N")]
    pub cache_weights: Vec<CacheWeight>,
    /// Who drafts tokens, which are then verified several in one step: off, auto, ngram, self, or the path of a smaller model. No
    /// answer is another for it.
    #[arg(long, value_name = "DRAFT")]
    pub draft: DraftChoice,
    /// Most drafted tokens of a sequence that a step verifies.
    #[arg(long, value_name = "N")]
    pub draft_tokens: usize,
    /// Memory for keys and values of a draft that is a model, and for the rows of the head that it has of its own.
    #[arg(long, value_name = "BYTES")]
    pub draft_bytes: ByteCount,
    /// What a request does whose adapter is not on the device.
    #[arg(long, value_name = "MODE")]
    pub cold_start: ColdStart,
    /// Emulate a link of this many gigabits per second between host tier and device, for experiments.
    #[arg(long, value_name = "GBIT_PER_S")]
    pub link_gbps: Option<Gbps>,
    /// Where workers connect [default: workers.sock beside the gateways' socket].
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_WORKER_SOCKET")]
    pub worker_socket: Option<PathBuf>,
    /// How the GPU asks workers: in its own stream, or through the host, for comparison.
    #[arg(long, value_name = "WAY", env = "HOLOBIONT_WORKER_INVOCATION", default_value = "fused")]
    pub worker_invocation: WorkerInvocation,
    /// Most workers; with 0 there is no socket for them.
    #[arg(long, value_name = "COUNT", env = "HOLOBIONT_MAX_WORKERS", default_value_t = 16)]
    pub max_workers: usize,
    /// Requests computed together.
    #[arg(long, value_name = "COUNT")]
    pub max_running: usize,
    /// Requests that may wait for their turn: the longest burst. More are refused at once.
    ///
    /// This bounds memory. That nobody waits for too long under a load that lasts is the gateways' to see to.
    #[arg(long, value_name = "COUNT")]
    pub max_waiting: usize,
    /// Prompt tokens of all requests that wait, together; a request that would wait alone is never too long.
    #[arg(long, value_name = "TOKENS")]
    pub max_waiting_tokens: usize,
    /// Prompt tokens computed in a step; longer prompts take several.
    #[arg(long, value_name = "TOKENS")]
    pub chunk_tokens: usize,
    /// Longest sequence, if shorter than the model's own [default: the model's].
    #[arg(long, value_name = "TOKENS")]
    pub context_length: Option<usize>,
    /// Time for running requests to finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "MS")]
    pub grace_ms: u64,
    /// Treat the end of standard input like SIGTERM: the supervisor that holds its other end is gone.
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// What split clients are served.
    #[command(flatten)]
    pub layers: LayerFlags,
    /// How the log is written to stderr.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub log_format: LogFormat,
}

/// Who runs the model's pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// The resident engine, for gateways; split clients run their own.
    Resident,
    /// Split clients alone: of any architecture, its linear layers.
    None,
}

/// How a GPU asks workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkerInvocation {
    /// It copies, signals and waits in its own stream (CaraServe §4.2).
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

/// Why the settings make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorConfigError {
    /// The process may not run on a core.
    #[error("--cores names core {0}, which this process may not run on; leave it out")]
    Core(usize),
    /// A number is too small to work with.
    #[error("{flag} is {value}, but must be at least {least}; raise it or leave it out")]
    TooSmall {
        /// The setting.
        flag: &'static str,
        /// What it is.
        value: usize,
        /// What it must be.
        least: usize,
    },
    /// A number is too large to work with.
    #[error("{flag} is {value}, but must be at most {most}; lower it")]
    TooLarge {
        /// The setting.
        flag: &'static str,
        /// What it is.
        value: usize,
        /// What it may be.
        most: usize,
    },
    /// TLS without a certificate.
    #[error("--layer-listen needs --layer-cert and --layer-cert-key: give all three, or none")]
    LayerCertificate,
    /// A certificate without TLS.
    #[error(
        "--layer-cert, --layer-cert-key and --layer-client-ca do nothing without --layer-listen: give it too"
    )]
    LayerListen,
    /// Gateways that nobody could tell from others, or that could not come.
    #[error(
        "--layer-gateways needs --layer-listen, where they come, and --layer-client-ca, which signs their certificates: give both"
    )]
    LayerGateways,
    /// Gateways of other hosts have nothing to drive.
    #[error("--layer-gateways does nothing with --engine none: leave one of them out")]
    NothingToDrive,
    /// An engine that nobody reaches.
    #[error("--engine resident needs --socket, where gateways connect: give it, or --engine none")]
    NoSocket,
    /// Neither engine nor layers.
    #[error("--engine none with --layers off serves nothing: leave one of them out")]
    NothingToServe,
    /// Files to lend that there are none of.
    #[error(
        "--engine none lends a model's files to split clients, and --random-weights has none: leave one of them out"
    )]
    NothingToLend,
    /// A GPU has weights in its own memory.
    #[error(
        "--resident-weight-bytes has the host's cores read weights from a disk, and --device names a GPU: leave one of them out"
    )]
    StreamedToGpu,
    /// A GPU rounds in its own way.
    #[error("--precision is what the host's cores compute with, and --device names a GPU: leave it out")]
    PrecisionOfGpu,
    /// Keys and values in a form that no GPU has.
    #[error("--kv-dtype int8 is for --device cpu alone; leave it out, or take f16")]
    KvOfGpu,
    /// Drafts where verification does not have the bits of a decode step.
    #[error(
        "--draft works with --device cpu alone, but for off and auto; leave it out, or take one of these"
    )]
    DraftDevice,
    /// Other hosts' clients without the service.
    #[error("--layer-listen does nothing with --layers off: leave one of them out")]
    LayersOff,
}

impl ExecutorConfig {
    /// Checks what the types alone do not.
    ///
    /// # Errors
    /// If a value cannot work; the setting is named.
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
        if self.kv_dtype == KvDtype::Int8 && self.device != DeviceChoice::Cpu {
            return Err(ExecutorConfigError::KvOfGpu);
        }
        if self.precision != Precision::Auto && self.device != DeviceChoice::Cpu {
            return Err(ExecutorConfigError::PrecisionOfGpu);
        }
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

    /// Bytes a second that an emulated link lets through.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> Option<NonZeroU64> {
        self.link_gbps.and_then(|gbps| NonZeroU64::new(gbps.bytes_per_s()))
    }

    /// What a request does whose adapter is not on the device, as gateways are told.
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
            (vec!["--layer-cert", "c", "--layer-cert-key", "k"], ExecutorConfigError::LayerListen),
            (vec!["--layer-gateways", "front"], ExecutorConfigError::LayerGateways),
        ];
        for (arguments, error) in refused {
            assert_eq!(checked(&arguments), Err(error), "{arguments:?}");
        }
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

//! Settings of the process: from the command line, else from the environment, else their defaults.

mod layers;
mod values;

use std::{num::NonZeroU64, path::PathBuf};

use clap::{Parser, ValueEnum};
use model::{assist::Invocation, forward::BLOCK_TOKENS};
use shmproto::{board::MAX_SEATS, message::ColdStart};

pub use self::{
    layers::{LayerBatching, LayerFlags, LayerPlace},
    values::{ByteCount, CoreList, DeviceChoice},
};

const BYTES_PER_GIGABIT: f64 = 125e6;

/// The process that owns the frozen base weights and runs the resident engine.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "base-executor", version)]
pub struct Config {
    /// The base model: a GGUF file, a directory, or a hub name (org/name@revision).
    #[arg(long, value_name = "NAME_OR_PATH", env = "HOLOBIONT_MODEL")]
    pub model: String,
    /// Make the weights of this number instead of reading them: the model needs a config.json only. Answers mean
    /// nothing; how long they take does.
    #[arg(long, value_name = "SEED", env = "HOLOBIONT_RANDOM_WEIGHTS")]
    pub random_weights: Option<u64>,
    /// What computes: cpu, cuda, or cuda:1 for another GPU than the first.
    #[arg(long, value_name = "DEVICE", env = "HOLOBIONT_DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// Where gateways connect: a socket in a directory that only this user may enter. Without an engine no gateway
    /// connects, and it says where `layers.sock` is.
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_SOCKET", required_unless_present = "place")]
    pub socket: Option<PathBuf>,
    /// Whether requests are answered here, or only the linear layers of the base are served.
    #[arg(long, value_name = "ENGINE", env = "HOLOBIONT_ENGINE", default_value = "resident")]
    pub engine: EngineKind,
    /// Cores to run on, such as 0,1 or 0-3 [default: all that are allowed].
    #[arg(long, value_name = "LIST", env = "HOLOBIONT_CORES")]
    pub cores: Option<CoreList>,
    /// Memory for keys and values [default: 512MiB; on a GPU nine tenths of what everything else leaves].
    #[arg(long, value_name = "BYTES", env = "HOLOBIONT_KV_BYTES")]
    pub kv_bytes: Option<ByteCount>,
    /// How keys and values are stored.
    #[arg(long, value_name = "DTYPE", env = "HOLOBIONT_KV_DTYPE", default_value = "auto")]
    pub kv_dtype: KvDtype,
    /// Memory for adapters in the host tier, where workers read them too.
    #[arg(long, value_name = "BYTES", env = "HOLOBIONT_ADAPTER_BYTES", default_value = "1GiB")]
    pub adapter_bytes: ByteCount,
    /// How adapters are stored and multiplied.
    #[arg(long, value_name = "DTYPE", env = "HOLOBIONT_ADAPTER_DTYPE", default_value = "auto")]
    pub adapter_dtype: AdapterDtype,
    /// Memory for adapters on the device; on a CPU, huge pages beside the host tier.
    #[arg(long, value_name = "BYTES", env = "HOLOBIONT_DEVICE_ADAPTER_BYTES", default_value = "512MiB")]
    pub device_adapter_bytes: ByteCount,
    /// What a request does whose adapter is not on the device.
    #[arg(long, value_name = "MODE", env = "HOLOBIONT_COLD_START", default_value = "cpu-assist")]
    pub cold_start: ColdStartMode,
    /// Emulate a link of this many gigabits per second between host tier and device, for experiments.
    #[arg(long, value_name = "GBIT_PER_S", env = "HOLOBIONT_LINK_GBPS")]
    pub link_gbps: Option<f64>,
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
    #[arg(long, value_name = "COUNT", env = "HOLOBIONT_MAX_RUNNING", default_value_t = 64)]
    pub max_running: usize,
    /// Requests that may wait for their turn; more are refused at once.
    ///
    /// A request that is let in last waits until as many have ended, about max_waiting / max_running of the time one
    /// takes. An eighth keeps the first token about as near as it is without a queue; the queue only has to bridge the
    /// moment between one request's end and the next one's arrival.
    #[arg(long, value_name = "COUNT", env = "HOLOBIONT_MAX_WAITING", default_value_t = 8)]
    pub max_waiting: usize,
    /// Prompt tokens computed in a step; longer prompts take several.
    #[arg(long, value_name = "TOKENS", env = "HOLOBIONT_CHUNK_TOKENS", default_value_t = 512)]
    pub chunk_tokens: usize,
    /// Longest sequence, if shorter than the model's own [default: the model's].
    #[arg(long, value_name = "TOKENS", env = "HOLOBIONT_CONTEXT_LENGTH")]
    pub context_length: Option<usize>,
    /// Time for running requests to finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "MS", env = "HOLOBIONT_GRACE_MS", default_value_t = 10_000)]
    pub grace_ms: u64,
    /// Treat the end of standard input like SIGTERM: the supervisor that holds its other end is gone.
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// What split clients are served.
    #[command(flatten)]
    pub layers: LayerFlags,
    /// How the log is written to stderr.
    #[arg(long, value_name = "FORMAT", env = "HOLOBIONT_LOG_FORMAT", default_value = "auto")]
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

/// How adapters are stored and multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AdapterDtype {
    /// What suits the weights: `exact` for weights of 32 or 16 bits that are not rounded, else `f16`.
    Auto,
    /// As many bits as hold the adapter's own numbers.
    Exact,
    /// 16 bits with 11 of precision; multiplied in 32.
    F16,
    /// 16 bits with 8 of precision, and so are the activations they meet: twice as fast with long prompts.
    Bf16,
}

/// What a request does whose adapter is not on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ColdStartMode {
    /// It starts at once; CPU workers compute what has not arrived.
    CpuAssist,
    /// It waits until the adapter has arrived.
    OnDemand,
    /// There are none: a load is answered once the adapter is on the device.
    Cached,
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

impl From<ColdStartMode> for ColdStart {
    fn from(mode: ColdStartMode) -> Self {
        match mode {
            ColdStartMode::CpuAssist => Self::CpuAssist,
            ColdStartMode::OnDemand => Self::OnDemand,
            ColdStartMode::Cached => Self::Cached,
        }
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvDtype {
    /// What suits the weights.
    Auto,
    /// 32 bits.
    F32,
    /// 16 bits.
    F16,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines to read.
    Human,
    /// An object a line.
    Json,
    /// `human` on a terminal, else `json`.
    Auto,
}

/// Why the settings make no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
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
    /// The emulated link has no speed.
    #[error(
        "--link-gbps is {0}, but must be a positive number of gigabits per second; leave it out for the real link"
    )]
    Link(f64),
    /// The waits of layer calls have no length.
    #[error("--layer-wait-factor is {0}, but must be between 0 and 1000; leave it out for 1")]
    WaitFactor(f64),
    /// TLS without a certificate.
    #[error("--layer-listen needs --layer-cert and --layer-cert-key: give all three, or none")]
    LayerCertificate,
    /// A certificate without TLS.
    #[error(
        "--layer-cert, --layer-cert-key and --layer-client-ca do nothing without --layer-listen: give it too"
    )]
    LayerListen,
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
    /// Other hosts' clients without the service.
    #[error("--layer-listen does nothing with --layers off: leave one of them out")]
    LayersOff,
}

impl Config {
    /// Checks what the types alone do not.
    ///
    /// # Errors
    /// If a value cannot work; the setting is named.
    pub fn validated(self) -> Result<Self, ConfigError> {
        let at_least = |flag, value, least| {
            if value < least { Err(ConfigError::TooSmall { flag, value, least }) } else { Ok(()) }
        };
        at_least("--max-running", self.max_running, 1)?;
        at_least("--max-waiting", self.max_waiting, 1)?;
        at_least("--chunk-tokens", self.chunk_tokens, BLOCK_TOKENS)?;
        at_least("--context-length", self.context_length.unwrap_or(2), 2)?;
        if self.max_workers > MAX_SEATS {
            let (flag, value) = ("--max-workers", self.max_workers);
            return Err(ConfigError::TooLarge { flag, value, most: MAX_SEATS });
        }
        self.layers.check()?;
        let is_off = self.layers.place == Some(LayerPlace::Off);
        match (self.engine, &self.socket) {
            (EngineKind::Resident, None) => return Err(ConfigError::NoSocket),
            (EngineKind::None, _) if is_off => return Err(ConfigError::NothingToServe),
            (EngineKind::None, _) if self.random_weights.is_some() => return Err(ConfigError::NothingToLend),
            _ if is_off && self.layers.listen.is_some() => return Err(ConfigError::LayersOff),
            _ => {}
        }
        match self.link_gbps {
            Some(gbps) if !(gbps.is_finite() && gbps * BYTES_PER_GIGABIT >= 1.0) => {
                Err(ConfigError::Link(gbps))
            }
            _ => Ok(self),
        }
    }

    /// Bytes a second that an emulated link lets through.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> Option<NonZeroU64> {
        // Validated to be at least 1; a float beyond the integers becomes the largest of them.
        self.link_gbps.and_then(|gbps| NonZeroU64::new((gbps * BYTES_PER_GIGABIT) as u64))
    }

    /// Where workers connect.
    #[must_use]
    pub fn worker_socket(&self) -> PathBuf {
        self.worker_socket.clone().unwrap_or_else(|| self.beside("workers.sock"))
    }

    /// Where split clients of this host connect; `None` if they are not served.
    #[must_use]
    pub fn layer_socket(&self) -> Option<PathBuf> {
        match &self.layers.place {
            // There are no files to give them.
            _ if self.random_weights.is_some() => None,
            Some(LayerPlace::Off) => None,
            Some(LayerPlace::At(path)) => Some(path.clone()),
            None => Some(self.beside("layers.sock")),
        }
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.socket.as_ref().map_or_else(|| name.into(), |socket| socket.with_file_name(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::settings::LayerSettings;

    fn parse(arguments: &[&str]) -> Result<Config, clap::Error> {
        let required = ["base-executor", "--model", "m", "--socket", "s"];
        Config::try_parse_from(required.iter().chain(arguments))
    }

    #[test]
    fn every_setting_but_model_and_socket_has_a_default() {
        let config = parse(&[]).unwrap().validated().unwrap();
        assert_eq!((config.device, config.kv_bytes), (DeviceChoice::Cpu, None));
        assert_eq!(config.random_weights, None);
        assert_eq!(config.adapter_bytes, ByteCount(1 << 30));
        assert_eq!((config.max_running, config.max_waiting, config.chunk_tokens), (64, 8, 512));
        assert_eq!((config.device_adapter_bytes, config.max_workers), (ByteCount(512 << 20), 16));
        assert_eq!((config.cold_start, config.link_bytes_per_s()), (ColdStartMode::CpuAssist, None));
        assert_eq!(config.worker_socket(), PathBuf::from("workers.sock"));
        assert_eq!(config.layer_socket(), Some(PathBuf::from("layers.sock")));
        assert_eq!(
            (config.engine, config.layers.settings()),
            (EngineKind::Resident, LayerSettings::default())
        );
        assert_eq!((config.cores, config.context_length, config.grace_ms), (None, None, 10_000));
    }

    #[test]
    fn an_emulated_link_has_a_speed_in_bits() {
        let link = |gbps: &str| parse(&["--link-gbps", gbps]).unwrap().validated();
        assert_eq!(link("0.8").unwrap().link_bytes_per_s(), NonZeroU64::new(100_000_000));
        for wrong in ["0", "nan", "inf", "1e-9"] {
            assert_eq!(
                link(wrong).unwrap_err().to_string().split(',').next(),
                Some(&*format!(
                    "--link-gbps is {}",
                    wrong.replace("nan", "NaN").replace("1e-9", "0.000000001")
                ))
            );
        }
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
            (vec!["--engine", "none", "--layers", "off"], ConfigError::NothingToServe),
            (vec!["--engine", "none", "--random-weights", "1"], ConfigError::NothingToLend),
            (vec!["--layer-listen", "127.0.0.1:1"], ConfigError::LayerCertificate),
            (vec!["--layer-cert", "c", "--layer-cert-key", "k"], ConfigError::LayerListen),
            (vec!["--layer-wait-factor=-1"], ConfigError::WaitFactor(-1.0)),
        ];
        for (arguments, error) in refused {
            assert_eq!(checked(&arguments), Err(error), "{arguments:?}");
        }
        for wrong in [
            "--layer-max-sessions=0",
            "--layer-tenant-rows=0",
            "--layer-rows-per-s=0",
            "--layer-wait-factor=nan",
        ] {
            assert!(checked(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn without_an_engine_a_place_for_split_clients_is_enough() {
        let parse = |arguments: &[&str]| {
            let required = ["base-executor", "--model", "m"];
            Config::try_parse_from(required.iter().chain(arguments)).map(Config::validated)
        };
        let config = parse(&["--engine", "none", "--layers", "l"]).unwrap().unwrap();
        assert_eq!((config.socket.as_deref(), config.layer_socket()), (None, Some(PathBuf::from("l"))));
        assert_eq!(parse(&["--layers", "l"]).unwrap(), Err(ConfigError::NoSocket));
        assert!(parse(&["--engine", "none"]).is_err());
    }
}

//! Settings of the process: command line, then environment, then defaults.

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use settings::LogFormat;

/// Maximum spin time; a worker that waits longer should sleep, for the sake of other processes.
const MAX_SPIN_US: u64 = 1_000_000;

/// A worker process that computes adapters on one core, through shared memory.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(name = "lora-worker", version, mut_args(settings::described))]
pub struct WorkerConfig {
    /// Socket of the executor for workers, `workers.sock` beside its own; it may appear later
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_WORKER_SOCKET")]
    pub executor: PathBuf,
    /// Core of the worker, which no other worker and no thread of the executor should use
    #[arg(long, value_name = "N")]
    pub core: u16,
    /// Time that the worker spins for the next job of a pass before it sleeps
    ///
    /// Jobs of a pass are as far apart as a layer of the base takes: some milliseconds with long prompts. A
    /// worker that sleeps in between wakes too late. Between passes, and without cold adapters, it sleeps
    /// anyway.
    #[arg(long, value_name = "US", default_value_t = 10_000)]
    pub spin_us: u64,
    /// Exit at the end of standard input, as on SIGTERM, because the supervisor is gone
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// Format of the log on stderr
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub log_format: LogFormat,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerConfigError {
    #[error("{flag} is {value}, and the maximum is {most}; lower or remove it")]
    TooLarge {
        flag: &'static str,
        value: u64,
        /// Maximum value of the setting.
        most: u64,
    },
    /// The process may not run on the core.
    #[error("--core names core {core}, but this process may only run on {allowed:?}; name one of those")]
    Core {
        core: usize,
        /// Cores on which the process may run.
        allowed: Vec<usize>,
    },
}

impl WorkerConfig {
    /// Checks what the types alone do not.
    ///
    /// # Errors
    /// If a value is out of range; the error names the setting.
    pub fn validated(self) -> Result<Self, WorkerConfigError> {
        match self.spin_us {
            value if value > MAX_SPIN_US => {
                Err(WorkerConfigError::TooLarge { flag: "--spin-us", value, most: MAX_SPIN_US })
            }
            _ => Ok(self),
        }
    }

    /// Returns the time to spin before sleeping.
    #[must_use]
    pub(crate) fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<WorkerConfig, clap::Error> {
        WorkerConfig::try_parse_from(["lora-worker", "--executor", "workers.sock"].iter().chain(arguments))
    }

    #[test]
    fn every_setting_but_socket_and_core_has_a_default() {
        let config = parse(&["--core", "3"]).unwrap().validated().unwrap();
        assert_eq!((config.core, config.spin()), (3, Duration::from_millis(10)));
        assert_eq!((config.exit_with_stdin, config.log_format), (false, LogFormat::Auto));
        assert!(parse(&[]).is_err(), "a worker without a core would be in everybody's way");
    }

    #[test]
    fn a_value_that_cannot_work_is_named() {
        let refused = parse(&["--core", "0", "--spin-us", "1000001"]).unwrap().validated().unwrap_err();
        assert!(refused.to_string().contains("--spin-us is 1000001"), "{refused}");
        for wrong in ["-1", "a", "65536", "0-1"] {
            assert!(parse(&["--core", wrong]).is_err(), "{wrong}");
        }
    }
}

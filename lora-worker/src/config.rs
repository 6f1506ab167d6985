//! Settings of the process: from the command line, else from the environment, else their defaults.

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use settings::LogFormat;

/// Longest spin: beyond it a parked worker is the better neighbour.
const MAX_SPIN_US: u64 = 1_000_000;

/// A process that computes adapters on one core, through shared memory.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(name = "lora-worker", version, mut_args(settings::described))]
pub struct WorkerConfig {
    /// The executor's socket for workers, `workers.sock` beside its own; it need not be there yet.
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_WORKER_SOCKET")]
    pub executor: PathBuf,
    /// The core to stay on; no other worker, and no thread of the executor, should be there.
    #[arg(long, value_name = "N")]
    pub core: u16,
    /// Time to look out for the next job of a pass before going to sleep.
    ///
    /// Jobs of a pass are as far apart as the base takes for a layer: some milliseconds with long prompts. Whoever sleeps
    /// meanwhile is woken too late to be of help. Between passes, and without cold adapters, a worker sleeps in any case.
    #[arg(long, value_name = "US", default_value_t = 10_000)]
    pub spin_us: u64,
    /// Treat the end of standard input like SIGTERM: the supervisor that holds its other end is gone.
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// How the log is written to stderr.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub log_format: LogFormat,
}

/// Why the settings make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerConfigError {
    /// A number is too large to work with.
    #[error("{flag} is {value}, but may be {most} at most; lower it or leave it out")]
    TooLarge {
        /// The setting.
        flag: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        most: u64,
    },
    /// The process may not run on the core.
    #[error("--core names core {core}, but this process may only run on {allowed:?}; name one of those")]
    Core {
        /// The core.
        core: usize,
        /// Where it may run.
        allowed: Vec<usize>,
    },
}

impl WorkerConfig {
    /// Checks what the types alone do not.
    ///
    /// # Errors
    /// If a value cannot work; the setting is named.
    pub fn validated(self) -> Result<Self, WorkerConfigError> {
        match self.spin_us {
            value if value > MAX_SPIN_US => {
                Err(WorkerConfigError::TooLarge { flag: "--spin-us", value, most: MAX_SPIN_US })
            }
            _ => Ok(self),
        }
    }

    /// Time to look out for the next job before going to sleep.
    #[must_use]
    pub fn spin(&self) -> Duration {
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

//! Duties of every program as a process.
//!
//! - [`start_log`]: the log on stderr.
//! - [`raise_file_limit`], [`allowed_cores`]: resources that the operating system grants.
//! - [`notify`]: progress, readiness and watchdog signals to systemd or `holobiont up`.

#![forbid(unsafe_code)]

pub mod notify;

use std::io::{self, IsTerminal as _};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CpuSet, sched_getaffinity},
};
use settings::LogFormat;
use tracing_subscriber::EnvFilter;

/// Starts the log on stderr; `RUST_LOG` sets its filter. A second start in one process keeps the first log.
pub fn start_log(format: LogFormat) {
    let is_json = match format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !io::stderr().is_terminal(),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let _ = if is_json { log.json().with_span_list(false).try_init() } else { log.try_init() };
}

/// Raises the limit of open files to its maximum, because each adapter image needs one.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // On failure the limit stays, and the adapter load that exceeds it returns an error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Returns the cores that this process may run on, in ascending order.
///
/// # Errors
/// Fails if the operating system does not report them.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let explained =
        |error| io::Error::other(format!("cannot read the cores this process may run on: {error}"));
    let allowed = sched_getaffinity(None).map_err(explained)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

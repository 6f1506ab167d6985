//! Operating system setup: the core, the limit of open files, and the log.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use rustix::{
    process::{Resource, getrlimit, setrlimit},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use settings::LogFormat;
use tracing_subscriber::EnvFilter;

use crate::config::WorkerConfigError;

/// Pins this thread, and all that it starts, to `core`. The control thread stays there too, because it seldom
/// works and would disturb others elsewhere.
///
/// # Errors
/// If the process may not run on the core; the error lists the allowed cores.
pub(crate) fn stay_on(core: u16) -> anyhow::Result<()> {
    let allowed = sched_getaffinity(None).context("cannot read the cores this process may run on")?;
    let core = usize::from(core);
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if !allowed.contains(&core) {
        return Err(WorkerConfigError::Core { core, allowed }.into());
    }
    // The parent may have pinned the process already and forbidden changes, as the systemd unit does.
    if allowed.len() == 1 {
        return Ok(());
    }
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only).with_context(|| format!("cannot stay on core {core}"))
}

/// Raises the limit of open files to its maximum, because each adapter needs one.
pub(crate) fn allow_many_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // A lower limit only reduces the number of adapters.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Starts the log on stderr; `RUST_LOG` sets its level.
pub(crate) fn start_log(format: LogFormat) {
    let json = match format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first log.
    let _ = if json { log.json().try_init() } else { log.try_init() };
}

//! Pinning of the process to its core.

use anyhow::Context as _;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::config::WorkerConfigError;

/// Pins this thread, and all that it starts, to `core`. The control thread stays there too, because it seldom
/// works and would disturb others elsewhere.
///
/// # Errors
/// If the process may not run on the core; the error lists the allowed cores.
pub(crate) fn stay_on(core: u16) -> anyhow::Result<()> {
    let allowed = process::allowed_cores()?;
    let core = usize::from(core);
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

//! The machine of a run: its cores, and whether other processes use them.

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Load average over one minute, per core, above which results suffer.
const QUIET_LOAD: f64 = 0.3;

/// Cores to which everything in a run is confined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cores(Vec<usize>);

/// Pins this thread to `core`.
///
/// # Errors
/// If the thread may not run there.
pub(crate) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("cannot pin a thread to core {core}"))
}

/// Core numbers in the format of our programs: `0,1`.
pub(crate) fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

impl Cores {
    /// Returns the first `count` cores that this thread may use.
    ///
    /// # Errors
    /// If fewer are allowed.
    pub(crate) fn first(count: usize) -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot read which cores this process may use")?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(count).collect();
        ensure!(
            cores.len() == count,
            "{count} threads need {count} cores, but only {} may be used; give a smaller --threads or --cores",
            cores.len()
        );
        Ok(Self(cores))
    }

    /// Returns all cores that this thread may use.
    ///
    /// # Errors
    /// Fails if the system does not report the cores.
    pub(crate) fn all() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot read which cores this process may use")?;
        Ok(Self((0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect()))
    }

    /// Confines this thread, and every process and thread that it starts later, to these cores, so that both
    /// sides and the load generator share them.
    ///
    /// # Errors
    /// If the thread may not run there.
    pub(crate) fn confine(&self) -> Result<()> {
        let mut set = CpuSet::new();
        for &cpu in &self.0 {
            set.set(cpu);
        }
        sched_setaffinity(None, &set).context("cannot confine this process to its cores")
    }

    pub(crate) fn numbers(&self) -> &[usize] {
        &self.0
    }

    pub(crate) fn list(&self) -> String {
        list(&self.0)
    }

    /// Warns on standard error if other processes use the machine.
    pub(crate) fn warn_if_busy(&self) {
        let Ok(text) = std::fs::read_to_string("/proc/loadavg") else {
            return;
        };
        let load: f64 = text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0);
        let cores = std::thread::available_parallelism().map_or(self.0.len(), usize::from);
        if load > QUIET_LOAD * f64::from(u32::try_from(cores).unwrap_or(u32::MAX)) {
            eprintln!(
                "holobiont-bench: the load average is {load}; wait for an idle machine before quoting figures"
            );
        }
    }
}

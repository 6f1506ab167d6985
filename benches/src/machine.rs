//! The machine a run is made on: its cores, and whether others are using them.

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Load average over a minute, per core, above which figures suffer.
const QUIET_LOAD: f64 = 0.3;

/// The cores that everything in a run is confined to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cores(Vec<usize>);

/// Pins this thread to `core`.
///
/// # Errors
/// If it may not run there.
pub(crate) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("cannot pin a thread to core {core}"))
}

/// Numbers of cores as our programs take them: `0,1`.
pub(crate) fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

impl Cores {
    /// The first `count` cores that this thread may use.
    ///
    /// # Errors
    /// If it may not use so many.
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

    /// All cores that this thread may use.
    ///
    /// # Errors
    /// If the system does not say.
    pub(crate) fn all() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot read which cores this process may use")?;
        Ok(Self((0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect()))
    }

    /// Confines this thread, and with it every process and thread it starts later, to these cores, so that both sides
    /// and the load generator share the same ones.
    ///
    /// # Errors
    /// If it may not run there.
    pub(crate) fn confine(&self) -> Result<()> {
        let mut set = CpuSet::new();
        for &cpu in &self.0 {
            set.set(cpu);
        }
        sched_setaffinity(None, &set).context("cannot confine this process to its cores")
    }

    /// Each core's number.
    pub(crate) fn numbers(&self) -> &[usize] {
        &self.0
    }

    /// As `holobiont up --cores` takes them: `0,1`.
    pub(crate) fn list(&self) -> String {
        list(&self.0)
    }

    /// Says on standard error when other processes are using the machine.
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

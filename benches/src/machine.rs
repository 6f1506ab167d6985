//! The machine a run is made on: its cores, and whether others are using them.

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Load average over a minute, per core, above which figures suffer.
const QUIET_LOAD: f64 = 0.3;

/// The cores that everything in a run is confined to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cores(Vec<usize>);

impl Cores {
    /// Confines this thread, and with it every process and thread it starts later, to `count` cores, so that both
    /// sides and the load generator share the same ones.
    ///
    /// # Errors
    /// If the process may not use so many cores.
    pub(crate) fn confine_to(count: usize) -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot read which cores this process may use")?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(count).collect();
        ensure!(
            cores.len() == count,
            "{count} threads need {count} cores, but only {} may be used; give a smaller --threads",
            cores.len()
        );
        let mut set = CpuSet::new();
        for &cpu in &cores {
            set.set(cpu);
        }
        sched_setaffinity(None, &set).context("cannot confine this process to its cores")?;
        Ok(Self(cores))
    }

    /// As `holobiont up --cores` takes them: `0,1`.
    pub(crate) fn list(&self) -> String {
        self.0.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
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

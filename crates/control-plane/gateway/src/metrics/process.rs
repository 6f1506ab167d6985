//! Resource use of the gateway process, from `/proc`.

use std::{fs, sync::Arc};

use super::{
    store::{MetricStore, MetricValue},
    table::Id,
};

#[derive(Debug)]
pub(super) struct ProcessMetrics {
    memory: Arc<MetricValue>,
    fds: Arc<MetricValue>,
    max_fds: Arc<MetricValue>,
    cpu: Arc<MetricValue>,
    start: Arc<MetricValue>,
}

impl ProcessMetrics {
    pub(super) fn new(store: &MetricStore) -> Self {
        let number = |id| store.number(id, &[]);
        Self {
            memory: number(Id::ResidentMemory),
            fds: number(Id::OpenFds),
            max_fds: number(Id::MaxFds),
            cpu: number(Id::CpuTime),
            start: number(Id::StartTime),
        }
    }

    /// Reads all values; a value that cannot be read keeps its last state.
    pub(super) fn refresh(&self) {
        let set = |number: &MetricValue, value: Option<f64>| {
            if let Some(value) = value {
                number.set(value);
            }
        };
        set(&self.memory, status_kib("VmRSS:").map(|kib| kib * 1024.0));
        set(&self.fds, open_fds());
        set(&self.max_fds, max_fds());
        if let Some((cpu_s, start_s)) = times() {
            self.cpu.set(cpu_s);
            self.start.set(start_s);
        }
    }
}

fn status_kib(field: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

fn open_fds() -> Option<f64> {
    // The count includes the directory that is being read.
    let count = fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
    u32::try_from(count).ok().map(f64::from)
}

fn max_fds() -> Option<f64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Ticks per second in `/proc`: `USER_HZ`, which is fixed on Linux.
const TICKS_PER_S: f64 = 100.0;

/// Returns processor time in seconds, and the process's start in seconds since 1970.
fn times() -> Option<(f64, f64)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The process name comes first and may contain spaces and parentheses.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let (user, system, start) = (field(14)?, field(15)?, field(22)?);
    let boot = fs::read_to_string("/proc/stat").ok()?;
    let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(((user + system) / TICKS_PER_S, boot + start / TICKS_PER_S))
}

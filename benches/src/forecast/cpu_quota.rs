//! CPU quota of a process: a control group limits it to a share of a core.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

const ROOT: &str = "/sys/fs/cgroup";
/// Period of a quota: short beside a step, so that the process sees a slow core and not pauses.
const PERIOD_US: u64 = 5_000;
/// A group can be removed once its processes have ended.
const GONE: (usize, Duration) = (100, Duration::from_millis(20));

/// Limits a process to a share of a core until it is dropped.
#[derive(Debug)]
pub(super) struct CpuQuota(PathBuf);

impl CpuQuota {
    /// Limits `process` and all its threads to `share` of one core.
    ///
    /// # Errors
    /// If control groups cannot be written.
    pub(super) fn of(process: u32, share: f64) -> Result<Self> {
        let root = Path::new(ROOT);
        let is_unified = root.join("cgroup.controllers").exists();
        let name = format!("holobiont-bench-{process}");
        let group = Self(if is_unified { root.join(name) } else { root.join("cpu").join(name) });
        fs::create_dir(&group.0).with_context(|| format!("cannot make {}", group.0.display()))?;
        let quota_us = (share * PERIOD_US as f64) as u64;
        if is_unified {
            group.write("cpu.max", &format!("{quota_us} {PERIOD_US}"))?;
        } else {
            group.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
            group.write("cpu.cfs_quota_us", &quota_us.to_string())?;
        }
        group.write("cgroup.procs", &process.to_string())?;
        Ok(group)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for CpuQuota {
    fn drop(&mut self) {
        for _ in 0..GONE.0 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            thread::sleep(GONE.1);
        }
    }
}

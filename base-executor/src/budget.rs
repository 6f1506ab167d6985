//! What this process may hold in its host's memory, and what does: one ledger of all that grows (D4.10).
//!
//! The bound is the machine's, or the smallest of the control groups the process is in, as `MemoryMax=` of a unit or the limit
//! of a container sets it. So what would have the system kill the process is refused by name instead: a base at the start, an
//! adapter or a channel where it is asked for, and what would have been kept is computed again.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_cache::ledger::{MemoryAccount, MemoryReservation, OutOfBudget};
use settings::{ByteCount, MemoryFraction};
use shmproto::message::MemoryAccountStats;

/// Of the bound, one part in so many is for what is not accounted for: programs, rows on their way through a pass, files.
const SPARE: u64 = 16;

/// The process's account of its host's memory, by what it is for.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    all: MemoryAccount,
    /// Weights, as they are computed with.
    pub weights: MemoryAccount,
    /// Blocks of the pool: keys, values and adapters, where the host's cores compute.
    pub blocks: MemoryAccount,
    /// Adapters of the host tier.
    pub adapters: MemoryAccount,
    /// Keys and values below the device, and those on their way to or from the disk.
    pub history: MemoryAccount,
    /// The workers' board, and what each of them sums in.
    pub workers: MemoryAccount,
    /// What split clients make the process hold: channels and messages.
    pub clients: MemoryAccount,
    /// Drafts that are models: weights, keys and values.
    pub drafts: MemoryAccount,
}

impl MemoryBudget {
    /// Of this machine, or of a part of it; adapters may take so much of it.
    #[must_use]
    pub fn of_this_machine(part: Option<MemoryFraction>, adapter_bytes: u64) -> Self {
        let bound = bound_bytes();
        let bound = bound - bound / SPARE;
        match part {
            None => Self::new(bound, adapter_bytes),
            Some(part) => Self::named("--process-memory", part.bytes_of(bound), adapter_bytes),
        }
    }

    /// Of `limit_bytes`, of which adapters may take so many.
    #[must_use]
    pub fn new(limit_bytes: u64, adapter_bytes: u64) -> Self {
        Self::named("the memory of this machine or of its control group", limit_bytes, adapter_bytes)
    }

    fn named(name: &str, limit_bytes: u64, adapter_bytes: u64) -> Self {
        let all = MemoryAccount::new(name, limit_bytes);
        let [weights, blocks, history, workers, clients, drafts] =
            ["weights", "blocks", "history", "workers", "clients", "drafts"]
                .map(|name| all.part(name, limit_bytes));
        let adapters = all.part("adapters", adapter_bytes);
        Self { all, weights, blocks, adapters, history, workers, clients, drafts }
    }

    /// The account of weights, of which there may be so many, if there is a bound.
    #[must_use]
    pub fn bounded_weights(&self, bound: Option<ByteCount>) -> MemoryAccount {
        let bounded = |bound: ByteCount| self.weights.part("weights under --resident-weight-bytes", bound.0);
        bound.map_or_else(|| self.weights.clone(), bounded)
    }

    /// What is held now.
    #[must_use]
    pub fn figures(&self) -> MemoryAccountStats {
        MemoryAccountStats {
            limit_bytes: self.all.limit_bytes(),
            weights_bytes: self.weights.held_bytes(),
            blocks_bytes: self.blocks.held_bytes(),
            adapters_bytes: self.adapters.held_bytes(),
            history_bytes: self.history.held_bytes(),
            workers_bytes: self.workers.held_bytes(),
            clients_bytes: self.clients.held_bytes(),
            drafts_bytes: self.drafts.held_bytes(),
        }
    }
}

impl Default for MemoryBudget {
    /// One without a bound.
    fn default() -> Self {
        Self::new(u64::MAX, u64::MAX)
    }
}

/// Whether bytes that are taken later could be, beside what is held now.
///
/// # Errors
/// If not; `remedy` says what to do.
pub(crate) fn expect(account: &MemoryAccount, bytes: u64, remedy: &str) -> anyhow::Result<()> {
    account.charge(bytes).map(drop).map_err(|full| no_room(account, &full, remedy))
}

fn no_room(account: &MemoryAccount, full: &OutOfBudget, remedy: &str) -> anyhow::Error {
    anyhow::anyhow!("no memory for {}: {full}; {remedy}", account.name())
}

/// Takes bytes that are held until the process ends.
///
/// # Errors
/// If there are not so many; `remedy` says what to do.
pub(crate) fn reserve(account: &MemoryAccount, bytes: u64, remedy: &str) -> anyhow::Result<()> {
    account.charge(bytes).map(MemoryReservation::for_good).map_err(|full| no_room(account, &full, remedy))
}

/// Memory that nobody uses.
pub(crate) fn free_bytes() -> u64 {
    of_the_machine("MemAvailable:")
}

/// The most that this process can have: what the machine has, or a control group that it is in.
pub(crate) fn bound_bytes() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match of_the_machine("MemTotal:") {
        0 => u64::MAX,
        machine => of_groups(Path::new("/sys/fs/cgroup"), &groups).fold(machine, u64::min),
    }
}

/// Limits of the groups that `told` names in the system's words, and of those around them.
fn of_groups<'a>(root: &'a Path, told: &'a str) -> impl Iterator<Item = u64> + 'a {
    let limits = told.lines().filter_map(move |line| {
        let (_, group) = line.split_once(':')?;
        let (controllers, path) = group.split_once(":/")?;
        // Version 2 has one tree for all controllers, version 1 one for each.
        let (tree, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            some if some.split(',').any(|one| one == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let groups: Vec<PathBuf> =
            Path::new(path).ancestors().map(|group| tree.join(group).join(file)).collect();
        Some(groups)
    });
    // A group without a limit says "max".
    limits.flatten().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// A line of the system's account of its memory, in bytes; 0 without one.
fn of_the_machine(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests")]

    use super::*;

    #[test]
    fn the_system_says_what_memory_there_is_and_what_of_it_is_free() {
        let machine = of_the_machine("MemTotal:");
        assert!(free_bytes() > 0 && free_bytes() <= machine && bound_bytes() <= machine);
        assert_eq!(of_the_machine("MemImaginary:"), 0);
    }

    #[test]
    fn the_smallest_group_around_the_process_bounds_it() {
        let root = tempfile::tempdir().unwrap();
        let unit = root.path().join("system.slice/holobiont.service");
        fs::create_dir_all(&unit).unwrap();
        fs::write(unit.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("system.slice/memory.max"), "4096\n").unwrap();
        let limits = |told| of_groups(root.path(), told).collect::<Vec<_>>();
        assert_eq!(limits("0::/system.slice/holobiont.service\n"), [4096]);
        assert!(limits("1:name=systemd:/init.scope\n").is_empty());
        fs::create_dir_all(root.path().join("memory/docker/it")).unwrap();
        fs::write(root.path().join("memory/docker/it/memory.limit_in_bytes"), "2048\n").unwrap();
        assert_eq!(limits("4:hugetlb,memory:/docker/it\n1:cpu:/docker/it\n0::/\n"), [2048]);
        fs::write(root.path().join("memory.max"), "8192\n").unwrap();
        assert_eq!(limits("0::/system.slice/holobiont.service\n"), [4096, 8192]);
    }

    #[test]
    fn several_on_one_machine_are_held_to_their_parts_of_it() {
        let limit = |part: Option<&str>| {
            let part = part.map(|part| part.parse().unwrap());
            MemoryBudget::of_this_machine(part, 50).figures().limit_bytes
        };
        let whole = limit(None);
        assert_eq!((limit(Some("1/3")), limit(Some("4096"))), (whole / 3, 4096));
        assert_eq!(limit(Some("99999999GiB")), whole, "nobody has more than there is");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_to_do() {
        let budget = MemoryBudget::new(100, 50);
        reserve(&budget.weights, 80, "choose a smaller one").unwrap();
        let refused = reserve(&budget.blocks, 30, "lower --device-bytes").unwrap_err().to_string();
        assert!(refused.starts_with("no memory for blocks: 30 bytes are more than is left"), "{refused}");
        assert!(refused.contains("memory of this machine") && refused.ends_with("lower --device-bytes"));
        assert_eq!(
            budget.figures(),
            MemoryAccountStats { limit_bytes: 100, weights_bytes: 80, ..MemoryAccountStats::default() }
        );
    }
}

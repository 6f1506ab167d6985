//! The budget of this process in its host's memory: one ledger of all allocations that grow.
//!
//! The limit is that of the machine or of the process's smallest control group, as set by `MemoryMax=` of a
//! unit or by a container. Beyond it the kernel would kill the process. The ledger instead refuses a base at
//! the start, or an adapter or channel on request, and drops KV blocks that would have been kept.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_cache::ledger::{MemoryAccount, MemoryReservation, OutOfBudget};
use settings::{ByteCount, MemoryFraction};
use shmproto::message::MemoryAccountStats;

/// Divisor of the spare part of the limit, for unaccounted memory: programs, rows of a pass, files.
const SPARE: u64 = 16;

/// Accounts of the process's host memory, by purpose.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    all: MemoryAccount,
    /// Weights in the form of the forward pass.
    pub weights: MemoryAccount,
    /// Blocks of the pool for KV cache and adapters, on a CPU.
    pub blocks: MemoryAccount,
    pub adapters: MemoryAccount,
    /// KV blocks below the device, and those in transit to or from the disk.
    pub history: MemoryAccount,
    /// The workers' board and their buffers for sums.
    pub workers: MemoryAccount,
    /// Channels and messages of split clients.
    pub clients: MemoryAccount,
    /// Drafter models: weights and KV cache.
    pub drafts: MemoryAccount,
}

impl MemoryBudget {
    /// Creates the budget of this machine, or of `part` of it, with `adapter_bytes` for adapters.
    #[must_use]
    pub(crate) fn of_this_machine(part: Option<MemoryFraction>, adapter_bytes: u64) -> Self {
        let bound = bound_bytes();
        let bound = bound - bound / SPARE;
        match part {
            None => Self::new(bound, adapter_bytes),
            Some(part) => Self::named("--process-memory", part.bytes_of(bound), adapter_bytes),
        }
    }

    /// Creates a budget of `limit_bytes`, with `adapter_bytes` for adapters.
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

    /// Returns the account of weights, limited to `bound` if there is one.
    #[must_use]
    pub(crate) fn bounded_weights(&self, bound: Option<ByteCount>) -> MemoryAccount {
        let bounded = |bound: ByteCount| self.weights.part("weights under --resident-weight-bytes", bound.0);
        bound.map_or_else(|| self.weights.clone(), bounded)
    }

    #[must_use]
    pub fn stats(&self) -> MemoryAccountStats {
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
    /// Returns a budget without a limit.
    fn default() -> Self {
        Self::new(u64::MAX, u64::MAX)
    }
}

/// Checks that `bytes` could be taken later.
///
/// # Errors
/// Fails if `bytes` exceed the account; `remedy` is the advice in the message.
pub(crate) fn expect(account: &MemoryAccount, bytes: u64, remedy: &str) -> anyhow::Result<()> {
    account.charge(bytes).map(drop).map_err(|full| no_room(account, &full, remedy))
}

fn no_room(account: &MemoryAccount, full: &OutOfBudget, remedy: &str) -> anyhow::Error {
    anyhow::anyhow!("no memory for {}: {full}; {remedy}", account.name())
}

/// Takes `bytes` until the process ends.
///
/// # Errors
/// Fails if `bytes` exceed the account; `remedy` is the advice in the message.
pub(crate) fn reserve(account: &MemoryAccount, bytes: u64, remedy: &str) -> anyhow::Result<()> {
    account.charge(bytes).map(MemoryReservation::for_good).map_err(|full| no_room(account, &full, remedy))
}

/// Returns the available memory of the machine, in bytes.
pub(crate) fn free_bytes() -> u64 {
    of_the_machine("MemAvailable:")
}

/// Returns the memory limit of the process: the machine's memory, or a control group's limit.
pub(crate) fn bound_bytes() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match of_the_machine("MemTotal:") {
        0 => u64::MAX,
        machine => of_groups(Path::new("/sys/fs/cgroup"), &groups).fold(machine, u64::min),
    }
}

/// Returns the limits of the groups in `cgroups`, the text of `/proc/self/cgroup`, and of their parents.
fn of_groups<'a>(root: &'a Path, cgroups: &'a str) -> impl Iterator<Item = u64> + 'a {
    let limits = cgroups.lines().filter_map(move |line| {
        let (_, group) = line.split_once(':')?;
        let (controllers, path) = group.split_once(":/")?;
        // Version 2 has one tree for all controllers, version 1 one tree per controller.
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
    // A group without a limit has the text "max", which does not parse.
    limits.flatten().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Returns a line of `/proc/meminfo` in bytes; 0 without one.
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
        let limits = |cgroups| of_groups(root.path(), cgroups).collect::<Vec<_>>();
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
            MemoryBudget::of_this_machine(part, 50).stats().limit_bytes
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
        assert!(refused.starts_with("no memory for blocks: 30 bytes do not fit"), "{refused}");
        assert!(refused.contains("memory of this machine") && refused.ends_with("lower --device-bytes"));
        assert_eq!(
            budget.stats(),
            MemoryAccountStats { limit_bytes: 100, weights_bytes: 80, ..MemoryAccountStats::default() }
        );
    }
}

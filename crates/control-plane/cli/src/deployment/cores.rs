//! Assigns cores to the executor and the workers.
//!
//! By default, workers take the last cores. With four or more cores, workers get a quarter and the executor
//! leaves them alone. With two or three cores, one worker shares the last core with the executor, which
//! cannot spare one. With one core there is no worker. Explicit settings take precedence.

use std::collections::BTreeSet;

use settings::{CoreList, DeviceGroup, MAX_CORES, MAX_WORKERS};

use crate::deployment::config::{DeployedExecutor, DeploymentConfig};

/// Number of cores from which workers do not share theirs with the executor.
const ENOUGH_CORES: usize = 4;

/// Spin time of a worker before it parks on a shared core, short so that the executor does not wait for it.
const SHARED_SPIN_US: u32 = 20;

/// Returns the cores on which this process may run; empty if the system call fails.
pub(crate) fn allowed() -> CoreList {
    let set = rustix::thread::sched_getaffinity(None).ok();
    let is_allowed = |core: &u32| set.is_some_and(|set| set.is_set(*core as usize));
    CoreList((0..MAX_CORES).filter(is_allowed).collect())
}

/// Process that shares the core of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CoreSharing {
    None,
    Executor,
}

/// Core assignment of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerCore {
    /// Core to which the worker is pinned.
    pub(crate) core: u32,
    /// Process that computes on the same core.
    pub(crate) neighbour: CoreSharing,
}

impl WorkerCore {
    /// Returns the worker's spin time in microseconds before it parks; `None` keeps the default.
    pub(crate) fn spin_us(self) -> Option<u32> {
        (self.neighbour == CoreSharing::Executor).then_some(SHARED_SPIN_US)
    }
}

/// Cores of one executor and of its workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CoreSplit {
    /// Cores passed to the executor; `None` allows all cores.
    pub(crate) executor: Option<CoreList>,
    /// Assignments of the workers, one each.
    pub(crate) workers: Vec<WorkerCore>,
}

impl CoreSplit {
    /// Returns the split of each member. With several members, those without `cores` share the cores that no
    /// member names in equal parts. The workers of a member run on the member's cores by default.
    pub(crate) fn each(members: &[DeployedExecutor], allowed: &CoreList) -> Vec<Self> {
        if let [only] = members {
            return vec![Self::new(&only.config, allowed)];
        }
        let named = |member: &DeployedExecutor| named_cores(&member.config);
        let taken: BTreeSet<u32> = members.iter().filter_map(named).flat_map(|cores| cores.0).collect();
        let free: Vec<u32> = allowed.0.difference(&taken).copied().collect();
        let unnamed = members.iter().filter(|member| named(member).is_none()).count();
        let mut part = 0..;
        let own = |member: &DeployedExecutor| {
            named(member).unwrap_or_else(|| {
                let part: usize = part.next().unwrap_or_default();
                let bounds = [part, part + 1].map(|part| part * free.len() / unnamed);
                match &free[bounds[0]..bounds[1]] {
                    // With more executors than cores, the executors share all cores.
                    [] => allowed.clone(),
                    cores => CoreList(cores.iter().copied().collect()),
                }
            })
        };
        let cores: Vec<CoreList> = members.iter().map(own).collect();
        let split = |(member, cores): (&DeployedExecutor, CoreList)| {
            let split = Self::new(&member.config, &cores);
            Self { executor: split.executor.or(Some(cores)), ..split }
        };
        members.iter().zip(cores).map(split).collect()
    }

    /// Returns the split for `config` on a machine with the cores `allowed`.
    pub(crate) fn new(config: &DeploymentConfig, allowed: &CoreList) -> Self {
        let count = config.workers.count.map(|count| count.0);
        let cores = match &config.workers.cores {
            Some(cores) => cores.clone(),
            None => last_cores(allowed, count),
        };
        let count = count.map_or(cores.0.len(), usize::from).min(MAX_WORKERS.into());
        // With more workers than cores, workers share cores, which helps only in experiments.
        let workers: Vec<u32> = cores.0.iter().copied().cycle().take(count).collect();
        let executor = named_cores(config).or_else(|| remaining_cores(allowed, &workers));
        let shared = |core: u32| executor.as_ref().is_none_or(|list| list.0.contains(&core));
        let neighbour = |core| if shared(core) { CoreSharing::Executor } else { CoreSharing::None };
        let workers = workers.into_iter().map(|core| WorkerCore { core, neighbour: neighbour(core) });
        Self { workers: workers.collect(), executor }
    }
}

/// Returns the cores that the settings name for an executor, of all devices of a group.
pub(crate) fn named_cores(config: &DeploymentConfig) -> Option<CoreList> {
    let of_group = config.executor.devices.as_ref().map(DeviceGroup::cores);
    of_group.or_else(|| config.executor.cores.clone())
}

/// Returns the last `count` cores, or the default number. On machines with `ENOUGH_CORES`, one core is left
/// to the executor.
fn last_cores(allowed: &CoreList, count: Option<u8>) -> CoreList {
    let all = allowed.0.len();
    let by_default = match all {
        0 | 1 => 0,
        2 | 3 => 1,
        _ => (all / 4).min(MAX_WORKERS.into()),
    };
    let most = if all < ENOUGH_CORES { all } else { all - 1 };
    let wanted = count.map_or(by_default, usize::from).min(most);
    CoreList(allowed.0.iter().copied().skip(all - wanted).collect())
}

/// Returns the cores without those of workers, if there are at least `ENOUGH_CORES`.
fn remaining_cores(allowed: &CoreList, workers: &[u32]) -> Option<CoreList> {
    let rest: BTreeSet<u32> = allowed.0.iter().copied().filter(|core| !workers.contains(core)).collect();
    let is_split = allowed.0.len() >= ENOUGH_CORES && !workers.is_empty() && !rest.is_empty();
    is_split.then_some(CoreList(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(machine: u32, settings: &str) -> (Option<String>, Vec<u32>) {
        let split = CoreSplit::new(&toml::from_str(settings).unwrap(), &CoreList((0..machine).collect()));
        (
            split.executor.map(|cores| cores.to_string()),
            split.workers.iter().map(|worker| worker.core).collect(),
        )
    }

    #[test]
    fn workers_take_the_last_cores_and_the_executor_leaves_them_alone_where_there_are_four() {
        assert_eq!(split(0, ""), (None, vec![]));
        assert_eq!(split(1, ""), (None, vec![]));
        assert_eq!(split(2, ""), (None, vec![1]));
        assert_eq!(split(3, ""), (None, vec![2]));
        assert_eq!(split(4, ""), (Some("0-2".into()), vec![3]));
        assert_eq!(split(16, ""), (Some("0-11".into()), vec![12, 13, 14, 15]));
        assert_eq!(split(1000, ""), (Some("0-935".into()), (936..1000).collect()));
    }

    #[test]
    fn what_is_set_wins() {
        assert_eq!(split(16, "workers.count = 0"), (None, vec![]));
        assert_eq!(split(8, "workers.count = 3"), (Some("0-4".into()), vec![5, 6, 7]));
        assert_eq!(split(8, "workers.cores = '1,3'"), (Some("0,2,4-7".into()), vec![1, 3]));
        assert_eq!(split(8, "executor.cores = '0-7'"), (Some("0-7".into()), vec![6, 7]));
        let both = "executor.cores = '0'\nworkers = { cores = '1-2', count = 1 }";
        assert_eq!(split(8, both), (Some("0".into()), vec![1]));
        assert_eq!(split(1, "workers.count = 1"), (None, vec![0]));
    }

    #[test]
    fn the_executor_keeps_a_core_however_many_workers_are_asked_for() {
        let all_but_one = (Some("0".into()), vec![1, 2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(split(4, "workers.count = 8"), all_but_one);
        assert_eq!(split(2, "workers.count = 4"), (None, vec![0, 1, 0, 1]));
        assert_eq!(split(4, "workers.cores = '0-3'"), (None, vec![0, 1, 2, 3]), "there is nothing to leave");
    }

    #[test]
    fn several_executors_divide_the_cores_that_nobody_named() {
        let split = |machine: u32, settings: &str| -> Vec<_> {
            let config: DeploymentConfig = toml::from_str(settings).unwrap();
            let splits = CoreSplit::each(&config.members(), &CoreList((0..machine).collect()));
            let workers =
                |split: &CoreSplit| split.workers.iter().map(|worker| worker.core).collect::<Vec<_>>();
            splits
                .iter()
                .map(|split| (split.executor.as_ref().unwrap().to_string(), workers(split)))
                .collect()
        };
        let two = "[[executor]]\nname = 'a'\n[[executor]]\nname = 'b'\n";
        assert_eq!(split(16, two), [("0-5".into(), vec![6, 7]), ("8-13".into(), vec![14, 15])]);
        assert_eq!(split(2, two), [("0".into(), vec![]), ("1".into(), vec![])]);
        assert_eq!(split(1, two)[0].0, "0", "more executors than cores share one");
        let named = "[[executor]]\nname = 'a'\ncores = '0-1'\nworkers.count = 0\n[[executor]]\nname = 'b'\n";
        assert_eq!(split(8, named), [("0-1".into(), vec![]), ("2-6".into(), vec![7])]);
    }

    #[test]
    fn a_worker_that_shares_its_core_spins_less() {
        let spins = |machine, settings: &str| -> Vec<Option<u32>> {
            let split = CoreSplit::new(&toml::from_str(settings).unwrap(), &CoreList((0..machine).collect()));
            split.workers.iter().map(|worker| worker.spin_us()).collect()
        };
        assert_eq!(spins(2, ""), [Some(20)]);
        assert_eq!(spins(8, ""), [None, None]);
        assert_eq!(spins(8, "executor.cores = '0-6'"), [Some(20), None]);
        assert_eq!(spins(2, "executor.cores = '0'"), [None]);
    }
}

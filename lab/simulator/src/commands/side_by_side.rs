//! Runs many simulations in parallel, with results in a fixed order.

use std::{
    sync::{Mutex, PoisonError, atomic::AtomicUsize, atomic::Ordering::Relaxed},
    thread,
};

use super::{CommandError, SimulationOptions};
use crate::report::SimulationReport;

pub(super) fn reports(jobs: &[SimulationOptions]) -> Result<Vec<SimulationReport>, CommandError> {
    all(jobs, SimulationOptions::report)
}

/// Runs all jobs, on as many threads as there are cores.
pub(super) fn all<J: Sync, R: Send>(
    jobs: &[J],
    work: impl Fn(&J) -> Result<R, CommandError> + Sync,
) -> Result<Vec<R>, CommandError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((index, job)) =
                    Some(next.fetch_add(1, Relaxed)).and_then(|at| Some((at, jobs.get(at)?)))
                {
                    let result = work(job);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Returns the options once for each of `count` seeds, from their own seed on.
pub(super) fn seeds(options: &SimulationOptions, count: u64) -> Vec<SimulationOptions> {
    (options.seed..options.seed + count).map(|seed| SimulationOptions { seed, ..options.clone() }).collect()
}

//! Assigns cores to the deployments of tests.
//!
//! The thread that runs an executor's passes uses the first of its cores. Concurrent deployments on all cores
//! would share that core and leave the others idle. So each deployment uses one core, a different one in
//! every slot of nextest, and a test that needs more states the number. The results are bitwise equal for any
//! number.

use std::{
    env, fs,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Microseconds that a worker spins for its next job, since other deployments share its core.
const SPIN_US: u32 = 20;

/// Number of deployments of this process, which `cargo test` runs concurrently.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// Returns the core options of `holobiont up`, for an executor on `count` cores and `workers` workers.
pub(crate) fn options(count: Option<usize>, workers: usize) -> Vec<String> {
    let allowed = allowed();
    let option = |name: &str, value: String| [name.to_owned(), value];
    let Some(count) = count else {
        let at = |slot: usize| allowed[slot % allowed.len()].to_string();
        let slot = slot();
        let mut options = option("--cores", at(slot)).to_vec();
        options.extend(option("--spin-us", SPIN_US.to_string()));
        if workers == 1 {
            options.extend(option("--workers-cores", at(slot + 1)));
        }
        return options;
    };
    let first: Vec<_> = allowed.iter().take(count).map(u32::to_string).collect();
    option("--cores", first.join(",")).to_vec()
}

/// Returns a core for an executor without a deployment.
pub(crate) fn one() -> String {
    let allowed = allowed();
    allowed[slot() % allowed.len()].to_string()
}

/// Returns a number that differs between concurrent deployments.
fn slot() -> usize {
    let slot = env::var("NEXTEST_TEST_GROUP_SLOT").ok().and_then(|slot| slot.parse().ok());
    slot.unwrap_or_else(|| STARTED.fetch_add(1, Ordering::Relaxed))
}

fn allowed() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").expect("the status of this process");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.expect("a list of cores").trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u32>().expect("a core")..=last.parse::<u32>().expect("a core")
    });
    ranges.flatten().collect()
}

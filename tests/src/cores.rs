//! Which cores a test's deployment computes on.
//!
//! The thread that runs an executor's passes keeps to the first of its cores. Deployments that run at once, each on all
//! cores, would share that one and leave the others idle: so each computes on one core, another one in every slot of
//! nextest, and a test that wants more says how many. The bits are the same on any number.

use std::{
    env, fs,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Microseconds that a worker looks out for its next job: its core is another deployment's too.
const SPIN_US: u32 = 20;

/// Deployments of this process, which `cargo test` runs at once.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// What `holobiont up` is told of cores, for an executor on `count` of them and so many workers.
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

/// A core for an executor that is started alone.
pub(crate) fn one() -> String {
    let allowed = allowed();
    allowed[slot() % allowed.len()].to_string()
}

/// Differs between deployments that run at once.
fn slot() -> usize {
    let slot = env::var("NEXTEST_TEST_GROUP_SLOT").ok().and_then(|slot| slot.parse().ok());
    slot.unwrap_or_else(|| STARTED.fetch_add(1, Ordering::Relaxed))
}

/// The cores this process may use.
fn allowed() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").expect("the status of this process");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.expect("a list of cores").trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u32>().expect("a core")..=last.parse::<u32>().expect("a core")
    });
    ranges.flatten().collect()
}

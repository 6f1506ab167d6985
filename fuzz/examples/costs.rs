//! Prints the CPU time of every hostile seed, by target, most expensive first.
//!
//! cargo run --release -p fuzz --example costs
#![forbid(unsafe_code)]

use std::{hint::black_box, time::Duration};

use fuzz::{TARGETS, Target, seeds};
use rustix::time::{ClockId, clock_gettime};

/// Number of runs, of which the fastest counts: the first ones fill the caches.
const RUNS: usize = 5;

fn main() {
    println!("| Target | Input | Bytes | CPU time in ms |\n|---|---|---|---|");
    for target in TARGETS {
        let hostile = seeds::of(target.name).into_iter().filter(|seed| seed.class != "valid");
        let mut costs: Vec<_> =
            hostile.map(|seed| (cost(target, &seed.bytes), seed.bytes.len(), seed.name)).collect();
        costs.sort_unstable_by(|one, other| other.cmp(one));
        for (cost, bytes, name) in costs {
            println!("| `{}` | {name} | {bytes} | {:.3} |", target.name, cost.as_secs_f64() * 1e3);
        }
    }
}

fn cost(target: &Target, input: &[u8]) -> Duration {
    let run = || {
        let started = computed();
        let _ = black_box((target.run)(black_box(input)));
        computed().saturating_sub(started)
    };
    (0..RUNS).map(|_| run()).min().unwrap_or_default()
}

fn computed() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

//! Every seed, all findings of the fuzzers, and fresh mutations of both: no panic, no hang, bounded memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use fuzz::{
    Outcome, TARGETS, Target, guide,
    mutate::{Random, mutated},
    named,
    seeds::{self, Expected},
};
use peak_alloc::PeakAlloc;
use testkit::WATCHDOG;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Serializes inputs, since memory is counted for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Outcome of one input, on a thread with the stack size of a server thread. `what` is for messages.
fn bounded(target: &'static Target, input: &[u8], what: &str) -> Outcome {
    let budget = target.budget(input);
    let bytes = input.to_vec();
    let (answer, answered) = mpsc::channel();
    let worker = thread::Builder::new().stack_size(2 << 20);
    let worker = worker.spawn(move || {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(&bytes)));
        let held = MEMORY.peak_usage().saturating_sub(before);
        let _ = answer.send((outcome, held));
    });
    let worker = worker.unwrap();
    let Ok((outcome, held)) = answered.recv_timeout(WATCHDOG) else {
        panic!("{}: {what} hangs", target.name);
    };
    worker.join().unwrap();
    let Ok(outcome) = outcome else { panic!("{}: {what} panics: {}", target.name, hexadecimal(input)) };
    assert!(
        held <= budget,
        "{}: {what} of {} bytes holds {held}, and {budget} are allowed",
        target.name,
        input.len()
    );
    outcome
}

/// Input as hexadecimal digits, if it is short enough to print.
fn hexadecimal(input: &[u8]) -> String {
    input.iter().take(4096).map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_published_shape_gets_its_answer_within_bounds() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for seed in seeds::all() {
        let what = format!("\"{}\"", seed.name);
        let outcome = catch_unwind(|| bounded(named(seed.target), &seed.bytes, &what));
        let Ok(outcome) = outcome else {
            wrong.push(format!("{}: {what} breaks a bound", seed.target));
            continue;
        };
        let right = match (seed.expected, &outcome) {
            (Expected::Bounded, _) | (Expected::Accepted, Ok(())) => true,
            (Expected::Refused(why), Err(message)) => message.contains(why),
            _ => false,
        };
        if !right {
            wrong.push(format!("{}: {what} came to {outcome:?}, not {:?}", seed.target, seed.expected));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_the_fuzzers_found_stays_within_bounds() {
    let _alone = alone();
    for target in TARGETS {
        for path in corpus(target) {
            let input = fs::read(&path).unwrap();
            let _ = bounded(target, &input, &path.display().to_string());
        }
    }
}

fn corpus(target: &Target) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Runs mutations of `target`'s seeds for a second, or for `HOLOBIONT_FUZZ_SECONDS`. `HOLOBIONT_FUZZ_SEED`
/// alone decides the mutations; their number depends on the machine.
fn mutations_stay_within_bounds(name: &str) {
    let (_alone, target) = (alone(), named(name));
    let number = |name: &str, default| env::var(name).map_or(default, |value| value.parse().unwrap());
    let seed = number("HOLOBIONT_FUZZ_SEED", 1);
    let seeds = seeds::of(target.name).into_iter().filter(seeds::Seed::may_be_mutated);
    let mut inputs: Vec<Vec<u8>> = seeds.map(|seed| seed.bytes).collect();
    inputs.extend(corpus(target).iter().map(|path| fs::read(path).unwrap()));
    let mut random = Random::new(seed);
    let mut round = 0;
    let end = Instant::now() + Duration::from_secs(number("HOLOBIONT_FUZZ_SECONDS", 1));
    while Instant::now() < end {
        let input = mutated(&inputs[random.below(inputs.len())], &mut random);
        let _ = bounded(target, &input, &format!("mutation {round} of seed {seed}"));
        round += 1;
    }
    println!("{}: {round} mutations", target.name);
    assert!(round > 0, "nothing was explored");
}

macro_rules! explored {
    ($($name:ident: $reads:literal, $run:path, $bytes_per_byte:expr;)*) => {
        $(mod $name {
            #[test]
            fn mutated_input_stays_within_bounds() {
                super::mutations_stay_within_bounds(stringify!($name));
            }
        })*
    };
}
fuzz::for_each_target!(explored);

/// Compares the table with the guide; `HOLOBIONT_WRITE_GUIDE=1` writes it instead.
#[test]
fn the_guide_lists_every_seed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/bad-input.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(guide::BEGIN).unwrap();
    let (_, after) = rest.split_once(guide::END).unwrap();
    let expected = [before, guide::BEGIN, "\n", &guide::table(), "\n", guide::END, after].concat();
    if env::var_os("HOLOBIONT_WRITE_GUIDE").is_some() {
        fs::write(path, expected).unwrap();
    } else {
        assert!(
            text == expected,
            "the guide's table is not that of the seeds; HOLOBIONT_WRITE_GUIDE=1 writes it"
        );
    }
}

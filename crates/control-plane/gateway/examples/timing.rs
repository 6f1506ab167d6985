//! Measures whether time tells what answers do not: whose key is nearly right, and whose adapter has a name.
//!
//! ```text
//! nice cargo run --release -p gateway --example timing -- --samples 1000000
//! ```
//!
//! Each case has two classes of inputs whose answers are the same. Which class a sample is of is drawn at random, both
//! are copied to the same place first, and Welch's t says how sure one can be that their mean times differ (dudect:
//! Reparaz, Balasch and Verbauwhede 2017). Interrupts make a few samples very slow, so t is taken below several
//! percentiles too, and the largest counts. Above 4.5 a difference is certain.
//!
//! Prints one JSON line for each case. The last one compares what may differ, a caller's own adapter with a name that
//! does not exist: it is met if this program sees the difference.

use std::{
    collections::BTreeSet,
    error::Error,
    hint::black_box,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use gateway::{
    adapters::{
        EphemeralStorage, Labels, Record, Registry, RegistryOptions, RemoteOptions, database::Database,
        store::ContentId,
    },
    caller::{Caller, KeyRole, RequestPriority},
    executor::{Endpoint, Executor, LinkSettings, SharedConnections},
    executors::{Executors, ONLY},
    keys::{Keys, line_of},
    limits::KeyLimit,
    random::random_u64,
};
use serde_json::json;
use types::AdapterVersion;

/// Beyond this two means differ (dudect).
const LIMIT: f64 = 4.5;
/// Shares of the fastest samples that t is taken of.
const CROPS: [f64; 7] = [1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5];
/// Keys that are known.
const KNOWN_KEYS: u64 = 64;
/// Inputs of a class.
const POOL: usize = 32;
/// Keys tried to find some whose hash begins as that of a known key.
const TRIES: u64 = 1 << 21;
/// Adapters of the caller, of everybody and of another tenant: so many each.
const ADAPTERS: u64 = 32;

#[derive(Debug, Parser)]
struct TimingArguments {
    /// Samples of each case.
    #[arg(long, default_value_t = 1_000_000)]
    samples: usize,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments = TimingArguments::parse();
    let directory = tempfile::tempdir()?;
    let keys = keys(directory.path())?;
    let measure = Measurement { samples: arguments.samples };
    let look_up = |key: &str| drop(black_box(keys.caller(Some(key.as_bytes()))));
    let case = "a key unlike all known ones, and one whose hash begins as a known one's";
    measure.report(case, &key_classes(), TimingExpectation::Agree, look_up);

    let registry = registry(directory.path()).await?;
    let (limit, priority) = (KeyLimit::new(None), RequestPriority::Online);
    let caller = Caller { tenant: "mine".into(), role: KeyRole::User, limit, priority };
    let lease = |name: &str| drop(black_box(registry.lease(name, &caller)));
    let case = "a name that does not exist, and another tenant's adapter";
    measure.report(case, &name_classes("theirs"), TimingExpectation::Agree, lease);
    let case = "to compare: a name that does not exist, and the caller's own";
    measure.report(case, &name_classes("mine"), TimingExpectation::Differ, lease);
    Ok(())
}

/// Two sets of inputs.
type Classes = [Vec<String>; 2];

/// What their times ought to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimingExpectation {
    Agree,
    Differ,
}

/// The class and the time of a call, in nanoseconds.
type TimedCall = (usize, f64);

/// How each case is measured.
#[derive(Debug)]
struct Measurement {
    samples: usize,
}

impl Measurement {
    /// Measures `work` on both classes and prints what came of it.
    fn report(&self, case: &str, classes: &Classes, expected: TimingExpectation, work: impl Fn(&str)) {
        let t = largest_t(&self.measure(classes, work));
        let found = if t.abs() < LIMIT { TimingExpectation::Agree } else { TimingExpectation::Differ };
        let t = (t * 100.0).round() / 100.0;
        let (samples, met) = (self.samples, found == expected);
        println!("{}", json!({ "case": case, "samples": samples, "t": t, "limit": LIMIT, "met": met }));
    }

    fn measure(&self, classes: &Classes, work: impl Fn(&str)) -> Vec<TimedCall> {
        let mut random = ClassRng(random_u64());
        let mut input = String::with_capacity(256);
        let mut times = Vec::with_capacity(self.samples);
        // The first are slower: caches and branch predictors are cold.
        let warm_up = self.samples / 50;
        for sample in 0..warm_up + self.samples {
            let class = random.below(2);
            let member = random.below(classes[class].len());
            input.clear();
            input.push_str(&classes[class][member]);
            let begun = Instant::now();
            work(black_box(&input));
            let taken = begun.elapsed();
            if sample >= warm_up {
                times.push((class, taken.as_secs_f64() * 1e9));
            }
        }
        times
    }
}

/// The t furthest from zero, of all samples and of the fastest.
fn largest_t(samples: &[TimedCall]) -> f64 {
    let mut sorted: Vec<f64> = samples.iter().map(|(_, time)| *time).collect();
    sorted.sort_by(f64::total_cmp);
    let t_of_crop = |share: f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a count"
        )]
        let last = ((sorted.len() as f64 * share) as usize).saturating_sub(1);
        let limit = sorted.get(last).copied().unwrap_or(f64::INFINITY);
        welch(samples.iter().filter(|(_, time)| *time <= limit))
    };
    CROPS.into_iter().map(t_of_crop).fold(0.0, |most, t| if t.abs() > most.abs() { t } else { most })
}

/// Welch's t: how many standard errors the second class's mean is above the first's.
fn welch<'a>(samples: impl Iterator<Item = &'a TimedCall>) -> f64 {
    let mut classes = [RunningStats::default(); 2];
    for (class, time) in samples {
        classes[*class].add(*time);
    }
    let [first, second] = classes;
    let error = (first.variance() / first.count + second.variance() / second.count).sqrt();
    // Too few samples, or all of one time: nothing is known to differ.
    if error > 0.0 { (second.mean - first.mean) / error } else { 0.0 }
}

/// Mean and variance of what has been added (Welford).
#[derive(Debug, Clone, Copy, Default)]
struct RunningStats {
    count: f64,
    mean: f64,
    squares: f64,
}

impl RunningStats {
    fn add(&mut self, value: f64) {
        self.count += 1.0;
        let before = value - self.mean;
        self.mean += before / self.count;
        self.squares += before * (value - self.mean);
    }

    fn variance(&self) -> f64 {
        self.squares / (self.count - 1.0).max(1.0)
    }
}

/// SplitMix64: drawing the class must cost next to nothing.
struct ClassRng(u64);

impl ClassRng {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) >> 32).unwrap_or(0) % limit
    }
}

fn known_key(index: u64) -> String {
    format!("hb-known-{index:034}")
}

fn wrong_key(index: u64) -> String {
    format!("hb-wrong-{index:034}")
}

/// The first eight bytes of a key's hash, which a key file says.
fn hash_start(key: &str) -> u64 {
    let line = line_of("user", "anybody", key);
    let digits = line.split("blake3:").nth(1).and_then(|hash| hash.get(..16));
    digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

fn keys(directory: &Path) -> Result<Keys, Box<dyn Error>> {
    let path = directory.join("keys");
    let lines = (0..KNOWN_KEYS).map(|index| line_of("user", &format!("tenant-{index}"), &known_key(index)));
    std::fs::write(&path, lines.collect::<String>())?;
    Ok(Keys::read(&path, None)?)
}

/// Unknown keys: those whose hash shares least with any known one, and those whose hash shares most.
fn key_classes() -> Classes {
    let known: BTreeSet<u64> = (0..KNOWN_KEYS).map(|index| hash_start(&known_key(index))).collect();
    // The longest common prefix is with a neighbour in the order.
    let shared_bits = |start: u64| {
        let neighbours = known.range(..start).next_back().into_iter().chain(known.range(start..).next());
        neighbours.map(|other| (start ^ other).leading_zeros()).max().unwrap_or(0)
    };
    let mut tried: Vec<(u32, u64)> =
        (0..TRIES).map(|index| (shared_bits(hash_start(&wrong_key(index))), index)).collect();
    tried.sort_unstable();
    let keys = |chosen: &[(u32, u64)]| chosen.iter().map(|(_, index)| wrong_key(*index)).collect();
    [keys(&tried[..POOL]), keys(&tried[tried.len() - POOL..])]
}

/// Names in no order that a class could be told by.
fn adapter(owner: &str, index: u64) -> String {
    let scrambled = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    format!("adapter-{scrambled:06x}-of-{owner}-a")
}

/// Names that do not exist, and their neighbours of the same length that do.
fn name_classes(owner: &str) -> Classes {
    let names: Vec<String> = (0..ADAPTERS).map(|index| adapter(owner, index)).collect();
    let absent = names.iter().map(|name| format!("{}b", &name[..name.len() - 1])).collect();
    [absent, names]
}

fn record(owner: &str, index: u64) -> Record {
    let hash = *blake3::hash(adapter(owner, index).as_bytes()).as_bytes();
    Record {
        name: adapter(owner, index),
        tenant: (owner != "everybody").then(|| owner.to_owned()),
        content: ContentId(hash),
        generation: AdapterVersion(hash),
        template: None,
        rank: 8,
        bytes: 1 << 20,
        modules: 4,
        draft_layers: 0,
        labels: Labels::default(),
        source: PathBuf::from("adapter"),
        loaded_at: 0,
        last_used_us: 0,
        pinned: false,
        version: 0,
        made_by: None,
        expires_at: None,
    }
}

/// A registry without an executor: looking up a name needs none.
async fn registry(directory: &Path) -> Result<Arc<Registry>, Box<dyn Error>> {
    let silence = Duration::from_secs(30);
    let limits = LinkSettings { max_sequences: 1, silence };
    let common = SharedConnections::default();
    let executor = Executor::connect(Endpoint::Socket(directory.join("nobody")), limits, common.clone());
    let executors = Executors::of([(ONLY.to_owned(), executor)], &common);
    let state = directory.join("state");
    let options = RegistryOptions {
        state: state.clone(),
        adapter_root: directory.to_owned(),
        max_adapters: 1000,
        max_adapter_file_bytes: 1,
        tenant_bytes: 1,
        ephemeral: EphemeralStorage { memory: state.clone(), bytes: 1 },
        remote: RemoteOptions::default(),
        fleet: None,
    };
    drop(Registry::open(executors.clone(), options.clone()).await?);
    let (database, _) = Database::open(&state).await?;
    for owner in ["mine", "everybody", "theirs"] {
        for index in 0..ADAPTERS {
            database.put(&record(owner, index), None).await?;
        }
    }
    drop(database);
    Ok(Registry::open(executors, options).await?)
}

//! The programs, the model and the adapters that tests use.
//!
//! The model is the first layers of the real one, and the example adapters are cut alike: what is tested between processes is
//! not how many layers they compute. `HOLOBIONT_LAYERS` says how many (`scripts/test --long`: all of them).

mod first_layers;
mod safetensors;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};
use testkit::paths::root;
pub use testkit::paths::{example_adapter as whole_example, real_model as whole_model};

use serde_json::{Map, Value};

use self::safetensors::{number, rewritten};
use crate::repeats;

/// Layers that the real model has.
pub const WHOLE: u64 = 30;

/// What the base model is called.
pub const BASE: &str = "base";

/// The example adapters, under their own names.
pub const EXAMPLES: [&str; 3] = ["pirate", "json", "haiku"];

/// Everything a deployment of base and examples serves.
pub const MODELS: [&str; 4] = [BASE, "pirate", "json", "haiku"];

/// What the command `holobiont` says, and whether it did what it was told.
///
/// # Panics
/// If it does not start.
#[must_use]
pub fn holobiont(arguments: &[&str], variables: &[(&str, String)]) -> (bool, String) {
    let mut command = Command::new(program("holobiont"));
    let variables = variables.iter().map(|(name, value)| (name, value));
    let output = command.args(arguments).envs(variables).output().expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// The program that was built together with the running test.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let test = env::current_exe().expect("the test's own path");
    // target/PROFILE/deps/TEST
    let profile = test.parent().and_then(Path::parent).expect("the folder the programs are built into");
    let path = profile.join(name);
    assert!(path.is_file(), "{} is missing; run cargo build --workspace", path.display());
    path
}

/// Layers that the tests' model has.
#[must_use]
pub fn layers() -> u64 {
    repeats::LAYERS.number()
}

/// Calls of a token: four for each layer, and the head.
#[must_use]
pub fn calls() -> u64 {
    4 * layers() + 1
}

/// What the layers of the tests' model need of something, where those of the real one need `whole`.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "few layers")]
pub fn of_layers(whole: f64) -> f64 {
    whole * layers() as f64 / WHOLE as f64
}

/// The same in bytes, for a setting.
#[must_use]
pub fn bytes_of_layers(whole_kib: u64) -> String {
    (whole_kib * 1024 * layers() / WHOLE).to_string()
}

/// The model of all tests that do not say otherwise.
#[must_use]
pub fn model() -> PathBuf {
    match layers() {
        WHOLE => whole_model(),
        layers => first_layers::kept(&whole_model(), layers, first_layers::cut_model),
    }
}

/// The directory that holds the example adapters for the tests' model.
#[must_use]
pub fn examples() -> PathBuf {
    match layers() {
        WHOLE => whole_examples(),
        layers => first_layers::kept(&whole_examples(), layers, first_layers::cut_adapters),
    }
}

/// Returns the directory of the example adapters for the real model.
fn whole_examples() -> PathBuf {
    root().join("examples/adapters")
}

/// The directory of an example adapter.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    examples().join(name)
}

/// The names PEFT gives to an adapter's files.
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// Writes an adapter like the example `name`, but `alpha` strong, into `into`: other content, so another generation.
pub fn variant(name: &str, alpha: u32, into: &Path) {
    stacked(name, 1, alpha, into);
}

/// Writes a variant that applies from where a prompt says `invocation`.
pub fn activated(name: &str, invocation: &[u32], into: &Path) {
    variant(name, 32, into);
    let path = into.join(CONFIG);
    let config = fs::read(&path).expect("the variant's configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("the configuration is JSON");
    config["alora_invocation_tokens"] = invocation.into();
    fs::write(path, config.to_string()).expect("the variant's configuration");
}

/// Writes a variant that has every rank of the example `times` times: so wide that it travels in several blocks.
pub fn stacked(name: &str, times: usize, alpha: u32, into: &Path) {
    let from = example(name);
    fs::create_dir_all(into).expect("a directory for the variant");
    let weights = fs::read(from.join(WEIGHTS)).expect("the example's weights");
    fs::write(into.join(WEIGHTS), stack(&weights, times)).expect("the variant's weights");
    let config = fs::read(from.join(CONFIG)).expect("the example's configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("the configuration is JSON");
    config["lora_alpha"] = alpha.into();
    config["r"] = (config["r"].as_u64().expect("a rank") * times as u64).into();
    fs::write(into.join(CONFIG), config.to_string()).expect("the variant's configuration");
}

/// The same weights with every rank `times` times.
fn stack(weights: &[u8], times: usize) -> Vec<u8> {
    rewritten(weights, |name, tensor: &mut Map<String, Value>, bytes| {
        // A has its ranks one after the other; B has all of them in each of its rows.
        let (rank_at, rows) = if name.contains("lora_A") { (0, 1) } else { (1, number(&tensor["shape"][0])) };
        tensor["shape"][rank_at] = (number(&tensor["shape"][rank_at]) * times).into();
        Some(bytes.chunks(bytes.len() / rows).flat_map(|row| row.repeat(times)).collect())
    })
}

/// `length` token ids that mean nothing and differ with `seed`.
#[must_use]
pub fn prompt(seed: u32, length: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let tokens = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Ordinary tokens: above the special ones, inside the vocabulary.
        100 + (state >> 8) % 40_000
    });
    tokens.take(length).collect()
}

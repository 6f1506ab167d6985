//! The programs, the model and the adapters of the tests.
//!
//! The model is the first layers of the real one, and the example adapters are cut accordingly, since tests
//! between processes do not depend on the number of layers. `HOLOBIONT_LAYERS` sets the number (`scripts/test
//! --long`: all of them).

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

/// Number of layers of the real model.
pub const WHOLE: u64 = 30;

/// Name of the base model.
pub const BASE: &str = "base";

/// Names of the example adapters.
pub const EXAMPLES: [&str; 3] = ["pirate", "json", "haiku"];

/// Names of the base and the examples.
pub const MODELS: [&str; 4] = [BASE, "pirate", "json", "haiku"];

/// Runs the command `holobiont` and returns its output and success.
///
/// # Panics
/// If the command does not start.
#[must_use]
pub fn holobiont(arguments: &[&str], variables: &[(&str, String)]) -> (bool, String) {
    let mut command = Command::new(program("holobiont"));
    let variables = variables.iter().map(|(name, value)| (name, value));
    let output = command.args(arguments).envs(variables).output().expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// Returns the path of a program built together with the running test.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let test = env::current_exe().expect("the test's own path");
    // The test's path is target/PROFILE/deps/TEST.
    let profile = test.parent().and_then(Path::parent).expect("the folder the programs are built into");
    let path = profile.join(name);
    assert!(path.is_file(), "{} is missing; run cargo build --workspace", path.display());
    path
}

/// Returns the number of layers of the tests' model.
#[must_use]
pub fn layers() -> u64 {
    repeats::LAYERS.number()
}

/// Returns the calls per token: four for each layer, and the head.
#[must_use]
pub fn calls() -> u64 {
    4 * layers() + 1
}

/// Scales `whole`, an amount for the real model's layers, to the tests' model.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "few layers")]
pub fn of_layers(whole: f64) -> f64 {
    whole * layers() as f64 / WHOLE as f64
}

/// Scales an amount in bytes, as text for a setting.
#[must_use]
pub fn bytes_of_layers(whole_kib: u64) -> String {
    (whole_kib * 1024 * layers() / WHOLE).to_string()
}

/// Returns the default model of the tests.
#[must_use]
pub fn model() -> PathBuf {
    match layers() {
        WHOLE => whole_model(),
        layers => first_layers::kept(&whole_model(), layers, first_layers::cut_model),
    }
}

/// Returns another base than the default model: the real model's first layers, one more.
#[must_use]
pub fn another_model() -> PathBuf {
    let layers = if layers() < WHOLE { layers() + 1 } else { WHOLE - 1 };
    first_layers::kept(&whole_model(), layers, first_layers::cut_model)
}

/// Returns the directory of the example adapters for the tests' model.
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

/// Returns the directory of an example adapter.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    examples().join(name)
}

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// Writes an adapter like the example `name` with another `alpha` into `into`: other content, so another
/// version.
pub fn variant(name: &str, alpha: u32, into: &Path) {
    stacked(name, 1, alpha, into);
}

/// Writes a variant that applies from the `invocation` tokens of a prompt on.
pub fn activated(name: &str, invocation: &[u32], into: &Path) {
    variant(name, 32, into);
    let path = into.join(CONFIG);
    let config = fs::read(&path).expect("the variant's configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("the configuration is JSON");
    config["alora_invocation_tokens"] = invocation.into();
    fs::write(path, config.to_string()).expect("the variant's configuration");
}

/// Writes a variant in which every rank is repeated `times` times, so that its copy takes several blocks.
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

/// Returns the weights with every rank repeated `times` times.
fn stack(weights: &[u8], times: usize) -> Vec<u8> {
    rewritten(weights, |name, tensor: &mut Map<String, Value>, bytes| {
        // A stores its ranks as rows; B has all of them in each row.
        let (rank_at, rows) = if name.contains("lora_A") { (0, 1) } else { (1, number(&tensor["shape"][0])) };
        tensor["shape"][rank_at] = (number(&tensor["shape"][rank_at]) * times).into();
        Some(bytes.chunks(bytes.len() / rows).flat_map(|row| row.repeat(times)).collect())
    })
}

/// Returns `length` pseudo-random token ids for `seed`.
#[must_use]
pub fn prompt(seed: u32, length: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let tokens = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // The ids are those of ordinary tokens: above the special ones, inside the vocabulary.
        100 + (state >> 8) % 40_000
    });
    tokens.take(length).collect()
}

//! The programs, the model and the adapters that tests use.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// What the base model is called.
pub const BASE: &str = "base";

/// The example adapters, under their own names.
pub const EXAMPLES: [&str; 3] = ["pirate", "json", "haiku"];

/// Everything a deployment of base and examples serves.
pub const MODELS: [&str; 4] = [BASE, "pirate", "json", "haiku"];

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

/// The real model.
#[must_use]
pub fn model() -> PathBuf {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = env::var_os("HOLOBIONT_TEST_MODEL").map_or(fetched, PathBuf::from);
    assert!(path.is_file(), "the model {} is missing; run scripts/fetch-model", path.display());
    path
}

/// The directory that holds the example adapters.
#[must_use]
pub fn examples() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the tree").join("examples/adapters")
}

/// The directory of an example adapter.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    examples().join(name)
}

/// Writes an adapter like the example `name`, but `alpha` strong, into `into`: other content, so another generation.
pub fn variant(name: &str, alpha: u32, into: &Path) {
    let from = example(name);
    fs::create_dir_all(into).expect("a directory for the variant");
    let weights = "adapter_model.safetensors";
    fs::copy(from.join(weights), into.join(weights)).expect("the example's weights");
    let config = fs::read(from.join("adapter_config.json")).expect("the example's configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("the configuration is JSON");
    config["lora_alpha"] = alpha.into();
    fs::write(into.join("adapter_config.json"), config.to_string()).expect("the variant's configuration");
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

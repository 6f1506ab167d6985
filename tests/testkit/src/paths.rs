//! Where tests find what the repository holds, and the real model.

use std::{
    env,
    path::{Path, PathBuf},
};

/// Returns the root of the repository, or `HOLOBIONT_TEST_ROOT`: a copy of the tests' files for a machine
/// without the repository.
#[must_use]
pub fn root() -> PathBuf {
    let built_in =
        || Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("two folders up").to_owned();
    env::var_os("HOLOBIONT_TEST_ROOT").map_or_else(built_in, PathBuf::from)
}

/// Returns the path of a part of `tests/golden`.
#[must_use]
pub fn golden(part: &str) -> PathBuf {
    root().join("tests/golden").join(part)
}

/// Returns the directory of a golden model, for example `llama-tied`.
#[must_use]
pub fn golden_model(name: &str) -> PathBuf {
    golden("models").join(name)
}

/// Returns the directory of an example adapter for the real model.
#[must_use]
pub fn example_adapter(name: &str) -> PathBuf {
    root().join("examples/adapters").join(name)
}

/// Returns the file of the real model: `HOLOBIONT_TEST_MODEL`, or the file that `scripts/fetch-model` writes.
///
/// # Panics
/// If there is no such file.
#[must_use]
pub fn real_model() -> PathBuf {
    let fetched = || root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = env::var_os("HOLOBIONT_TEST_MODEL").map_or_else(fetched, PathBuf::from);
    assert!(path.is_file(), "the model {} is missing; run scripts/fetch-model", path.display());
    path
}

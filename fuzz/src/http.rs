//! What reaches the gateway from outside: bodies of requests, and the file of keys.

use std::{fs, path::Path};

use gateway::{
    keys::Keys,
    limits::PerMin,
    openai::{chat, completions, errors::ApiError, params::Limits},
};
use model::generation_defaults::GenerationDefaults;

use crate::Outcome;

/// Reads a body under the limits of a small model.
fn read<T>(read: impl Fn(&Limits<'_>) -> Result<T, ApiError>) -> Outcome {
    let defaults = GenerationDefaults::default();
    let limits = Limits { vocab_size: 32_000, default_seed: 1, defaults: &defaults };
    read(&limits).map(drop).map_err(|error| format!("{error:?}"))
}

pub(crate) fn completion(input: &[u8]) -> Outcome {
    read(|limits| completions::Body::read(input, limits))
}

pub(crate) fn chat(input: &[u8]) -> Outcome {
    read(|limits| chat::Body::read(input, limits))
}

pub(crate) fn key_file(input: &[u8]) -> Outcome {
    let folder = crate::targets::folder(&[("keys", input)]);
    let path: &Path = &folder.path().join("keys");
    debug_assert!(fs::exists(path).unwrap_or(false));
    Keys::read(path, PerMin::default()).map(drop).map_err(|error| error.to_string())
}

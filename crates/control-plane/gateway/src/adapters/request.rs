//! Parameters of a load, and the check of the caller's expectations.

use std::path::PathBuf;

use super::{entry::AdapterEntry, errors::AdapterError, publication::Publication};

#[derive(Debug, Clone)]
pub struct LoadRequest {
    pub name: String,
    pub path: PathBuf,
    pub replace: Replace,
    /// Owner of the adapter. `None` means all tenants, or the previous owner if the name is taken.
    pub tenant: Option<String>,
    /// Whether to keep the adapter resident. `None` means no, or as before if the name is taken.
    pub pinned: Option<bool>,
}

/// Properties of an adapter that was made here, which a client cannot set.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// Gateway process that needs the adapter; see [`Record::made_by`](super::Record).
    pub made_by: Option<String>,
    /// When the adapter is unloaded, in seconds since 1970.
    pub expires_at: Option<u64>,
    /// Fine-tuning job whose result the adapter is.
    pub publication: Option<Publication>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replace {
    Never,
    Always,
    /// Replace only this adapter version: at least 12 hexadecimal digits, or `*` for any.
    Only(String),
}

/// Matches any existing adapter version.
const ANY_GENERATION: &str = "*";

/// Minimum number of digits that identify an adapter version: as many as tables print.
const MIN_DIGITS: usize = 12;

/// Fails unless the request allows to replace `old`.
pub(super) fn check_replace(request: &LoadRequest, old: Option<&AdapterEntry>) -> Result<(), AdapterError> {
    match &request.replace {
        Replace::Never if old.is_some() => Err(AdapterError::NameTaken(request.name.clone())),
        Replace::Never | Replace::Always => Ok(()),
        Replace::Only(expected) => check_generation(&request.name, Some(expected), old),
    }
}

/// Fails unless `expected` is the adapter version of `old`, its first digits, or `*`.
pub(super) fn check_generation(
    name: &str,
    expected: Option<&str>,
    old: Option<&AdapterEntry>,
) -> Result<(), AdapterError> {
    let Some(expected) = expected else { return Ok(()) };
    let old = old.ok_or_else(|| AdapterError::NotFound(name.to_owned()))?;
    let found = old.record.generation.to_string();
    if expected == ANY_GENERATION || (expected.len() >= MIN_DIGITS && found.starts_with(expected)) {
        return Ok(());
    }
    Err(AdapterError::OtherGeneration {
        name: name.to_owned(),
        expected: expected.chars().take(64).collect(),
        found,
    })
}

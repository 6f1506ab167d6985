//! A load as it is asked for, and whether what it expects is there.

use std::path::PathBuf;

use super::{entry::AdapterEntry, errors::AdapterError, publication::Publication};

/// A load as a caller asks for it.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// The name it will have.
    pub name: String,
    /// Where its files are.
    pub path: PathBuf,
    /// What to do if the name is taken.
    pub replace: Replace,
    /// Whose it will be. `None` is everybody's, or for a name that is taken, whose it was.
    pub tenant: Option<String>,
    /// Whether to keep it resident. `None` is no, or for a name that is taken, as it was.
    pub pinned: Option<bool>,
}

/// What holds for an adapter that was made here, besides what a caller may say.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// See [`Record::made_by`](super::Record).
    pub made_by: Option<String>,
    /// When the adapter is unloaded, in seconds since 1970.
    pub expires_at: Option<u64>,
    /// The fine-tuning job that the adapter is the result of.
    pub publication: Option<Publication>,
}

/// What to do with a name that is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replace {
    /// A name that is taken is refused.
    Never,
    /// Replace whatever it is.
    Always,
    /// Replace only this generation: in hexadecimal, 12 digits at least, or `*` for any that is there.
    Only(String),
}

/// Stands for whatever generation is there, if there is one.
const ANY_GENERATION: &str = "*";

/// So many digits of a generation name it: as many as tables print.
const MIN_DIGITS: usize = 12;

/// Fails if what has the name is not to be replaced.
pub(super) fn check_replace(request: &LoadRequest, old: Option<&AdapterEntry>) -> Result<(), AdapterError> {
    match &request.replace {
        Replace::Never if old.is_some() => Err(AdapterError::NameTaken(request.name.clone())),
        Replace::Never | Replace::Always => Ok(()),
        Replace::Only(expected) => check_generation(&request.name, Some(expected), old),
    }
}

/// `expected` is a generation, its first digits as tables print them, or `*` for any.
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

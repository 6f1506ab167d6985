//! Models by hub name. What a hub name is and where its files lie belongs to `model`; this is its door.

use std::path::PathBuf;

use crate::exit::{Exit, Explain};

/// Why a hub name gave no model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// Not in the cache, and this build does not download.
    #[error(
        "it is not in the hub cache, and this build cannot download: it was made without the feature `hub`"
    )]
    NotBuilt,
}

impl Explain for HubError {
    fn exit(&self) -> Exit {
        match self {
            Self::NotBuilt => Exit::NotFound,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::NotBuilt => {
                Some("cargo build --release -p holobiont --features hub, then holobiont pull".into())
            }
        }
    }
}

/// True for `org/name` and `org/name@revision`.
pub(crate) fn is_hub_name(name: &str) -> bool {
    let repository = name.split('@').next().unwrap_or(name);
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    repository
        .split_once('/')
        .is_some_and(|(organisation, name)| is_part(organisation) && is_part(name))
}

/// Where the model lies in the local cache.
pub(crate) fn locate(_name: &str) -> Result<PathBuf, HubError> {
    Err(HubError::NotBuilt)
}

/// Brings the model into the local cache.
pub(crate) fn download(name: &str) -> Result<PathBuf, HubError> {
    locate(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_have_an_organisation_and_perhaps_a_revision() {
        for name in ["org/name", "org/name-1.5_x@main", "o/n@refs/pr/1"] {
            assert!(is_hub_name(name), "{name}");
        }
        for name in [
            "name",
            "/org/name",
            "./a/b",
            "a/b/c",
            "../b",
            "org/",
            "",
            "org/..",
        ] {
            assert!(!is_hub_name(name), "{name}");
        }
    }
}

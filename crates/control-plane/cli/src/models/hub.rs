//! Maps errors of the crate `files`, which resolves hub names, to exit codes and hints.

use std::path::PathBuf;

use model_files::location::{HubName, HubSettings, LocationError, resolve};

use crate::exit::{Exit, Explain};

/// Error of resolving a hub name.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct HubError(Box<LocationError>);

impl From<LocationError> for HubError {
    fn from(error: LocationError) -> Self {
        Self(Box::new(error))
    }
}

impl Explain for HubError {
    fn exit(&self) -> Exit {
        match &*self.0 {
            LocationError::Unknown { .. } | LocationError::NotCached { .. } => Exit::NotFound,
            LocationError::Download { .. } => Exit::Unavailable,
            LocationError::Cache { .. } | LocationError::Reference { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match &*self.0 {
            LocationError::NotCached { .. } if !cfg!(feature = "hub") => {
                Some("use a build with downloads: cargo build --release -p holobiont --features hub".into())
            }
            _ => None,
        }
    }
}

/// True for `org/name` and `org/name@revision`.
pub(crate) fn is_hub_name(name: &str) -> bool {
    name.parse::<HubName>().is_ok()
}

/// Returns the model's path in the local cache. Builds with the feature `hub` download a missing model.
pub(crate) fn locate(name: &str) -> Result<PathBuf, HubError> {
    Ok(resolve(name, &HubSettings::from_env())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_not_in_the_cache_is_not_found_and_says_how_to_get_it() {
        let cache = tempfile::tempdir().unwrap();
        let settings =
            HubSettings { cache: cache.path().to_owned(), access: model_files::location::HubAccess::Offline };
        let error = HubError::from(resolve("org/no-such-model", &settings).unwrap_err());
        assert_eq!(error.exit(), Exit::NotFound, "{error}");
        assert_eq!(error.next().is_some(), !cfg!(feature = "hub"));
    }
}

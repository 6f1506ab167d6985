//! Models and adapters of a hub: found in the Hugging Face cache, or downloaded into it.

mod download;

use std::path::{Path, PathBuf};

use model_files::{
    hub_access::HubAccess,
    location::{HubName, LocationError, hub_cache, resolve},
};

use crate::exit::{Exit, Explain};

/// Error of resolving a hub name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The name is not found, or the cache cannot be read.
    #[error(transparent)]
    Location(Box<LocationError>),
    /// The files are not in the cache, and downloads are forbidden.
    #[error("{0} is not complete in the cache, and HF_HUB_OFFLINE forbids downloads")]
    Offline(HubName),
    /// The download failed.
    #[error("cannot download {name}: {reason}")]
    Download {
        /// Name of the model or adapter.
        name: HubName,
        /// Description of the failure.
        reason: String,
    },
}

impl Explain for HubError {
    fn exit(&self) -> Exit {
        match self {
            Self::Location(error) => match **error {
                LocationError::Unknown { .. } | LocationError::NotCached { .. } => Exit::NotFound,
                LocationError::Cache { .. } | LocationError::Reference { .. } => Exit::Failed,
            },
            Self::Offline(_) => Exit::NotFound,
            Self::Download { .. } => Exit::Unavailable,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Location(_) => None,
            Self::Offline(_) => Some("unset HF_HUB_OFFLINE, or give a path".into()),
            Self::Download { .. } => {
                Some("check the name, the connection, and HF_TOKEN if the repository is private".into())
            }
        }
    }
}

/// True for `org/name` and `org/name@revision`.
pub(crate) fn is_hub_name(name: &str) -> bool {
    name.parse::<HubName>().is_ok()
}

/// Returns the path of the files in the local cache, downloaded if they are missing.
pub(crate) fn locate(name: &str) -> Result<PathBuf, HubError> {
    locate_in(name, &hub_cache(), HubAccess::from_env().is_offline)
}

fn locate_in(name: &str, cache: &Path, is_offline: bool) -> Result<PathBuf, HubError> {
    let missing = match resolve(name, cache) {
        Ok(path) => match name.parse() {
            Ok(name) if download::is_unfinished(&name, cache) => name,
            _ => return Ok(path),
        },
        Err(LocationError::NotCached { name, .. }) => name,
        Err(error) => return Err(HubError::Location(Box::new(error))),
    };
    if is_offline {
        return Err(HubError::Offline(missing));
    }
    download::fetch(&missing, cache).map_err(|reason| HubError::Download { name: missing, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_not_in_the_cache_is_not_downloaded_offline() {
        let cache = tempfile::tempdir().unwrap();
        let error = locate_in("org/no-such-model", cache.path(), true).unwrap_err();
        assert_eq!(error.exit(), Exit::NotFound, "{error}");
        assert_eq!(error.next().as_deref(), Some("unset HF_HUB_OFFLINE, or give a path"));
    }
}

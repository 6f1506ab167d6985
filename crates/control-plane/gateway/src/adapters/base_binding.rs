//! Binds the registry of one of several bases to the hash of the base model. Adapters never serve with
//! another model in the place of their base.

use std::{fs, io, path::Path, sync::Arc};

use super::registry::Registry;
use crate::thread;

/// File in the registry's directory with the hash of the base model in hexadecimal digits.
const BASE_FILE: &str = "base-hash";

/// Reason why a base model may not use a registry.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindingError {
    #[error(
        "its adapters in {directory} belong to another base model; restore that model, or unload the adapters \
         with it and start again"
    )]
    OtherBase { directory: String },
    #[error("cannot read or write the hash of the base model in {directory}: {reason}")]
    Io { directory: String, reason: io::Error },
}

impl Registry {
    /// Binds the registry to a base model; a registry without adapters may change its base.
    pub(crate) async fn bind_base(self: &Arc<Self>, base_hash: [u8; 32]) -> Result<(), BindingError> {
        let (directory, is_empty) = (self.state().to_owned(), self.is_empty());
        let hash = blake3::Hash::from_bytes(base_hash).to_hex().to_string();
        let bound = thread::run("base-binding", move || bind(&directory, &hash, is_empty)).await;
        bound.unwrap_or_else(|stopped| {
            let directory = self.state().display().to_string();
            Err(BindingError::Io { directory, reason: io::Error::other(stopped.to_string()) })
        })
    }
}

fn bind(directory: &Path, hash: &str, is_empty: bool) -> Result<(), BindingError> {
    let shown = || directory.display().to_string();
    let failed = |reason| BindingError::Io { directory: shown(), reason };
    let file = directory.join(BASE_FILE);
    match fs::read_to_string(&file) {
        Ok(known) if known == hash => return Ok(()),
        Ok(_) if !is_empty => return Err(BindingError::OtherBase { directory: shown() }),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    // A crash leaves the old hash or the new one.
    let draft = directory.join(format!("{BASE_FILE}.new"));
    fs::write(&draft, hash).and_then(|()| fs::rename(&draft, &file)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_with_adapters_keeps_its_base() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        bind(path, "one", false).unwrap();
        bind(path, "one", false).unwrap();
        assert!(matches!(bind(path, "two", false), Err(BindingError::OtherBase { .. })));
        bind(path, "two", true).unwrap();
        bind(path, "two", false).unwrap();
    }
}

//! Which files of a Hugging Face directory hold weights: a single one, or those that a list names.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    bounded_json,
    model_files::{INDEX_FILE, SINGLE_FILE},
    whole_file,
};

/// Bytes of the list of weight files.
const MAX_INDEX_BYTES: u64 = 1 << 24;
/// Weight files of a model.
const MAX_SHARDS: usize = 1 << 10;

/// Why it is not known which files hold weights.
#[derive(Debug, thiserror::Error)]
pub enum WeightFilesError {
    /// The list could not be read.
    #[error("cannot read {}: {source}; a model directory has config.json and model.safetensors", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The list is broken.
    #[error("{} is not a usable list of weight files: {reason}; fetch the model again", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// The names of the weight files in `directory`, plain and one at least; whether these are there is not looked at.
///
/// # Errors
/// If there is a list of them that is no use.
pub fn weight_files(directory: &Path) -> Result<BTreeSet<String>, WeightFilesError> {
    let path = directory.join(INDEX_FILE);
    match whole_file::read_if_there(&path, MAX_INDEX_BYTES) {
        Ok(None) => Ok(BTreeSet::from([SINGLE_FILE.to_owned()])),
        Ok(Some(json)) => shard_names(&json).map_err(|reason| WeightFilesError::Index { path, reason }),
        Err(source) => Err(WeightFilesError::Read { path, source }),
    }
}

fn shard_names(json: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let index: Index = bounded_json::parse(json).map_err(|error| error.to_string())?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    if names.is_empty() || names.len() > MAX_SHARDS {
        return Err(format!("it names {} files, and 1 to {MAX_SHARDS} are read", names.len()));
    }
    // A name that leads out of the directory would read what nobody asked for.
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(name) => Err(format!("\"{}\" is not a plain file name", name.escape_debug())),
        None => Ok(names),
    }
}

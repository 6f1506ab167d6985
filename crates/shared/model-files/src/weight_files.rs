//! Lists the weight files of a Hugging Face directory: a single file, or the files that an index names.

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

/// Maximum bytes of the index of weight files.
const MAX_INDEX_BYTES: u64 = 1 << 24;
/// Maximum number of weight files of a model.
const MAX_SHARDS: usize = 1 << 10;

/// Error while listing the files that hold weights.
#[derive(Debug, thiserror::Error)]
pub enum WeightFilesError {
    /// The index of weight files could not be read.
    #[error("cannot read {}: {source}; a model directory has config.json and model.safetensors", path.display())]
    Read {
        /// Path of the index file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The index of weight files is broken.
    #[error("{} is not a usable list of weight files: {reason}; fetch the model again", path.display())]
    Index {
        /// Path of the index file.
        path: PathBuf,
        /// Description of the defect in the index.
        reason: String,
    },
}

/// Returns the names of the weight files in `directory`: at least one, each a plain file name. Does not
/// check that the files exist.
///
/// # Errors
/// If the index exists but is unusable.
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
        return Err(format!("it names {} files; 1 to {MAX_SHARDS} are supported", names.len()));
    }
    // A name that leads out of the directory would read a file that is not part of the model.
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(name) => Err(format!("\"{}\" is not a plain file name", name.escape_debug())),
        None => Ok(names),
    }
}

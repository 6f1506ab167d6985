//! Imports the registry of earlier versions: one JSON file, `adapters.json`, with paths of adapter files.
//!
//! The import runs once and copies the files into the store. An adapter whose files are missing stays
//! registered by name, with a fault.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use types::{AdapterVersion, TenantId};

use super::{
    database::{DatabaseError, Labels, Record, failed},
    jail::AdapterLocation,
    store::{AdapterStore, ContentId, StoreError},
};

const FILE: &str = "adapters.json";
const IMPORTED: &str = "adapters.json.imported";
const VERSION: u32 = 1;
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Content id of an adapter without files.
const NO_FILES: ContentId = ContentId([0; 32]);

#[derive(Deserialize)]
struct LegacyRegistry {
    version: u32,
    adapters: Vec<LegacyAdapter>,
}

#[derive(Deserialize)]
struct LegacyAdapter {
    name: String,
    path: PathBuf,
    generation: String,
    rank: u32,
    bytes: u64,
    modules: u32,
    loaded_at: u64,
}

/// Reads the old registry of `state`, if there is one, and copies its adapters into `store`. May block.
pub(super) fn read(state: &Path, store: &AdapterStore) -> Result<Vec<Record>, DatabaseError> {
    let path = state.join(FILE);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("opening", &path)(error)),
    };
    let damaged = |reason: String| DatabaseError::Damaged { path: path.clone(), reason };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed("reading", &path))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(damaged(format!("it has more than {MAX_FILE_BYTES} bytes")));
    }
    let contents: LegacyRegistry =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if contents.version != VERSION {
        return Err(damaged(format!("its version is {}, not {VERSION}", contents.version)));
    }
    contents.adapters.into_iter().map(|old| record(old, store, &damaged)).collect()
}

/// Renames the old registry, so that it is not imported again.
pub(super) fn finish(state: &Path) -> Result<(), DatabaseError> {
    match fs::rename(state.join(FILE), state.join(IMPORTED)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("renaming", &state.join(FILE))(error))
        }
        _ => Ok(()),
    }
}

fn record(
    old: LegacyAdapter,
    store: &AdapterStore,
    damaged: &dyn Fn(String) -> DatabaseError,
) -> Result<Record, DatabaseError> {
    let generation = blake3::Hash::from_hex(&old.generation)
        .map_err(|error| damaged(format!("'{}' is not a generation: {error}", old.generation)))?;
    let content = match copy(&old.path, store) {
        Ok(content) => content,
        // A full disk must not lose an adapter for good.
        Err(error @ StoreError::Full(_)) => {
            return Err(failed("importing", &old.path)(io::Error::new(io::ErrorKind::StorageFull, error)));
        }
        Err(error) => {
            tracing::error!(name = %old.name, %error, "cannot import an adapter's files");
            NO_FILES
        }
    };
    Ok(Record {
        name: old.name,
        tenant: None,
        content,
        generation: AdapterVersion(*generation.as_bytes()),
        template: None,
        rank: old.rank,
        bytes: old.bytes,
        modules: old.modules,
        draft_layers: 0,
        labels: Labels::default(),
        source: old.path,
        loaded_at: old.loaded_at,
        last_used_us: old.loaded_at.saturating_mul(1_000_000),
        pinned: false,
        version: 0,
        made_by: None,
        expires_at: None,
    })
}

fn copy(path: &Path, store: &AdapterStore) -> Result<ContentId, StoreError> {
    let incoming = store.copy(&AdapterLocation::anywhere(path)?, TenantId::EVERYBODY)?;
    // No eviction runs before the adapters are registered, so the file needs no hold.
    drop(store.install(&incoming)?);
    Ok(incoming.content)
}

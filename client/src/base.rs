//! The client weights: tokenizer, configuration, embedding and norms of the base.
//!
//! The executor sends the client weights as sparse copies of the model's files, with holes in place of the
//! linear layers. The client caches the copies under the base's content hash, or uses its own copy of the
//! model. Either source is opened with [`ClientBase`](model::client_weights::client_base::ClientBase).

use std::path::{Path, PathBuf};

use model::{
    client_weights::{self, SparseCopy, SparseCopyError, client_base::ClientBaseError},
    sources::open::OpenError,
};
use model_files::model_files::SPARSE_COPY;
use shmproto::layer::control::Catalog;
use types::AdapterVersion;

use crate::{error::CallError, session::Session};

/// Reason why the client has no base.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    /// The executor is gone, or refuses to send the files.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The executor offers no files.
    #[error("the executor serves no files of its base: use --model with your own copy")]
    NoFiles,
    /// The listed or received files cannot be stored.
    #[error(transparent)]
    Copy(#[from] SparseCopyError),
    /// The files are not a model.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The model lacks something that a client needs.
    #[error(transparent)]
    Client(#[from] ClientBaseError),
    /// The client's own copy is another model than the executor's.
    #[error("{} differs from the executor's model: its identity is {found:.12}, not \
             {wanted:.12}", path.display())]
    Other {
        /// Path of the client's copy.
        path: PathBuf,
        /// Content hash of the client's copy, in hexadecimal digits.
        found: String,
        /// Content hash of the executor's base, in hexadecimal digits.
        wanted: String,
    },
}

/// Location and limit of sparse copies.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Directory of all copies.
    pub directory: PathBuf,
    /// Maximum number of fetched bytes.
    pub limit_bytes: u64,
}

/// Returns the path of the sparse copy of the session's base, and fetches the copy if it is missing. Calls
/// `on_progress` with the fetched bytes and the total.
///
/// # Errors
/// Fails if the executor does not send the files, or they cannot be stored.
pub fn fetch(
    session: &mut Session,
    cache: &Cache,
    on_progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, BaseError> {
    let catalog = session.catalog();
    let place = cache.directory.join(AdapterVersion(catalog.base_hash).to_string());
    if place.join(SPARSE_COPY).exists() {
        return Ok(place);
    }
    if catalog.files.is_empty() {
        return Err(BaseError::NoFiles);
    }
    let files: Vec<client_weights::ClientWeightsFile> = catalog.files.iter().map(planned).collect();
    let total =
        files.iter().map(client_weights::ClientWeightsFile::planned_bytes).fold(0, u64::saturating_add);
    let mut copy = SparseCopy::create(&place, &files, cache.limit_bytes)?;
    let mut done = 0;
    while let Some(wanted) = copy.wanted() {
        // Blob 0 is the catalog, so file `n` is blob `n + 1`.
        let blob = u32::try_from(wanted.file + 1).unwrap_or(u32::MAX);
        let bytes = session.fetch(blob, wanted.offset, wanted.bytes)?;
        copy.write(&bytes)?;
        done += bytes.len() as u64;
        on_progress(done, total);
    }
    Ok(copy.finish()?)
}

/// Converts a listed file. A range that overflows becomes an invalid range, which [`SparseCopy`] refuses.
fn planned(file: &shmproto::layer::control::ClientFileEntry) -> client_weights::ClientWeightsFile {
    let range = |&(offset, bytes): &(u64, u64)| offset..offset.checked_add(bytes).unwrap_or(0);
    let ranges = file.ranges.iter().map(range).collect();
    client_weights::ClientWeightsFile { name: file.name.clone(), bytes: file.bytes, ranges }
}

/// Compares the model at `path` with the executor's base. The first comparison reads the whole model; the
/// directory `kept` caches its content hash.
///
/// # Errors
/// Fails if `path` is no model, or another one.
pub fn compare(catalog: &Catalog, path: &Path, kept: Option<&Path>) -> Result<(), BaseError> {
    let found = model::sources::identity::of_model_once(path, kept)?;
    if found == catalog.base_hash {
        return Ok(());
    }
    let (found, wanted) = (AdapterVersion(found).to_string(), AdapterVersion(catalog.base_hash).to_string());
    Err(BaseError::Other { path: path.to_owned(), found, wanted })
}

//! What a client needs of the base besides its linear layers: tokenizer, configuration, embedding, norms.
//!
//! It comes from the executor as sparse copies of the model's own files, with holes where the linear layers are, and is
//! kept in a cache directory by the base's identity; or from a copy of the model that the client has already. Either way
//! [`ClientBase`](model::client_weights::client_base::ClientBase) opens it.

use std::path::{Path, PathBuf};

use model::{
    client_weights::{self, SparseCopy, SparseCopyError, client_base::ClientBaseError},
    sources::open::OpenError,
};
use model_files::model_files::SPARSE_COPY;
use shmproto::layer::control::Catalog;
use types::Generation;

use crate::{error::CallError, session::Session};

/// Why there is no base to work with.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    /// The executor is gone, or does not give the files out.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The executor gives no files out.
    #[error("the executor gives out no files of its base: use --model with a copy of your own")]
    NoFiles,
    /// What the executor lists, or sends, cannot be kept.
    #[error(transparent)]
    Copy(#[from] SparseCopyError),
    /// The files are no model.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// They are not what a client needs of one.
    #[error(transparent)]
    Client(#[from] ClientBaseError),
    /// A copy of another model.
    #[error("{} is another model than the executor's: its identity is {found:.12}, not {wanted:.12}", path.display())]
    Other {
        /// The copy.
        path: PathBuf,
        /// Its identity, as hexadecimal.
        found: String,
        /// The executor's, as hexadecimal.
        wanted: String,
    },
}

/// Where sparse copies are kept, and how much is fetched for one.
#[derive(Debug, Clone)]
pub struct Cache {
    /// The directory.
    pub directory: PathBuf,
    /// Most bytes that are fetched.
    pub limit_bytes: u64,
}

/// The path of the sparse copy of the session's base, fetched if it is not there. `told` hears of bytes fetched, and of
/// all there are to fetch.
///
/// # Errors
/// The executor does not give it out, or there is no room for it.
pub fn fetch(
    session: &mut Session,
    cache: &Cache,
    told: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, BaseError> {
    let catalog = session.catalog();
    let place = cache.directory.join(Generation(catalog.base_hash).to_string());
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
        // Blob 0 is the catalog.
        let blob = u32::try_from(wanted.file + 1).unwrap_or(u32::MAX);
        let bytes = session.fetch(blob, wanted.offset, wanted.bytes)?;
        copy.write(&bytes)?;
        done += bytes.len() as u64;
        told(done, total);
    }
    Ok(copy.finish()?)
}

/// A listed file as the copy takes it. A range that wraps around is no range, and is refused there.
fn planned(file: &shmproto::layer::control::ClientFileEntry) -> client_weights::ClientWeightsFile {
    let range = |&(offset, bytes): &(u64, u64)| offset..offset.checked_add(bytes).unwrap_or(0);
    let ranges = file.ranges.iter().map(range).collect();
    client_weights::ClientWeightsFile { name: file.name.clone(), bytes: file.bytes, ranges }
}

/// Compares the model at `path` with the executor's base. All of it is read, the first time; its identity is kept in the
/// directory `kept`, if there is one.
///
/// # Errors
/// It is none, or another.
pub fn compare(catalog: &Catalog, path: &Path, kept: Option<&Path>) -> Result<(), BaseError> {
    let found = model::sources::identity::of_model_once(path, kept)?;
    if found == catalog.base_hash {
        return Ok(());
    }
    let (found, wanted) = (Generation(found).to_string(), Generation(catalog.base_hash).to_string());
    Err(BaseError::Other { path: path.to_owned(), found, wanted })
}

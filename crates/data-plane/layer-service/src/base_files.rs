//! Catalog and client weights, which clients fetch in pieces.

use model::client_weights::{ClientWeightsPlan, ClientWeightsReadError};
use shmproto::{
    codec::Wire as _,
    layer::{
        SitePath,
        control::{
            CATALOG, Catalog, ClientFileEntry, MAX_CATALOG_BYTES, MAX_FETCH_BYTES, RefusalCode,
            SessionRefused, Site as CatalogSite,
        },
    },
};

use super::registry::{MaskedRowSupport, refused};

/// Source of the catalog and of the files with client weights.
pub trait Blobs: std::fmt::Debug + Send + Sync {
    /// Returns the bytes of the encoded catalog.
    fn catalog_bytes(&self) -> u32;

    /// Returns at most `bytes` bytes of a blob from `offset` on.
    ///
    /// # Errors
    /// Returns the refusal for the client if the blob does not exist or these bytes are not offered.
    fn read(&self, blob: u32, offset: u64, bytes: u32) -> Result<Vec<u8>, SessionRefused>;
}

/// Returns the kinds of masked rows that every site of a catalog accepts.
#[must_use]
pub fn maskable(sites: &[CatalogSite]) -> MaskedRowSupport {
    let has = |path| sites.iter().all(|site| site.has_path(path));
    MaskedRowSupport { linear: has(SitePath::Linear), ring: has(SitePath::Ring) }
}

/// Converts the files of a plan to catalog entries.
#[must_use]
pub fn catalog_files(plan: &ClientWeightsPlan) -> Vec<ClientFileEntry> {
    let files = plan.files().iter().map(|file| ClientFileEntry {
        name: file.name.clone(),
        bytes: file.bytes,
        ranges: file.ranges.iter().map(|range| (range.start, range.end - range.start)).collect(),
    });
    files.collect()
}

/// The catalog exceeds the maximum length of the protocol.
#[derive(Debug, thiserror::Error)]
#[error(
    "the catalog of layers has {0} bytes, and the limit is {MAX_CATALOG_BYTES}: serve a model with fewer \
     layers, or set --layers off"
)]
pub struct CatalogTooLong(usize);

/// The catalog, and the client weights from the model's files.
#[derive(Debug)]
pub struct BaseBlobs {
    catalog: Vec<u8>,
    plan: Option<ClientWeightsPlan>,
}

impl BaseBlobs {
    /// Offers `catalog` and the files of `plan`, which it lists. Without a plan only the catalog is offered,
    /// for clients with their own copy of the model.
    ///
    /// # Errors
    /// Fails if the catalog is too long.
    pub fn new(catalog: &Catalog, plan: Option<ClientWeightsPlan>) -> Result<Self, CatalogTooLong> {
        let catalog = catalog.to_bytes();
        if catalog.len() > MAX_CATALOG_BYTES as usize {
            Err(CatalogTooLong(catalog.len()))
        } else {
            Ok(Self { catalog, plan })
        }
    }
}

impl Blobs for BaseBlobs {
    fn catalog_bytes(&self) -> u32 {
        // `new` has checked that the catalog is not longer than MAX_CATALOG_BYTES.
        u32::try_from(self.catalog.len()).unwrap_or(u32::MAX)
    }

    fn read(&self, blob: u32, offset: u64, bytes: u32) -> Result<Vec<u8>, SessionRefused> {
        let bytes = bytes.min(MAX_FETCH_BYTES);
        if blob == CATALOG {
            let rest = usize::try_from(offset)
                .ok()
                .and_then(|offset| self.catalog.get(offset..))
                .unwrap_or_default();
            return Ok(rest[..rest.len().min(bytes as usize)].to_vec());
        }
        let nothing = || format!("there is no blob {blob}: fetch a blob of the catalog");
        let plan = self.plan.as_ref().ok_or_else(|| refused(RefusalCode::NoSuchBlob, nothing()))?;
        plan.read(blob as usize - 1, offset, bytes).map_err(|error| unread(blob, &error))
    }
}

/// Converts a read error; disk errors are logged, and the client gets only a general message.
fn unread(blob: u32, error: &ClientWeightsReadError) -> SessionRefused {
    match error {
        ClientWeightsReadError::NoSuchFile { .. } | ClientWeightsReadError::NotPlanned { .. } => {
            refused(RefusalCode::NoSuchBlob, error.to_string())
        }
        ClientWeightsReadError::Changed { .. } | ClientWeightsReadError::Read { .. } => {
            tracing::error!(blob, %error, "cannot read a part of the model's files for a client");
            let message =
                "the executor cannot read its model's files: use your own copy, or ask the operator"
                    .to_owned();
            refused(RefusalCode::NoSuchBlob, message)
        }
    }
}

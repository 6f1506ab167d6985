//! Copies the files of an adapter from its source to the store's directory for incoming files.
//!
//! Only the files that adapters have are read, each up to its limit. Staged files are removed with the last
//! reference to them, or by the next start.

use futures::TryStreamExt as _;
use text::adapter_text;

use super::{byte_stream::ByteStream, source::AdapterSource, stats::FetchedBytes};
use crate::adapters::{
    errors::FetchError,
    jail::{AdapterLocation, CONFIG_FILE, JailError, PICKLES, WEIGHT_FILE},
    store::{AdapterStore, IncomingAdapter},
    uri::{
        AdapterUri,
        digest::{Digest, DigestWriter},
    },
};

/// Files of an adapter that were fetched and are not loaded yet.
#[derive(Debug)]
pub(in crate::adapters) struct StagedAdapter {
    files: IncomingAdapter,
    /// URI of exactly these bytes.
    pub(in crate::adapters) pinned: AdapterUri,
    /// Bytes of all files.
    pub(in crate::adapters) bytes: u64,
}

impl StagedAdapter {
    pub(in crate::adapters) fn place(&self) -> Result<AdapterLocation, JailError> {
        Ok(self.files.place()?.displayed_as(self.pinned.to_string().as_ref()))
    }
}

/// Copies the files of `source`, and checks that the weights have the digest in `uri`, if there is one.
pub(super) async fn stage(
    uri: &AdapterUri,
    source: &AdapterSource,
    store: &AdapterStore,
    counted: &FetchedBytes<'_>,
) -> Result<StagedAdapter, FetchError> {
    let mut copy = StagedCopy { files: store.receive()?, bytes: 0, counted };
    let config = source.file(CONFIG_FILE).await?.ok_or_else(|| missing(uri, CONFIG_FILE))?;
    copy.add(CONFIG_FILE, config).await?;
    let Some(weights) = source.file(WEIGHT_FILE).await? else {
        return Err(without_weights(uri, source).await?);
    };
    let digest = copy.add(WEIGHT_FILE, weights).await?;
    if let Some(expected) = uri.digest().filter(|expected| *expected != digest) {
        return Err(FetchError::OtherDigest {
            uri: uri.to_string(),
            expected: expected.to_string(),
            found: digest.to_string(),
        });
    }
    for (name, _) in adapter_text::FILES {
        if let Some(bytes) = source.file(name).await? {
            copy.add(name, bytes).await?;
        }
    }
    Ok(StagedAdapter { files: copy.files, pinned: source.pinned(digest), bytes: copy.bytes })
}

struct StagedCopy<'a> {
    files: IncomingAdapter,
    bytes: u64,
    counted: &'a FetchedBytes<'a>,
}

impl StagedCopy<'_> {
    /// Copies one file, and returns its digest.
    async fn add(&mut self, name: &str, mut bytes: ByteStream) -> Result<Digest, FetchError> {
        let (mut file, mut digest) = (self.files.begin(name).await?, DigestWriter::default());
        while let Some(piece) = bytes.try_next().await? {
            file.write(&piece).await?;
            digest.update(&piece);
            self.bytes = self.bytes.saturating_add(piece.len() as u64);
            self.counted.add(piece.len());
        }
        file.end().await?;
        Ok(digest.finish())
    }
}

/// Returns the error of an adapter whose weights are a pickle or missing.
async fn without_weights(uri: &AdapterUri, source: &AdapterSource) -> Result<FetchError, FetchError> {
    for pickle in PICKLES {
        if source.file(pickle).await?.is_some() {
            return Ok(JailError::Pickle(format!("{uri}/{pickle}").into()).into());
        }
    }
    Ok(missing(uri, WEIGHT_FILE))
}

fn missing(uri: &AdapterUri, name: &str) -> FetchError {
    FetchError::Missing { uri: uri.to_string(), what: name.to_owned() }
}

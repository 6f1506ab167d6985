//! The places from which adapters are fetched: a hub, a bucket, or a directory inside the adapter root.

use std::{path::Path, sync::Arc};

use axum::body::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use tokio::io::AsyncReadExt as _;

use super::{
    RemoteOptions,
    byte_stream::{ByteStream, with_patience},
    hub::HubSnapshot,
};
use crate::{
    adapters::{
        errors::FetchError,
        jail::AdapterLocation,
        store::{BucketAddress, bucket::Bucket},
        uri::{AdapterUri, UriScheme, digest::Digest},
    },
    thread,
};

/// Bytes read from a file at once.
const PIECE_BYTES: usize = 1 << 20;

/// An open source of one adapter.
pub(super) struct AdapterSource {
    uri: AdapterUri,
    place: SourcePlace,
}

enum SourcePlace {
    Hub(Box<HubSnapshot>),
    Bucket(Bucket),
    Directory(Arc<AdapterLocation>),
}

impl AdapterSource {
    /// Opens the source of `uri`; directories must be inside `root`.
    pub(super) async fn open(
        uri: &AdapterUri,
        root: &Path,
        options: &RemoteOptions,
    ) -> Result<Self, FetchError> {
        let text = uri.to_string();
        let missing = |what: &str| FetchError::Missing { uri: text.clone(), what: what.to_owned() };
        let path = uri.parts().join("/");
        let place = match uri.scheme() {
            UriScheme::Hub => {
                let name = uri.hub_name().ok_or_else(|| missing("repository"))?;
                SourcePlace::Hub(Box::new(HubSnapshot::open(&text, &name, &options.hub).await?))
            }
            UriScheme::Bucket => {
                let address = BucketAddress::parse(&format!("s3://{path}"), options.bucket.variables());
                let address = address.ok_or_else(|| missing("bucket"))?;
                let opened = Bucket::open(address);
                SourcePlace::Bucket(opened.map_err(|error| FetchError::of_bucket(&text, &error))?)
            }
            UriScheme::File => {
                let inside = AdapterLocation::inside(root, Path::new(&format!("/{path}")))?;
                SourcePlace::Directory(Arc::new(inside.displayed_as(Path::new(&text))))
            }
        };
        Ok(Self { uri: uri.clone(), place })
    }

    /// Returns the URI of exactly the bytes that the source delivers.
    pub(super) fn pinned(&self, digest: Digest) -> AdapterUri {
        let commit = match &self.place {
            SourcePlace::Hub(snapshot) => Some(snapshot.commit.clone()),
            SourcePlace::Bucket(_) | SourcePlace::Directory(_) => None,
        };
        self.uri.pinned(commit, digest)
    }

    /// Returns the bytes of the file `name`; `None` if there is no such file.
    pub(super) async fn file(&self, name: &'static str) -> Result<Option<ByteStream>, FetchError> {
        match &self.place {
            SourcePlace::Hub(snapshot) => snapshot.file(name).await,
            SourcePlace::Bucket(bucket) => {
                let uri = self.uri.to_string();
                let read = bucket.read(name).await.map_err(|error| FetchError::of_bucket(&uri, &error))?;
                Ok(read.map(|bytes| {
                    let text = uri.clone();
                    with_patience(&uri, bytes.map_err(move |error| FetchError::of_bucket(&text, &error)))
                }))
            }
            SourcePlace::Directory(place) => self.file_in(Arc::clone(place), name).await,
        }
    }

    async fn file_in(
        &self,
        place: Arc<AdapterLocation>,
        name: &'static str,
    ) -> Result<Option<ByteStream>, FetchError> {
        let uri = self.uri.to_string();
        let stopped = FetchError::Stopped(uri.clone());
        let opened = thread::run("adapter-open", move || place.file(name)).await.map_err(|_| stopped)??;
        let Some(file) = opened else { return Ok(None) };
        let read = move |mut file: tokio::fs::File| {
            let uri = uri.clone();
            async move {
                let mut piece = vec![0; PIECE_BYTES];
                match file.read(&mut piece).await {
                    Ok(0) => Ok(None),
                    Ok(count) => {
                        piece.truncate(count);
                        Ok(Some((Bytes::from(piece), file)))
                    }
                    Err(error) => Err(FetchError::Failed { uri, reason: error.to_string() }),
                }
            }
        };
        Ok(Some(futures::stream::try_unfold(tokio::fs::File::from_std(file), read).boxed()))
    }
}

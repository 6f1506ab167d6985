//! The bytes of a file as a source sends them.

use std::time::Duration;

use axum::body::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream::BoxStream};
use tokio::time::timeout;

use crate::adapters::errors::FetchError;

/// Timeout of each piece that a source sends.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a file as they arrive.
pub(super) type ByteStream = BoxStream<'static, Result<Bytes, FetchError>>;

/// Ends a stream with an error if the source sends nothing for [`PATIENCE`].
pub(super) fn with_patience(
    uri: &str,
    stream: impl Stream<Item = Result<Bytes, FetchError>> + Send + Unpin + 'static,
) -> ByteStream {
    let uri = uri.to_owned();
    futures::stream::try_unfold(stream, move |mut stream| {
        let uri = uri.clone();
        async move {
            let next = timeout(PATIENCE, stream.try_next()).await;
            let reason = || format!("the source was silent for {} s", PATIENCE.as_secs());
            let piece = next.map_err(|_| FetchError::Failed { uri, reason: reason() })??;
            Ok(piece.map(|piece| (piece, stream)))
        }
    })
    .boxed()
}

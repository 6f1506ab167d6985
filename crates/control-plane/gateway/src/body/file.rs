//! A file as the body of an answer, read in pieces as it is sent.

use axum::{
    body::Body,
    http::{HeaderValue, header},
    response::Response,
};
use tokio::{fs::File, io::AsyncReadExt as _};

/// Bytes of a file that are in memory at once.
const PIECE_BYTES: usize = 64 << 10;

/// Returns an answer with a file of `bytes` bytes. `held` is dropped when all bytes are sent.
pub(crate) fn respond(file: File, bytes: u64, held: impl Send + 'static) -> Response {
    let pieces = futures::stream::unfold((file, held), |(mut file, held)| async move {
        let mut piece = vec![0; PIECE_BYTES];
        match file.read(&mut piece).await {
            Ok(0) => None,
            Ok(length) => {
                piece.truncate(length);
                Some((Ok(piece), (file, held)))
            }
            Err(error) => Some((Err(error), (file, held))),
        }
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
    response
}

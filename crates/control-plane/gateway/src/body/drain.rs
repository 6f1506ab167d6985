//! Handles the unread rest of a request's body. A short rest is read and discarded, so that the connection
//! can serve the next request. After a long rest the answer announces that the connection closes. Without the
//! announcement, a client that reuses the connection would lose its next request.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::Response,
};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use tokio::time::timeout;

/// Longest rest that is read, in bytes.
const SHORT_BYTES: u64 = 64 * 1024;
/// Timeout for the rest, which has normally arrived with the request.
const PATIENCE: Duration = Duration::from_millis(500);

/// Reads the rest of the body, or announces that the connection closes.
pub(crate) async fn read(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let is_asked_for = request.headers().contains_key(header::EXPECT);
    let rest = Arc::new(Mutex::new(None));
    let request =
        request.map(|body| Body::new(DrainableBody { body, has_ended: false, rest: Arc::clone(&rest) }));
    let mut response = next.run(request).await;
    let rest = rest.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(rest) = rest
        && (is_asked_for || !skip(rest).await)
    {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Discards a short body; false if the body is too long or too slow.
async fn skip(mut body: Body) -> bool {
    let to_the_end = async {
        let mut left = Some(SHORT_BYTES);
        while left.is_some_and(|left| body.size_hint().lower() <= left) {
            let Some(frame) = body.frame().await else { return true };
            let read =
                frame.map_or(SHORT_BYTES + 1, |frame| frame.data_ref().map_or(0, |data| data.len() as u64));
            left = left.and_then(|left| left.checked_sub(read));
        }
        false
    };
    timeout(PATIENCE, to_the_end).await.unwrap_or(false)
}

/// A body that stores itself in `rest` if it is dropped before its end.
struct DrainableBody {
    body: Body,
    /// Needed for chunked bodies, whose `is_end_stream` may be false at the end.
    has_ended: bool,
    rest: Arc<Mutex<Option<Body>>>,
}

impl HttpBody for DrainableBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.has_ended |= frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for DrainableBody {
    fn drop(&mut self) {
        if !self.has_ended && !self.body.is_end_stream() {
            let rest = std::mem::take(&mut self.body);
            *self.rest.lock().unwrap_or_else(PoisonError::into_inner) = Some(rest);
        }
    }
}

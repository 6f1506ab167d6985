//! What nobody has read of a request's body when it is answered: a short rest is read and thrown away, so that the connection is
//! good for the next request; after a long one it is not, and the answer says so. Otherwise it would be closed without a word, and a
//! client that was just about to ask again would believe that its next request was lost.

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

/// The longest rest that is read.
const SHORT_BYTES: u64 = 64 * 1024;
/// It has been sent with the request, or is not waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// Reads the rest, or says that the connection closes.
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

/// Whether a body was short, and came to its end.
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

/// A body that comes back, if it is dropped before its end.
struct DrainableBody {
    body: Body,
    /// Of one in chunks, nothing else says so.
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

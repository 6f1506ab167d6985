//! Forms with files (`multipart/form-data`), of which only a small piece is in memory at a time.
//!
//! The form parser buffers its input until a boundary or the head of a part is complete. So a body reaches
//! the parser in small pieces, and is refused after [`MAX_HEAD_BYTES`] bytes without a part or a piece of
//! one.
//!
//! A sender may lag `--body-timeout-ms` behind [`LEAST_BYTES_PER_S`]; see [`PeerTimeBudget`]. With the limit
//! on the length of files this bounds the duration of a form.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{
        FromRequest, Multipart, Request,
        multipart::{Field, MultipartError},
    },
};
use hyper::body::Frame;
use tokio::time::timeout;

use super::{broken, caller_of, kind};
use crate::{app::App, errors::ApiError, slow_peer_timeout::PeerTimeBudget, tenant_memory::Reservation};

/// Minimum rate of a sender, in bytes per second.
pub(super) const LEAST_BYTES_PER_S: u64 = 32 << 10;
/// Maximum bytes before a part begins or continues: boundaries and a part's head.
const MAX_HEAD_BYTES: u64 = 64 << 10;
const PIECE_BYTES: usize = 16 << 10;
/// Memory that a form takes: a head, and pieces in the parser and in transit.
const FORM_BYTES: usize = 128 << 10;
const MAX_FIELD_BYTES: usize = 1024;

#[derive(Debug)]
pub(crate) struct MultipartForm {
    parts: Multipart,
    clock: Clock,
    _memory: Reservation,
}

impl FromRequest<Arc<App>> for MultipartForm {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let memory = app.memory.reserve(&caller_of(&request)?.tenant, FORM_BYTES)?;
        Self::of(request, app.connections.body_timeout, memory).await
    }
}

impl MultipartForm {
    async fn of(request: Request, limit: Duration, memory: Reservation) -> Result<Self, ApiError> {
        let (kind, unparsed) = (kind(&request).map(str::to_owned), Arc::new(AtomicU64::new(0)));
        let pieces = |body| Body::new(BodyChunks::new(body, Arc::clone(&unparsed)));
        let parts = Multipart::from_request(request.map(pieces), &()).await;
        let parts = parts.map_err(|_| ApiError::not_multipart(kind.as_deref()))?;
        Ok(Self {
            parts,
            clock: Clock { limit, budget: PeerTimeBudget::new(limit, LEAST_BYTES_PER_S), unparsed },
            _memory: memory,
        })
    }

    /// Returns the next part.
    ///
    /// # Errors
    /// If the form breaks off, is invalid, or arrives too slowly.
    pub(crate) async fn next(&mut self) -> Result<Option<FormPart<'_>>, ApiError> {
        let field = self.clock.wait(self.parts.next_field()).await?;
        Ok(field.map(|field| FormPart { field, clock: &mut self.clock }))
    }
}

#[derive(Debug)]
pub(crate) struct FormPart<'a> {
    field: Field<'a>,
    clock: &'a mut Clock,
}

impl FormPart<'_> {
    /// Name of the part; empty if it has none.
    #[must_use]
    pub(crate) fn name(&self) -> &str {
        self.field.name().unwrap_or_default()
    }

    #[must_use]
    pub(crate) fn file_name(&self) -> Option<&str> {
        self.field.file_name()
    }

    /// Next bytes of the part; `None` at its end.
    ///
    /// # Errors
    /// Fails as [`MultipartForm::next`] does.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        self.clock.wait(self.field.chunk()).await
    }

    /// Reads the whole part as a short text.
    ///
    /// # Errors
    /// Fails as [`MultipartForm::next`] does, or if the text is too long.
    pub(crate) async fn text(mut self) -> Result<String, ApiError> {
        let mut text = Vec::new();
        while let Some(bytes) = self.chunk().await? {
            text.extend_from_slice(&bytes);
            if text.len() > MAX_FIELD_BYTES {
                let message = format!("a field has at most {MAX_FIELD_BYTES} bytes");
                return Err(ApiError::invalid(self.name(), message));
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Cuts off a sender that is too slow.
#[derive(Debug)]
struct Clock {
    limit: Duration,
    budget: PeerTimeBudget,
    /// Bytes received since the parser last returned something.
    unparsed: Arc<AtomicU64>,
}

impl Clock {
    /// Waits for the parser's next result, within the sender's time budget.
    async fn wait<T>(
        &mut self,
        next: impl Future<Output = Result<T, MultipartError>>,
    ) -> Result<T, ApiError> {
        let began = Instant::now();
        let next = timeout(self.budget.left(), next).await;
        self.budget.moved(began.elapsed(), self.unparsed.swap(0, Relaxed));
        let next = next.map_err(|_| ApiError::body_too_slow(LEAST_BYTES_PER_S, self.limit))?;
        next.map_err(|error| broken(&error))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the head of a part has more than {MAX_HEAD_BYTES} bytes")]
struct HeadTooLong;

/// A body in small pieces. The reader is woken again between two pieces, so that it parses one before it
/// takes the next.
struct BodyChunks {
    body: Body,
    /// Received bytes that were not passed on yet.
    rest: Bytes,
    unparsed: Arc<AtomicU64>,
    is_due: bool,
}

impl BodyChunks {
    fn new(body: Body, unparsed: Arc<AtomicU64>) -> Self {
        Self { body, rest: Bytes::new(), unparsed, is_due: true }
    }
}

impl HttpBody for BodyChunks {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if !std::mem::replace(&mut self.is_due, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        while self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let length = self.rest.len().min(PIECE_BYTES);
        if self.unparsed.fetch_add(length as u64, Relaxed) > MAX_HEAD_BYTES {
            return Poll::Ready(Some(Err(axum::Error::new(HeadTooLong))));
        }
        self.is_due = false;
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::header;
    use futures::stream;

    use super::*;
    use crate::tenant_memory::{MemoryLimits, TenantMemory};

    const FILE: &str = "--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    const LONG: Duration = Duration::from_secs(600);

    async fn form(body: Body, limit: Duration) -> MultipartForm {
        let request = Request::builder().header(header::CONTENT_TYPE, "multipart/form-data; boundary=x");
        let memory = TenantMemory::new(MemoryLimits::default()).reserve(&"a".into(), FORM_BYTES).unwrap();
        MultipartForm::of(request.body(body).unwrap(), limit, memory).await.unwrap()
    }

    /// A body that begins with `begin` and then repeats `piece` after each `pause`.
    fn endless(begin: &str, piece: &'static [u8], pause: Duration) -> Body {
        let begin = Bytes::from(begin.to_owned());
        Body::from_stream(stream::unfold(Some(begin), move |begin| async move {
            if begin.is_none() {
                tokio::time::sleep(pause).await;
            }
            Some((Ok::<_, std::io::Error>(begin.unwrap_or(Bytes::from_static(piece))), None))
        }))
    }

    async fn read(form: &mut MultipartForm) -> Result<Vec<Bytes>, ApiError> {
        let mut part = form.next().await?.expect("a part");
        let mut chunks = Vec::new();
        while let Some(chunk) = part.chunk().await? {
            chunks.push(chunk);
        }
        Ok(chunks)
    }

    #[tokio::test]
    async fn what_comes_without_the_head_of_a_part_is_refused_at_a_limit() {
        for begin in ["a", "--x\r\na: ", "--x"] {
            let mut form = form(endless(begin, &[b' '; 1 << 20], Duration::ZERO), LONG).await;
            let refused = form.next().await.unwrap_err();
            assert_eq!(refused.code(), "invalid_body", "{begin}");
            assert!(refused.to_string().contains("the head of a part has more than"), "{refused}");
        }
    }

    #[tokio::test]
    async fn a_file_that_comes_at_once_is_handed_on_in_small_pieces() {
        let content: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
        let body = [FILE.as_bytes(), &content, b"\r\n--x--\r\n"].concat();
        let mut form = form(Body::from(body), LONG).await;
        let chunks = read(&mut form).await.unwrap();
        assert!(chunks.iter().all(|chunk| chunk.len() <= 2 * PIECE_BYTES));
        assert!(chunks.concat() == content, "the file is as it was sent");
        assert!(form.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_sender_who_drips_is_cut_off_although_no_pause_is_too_long() {
        let limit = Duration::from_millis(400);
        let mut dripping = form(endless(FILE, b"a", limit / 8), limit).await;
        let refused = read(&mut dripping).await.unwrap_err();
        assert_eq!(refused.code(), "body_timeout");
    }
}

//! Streams an answer in the format of an API: each frame of the body holds all events that are ready.
//!
//! A stream ends with [`StreamFormat::finish`] or [`StreamFormat::fail`], because a client would read a bare
//! end as success. [`SseBody::frame`] therefore continues until one of the two sets `ended`.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body as HttpBody, Bytes},
    http::{HeaderValue, Response, header},
};

use serde::Serialize;
use serde_json::Value;

use super::generation_response::{ChoiceUpdate, GenerationResponse};
use crate::{errors::ApiError, telemetry};

/// Silence after which a keep-alive is sent, so that no proxy takes the connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Failpoints at which tests may kill or stop a streaming process (see the crate `failpoint`).
pub const FAILPOINTS: &[&str] = &["gateway.mid_stream", "gateway.redo", "gateway.before_last_chunk"];
/// Ready events are sent together up to about this many bytes.
const FRAME_BYTES: usize = 16 * 1024;
pub(crate) const EVENT_STREAM: &str = "text/event-stream";

/// Takes the name and the fields of each event.
pub(crate) type EventSink<'a> = dyn FnMut(&'static str, Value) + 'a;

/// The format of an API's events.
pub(crate) trait StreamFormat: Send + 'static {
    const CONTENT_TYPE: &'static str;
    /// Bytes sent during silence; empty if the format has no comments.
    const KEEP_ALIVE: &'static [u8];
    /// Appends the events of an update.
    fn step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate, out: &mut Vec<u8>);
    /// Appends what follows the last update.
    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>);
    /// Appends the last event of a failed answer.
    fn fail(&mut self, answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>);
}

/// Streams `answer`, whose first update has arrived; earlier failures get an HTTP status of their own.
#[must_use]
pub(crate) fn respond<S: StreamFormat>(
    answer: GenerationResponse,
    first: ChoiceUpdate,
    shape: S,
) -> Response<HttpBody> {
    let frames = SseBody { answer, shape, first: Some(first), begun: false, ended: false };
    let frames = futures::stream::unfold(frames, |mut frames| async move {
        let frame = frames.frame().await?;
        Some((Ok::<_, Infallible>(frame), frames))
    });
    let mut response = Response::new(HttpBody::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(S::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Appends an event with a name.
pub(crate) fn write_event<T: Serialize>(name: &str, data: &T, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\ndata: ");
    // Serializing plain data to memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, data);
    out.extend_from_slice(b"\n\n");
}

struct SseBody<S> {
    answer: GenerationResponse,
    shape: S,
    first: Option<ChoiceUpdate>,
    begun: bool,
    ended: bool,
}

impl<S: StreamFormat> SseBody<S> {
    /// Returns the next bytes to send: at least one event, and all others that are ready.
    async fn frame(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        if self.begun {
            failpoint::pass("gateway.mid_stream");
        }
        self.begun = true;
        let mut out = Vec::with_capacity(512);
        if let Some(step) = self.first.take() {
            self.step(step, &mut out);
        }
        // An update whose text is held back makes no event, so the loop waits for further updates.
        while !self.ended && out.is_empty() {
            match tokio::time::timeout(KEEP_ALIVE, self.answer.next()).await {
                Err(_) => out.extend_from_slice(S::KEEP_ALIVE),
                Ok(next) => self.next(next, &mut out),
            }
        }
        while !self.ended && out.len() < FRAME_BYTES {
            match self.answer.ready() {
                Some(next) => self.next(Some(next), &mut out),
                None => break,
            }
        }
        Some(Bytes::from(out))
    }

    fn next(&mut self, next: Option<Result<ChoiceUpdate, ApiError>>, out: &mut Vec<u8>) {
        match next {
            Some(Ok(step)) => self.step(step, out),
            Some(Err(error)) => self.fail(&error, out),
            None => self.fail(&ApiError::internal("the stream ended before its choices did"), out),
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        telemetry::failed(error.status(), error.code(), &error.to_string());
        self.shape.fail(&mut self.answer, error, out);
        self.ended = true;
    }

    fn step(&mut self, step: ChoiceUpdate, out: &mut Vec<u8>) {
        self.shape.step(&self.answer, step, out);
        if self.answer.is_over() {
            failpoint::pass("gateway.before_last_chunk");
            self.shape.finish(&self.answer, out);
            self.ended = true;
        }
    }
}

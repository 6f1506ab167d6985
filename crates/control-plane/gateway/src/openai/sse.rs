//! An answer as it comes, in the shape of whoever asked: pieces of a body, each as many events as are ready.
//!
//! A stream ends in exactly one of two ways: [`StreamFormat::finish`] or [`StreamFormat::fail`]. One that just ends would be read as success.
//! Every way out of [`SseBody::frame`] but the two that set `ended` leads back into it.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body as HttpBody, Bytes},
    http::{HeaderValue, Response, header},
};

use super::generation_response::{ChoiceUpdate, GenerationResponse};
use crate::{errors::ApiError, telemetry};

/// So long a silence is not left to be taken for an end by anybody between us and the caller.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Where tests may kill or stop a process that streams (see the crate `failpoint`).
pub const FAILPOINTS: &[&str] = &["gateway.mid_stream", "gateway.redo", "gateway.before_last_chunk"];
/// Events that are ready are sent together up to about this many bytes.
const FRAME_BYTES: usize = 16 * 1024;
/// The content type of server-sent events.
pub const EVENT_STREAM: &str = "text/event-stream";

/// What the events of an answer look like.
pub trait StreamFormat: Send + 'static {
    /// Of the body.
    const CONTENT_TYPE: &'static str;
    /// What silence is broken with; nothing, if the shape has nothing that means nothing.
    const KEEP_ALIVE: &'static [u8];
    /// Appends what a step tells.
    fn step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate, out: &mut Vec<u8>);
    /// Appends what stands behind the last step.
    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>);
    /// Appends the last event of an answer that failed.
    fn fail(&mut self, answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>);
}

/// Streams `answer`, whose first step has come already: a request that fails before has a status of its own.
#[must_use]
pub fn respond<S: StreamFormat>(
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

struct SseBody<S> {
    answer: GenerationResponse,
    shape: S,
    first: Option<ChoiceUpdate>,
    /// True once bytes have been handed to the body.
    begun: bool,
    ended: bool,
}

impl<S: StreamFormat> SseBody<S> {
    /// The next bytes to send: at least one event, and all others that are ready.
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
        // Text that is held back makes no event: there is nothing to send until some comes out.
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

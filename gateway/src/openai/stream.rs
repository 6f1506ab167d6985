//! An answer as server-sent events.
//!
//! A stream ends in exactly one of two ways: every choice has its finish reason and `data: [DONE]` follows, or
//! one `data: {"error": ...}` is the last event. A stream that just ends would be read as success. Every way out of
//! [`Writer::frame`] but the two that set `ended` leads back into it.
//!
//! Who asks for it is told what is drafted, too, in events that leave the answer as it is ([`Draft`]). None of that stands at the
//! end, whichever it is: it has become text, or was taken back.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body as HttpBody, Bytes},
    http::{HeaderValue, Response, header},
};
use serde::Serialize;

use super::{
    answer::{Answer, Step},
    choice::Piece,
    delivery::StreamUsage,
    job::Kind,
    logprobs,
    tools::CallPart,
    types::{Aside, Body, ChatDelta, Delta, Draft, Function, TextChoice, TextLogprobs, ToolCall},
};
use crate::{errors::ApiError, telemetry, usage::Usage};

/// A comment is sent after this much silence, so that nobody between us and the caller gives up.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Where tests may kill or stop a process that streams (see the crate `failpoint`).
pub const FAILPOINTS: &[&str] = &["gateway.mid_stream", "gateway.redo", "gateway.before_last_chunk"];
/// Events that are ready are sent together up to about this many bytes.
const FRAME_BYTES: usize = 16 * 1024;

/// Streams `answer`, whose first step has come already: a request that fails before has a status of its own.
#[must_use]
pub fn respond(answer: Answer, first: Step, usage: StreamUsage) -> Response<HttpBody> {
    let opened = vec![None; answer.job.choices()];
    let writer = Writer { answer, usage, first: Some(first), opened, begun: false, ended: false };
    let frames = futures::stream::unfold(writer, |mut writer| async move {
        let frame = writer.frame().await?;
        Some((Ok::<_, Infallible>(frame), writer))
    });
    let mut response = Response::new(HttpBody::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Writer {
    answer: Answer,
    usage: StreamUsage,
    first: Option<Step>,
    /// Characters of prompt in front of each choice that has been opened.
    opened: Vec<Option<usize>>,
    /// True once bytes have been handed to the body.
    begun: bool,
    ended: bool,
}

impl Writer {
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
                Err(_) => out.extend_from_slice(b": keep-alive\n\n"),
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

    fn next(&mut self, next: Option<Result<Step, ApiError>>, out: &mut Vec<u8>) {
        match next {
            Some(Ok(step)) => self.step(step, out),
            Some(Err(error)) => self.fail(&error, out),
            None => self.fail(&ApiError::internal("the stream ended before its choices did"), out),
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        telemetry::failed(error.status(), error.code(), &error.to_string());
        for (index, characters) in self.answer.retract() {
            self.aside(out, index, Draft::Retract { characters });
        }
        out.extend_from_slice(b"data: ");
        error.write_event(out);
        out.extend_from_slice(b"\n\n");
        self.ended = true;
    }

    fn step(&mut self, mut step: Step, out: &mut Vec<u8>) {
        let (index, provisional) = (step.index, std::mem::take(&mut step.piece.provisional));
        if step.piece.retracted > 0 {
            self.aside(out, index, Draft::Retract { characters: step.piece.retracted });
        }
        match self.answer.job.kind {
            Kind::Chat => self.chat(&step, out),
            Kind::Text | Kind::Tokens => self.text(step, out),
        }
        if !provisional.is_empty() {
            self.aside(out, index, Draft::Provisional { text: &provisional });
        }
        if self.answer.is_over() {
            self.finish(out);
        }
    }

    fn chat(&mut self, step: &Step, out: &mut Vec<u8>) {
        let Step { index, piece, .. } = step;
        let index = *index;
        if self.opened[index].replace(0).is_none() {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            self.event(out, ChatDelta { index, delta, logprobs: None, finish_reason: None });
        }
        if has_content(piece) {
            let delta = Delta { content: Some(&piece.text), ..Delta::default() };
            let wanted = self.answer.job.logprobs.is_some();
            let logprobs = wanted.then(|| {
                logprobs::chat(self.answer.job.text(), self.answer.job.params.token_names, &piece.scored)
            });
            self.event(out, ChatDelta { index, delta, logprobs, finish_reason: None });
        }
        for part in &piece.calls {
            let delta = Delta { tool_calls: vec![part_of(part)], ..Delta::default() };
            self.event(out, ChatDelta { index, delta, logprobs: None, finish_reason: None });
        }
        if piece.finish.is_some() {
            let delta = Delta::default();
            self.event(out, ChatDelta { index, delta, logprobs: None, finish_reason: piece.finish });
        }
    }

    fn text(&mut self, step: Step, out: &mut Vec<u8>) {
        let Step { index, piece, echoed, .. } = step;
        if let Some(echoed) = echoed {
            self.opened[index] = Some(echoed.chars);
            let choice =
                TextChoice { index, text: &echoed.text, logprobs: echoed.logprobs, finish_reason: None };
            self.event(out, choice);
        }
        let shift = self.opened[index].unwrap_or(0);
        if has_content(&piece) {
            let logprobs = self.answer.job.logprobs.map(|_| {
                let mut logprobs = TextLogprobs::default();
                let names = self.answer.job.params.token_names;
                logprobs::append(self.answer.job.text(), names, &piece.scored, shift, &mut logprobs);
                logprobs
            });
            self.event(out, TextChoice { index, text: &piece.text, logprobs, finish_reason: None });
        }
        if piece.finish.is_some() {
            self.event(out, TextChoice { index, text: "", logprobs: None, finish_reason: piece.finish });
        }
    }

    /// Tells something of drafts.
    fn aside(&self, out: &mut Vec<u8>, index: usize, draft: Draft<'_>) {
        let (logprobs, finish_reason) = (None, None);
        match self.answer.job.kind {
            Kind::Chat => {
                let choice = ChatDelta { index, delta: Delta::default(), logprobs, finish_reason };
                self.event(out, Aside { choice, draft });
            }
            Kind::Text | Kind::Tokens => {
                let choice = TextChoice { index, text: "", logprobs: None, finish_reason };
                self.event(out, Aside { choice, draft });
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        failpoint::pass("gateway.before_last_chunk");
        if self.usage != StreamUsage::Never {
            let usage = Some(Some(self.answer.usage()));
            let none: [TextChoice<'_>; 0] = [];
            write_event(out, &Body { envelope: self.answer.envelope(self.object()), choices: &none, usage });
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        self.ended = true;
    }

    fn event<C: Serialize>(&self, out: &mut Vec<u8>, choice: C) {
        let body =
            Body { envelope: self.answer.envelope(self.object()), choices: &[choice], usage: self.running() };
        write_event(out, &body);
    }

    /// The usage field of a chunk that is not the last.
    fn running(&self) -> Option<Option<Usage>> {
        match self.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(None),
            StreamUsage::Always => Some(Some(self.answer.usage())),
        }
    }

    fn object(&self) -> &'static str {
        match self.answer.job.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Text | Kind::Tokens => "text_completion",
        }
    }
}

/// A part of a call, as OpenAI tells it.
fn part_of(part: &CallPart) -> ToolCall<'_> {
    let (id, name) = part.begun.as_ref().map(|(id, name)| (id.as_str(), name.as_str())).unzip();
    let function = Function { name, arguments: &part.arguments };
    ToolCall { index: Some(part.index), id, r#type: id.map(|_| "function"), function }
}

fn has_content(piece: &Piece) -> bool {
    !piece.text.is_empty() || !piece.scored.is_empty()
}

fn write_event<C: Serialize>(out: &mut Vec<u8>, body: &Body<'_, C>) {
    out.extend_from_slice(b"data: ");
    // Plain data into memory: serializing it cannot fail.
    let _ = serde_json::to_writer(&mut *out, body);
    out.extend_from_slice(b"\n\n");
}

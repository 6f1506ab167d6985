//! An answer as server-sent events.
//!
//! It ends in a finish reason of every choice and `data: [DONE]`, or in one `data: {"error": ...}`.
//!
//! Who asks for it is told what is drafted, too, in events that leave the answer as it is ([`Draft`]). None of that stands at the
//! end, whichever it is: it has become text, or was taken back.

use serde::Serialize;

use super::{
    answer::{Answer, Step},
    choice::Piece,
    delivery::StreamUsage,
    frames::{EVENT_STREAM, Shape},
    job::Kind,
    logprobs,
    tools::CallPart,
    types::{Aside, Body, ChatDelta, Delta, Draft, Function, TextChoice, TextLogprobs, ToolCall},
};
use crate::{errors::ApiError, usage::Usage};

/// The shape of chat and completions.
#[derive(Debug)]
pub struct Chunks {
    usage: StreamUsage,
    /// Characters of prompt in front of each choice that has been opened.
    opened: Vec<Option<usize>>,
}

impl Chunks {
    /// Of an answer of so many choices.
    #[must_use]
    pub fn new(choices: usize, usage: StreamUsage) -> Self {
        Self { usage, opened: vec![None; choices] }
    }
}

impl Shape for Chunks {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;
    /// A comment.
    const KEEP_ALIVE: &'static [u8] = b": keep-alive\n\n";

    fn step(&mut self, answer: &Answer, mut step: Step, out: &mut Vec<u8>) {
        let (index, provisional) = (step.index, std::mem::take(&mut step.piece.provisional));
        let mut writer = Writer { chunks: self, answer, out };
        if step.piece.retracted > 0 {
            writer.aside(index, Draft::Retract { characters: step.piece.retracted });
        }
        match answer.job.kind {
            Kind::Chat => writer.chat(&step),
            Kind::Text | Kind::Tokens => writer.text(step),
        }
        if !provisional.is_empty() {
            writer.aside(index, Draft::Provisional { text: &provisional });
        }
    }

    fn finish(&mut self, answer: &Answer, out: &mut Vec<u8>) {
        if self.usage != StreamUsage::Never {
            let usage = Some(Some(answer.usage()));
            let none: [TextChoice<'_>; 0] = [];
            write_event(out, &Body { envelope: answer.envelope(object(answer)), choices: &none, usage });
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, answer: &mut Answer, error: &ApiError, out: &mut Vec<u8>) {
        for (index, characters) in answer.retract() {
            let mut writer = Writer { chunks: self, answer, out };
            writer.aside(index, Draft::Retract { characters });
        }
        out.extend_from_slice(b"data: ");
        error.write_event(out);
        out.extend_from_slice(b"\n\n");
    }
}

struct Writer<'a> {
    chunks: &'a mut Chunks,
    answer: &'a Answer,
    out: &'a mut Vec<u8>,
}

impl Writer<'_> {
    fn chat(&mut self, step: &Step) {
        let Step { index, piece, .. } = step;
        let index = *index;
        if self.chunks.opened[index].replace(0).is_none() {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            self.event(ChatDelta { index, delta, logprobs: None, finish_reason: None });
        }
        if has_content(piece) {
            let delta = Delta { content: Some(&piece.text), ..Delta::default() };
            let wanted = self.answer.job.logprobs.is_some();
            let logprobs = wanted.then(|| {
                logprobs::chat(self.answer.job.text(), self.answer.job.params.token_names, &piece.scored)
            });
            self.event(ChatDelta { index, delta, logprobs, finish_reason: None });
        }
        for part in &piece.calls {
            let delta = Delta { tool_calls: vec![part_of(part)], ..Delta::default() };
            self.event(ChatDelta { index, delta, logprobs: None, finish_reason: None });
        }
        if piece.finish.is_some() {
            let delta = Delta::default();
            self.event(ChatDelta { index, delta, logprobs: None, finish_reason: piece.finish });
        }
    }

    fn text(&mut self, step: Step) {
        let Step { index, piece, echoed, .. } = step;
        if let Some(echoed) = echoed {
            self.chunks.opened[index] = Some(echoed.chars);
            let choice =
                TextChoice { index, text: &echoed.text, logprobs: echoed.logprobs, finish_reason: None };
            self.event(choice);
        }
        let shift = self.chunks.opened[index].unwrap_or(0);
        if has_content(&piece) {
            let logprobs = self.answer.job.logprobs.map(|_| {
                let mut logprobs = TextLogprobs::default();
                let names = self.answer.job.params.token_names;
                logprobs::append(self.answer.job.text(), names, &piece.scored, shift, &mut logprobs);
                logprobs
            });
            self.event(TextChoice { index, text: &piece.text, logprobs, finish_reason: None });
        }
        if piece.finish.is_some() {
            self.event(TextChoice { index, text: "", logprobs: None, finish_reason: piece.finish });
        }
    }

    /// Tells something of drafts.
    fn aside(&mut self, index: usize, draft: Draft<'_>) {
        let (logprobs, finish_reason) = (None, None);
        match self.answer.job.kind {
            Kind::Chat => {
                let choice = ChatDelta { index, delta: Delta::default(), logprobs, finish_reason };
                self.event(Aside { choice, draft });
            }
            Kind::Text | Kind::Tokens => {
                let choice = TextChoice { index, text: "", logprobs: None, finish_reason };
                self.event(Aside { choice, draft });
            }
        }
    }

    fn event<C: Serialize>(&mut self, choice: C) {
        let body = Body {
            envelope: self.answer.envelope(object(self.answer)),
            choices: &[choice],
            usage: self.running(),
        };
        write_event(self.out, &body);
    }

    /// The usage field of a chunk that is not the last.
    fn running(&self) -> Option<Option<Usage>> {
        match self.chunks.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(None),
            StreamUsage::Always => Some(Some(self.answer.usage())),
        }
    }
}

fn object(answer: &Answer) -> &'static str {
    match answer.job.kind {
        Kind::Chat => "chat.completion.chunk",
        Kind::Text | Kind::Tokens => "text_completion",
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

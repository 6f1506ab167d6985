//! Writes an answer of chat or completions as server-sent events.
//!
//! The stream ends with a finish reason per choice and `data: [DONE]`, or with one `data: {"error": ...}`.
//!
//! On request, the stream also shows provisional tokens in events that do not change the answer
//! ([`DraftUpdate`]). All provisional text has become text or is retracted before the stream ends.

use serde::Serialize;

use super::{
    choice::{ChoiceDelta, ScoredToken},
    collect::{prompt_ids, token_ids},
    echo::EchoedPrompt,
    generation_request::GenerationKind,
    generation_response::{ChoiceUpdate, GenerationResponse},
    logprobs,
    sse::{EVENT_STREAM, StreamFormat},
    stream_options::StreamUsage,
    tools::ToolCallDelta,
    types::{
        ChatDelta, Delta, DraftEvent, DraftUpdate, EndReport, GenerationBody, PromptReport, TextChoice,
        TextLogprobs, ToolCall,
    },
};
use crate::{errors::ApiError, usage::Usage};

#[derive(Debug)]
pub(crate) struct OpenAiStream {
    usage: StreamUsage,
    /// Characters of echoed prompt before each choice that has begun.
    opened: Vec<Option<usize>>,
}

impl OpenAiStream {
    #[must_use]
    pub(crate) fn new(choices: usize, usage: StreamUsage) -> Self {
        Self { usage, opened: vec![None; choices] }
    }
}

impl StreamFormat for OpenAiStream {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;
    /// A comment of the event stream.
    const KEEP_ALIVE: &'static [u8] = b": keep-alive\n\n";

    fn step(&mut self, answer: &GenerationResponse, mut step: ChoiceUpdate, out: &mut Vec<u8>) {
        let (index, provisional) = (step.index, std::mem::take(&mut step.piece.provisional));
        let mut writer = ChunkWriter { chunks: self, answer, out };
        if step.piece.retracted > 0 {
            writer.aside(index, DraftUpdate::Retract { characters: step.piece.retracted });
        }
        match answer.job.kind {
            GenerationKind::Chat(_) => writer.chat(&step),
            GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Pooled(_) => writer.text(step),
        }
        if !provisional.is_empty() {
            writer.aside(index, DraftUpdate::Provisional { text: &provisional });
        }
    }

    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>) {
        if self.usage != StreamUsage::Never {
            let usage = Some(Some(answer.usage()));
            let none: [TextChoice<'_>; 0] = [];
            let (envelope, prompt) = (answer.envelope(object(answer)), PromptReport::default());
            let end = answer.end_report();
            write_event(out, &GenerationBody { envelope, choices: &none, prompt, usage, end });
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>) {
        for (index, characters) in answer.retract() {
            let mut writer = ChunkWriter { chunks: self, answer, out };
            writer.aside(index, DraftUpdate::Retract { characters });
        }
        out.extend_from_slice(b"data: ");
        error.write_event(out);
        out.extend_from_slice(b"\n\n");
    }
}

struct ChunkWriter<'a> {
    chunks: &'a mut OpenAiStream,
    answer: &'a GenerationResponse,
    out: &'a mut Vec<u8>,
}

impl<'a> ChunkWriter<'a> {
    fn chat(&mut self, step: &ChoiceUpdate) {
        let ChoiceUpdate { index, piece, .. } = step;
        let index = *index;
        if self.chunks.opened[index].replace(0).is_none() {
            // With tools, the answer may have no text, so the first chunk has no `content`.
            let content = self.answer.job.answering.is_none().then_some("");
            let delta = Delta { role: Some("assistant"), content: Some(content), ..Delta::default() };
            let prompt = prompt_ids(self.answer, index);
            self.write(delta_of(index, delta), prompt, EndReport::default());
        }
        if has_content(piece) {
            let content = Some(Some(piece.text.as_str())).filter(|_| !piece.text.is_empty() || !piece.thinks);
            let reasoning_content = Some(piece.thought.as_str()).filter(|thought| !thought.is_empty());
            let delta = Delta { content, reasoning_content, ..Delta::default() };
            let (job, wanted) = (&self.answer.job, self.answer.job.logprobs.is_some());
            let logprobs = wanted.then(|| logprobs::chat(job.text(), job.params.token_names, &piece.scored));
            let token_ids = token_ids(self.answer, &piece.scored);
            self.event(ChatDelta { logprobs, token_ids, ..delta_of(index, delta) });
        }
        for part in piece.calls.iter().filter(|part| !part.is_silent()) {
            let delta = Delta { tool_calls: vec![part_of(part)], ..Delta::default() };
            self.event(delta_of(index, delta));
        }
        if piece.finish.is_some() {
            let adapter_stages = self.answer.stages(index);
            let last = delta_of(index, Delta::default());
            self.last(ChatDelta { finish_reason: piece.finish, adapter_stages, ..last });
        }
    }

    fn text(&mut self, step: ChoiceUpdate) {
        let ChoiceUpdate { index, piece, echoed, .. } = step;
        if self.chunks.opened[index].is_none() {
            self.open(index, echoed);
        }
        if has_content(&piece) {
            let logprobs = self.answer.job.logprobs.map(|_| self.text_logprobs(index, &piece.scored));
            let token_ids = token_ids(self.answer, &piece.scored);
            self.event(TextChoice { logprobs, token_ids, ..text_of(index, &piece.text) });
        }
        if piece.finish.is_some() {
            let adapter_stages = self.answer.stages(index);
            self.last(TextChoice { finish_reason: piece.finish, adapter_stages, ..text_of(index, "") });
        }
    }

    /// Writes the prompt's chunk of a choice, if requested.
    fn open(&mut self, index: usize, echoed: Option<EchoedPrompt>) {
        let prompt = prompt_ids(self.answer, index);
        self.chunks.opened[index] = Some(echoed.as_ref().map_or(0, |echoed| echoed.chars));
        if let Some(EchoedPrompt { text, logprobs, .. }) = echoed {
            self.event(TextChoice { logprobs, prompt, ..text_of(index, &text) });
        } else if prompt.prompt_token_ids.is_some() {
            self.event(TextChoice { prompt, ..text_of(index, "") });
        }
    }

    fn text_logprobs(&self, index: usize, scored: &[ScoredToken]) -> TextLogprobs {
        let (job, shift) = (&self.answer.job, self.chunks.opened[index].unwrap_or(0));
        let mut logprobs = TextLogprobs::default();
        logprobs::append(job.text(), job.params.token_names, scored, shift, &mut logprobs);
        logprobs
    }

    /// Writes an event about provisional text.
    fn aside(&mut self, index: usize, draft: DraftUpdate<'_>) {
        match self.answer.job.kind {
            GenerationKind::Chat(_) => {
                self.event(DraftEvent { choice: delta_of(index, Delta::default()), draft })
            }
            GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Pooled(_) => {
                self.event(DraftEvent { choice: text_of(index, ""), draft });
            }
        }
    }

    fn event<C: Serialize>(&mut self, choice: C) {
        self.write(choice, PromptReport::default(), EndReport::default());
    }

    /// Writes the end of a choice, with the end report unless a later usage chunk carries it.
    fn last<C: Serialize>(&mut self, choice: C) {
        let ends_here = self.chunks.usage == StreamUsage::Never;
        let end = if ends_here { self.answer.end_report() } else { EndReport::default() };
        self.write(choice, PromptReport::default(), end);
    }

    fn write<C: Serialize>(&mut self, choice: C, prompt: PromptReport<'a>, end: EndReport<'a>) {
        let body = GenerationBody {
            envelope: self.answer.envelope(object(self.answer)),
            choices: &[choice],
            prompt,
            usage: self.running(),
            end,
        };
        write_event(self.out, &body);
    }

    /// Returns the usage field of a chunk that is not the last.
    fn running(&self) -> Option<Option<Usage>> {
        match self.chunks.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(None),
            StreamUsage::Always => Some(Some(self.answer.usage())),
        }
    }
}

fn object(answer: &GenerationResponse) -> &'static str {
    match answer.job.kind {
        GenerationKind::Chat(_) => "chat.completion.chunk",
        GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Pooled(_) => "text_completion",
    }
}

fn delta_of(index: usize, delta: Delta<'_>) -> ChatDelta<'_> {
    ChatDelta { index, delta, logprobs: None, finish_reason: None, adapter_stages: None, token_ids: None }
}

fn text_of(index: usize, text: &str) -> TextChoice<'_> {
    let prompt = PromptReport::default();
    let (logprobs, finish_reason, adapter_stages, token_ids) = (None, None, None, None);
    TextChoice { index, text, logprobs, finish_reason, adapter_stages, token_ids, prompt }
}

fn part_of(part: &ToolCallDelta) -> ToolCall<'_> {
    let begun = part.begun.as_ref().map(|(id, name)| (id.as_str(), name.as_str()));
    ToolCall { index: Some(part.index), ..ToolCall::of(part.kind, begun, &part.arguments) }
}

fn has_content(piece: &ChoiceDelta) -> bool {
    !piece.text.is_empty() || !piece.thought.is_empty() || !piece.scored.is_empty()
}

fn write_event<C: Serialize>(out: &mut Vec<u8>, body: &GenerationBody<'_, C>) {
    out.extend_from_slice(b"data: ");
    // Serializing plain data to memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, body);
    out.extend_from_slice(b"\n\n");
}

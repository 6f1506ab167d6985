//! Writes an answer as the Responses API's body or events, and stores the response.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::{
        choice::DeltaPart,
        generation_response::{ChoiceUpdate, GenerationResponse},
        logprobs,
        sse::{self, EVENT_STREAM, EventSink, StreamFormat},
    },
    object::{Failure, Incomplete, Object, ResponseStatus},
    output::OutputItems,
    request::ResponseEcho,
};
use crate::{
    caller::RequestPriority,
    clock::seconds_since_1970,
    errors::ApiError,
    random::new_id,
    response_store::{ResponseStore, StoredResponse},
    usage::FinishReason,
};

#[derive(Debug)]
pub(super) struct ResponseWriter {
    id: String,
    asked: ResponseEcho,
    /// All input items, earlier turns included.
    input: Vec<Value>,
    kept: Arc<ResponseStore>,
    output: OutputItems,
    finish: FinishReason,
    events: Events,
}

impl ResponseWriter {
    pub(super) fn new(asked: ResponseEcho, input: Vec<Value>, kept: Arc<ResponseStore>) -> Self {
        let (output, events) = (OutputItems::default(), Events::default());
        Self { id: new_id("resp"), asked, input, kept, output, finish: FinishReason::Length, events }
    }

    pub(super) fn record_step(
        &mut self,
        answer: &GenerationResponse,
        step: ChoiceUpdate,
        tell: &mut EventSink<'_>,
    ) {
        let piece = step.piece;
        let mut scores: Vec<Value> = if answer.job.logprobs.is_some() {
            let scores = logprobs::chat(answer.job.text(), answer.job.params.token_names, &piece.scored);
            scores.content.iter().map(|token| json!(token)).collect()
        } else {
            Vec::new()
        };
        if !piece.thought.is_empty() {
            self.output.thought(&piece.thought, tell);
        }
        for part in piece.parts() {
            match part {
                DeltaPart::Text(text) => self.output.text(text, std::mem::take(&mut scores), tell),
                DeltaPart::Call(call) => self.output.call(call, tell),
            }
        }
        // This API reports scores of text only.
        if !(scores.is_empty() || piece.thinks || self.output.is_in_a_call()) {
            self.output.text("", scores, tell);
        }
        self.finish = piece.finish.unwrap_or(self.finish);
    }

    /// Ends the response and stores it if requested; returns the whole response as JSON.
    pub(super) fn end(&mut self, answer: &GenerationResponse, tell: &mut EventSink<'_>) -> String {
        self.output.end(if self.is_cut() { "incomplete" } else { "completed" }, tell);
        let response = text_of(&self.object(answer, self.status()));
        // Lines of batches would evict the responses that the tenant's clients continue.
        if self.asked.store && answer.job.priority == RequestPriority::Online {
            let entry =
                StoredResponse { response: response.as_str().into(), input: text_of(&self.input).into() };
            self.kept.put(&answer.job.tenant, &self.id, entry);
        }
        response
    }

    fn is_cut(&self) -> bool {
        self.finish == FinishReason::Length
    }

    fn status(&self) -> ResponseStatus {
        if self.is_cut() { ResponseStatus::Incomplete } else { ResponseStatus::Completed }
    }

    fn object<'a>(&'a self, answer: &'a GenerationResponse, status: ResponseStatus) -> Object<'a> {
        let is_over = matches!(status, ResponseStatus::Completed | ResponseStatus::Incomplete);
        Object {
            id: &self.id,
            object: "response",
            created_at: answer.created(),
            completed_at: (status == ResponseStatus::Completed).then(seconds_since_1970),
            status,
            model: &answer.job.target.name,
            adapter_generation: answer.generation(),
            output: self.output.items(),
            error: None,
            incomplete_details: (status == ResponseStatus::Incomplete)
                .then_some(Incomplete { reason: "max_output_tokens" }),
            usage: is_over.then(|| answer.usage().into()),
            adapter_stages: is_over.then(|| answer.stages(0)).flatten(),
            warnings: if is_over { answer.job.warnings() } else { &[] },
            asked: &self.asked,
        }
    }

    fn begin(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>) {
        if self.events.next > 0 {
            return;
        }
        let mut events = Events::default();
        let response = self.object(answer, ResponseStatus::InProgress);
        events.write("response.created", &ResponseEnvelope { response: &response }, out);
        events.write("response.in_progress", &ResponseEnvelope { response: &response }, out);
        self.events = events;
    }
}

impl StreamFormat for ResponseWriter {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;
    /// A comment of the event stream.
    const KEEP_ALIVE: &'static [u8] = b": keep-alive\n\n";

    fn step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate, out: &mut Vec<u8>) {
        self.begin(answer, out);
        let mut events = std::mem::take(&mut self.events);
        self.record_step(answer, step, &mut |name, fields| events.write(name, &fields, out));
        self.events = events;
    }

    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>) {
        let mut events = std::mem::take(&mut self.events);
        self.end(answer, &mut |name, fields| events.write(name, &fields, out));
        let response = self.object(answer, self.status());
        let name = if self.is_cut() { "response.incomplete" } else { "response.completed" };
        events.write(name, &ResponseEnvelope { response: &response }, out);
    }

    fn fail(&mut self, answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>) {
        self.begin(answer, out);
        let mut events = std::mem::take(&mut self.events);
        let failure = Some(Failure::from(error));
        let response = Object { error: failure, ..self.object(answer, ResponseStatus::Failed) };
        events.write("response.failed", &ResponseEnvelope { response: &response }, out);
    }
}

#[derive(Serialize)]
struct ResponseEnvelope<'a> {
    response: &'a Object<'a>,
}

/// Writes events with consecutive sequence numbers.
#[derive(Debug, Default)]
struct Events {
    next: u64,
}

#[derive(Serialize)]
struct ResponseEvent<'a, F> {
    r#type: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    fields: &'a F,
}

impl Events {
    fn write<F: Serialize>(&mut self, name: &'static str, fields: &F, out: &mut Vec<u8>) {
        let event = ResponseEvent { r#type: name, sequence_number: self.next, fields };
        sse::write_event(name, &event, out);
        self.next += 1;
    }
}

/// Serializing plain data to memory cannot fail.
fn text_of<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

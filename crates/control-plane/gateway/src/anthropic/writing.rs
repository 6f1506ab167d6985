//! Writes an answer as a message or as the events of a message.

use serde_json::{Value, json};

use super::{content::ContentBlocks, errors, request::AnswerOptions};
use crate::{
    errors::ApiError,
    openai::{
        choice::DeltaPart,
        generation_response::{ChoiceUpdate, GenerationResponse},
        sse::{self, EVENT_STREAM, EventSink, StreamFormat},
    },
    random::new_id,
    usage::FinishReason,
};

#[derive(Debug)]
pub(super) struct MessageWriter {
    id: String,
    content: ContentBlocks,
    finish: FinishReason,
    /// Index of the stop string that ended the answer.
    stop_string: Option<usize>,
    begun: bool,
}

impl MessageWriter {
    pub(super) fn new(options: AnswerOptions) -> Self {
        let (content, finish) = (ContentBlocks::new(options), FinishReason::Length);
        Self { id: new_id("msg"), content, finish, stop_string: None, begun: false }
    }

    pub(super) fn record_step(
        &mut self,
        answer: &GenerationResponse,
        step: ChoiceUpdate,
        tell: &mut EventSink<'_>,
    ) {
        if !std::mem::replace(&mut self.begun, true) {
            let ending = json!({ "stop_reason": null, "stop_sequence": null, "stop_details": null });
            tell("message_start", json!({ "message": self.message(answer, &ending) }));
        }
        let piece = step.piece;
        if !piece.thought.is_empty() {
            self.content.thought(&piece.thought, tell);
        }
        for part in piece.parts() {
            match part {
                DeltaPart::Text(text) => self.content.text(text, tell),
                DeltaPart::Call(part) => self.content.call(part, tell),
            }
        }
        self.finish = piece.finish.unwrap_or(self.finish);
        self.stop_string = piece.stop_string;
    }

    /// Ends the answer; returns the whole message.
    pub(super) fn end(&mut self, answer: &GenerationResponse, tell: &mut EventSink<'_>) -> Value {
        self.content.end(tell);
        let ending = self.ending(answer);
        let mut event = json!({ "delta": ending, "usage": usage(answer) });
        let mut message = self.message(answer, &ending);
        if !answer.job.warnings().is_empty() {
            event["warnings"] = json!(answer.job.warnings());
            message["warnings"] = event["warnings"].clone();
        }
        tell("message_delta", event);
        tell("message_stop", json!({}));
        message
    }

    fn message(&self, answer: &GenerationResponse, ending: &Value) -> Value {
        let mut message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": answer.job.target.name,
            "content": self.content.blocks(), "container": null,
        });
        for name in ["stop_reason", "stop_sequence", "stop_details"] {
            message[name] = ending[name].clone();
        }
        message["usage"] = usage(answer);
        message
    }

    fn ending(&self, answer: &GenerationResponse) -> Value {
        let params = &answer.job.params;
        let stops = params.stop.as_ref().zip(self.stop_string);
        let stop_sequence = stops.and_then(|(strings, index)| strings.get(index));
        let is_at_limit =
            params.max_tokens.is_none_or(|most| answer.usage().completion_tokens >= most as usize);
        let stop_reason = match self.finish {
            _ if stop_sequence.is_some() => "stop_sequence",
            FinishReason::Length if is_at_limit => "max_tokens",
            FinishReason::Length => "model_context_window_exceeded",
            FinishReason::ToolCalls if self.content.have_calls() => "tool_use",
            FinishReason::Stop | FinishReason::ToolCalls => "end_turn",
        };
        json!({ "stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": null })
    }
}

/// Returns the usage in Anthropic's accounting, where cached tokens are no input tokens. Every prefix is
/// cached, and no tokens are charged for that.
fn usage(answer: &GenerationResponse) -> Value {
    let usage = answer.usage();
    let cached = usage.prompt_tokens_details.cached_tokens;
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": usage.completion_tokens_details.reasoning_tokens },
        "service_tier": "standard",
    })
}

/// Appends the event `name`, whose data repeats the name as its type.
fn write(name: &'static str, mut fields: Value, out: &mut Vec<u8>) {
    let mut event = json!({ "type": name });
    if let (Some(event), Some(fields)) = (event.as_object_mut(), fields.as_object_mut()) {
        event.append(fields);
    }
    sse::write_event(name, &event, out);
}

impl StreamFormat for MessageWriter {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;
    const KEEP_ALIVE: &'static [u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

    fn step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate, out: &mut Vec<u8>) {
        self.record_step(answer, step, &mut |name, fields| write(name, fields, out));
    }

    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>) {
        self.end(answer, &mut |name, fields| write(name, fields, out));
    }

    fn fail(&mut self, _answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>) {
        sse::write_event("error", &errors::event(error), out);
    }
}

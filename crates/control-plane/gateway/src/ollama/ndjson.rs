//! Writes an answer in Ollama's format: a line of JSON per update, the last with usage and durations.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    clock::now_rfc3339,
    errors::ApiError,
    openai::{
        choice::DeltaPart,
        generation_response::{ChoiceUpdate, GenerationResponse},
        logprobs,
        sse::StreamFormat,
        tools::call_collector::{CallCollector, CollectedCall},
    },
    telemetry,
    usage::FinishReason,
};

/// The route, which decides where the text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OllamaRoute {
    Chat,
    Generate,
}

#[derive(Debug)]
pub(super) struct NdjsonBody {
    route: OllamaRoute,
    started: Instant,
    /// Content that is not written yet.
    thought: String,
    text: String,
    scores: Vec<Value>,
    /// Complete calls, because Ollama's format has no partial calls.
    calls: Vec<Value>,
    open: CallCollector,
    finish: FinishReason,
}

impl NdjsonBody {
    pub(super) fn new(route: OllamaRoute) -> Self {
        let (started, finish) = (telemetry::started(), FinishReason::Length);
        Self {
            route,
            started,
            thought: String::new(),
            text: String::new(),
            scores: Vec::new(),
            calls: Vec::new(),
            open: CallCollector::default(),
            finish,
        }
    }

    /// Records an update without writing a line.
    pub(super) fn record_step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate) {
        let piece = step.piece;
        if answer.job.logprobs.is_some() {
            let scores = logprobs::chat(answer.job.text(), answer.job.params.token_names, &piece.scored);
            self.scores.extend(scores.content.iter().map(|token| json!(token)));
        }
        self.thought.push_str(&piece.thought);
        for part in piece.parts() {
            match part {
                DeltaPart::Text(text) => {
                    self.close();
                    self.text.push_str(text);
                }
                DeltaPart::Call(part) => {
                    let ended = self.open.push(part);
                    self.append_call(ended);
                }
            }
        }
        if let Some(finish) = piece.finish {
            self.close();
            self.finish = finish;
        }
    }

    fn close(&mut self) {
        let ended = self.open.close();
        self.append_call(ended);
    }

    fn append_call(&mut self, ended: Option<CollectedCall>) {
        match ended {
            Some(CollectedCall::Call { id, name, arguments }) => {
                let function = json!({ "index": self.calls.len(), "name": name, "arguments": arguments });
                self.calls.push(json!({ "id": id, "function": function }));
            }
            Some(CollectedCall::Text(written)) => self.text.push_str(&written),
            None => {}
        }
    }

    fn has_news(&self) -> bool {
        !self.text.is_empty() || !self.thought.is_empty() || !self.scores.is_empty() || !self.calls.is_empty()
    }

    /// Returns a line with the content since the last line.
    fn line(&mut self, answer: &GenerationResponse) -> Value {
        let mut line = json!({ "model": answer.job.target.name, "created_at": now_rfc3339(), "done": false });
        let (text, thought) = (std::mem::take(&mut self.text), std::mem::take(&mut self.thought));
        let message = match self.route {
            OllamaRoute::Chat => {
                line["message"] = json!({ "role": "assistant", "content": text });
                &mut line["message"]
            }
            OllamaRoute::Generate => {
                line["response"] = text.into();
                &mut line
            }
        };
        if !thought.is_empty() {
            message["thinking"] = thought.into();
        }
        if !self.calls.is_empty() {
            line["message"]["tool_calls"] = std::mem::take(&mut self.calls).into();
        }
        if !self.scores.is_empty() {
            line["logprobs"] = std::mem::take(&mut self.scores).into();
        }
        line
    }

    /// Returns the last line, with usage and durations.
    pub(super) fn last(&mut self, answer: &GenerationResponse) -> Value {
        let mut line = self.line(answer);
        let (usage, total) = (answer.usage(), self.started.elapsed());
        let (first, load) = answer.first_token();
        line["done"] = true.into();
        line["done_reason"] = match self.finish {
            // Ollama has no finish reason for tool calls.
            FinishReason::Stop | FinishReason::ToolCalls => "stop",
            FinishReason::Length => "length",
        }
        .into();
        line["prompt_eval_count"] = usage.prompt_tokens.into();
        line["eval_count"] = usage.completion_tokens.into();
        if !answer.job.warnings().is_empty() {
            line["warnings"] = json!(answer.job.warnings());
        }
        for (name, time) in [
            ("total_duration", total),
            ("load_duration", load),
            ("prompt_eval_duration", first.saturating_sub(load)),
            ("eval_duration", total.saturating_sub(first)),
        ] {
            line[name] = nanoseconds(time).into();
        }
        line
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Answers a request that only loads the model.
pub(super) fn loaded(model: &str, route: OllamaRoute) -> Value {
    let mut line =
        json!({ "model": model, "created_at": now_rfc3339(), "done": true, "done_reason": "load" });
    match route {
        OllamaRoute::Chat => line["message"] = json!({ "role": "assistant", "content": "" }),
        OllamaRoute::Generate => line["response"] = "".into(),
    }
    line
}

impl StreamFormat for NdjsonBody {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";
    /// The format has no keep-alive, because an empty line is not JSON.
    const KEEP_ALIVE: &'static [u8] = b"";

    fn step(&mut self, answer: &GenerationResponse, step: ChoiceUpdate, out: &mut Vec<u8>) {
        self.record_step(answer, step);
        if self.has_news() {
            let line = self.line(answer);
            write(&line, out);
        }
    }

    fn finish(&mut self, answer: &GenerationResponse, out: &mut Vec<u8>) {
        let line = self.last(answer);
        write(&line, out);
    }

    fn fail(&mut self, _answer: &mut GenerationResponse, error: &ApiError, out: &mut Vec<u8>) {
        write(&json!({ "error": error.last_words() }), out);
    }
}

fn write(line: &Value, out: &mut Vec<u8>) {
    out.extend_from_slice(line.to_string().as_bytes());
    out.push(b'\n');
}

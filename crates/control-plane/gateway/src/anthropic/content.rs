//! The content blocks of an answer in progress, and the events that report them.

use serde_json::{Map, Value, json};

use super::{
    conversation::CALL_PREFIX,
    request::AnswerOptions,
    thinking::{ThinkingDisplay, signature},
};
use crate::openai::{
    sse::EventSink,
    tools::{
        ToolCallDelta,
        call_collector::{CallCollector, CollectedCall},
    },
};

#[derive(Debug)]
enum OpenBlock {
    Thinking(String),
    Text(String),
    /// A call whose input is streamed as the model writes it.
    EagerCall {
        id: String,
        name: String,
        text: String,
    },
}

#[derive(Debug)]
pub(super) struct ContentBlocks {
    options: AnswerOptions,
    /// Completed blocks, in the order of the answer.
    blocks: Vec<Value>,
    open: Option<OpenBlock>,
    /// The current call, which becomes a block when it is complete.
    call: CallCollector,
}

impl ContentBlocks {
    pub(super) fn new(options: AnswerOptions) -> Self {
        Self { options, blocks: Vec::new(), open: None, call: CallCollector::default() }
    }

    pub(super) fn blocks(&self) -> &[Value] {
        &self.blocks
    }

    pub(super) fn have_calls(&self) -> bool {
        self.blocks.iter().any(|block| block["type"] == "tool_use")
    }

    pub(super) fn thought(&mut self, new: &str, tell: &mut EventSink<'_>) {
        if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
            self.close(tell);
            self.open(OpenBlock::Thinking(String::new()), tell);
        }
        let at = self.blocks.len();
        let Some(OpenBlock::Thinking(text)) = &mut self.open else { return };
        text.push_str(new);
        if self.options.display == ThinkingDisplay::Text {
            delta(at, &json!({ "type": "thinking_delta", "thinking": new }), tell);
        }
    }

    pub(super) fn text(&mut self, new: &str, tell: &mut EventSink<'_>) {
        self.end_call(tell);
        self.append_text(new, tell);
    }

    fn append_text(&mut self, new: &str, tell: &mut EventSink<'_>) {
        if !matches!(self.open, Some(OpenBlock::Text(_))) {
            self.close(tell);
            self.open(OpenBlock::Text(String::new()), tell);
        }
        let at = self.blocks.len();
        let Some(OpenBlock::Text(text)) = &mut self.open else { return };
        text.push_str(new);
        delta(at, &json!({ "type": "text_delta", "text": new }), tell);
    }

    pub(super) fn call(&mut self, part: &ToolCallDelta, tell: &mut EventSink<'_>) {
        let ended = self.call.push(part);
        self.append_call(ended, tell);
        if let Some((id, name)) =
            part.begun.clone().filter(|(_, name)| self.options.eager_tools.contains(name))
        {
            self.close(tell);
            self.open(OpenBlock::EagerCall { id: call_id(&id), name, text: String::new() }, tell);
        }
        let at = self.blocks.len();
        let Some(OpenBlock::EagerCall { text, .. }) = &mut self.open else { return };
        text.push_str(&part.arguments);
        if !part.arguments.is_empty() {
            delta(at, &json!({ "type": "input_json_delta", "partial_json": part.arguments }), tell);
        }
    }

    /// Ends the last block.
    pub(super) fn end(&mut self, tell: &mut EventSink<'_>) {
        self.end_call(tell);
        self.close(tell);
    }

    fn end_call(&mut self, tell: &mut EventSink<'_>) {
        let ended = self.call.close();
        self.append_call(ended, tell);
    }

    /// Appends a whole call. A call that is no valid JSON becomes text with its tags, because `input` is an
    /// object.
    fn append_call(&mut self, ended: Option<CollectedCall>, tell: &mut EventSink<'_>) {
        match ended {
            None => {}
            Some(_) if matches!(self.open, Some(OpenBlock::EagerCall { .. })) => self.close(tell),
            Some(CollectedCall::Text(written)) => self.append_text(&written, tell),
            Some(CollectedCall::Call { id, name, arguments }) => {
                self.close(tell);
                let at = self.blocks.len();
                let block = call_block(&call_id(&id), &name, arguments);
                let mut empty = block.clone();
                empty["input"] = json!({});
                start(at, &empty, tell);
                let input = block["input"].to_string();
                delta(at, &json!({ "type": "input_json_delta", "partial_json": input }), tell);
                self.complete(block, tell);
            }
        }
    }

    fn open(&mut self, open: OpenBlock, tell: &mut EventSink<'_>) {
        let block = match &open {
            OpenBlock::Thinking(_) => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            OpenBlock::Text(_) => json!({ "type": "text", "text": "" }),
            OpenBlock::EagerCall { id, name, .. } => call_block(id, name, Map::new()),
        };
        start(self.blocks.len(), &block, tell);
        self.open = Some(open);
    }

    fn close(&mut self, tell: &mut EventSink<'_>) {
        let Some(open) = self.open.take() else { return };
        let block = match open {
            OpenBlock::Thinking(text) => {
                let signature = signature(&text, self.options.display);
                let event = json!({ "type": "signature_delta", "signature": signature });
                delta(self.blocks.len(), &event, tell);
                let shown = if self.options.display == ThinkingDisplay::Text { text } else { String::new() };
                json!({ "type": "thinking", "thinking": shown, "signature": signature })
            }
            OpenBlock::Text(text) => json!({ "type": "text", "text": text }),
            OpenBlock::EagerCall { id, name, text } => {
                call_block(&id, &name, serde_json::from_str(&text).unwrap_or_default())
            }
        };
        self.complete(block, tell);
    }

    fn complete(&mut self, block: Value, tell: &mut EventSink<'_>) {
        tell("content_block_stop", json!({ "index": self.blocks.len() }));
        self.blocks.push(block);
    }
}

fn start(index: usize, block: &Value, tell: &mut EventSink<'_>) {
    tell("content_block_start", json!({ "index": index, "content_block": block }));
}

fn delta(index: usize, delta: &Value, tell: &mut EventSink<'_>) {
    tell("content_block_delta", json!({ "index": index, "delta": delta }));
}

fn call_block(id: &str, name: &str, input: Map<String, Value>) -> Value {
    let mut block = json!({ "type": "tool_use", "id": id, "name": name });
    block["input"] = input.into();
    block
}

/// Returns the id of a call in Anthropic's format.
fn call_id(id: &str) -> String {
    format!("{CALL_PREFIX}{}", id.strip_prefix("call_").unwrap_or(id))
}

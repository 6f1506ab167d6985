//! The items of an answer in progress, and the events that report them.

use serde_json::{Value, json};

use super::{
    super::{
        sse::EventSink,
        tools::{ToolCallDelta, scan_result::CallKind},
    },
    items::{THOUGHT, part_of},
};
use crate::random::new_id;

#[derive(Debug)]
enum OpenItem {
    ReasoningPrefix { id: String, text: String },
    Message { id: String, text: String, logprobs: Vec<Value> },
    Call { id: String, call_id: String, name: String, arguments: String },
    Custom { id: String, call_id: String, name: String, input: String },
}

impl OpenItem {
    fn item(&self, status: &str) -> Value {
        // A new item has no content parts yet.
        let begins = status == "in_progress";
        match self {
            Self::ReasoningPrefix { id, text } => {
                let content = if begins { Vec::new() } else { vec![part_of(THOUGHT, text)] };
                json!({ "id": id, "type": "reasoning", "summary": [], "status": status, "content": content })
            }
            Self::Message { id, text, logprobs } => {
                let content = if begins { Vec::new() } else { vec![part(text, logprobs)] };
                json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
            }
            Self::Call { id, call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments,
                "status": status,
            }),
            Self::Custom { id, call_id, name, input } => json!({
                "id": id, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": input, "status": status,
            }),
        }
    }
}

fn part(text: &str, logprobs: &[Value]) -> Value {
    let mut part = part_of("output_text", text);
    part["logprobs"] = logprobs.into();
    part
}

#[derive(Debug, Default)]
pub(super) struct OutputItems {
    /// Completed items, in the order of the answer.
    items: Vec<Value>,
    open: Option<OpenItem>,
}

impl OutputItems {
    pub(super) fn items(&self) -> &[Value] {
        &self.items
    }

    pub(super) fn thought(&mut self, new: &str, tell: &mut EventSink<'_>) {
        if !matches!(self.open, Some(OpenItem::ReasoningPrefix { .. })) {
            self.close("completed", tell);
            self.open(OpenItem::ReasoningPrefix { id: new_id("rs"), text: String::new() }, tell);
        }
        let at = self.items.len();
        let Some(OpenItem::ReasoningPrefix { id, text }) = &mut self.open else { return };
        text.push_str(new);
        tell(
            "response.reasoning_text.delta",
            json!({ "item_id": id, "output_index": at, "content_index": 0, "delta": new }),
        );
    }

    pub(super) fn text(&mut self, new: &str, scores: Vec<Value>, tell: &mut EventSink<'_>) {
        if !matches!(self.open, Some(OpenItem::Message { .. })) {
            self.close("completed", tell);
            let message = OpenItem::Message { id: new_id("msg"), text: String::new(), logprobs: Vec::new() };
            self.open(message, tell);
        }
        let at = self.items.len();
        let Some(OpenItem::Message { id, text, logprobs }) = &mut self.open else { return };
        text.push_str(new);
        if !new.is_empty() {
            tell(
                "response.output_text.delta",
                json!({ "item_id": id, "output_index": at, "content_index": 0, "delta": new, "logprobs": scores }),
            );
        }
        logprobs.extend(scores);
    }

    pub(super) fn is_in_a_call(&self) -> bool {
        matches!(self.open, Some(OpenItem::Call { .. } | OpenItem::Custom { .. }))
    }

    pub(super) fn call(&mut self, part: &ToolCallDelta, tell: &mut EventSink<'_>) {
        if let Some((call_id, name)) = part.begun.clone() {
            self.close("completed", tell);
            let open = match part.kind {
                CallKind::Function => {
                    OpenItem::Call { id: new_id("fc"), call_id, name, arguments: String::new() }
                }
                CallKind::Custom => {
                    OpenItem::Custom { id: new_id("ctc"), call_id, name, input: String::new() }
                }
            };
            self.open(open, tell);
        }
        let at = self.items.len();
        let (event, id, all) = match &mut self.open {
            Some(OpenItem::Call { id, arguments, .. }) => {
                ("response.function_call_arguments.delta", id, arguments)
            }
            Some(OpenItem::Custom { id, input, .. }) => ("response.custom_tool_call_input.delta", id, input),
            _ => return,
        };
        all.push_str(&part.arguments);
        if !part.arguments.is_empty() {
            tell(event, json!({ "item_id": id, "output_index": at, "delta": part.arguments }));
        }
    }

    /// Ends the last item with the answer's `status`; an empty answer gets an empty message.
    pub(super) fn end(&mut self, status: &str, tell: &mut EventSink<'_>) {
        if self.items.is_empty() && self.open.is_none() {
            self.text("", Vec::new(), tell);
        }
        self.close(status, tell);
    }

    fn open(&mut self, open: OpenItem, tell: &mut EventSink<'_>) {
        let at = self.items.len();
        tell("response.output_item.added", json!({ "output_index": at, "item": open.item("in_progress") }));
        let first = match &open {
            OpenItem::ReasoningPrefix { id, .. } => Some((id, part_of(THOUGHT, ""))),
            OpenItem::Message { id, .. } => Some((id, part("", &[]))),
            OpenItem::Call { .. } | OpenItem::Custom { .. } => None,
        };
        if let Some((id, part)) = first {
            tell(
                "response.content_part.added",
                json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part }),
            );
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, tell: &mut EventSink<'_>) {
        let at = self.items.len();
        let Some(open) = self.open.take() else { return };
        let place = |id: &str| json!({ "item_id": id, "output_index": at, "content_index": 0 });
        match &open {
            OpenItem::ReasoningPrefix { id, text } => {
                let mut done = place(id);
                done["text"] = text.as_str().into();
                tell("response.reasoning_text.done", done);
                let mut done = place(id);
                done["part"] = part_of(THOUGHT, text);
                tell("response.content_part.done", done);
            }
            OpenItem::Message { id, text, logprobs } => {
                let mut done = place(id);
                (done["text"], done["logprobs"]) = (text.as_str().into(), logprobs.as_slice().into());
                tell("response.output_text.done", done);
                let mut done = place(id);
                done["part"] = part(text, logprobs);
                tell("response.content_part.done", done);
            }
            OpenItem::Call { id, name, arguments, .. } => tell(
                "response.function_call_arguments.done",
                json!({ "item_id": id, "output_index": at, "name": name, "arguments": arguments }),
            ),
            OpenItem::Custom { id, input, .. } => tell(
                "response.custom_tool_call_input.done",
                json!({ "item_id": id, "output_index": at, "input": input }),
            ),
        }
        let item = open.item(status);
        tell("response.output_item.done", json!({ "output_index": at, "item": item }));
        self.items.push(item);
    }
}

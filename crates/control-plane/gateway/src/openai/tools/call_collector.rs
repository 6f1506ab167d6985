//! Collects the parts of tool calls, for APIs whose calls have JSON objects as arguments.

use serde_json::{Map, Value};

use super::ToolCallDelta;

/// A tool call that has ended.
#[derive(Debug, PartialEq)]
pub(crate) enum CollectedCall {
    Call {
        id: String,
        name: String,
        arguments: Map<String, Value>,
    },
    /// The text of a call that was cut off, or whose arguments are no JSON object, tags included.
    Text(String),
}

#[derive(Debug)]
struct UnfinishedCall {
    id: String,
    name: String,
    arguments: String,
    /// Text of the call as the model wrote it.
    written: String,
}

#[derive(Debug, Default)]
pub(crate) struct CallCollector {
    open: Option<UnfinishedCall>,
}

impl CallCollector {
    /// Appends a part of a call; returns the call before it if the part begins a call.
    pub(crate) fn push(&mut self, part: &ToolCallDelta) -> Option<CollectedCall> {
        let mut ended = None;
        if let Some((id, name)) = part.begun.clone() {
            ended = self.close();
            let (arguments, written) = (String::new(), String::new());
            self.open = Some(UnfinishedCall { id, name, arguments, written });
        }
        if let Some(call) = &mut self.open {
            call.arguments.push_str(&part.arguments);
            call.written.push_str(&part.written);
        }
        ended
    }

    /// Ends the current call, if there is one.
    pub(crate) fn close(&mut self) -> Option<CollectedCall> {
        let UnfinishedCall { id, name, arguments, written } = self.open.take()?;
        Some(match serde_json::from_str(&arguments) {
            Ok(Value::Object(arguments)) => CollectedCall::Call { id, name, arguments },
            _ => CollectedCall::Text(written),
        })
    }
}

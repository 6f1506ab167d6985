//! Answers in OpenAI's harmony format, the messages of gpt-oss.
//!
//! ```text
//! <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
//! ```
//!
//! The prompt ends with `<|start|>assistant`. `<|return|>` and `<|call|>` end an answer, so no grammar names
//! them.

use super::{lark_string, tag::Tag};

/// Special tokens of the format that a grammar names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HarmonyTags {
    start: Tag,
    end: Tag,
    channel: Tag,
    message: Tag,
    constrain: Tag,
}

impl HarmonyTags {
    /// Name of the tag that begins a message.
    pub const START: &str = "<|start|>";
    /// Ends a message that another one follows.
    pub const END: &str = "<|end|>";
    /// Precedes the name of a message's channel.
    pub const CHANNEL: &str = "<|channel|>";
    /// Precedes the text of a message.
    pub const MESSAGE: &str = "<|message|>";
    /// Precedes the type of a message's text.
    pub const CONSTRAIN: &str = "<|constrain|>";

    /// Returns the tags, with the tokens that `token` finds for their names.
    #[must_use]
    pub fn of(token: impl Fn(&str) -> Option<u32>) -> Self {
        let tag = |name| Tag { name, token: token(name) };
        Self {
            start: tag(Self::START),
            end: tag(Self::END),
            channel: tag(Self::CHANNEL),
            message: tag(Self::MESSAGE),
            constrain: tag(Self::CONSTRAIN),
        }
    }

    /// Returns the Lark expression of the header before a text of `channel`.
    #[must_use]
    pub fn header(self, channel: &str) -> String {
        format!("{} {} {}", self.channel.lark(), lark_string(channel), self.message.lark())
    }

    /// Returns the Lark expression of the beginning of a call, up to the function's name.
    #[must_use]
    pub fn call(self) -> String {
        format!("{} \"commentary to=functions.\"", self.channel.lark())
    }

    /// Returns the Lark expression of the end of a header, before JSON or before any text.
    #[must_use]
    pub fn begins(self, is_json: bool) -> String {
        match is_json {
            true => format!("\" \" {} \"json\" {}", self.constrain.lark(), self.message.lark()),
            false => self.message.lark(),
        }
    }

    /// Returns a Lark grammar of messages of reasoning content, then the grammar `answer`. With `is_open` the
    /// prompt has begun such a message. With `opens_final` the answer is the text of the final message.
    pub(super) fn lark(self, answer: &str, is_open: bool, opens_final: bool) -> String {
        let (body, rules) = match self.end.token {
            Some(token) => (format!("TEXT? <[{token}]>"), "TEXT: /(?s:.+)/".to_owned()),
            None => ("body".to_owned(), format!("body[suffix={}]: /(?s:.*)/", lark_string(self.end.name))),
        };
        let next = format!("{} \"assistant\"", self.start.lark());
        let begun = if is_open { format!("{body} {next} ") } else { String::new() };
        let last = if opens_final { self.header("final") } else { String::new() };
        let thought = format!("thought: {} {body} {next}", self.header("analysis"));
        format!("start: {begun}thought* {last} @{answer}\n{thought}\n{rules}")
    }
}

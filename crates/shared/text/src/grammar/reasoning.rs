//! Reasoning content before a constrained answer: free text up to the closing tag.

use super::{harmony::HarmonyTags, lark_string, tag::Tag};

/// Reasoning content that precedes an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningPrefix {
    /// Text between two tags.
    Tags {
        /// Opening tag; `None` if the prompt already opened it, so that reasoning content is mandatory.
        open: Option<Tag>,
        /// Closing tag of the reasoning content.
        close: Tag,
    },
    /// Messages of the harmony format.
    Harmony {
        /// Tags of the format.
        tags: HarmonyTags,
        /// Whether the prompt has begun a message of reasoning content.
        is_open: bool,
        /// Whether the answer is the text of the final message, instead of messages with headers.
        opens_final: bool,
    },
}

impl ReasoningPrefix {
    /// Name of the grammar of the answer after the reasoning content.
    pub(super) const ANSWER: &str = "answer";

    /// Returns the Lark grammar of reasoning content and answer.
    pub(super) fn lark(self) -> String {
        let (open, close) = match self {
            Self::Tags { open, close } => (open, close),
            Self::Harmony { tags, is_open, opens_final } => {
                return tags.lark(Self::ANSWER, is_open, opens_final);
            }
        };
        let thought = match close.token {
            Some(token) => format!("thought: TEXT? <[{token}]>\nTEXT: /(?s:.+)/"),
            None => format!("thought[suffix={}]: /(?s:.*)/", lark_string(close.name)),
        };
        // Chat templates put these line breaks after the closing tag in earlier turns.
        let all = format!("thought (\"\\n\" | \"\\n\\n\")? @{}", Self::ANSWER);
        let start = match open {
            None => all,
            Some(open) => format!("{} {all} | @{}", open.lark(), Self::ANSWER),
        };
        format!("start: {start}\n{thought}")
    }
}

//! Reasoning content before a constrained answer: free text up to the closing tag.

use super::lark_string;

/// Tag that delimits reasoning content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Text of the tag.
    pub name: &'static str,
    /// Id of the tag's token, if the tag is a special token.
    pub token: Option<u32>,
}

/// Reasoning content that precedes an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningPrefix {
    /// Opening tag; `None` if the prompt already opened it, so that reasoning content is mandatory.
    pub open: Option<Tag>,
    /// Closing tag of the reasoning content.
    pub close: Tag,
}

impl ReasoningPrefix {
    /// Name of the grammar of the answer after the reasoning content.
    pub(super) const ANSWER: &str = "answer";

    /// Returns the Lark grammar of reasoning content and answer.
    pub(super) fn lark(self) -> String {
        let Self { open, close } = self;
        let thought = match close.token {
            Some(token) => format!("thought: TEXT? <[{token}]>\nTEXT: /(?s:.+)/"),
            None => format!("thought[suffix={}]: /(?s:.*)/", lark_string(close.name)),
        };
        // Chat templates put these line breaks after the closing tag in earlier turns.
        let all = format!("thought (\"\\n\" | \"\\n\\n\")? @{}", Self::ANSWER);
        let start = match open {
            None => all,
            Some(open) => {
                let open = open.token.map_or_else(|| lark_string(open.name), |token| format!("<[{token}]>"));
                format!("{open} {all} | @{}", Self::ANSWER)
            }
        };
        format!("start: {start}\n{thought}")
    }
}

//! A thought before an answer that has to look like something: free up to the tag that closes it.

use super::lark_string;

/// A tag around a thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Its text.
    pub name: &'static str,
    /// The token that it is, where that is no text.
    pub token: Option<u32>,
}

/// What stands before an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thought {
    /// What opens it; `None` if it is open already, so that there has to be one.
    pub open: Option<Tag>,
    /// What closes it.
    pub close: Tag,
}

impl Thought {
    /// What the grammar of the answer behind it is called.
    pub(super) const ANSWER: &str = "answer";

    /// The whole in Lark.
    pub(super) fn lark(self) -> String {
        let Self { open, close } = self;
        let thought = match close.token {
            Some(token) => format!("thought: TEXT? <[{token}]>\nTEXT: /(?s:.+)/"),
            None => format!("thought[suffix={}]: /(?s:.*)/", lark_string(close.name)),
        };
        // As templates write what was said before.
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

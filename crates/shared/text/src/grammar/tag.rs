//! Tags that delimit the parts of an answer.

use super::lark_string;

/// Tag that delimits a part of an answer, for example its reasoning content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Text of the tag.
    pub name: &'static str,
    /// Id of the tag's token, if the tag is a special token.
    pub token: Option<u32>,
}

impl Tag {
    /// Returns the Lark expression of the tag.
    pub(super) fn lark(self) -> String {
        self.token.map_or_else(|| lark_string(self.name), |token| format!("<[{token}]>"))
    }
}

//! The text and the tool calls that a scanner finds in an answer.

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallKind {
    /// A function, with JSON arguments.
    #[default]
    Function,
    /// A custom tool, with a text as input.
    Custom,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedCallDelta {
    pub index: usize,
    /// Byte offset of the part in the text of the scan result.
    pub at: usize,
    pub kind: CallKind,
    /// Name of the tool, in the call's first part.
    pub name: Option<String>,
    /// New text of the arguments, or of a custom tool's input.
    pub arguments: String,
    /// New text as the model wrote it, tags included, so that a route may show an invalid call as text.
    pub written: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    pub content: String,
    pub calls: Vec<ParsedCallDelta>,
}

impl ScanResult {
    pub(super) fn call(&mut self, mut piece: ParsedCallDelta) {
        piece.at = self.content.len();
        let goes_on = |last: &&mut ParsedCallDelta| {
            piece.name.is_none() && (last.index, last.at) == (piece.index, piece.at)
        };
        match self.calls.last_mut().filter(goes_on) {
            Some(last) => {
                last.arguments.push_str(&piece.arguments);
                last.written.push_str(&piece.written);
            }
            None => self.calls.push(piece),
        }
    }
}

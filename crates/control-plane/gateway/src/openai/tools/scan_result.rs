//! The text and the calls of tools that are found in an answer.

/// The kind of tool that is called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallKind {
    /// A function, with arguments that are JSON.
    #[default]
    Function,
    /// A custom tool, with a text for input.
    Custom,
}

/// A new piece of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedCallDelta {
    /// The number of the call, counted from 0.
    pub index: usize,
    /// Bytes of text that stand before it in what was found.
    pub at: usize,
    /// The kind of tool that is called.
    pub kind: CallKind,
    /// Its name, in its first piece.
    pub name: Option<String>,
    /// New text of its arguments, or of its input.
    pub arguments: String,
    /// New text of it as the model wrote it, tags included: a route may tell a call that does not parse as text.
    pub written: String,
}

/// The text and the calls that are found in a piece of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    /// Text that is no part of any call.
    pub content: String,
    /// Pieces of calls, in order.
    pub calls: Vec<ParsedCallDelta>,
}

impl ScanResult {
    /// Adds a piece behind all that was found so far.
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

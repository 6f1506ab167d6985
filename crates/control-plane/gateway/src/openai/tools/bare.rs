//! Reads an answer that is one JSON object without tags, perhaps in a Markdown fence, as a call.
//! Qwen2.5-Coder writes such calls.
//!
//! Text after the object would make the answer plain text, so the call is reported only at the answer's end.

use serde_json::{Map, Value};

use super::object::{CallProgress, ObjectScanner};

const FENCE: &str = "```";
/// Maximum length of a fence's first line, with the name of a language and white space.
const MAX_FENCE_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BarePosition {
    /// Before the object, perhaps in the first line of a fence.
    Before,
    Object,
    Behind,
}

#[derive(Debug)]
pub(super) struct BareScanner {
    at: BarePosition,
    before: String,
    object: ObjectScanner,
    arguments: String,
    /// The text after the object, without white space.
    behind: String,
}

impl Default for BareScanner {
    fn default() -> Self {
        let (before, arguments, behind) = (String::new(), String::new(), String::new());
        Self { at: BarePosition::Before, before, object: ObjectScanner::default(), arguments, behind }
    }
}

impl BareScanner {
    /// True if an answer that begins with `c` may be such a call.
    pub(super) fn begins_with(c: char) -> bool {
        c == '{' || FENCE.starts_with(c)
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.object.name()
    }

    /// Processes the next character; the result stays open until the answer ends.
    pub(super) fn push(&mut self, c: char) -> CallProgress {
        match self.at {
            BarePosition::Before if c == '{' => {
                self.at = BarePosition::Object;
                let fence = self.before.trim_end();
                if !fence.is_empty() && !fence.starts_with(FENCE) {
                    return CallProgress::Broken;
                }
                self.object.push(c)
            }
            BarePosition::Before => self.in_fence(c),
            BarePosition::Object => {
                let progress = self.object.push(c);
                self.arguments.push_str(&self.object.take_arguments());
                if progress == CallProgress::Whole {
                    self.at = BarePosition::Behind;
                }
                if progress == CallProgress::Broken { progress } else { CallProgress::Open }
            }
            BarePosition::Behind => {
                self.behind.extend(Some(c).filter(|c| !c.is_whitespace()));
                if self.closing().starts_with(&self.behind) {
                    CallProgress::Open
                } else {
                    CallProgress::Broken
                }
            }
        }
    }

    /// Processes a character of a fence's first line: the fence, a language, white space.
    fn in_fence(&mut self, c: char) -> CallProgress {
        self.before.push(c);
        let word = self.before.trim_end();
        let language = word.strip_prefix(FENCE);
        let is_fence =
            language.map_or(FENCE.starts_with(word), |word| word.chars().all(char::is_alphanumeric));
        if is_fence && self.before.len() <= MAX_FENCE_BYTES {
            CallProgress::Open
        } else {
            CallProgress::Broken
        }
    }

    /// Returns the text that must follow the object.
    fn closing(&self) -> &'static str {
        if self.before.is_empty() { "" } else { FENCE }
    }

    /// Returns the call's name and arguments, if the answer ends here and is a call.
    pub(super) fn whole(&self) -> Option<(String, String)> {
        let is_whole = self.at == BarePosition::Behind && self.behind == self.closing();
        let parses = serde_json::from_str::<Map<String, Value>>(&self.arguments).is_ok();
        let name = self.object.name().filter(|_| is_whole && parses)?;
        Some((name.to_owned(), self.arguments.clone()))
    }
}

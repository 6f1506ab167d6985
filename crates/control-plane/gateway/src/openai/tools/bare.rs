//! An answer that is nothing but a call without its tags: one JSON object, perhaps in a fence of Markdown. Qwen2.5-Coder writes its calls so.
//!
//! Nobody knows before the answer's end that nothing follows the object, so such a call is told as a whole.

use serde_json::{Map, Value};

use super::object::{CallProgress, ObjectScanner};

const FENCE: &str = "```";
/// Longest beginning of a fence: with the name of a language, and white space.
const MAX_FENCE_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BarePosition {
    /// Before the object, perhaps in the first line of a fence.
    Before,
    Object,
    Behind,
}

/// See the module.
#[derive(Debug)]
pub(super) struct BareScanner {
    at: BarePosition,
    /// The text before the object.
    before: String,
    object: ObjectScanner,
    arguments: String,
    /// The text behind the object, without white space.
    behind: String,
}

impl Default for BareScanner {
    fn default() -> Self {
        let (before, arguments, behind) = (String::new(), String::new(), String::new());
        Self { at: BarePosition::Before, before, object: ObjectScanner::default(), arguments, behind }
    }
}

impl BareScanner {
    /// Whether an answer may be such a call if `c` is its first character.
    pub(super) fn begins_with(c: char) -> bool {
        c == '{' || FENCE.starts_with(c)
    }

    /// The name in the object, once it is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.object.name()
    }

    /// Takes the next character; the answer is open until it ends.
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

    /// Takes a character of a fence's first line: the fence, the name of a language, white space.
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

    /// The text that has to stand behind the object.
    fn closing(&self) -> &'static str {
        if self.before.is_empty() { "" } else { FENCE }
    }

    /// The call, if the answer ends here and is one.
    pub(super) fn whole(&self) -> Option<(String, String)> {
        let is_whole = self.at == BarePosition::Behind && self.behind == self.closing();
        let parses = serde_json::from_str::<Map<String, Value>>(&self.arguments).is_ok();
        let name = self.object.name().filter(|_| is_whole && parses)?;
        Some((name.to_owned(), self.arguments.clone()))
    }
}

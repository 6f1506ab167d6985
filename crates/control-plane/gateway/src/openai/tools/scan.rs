//! Finds tool calls in a stream of text.
//!
//! The result does not depend on how the text is split. Text that may begin a call is held back until the
//! match is decided, as with stop strings. Text that turns out to be no call stays text, and so does a call
//! of an undeclared function.

mod between;

use std::sync::Arc;

pub use super::scan_result::{CallKind, ParsedCallDelta, ScanResult};
use super::{
    bare::BareScanner,
    format::ToolCallFormat,
    object::{CallProgress, ObjectScanner},
    parameter_kinds::Function,
    pythonic::{ListScanner, PythonCall},
    tagged::TaggedScanner,
};

/// Maximum white space, in bytes, that is held back until the next character.
const MAX_HELD_SPACE: usize = 64;

#[derive(Debug)]
enum ToolScanState {
    /// Text that may contain an announcement of calls.
    Text,
    /// After an announcement, or between calls of one group.
    Between,
    /// In a call that is a JSON object.
    Object(ObjectScanner),
    /// In a list of pythonic calls.
    List(ListScanner),
    /// In a call that is written in tags.
    Tagged(TaggedScanner),
    /// In an answer that may be a call as a whole.
    Bare(BareScanner),
    /// In the name before an object of arguments.
    Name(String),
    /// In a custom tool's input, up to the answer's end; the string is the separator still to come.
    Input(&'static str),
    /// All further characters are text.
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallState {
    /// The function's name is unknown, so all characters are held back.
    Undecided,
    /// The call was reported.
    Told(CallKind),
    /// The function is undeclared, so all characters are text.
    Text,
}

#[derive(Debug)]
pub struct Scanner {
    format: ToolCallFormat,
    /// Declared tools; a call of any other tool is text.
    functions: Arc<[Function]>,
    /// Whether an answer without tags may be a call.
    finds_bare: bool,
    state: ToolScanState,
    /// Text that is not decided yet; reported as text if it is no call.
    held: String,
    /// True while the answer is only white space.
    is_blank: bool,
    calls: usize,
    call: CallState,
    /// Whether the scanner is in a list of objects.
    in_list: bool,
    /// Whether the object is only the arguments of a call whose name preceded it.
    is_bare: bool,
}

impl Scanner {
    /// Creates a scanner for an answer that may call `functions`.
    #[must_use]
    pub fn new(format: ToolCallFormat, functions: Arc<[Function]>) -> Self {
        Self {
            format,
            functions,
            finds_bare: format == ToolCallFormat::Hermes,
            state: ToolScanState::Text,
            held: String::new(),
            is_blank: true,
            calls: 0,
            call: CallState::Undecided,
            in_list: false,
            is_bare: false,
        }
    }

    /// Returns the scanner for an answer whose calls match a grammar, so text outside tags is no call.
    #[must_use]
    pub(crate) fn of_grammar(self) -> Self {
        Self { finds_bare: false, ..self }
    }

    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls
    }

    pub fn push(&mut self, text: &str) -> ScanResult {
        let mut found = ScanResult::default();
        for c in text.chars() {
            self.push_char(c, &mut found);
        }
        found
    }

    /// Ends the answer; text held back is text, except white space beside calls.
    pub fn finish(&mut self) -> ScanResult {
        let mut found = ScanResult::default();
        if let ToolScanState::Bare(scanner) = &self.state
            && let Some((name, arguments)) = scanner.whole()
        {
            self.begin_call(&name, CallKind::Function, &mut found);
            self.extend_call(arguments, String::new(), &mut found);
            return found;
        }
        let held = std::mem::take(&mut self.held);
        let is_beside =
            self.calls > 0 && (held.trim().is_empty() || matches!(self.state, ToolScanState::Between));
        if !is_beside {
            found.content = held;
        }
        found
    }

    fn push_char(&mut self, c: char, found: &mut ScanResult) {
        let was_blank = self.is_blank;
        self.is_blank &= c.is_whitespace();
        let state = std::mem::replace(&mut self.state, ToolScanState::Over);
        match self.call {
            _ if matches!(state, ToolScanState::Over | ToolScanState::Input(_)) => {}
            CallState::Undecided => self.held.push(c),
            CallState::Told(_) => self.extend_call(String::new(), c.to_string(), found),
            CallState::Text => found.content.push(c),
        }
        match state {
            ToolScanState::Over => found.content.push(c),
            ToolScanState::Text if was_blank && self.begins_unannounced(c) => self.begin(c, found),
            ToolScanState::Text => self.in_text(found),
            ToolScanState::Between => self.between(c, found),
            ToolScanState::Name(name) => self.in_name(name, c, found),
            ToolScanState::Object(scanner) => self.in_object(scanner, c, found),
            ToolScanState::List(scanner) => self.in_list(scanner, c, found),
            ToolScanState::Tagged(scanner) => self.in_tags(scanner, c, found),
            ToolScanState::Bare(scanner) => self.in_bare(scanner, c, found),
            ToolScanState::Input(before) => self.in_input(before, c, found),
        }
    }

    /// Returns the kind of the declared tool `name`.
    fn kind_of(&self, name: &str) -> Option<CallKind> {
        self.functions.iter().find(|known| known.name == name).map(|known| known.kind)
    }

    fn begin_call(&mut self, name: &str, kind: CallKind, found: &mut ScanResult) {
        let (index, written) = (self.calls, std::mem::take(&mut self.held));
        let name = Some(name.to_owned());
        found.call(ParsedCallDelta { index, kind, name, written, ..ParsedCallDelta::default() });
        self.calls += 1;
        self.call = CallState::Told(kind);
    }

    fn extend_call(&self, arguments: String, written: String, found: &mut ScanResult) {
        let (index, kind) = (self.calls.saturating_sub(1), self.told_kind());
        found.call(ParsedCallDelta { index, kind, arguments, written, ..ParsedCallDelta::default() });
    }

    fn told_kind(&self) -> CallKind {
        if let CallState::Told(kind) = self.call { kind } else { CallKind::Function }
    }

    /// Reports held text as text and enters `state`.
    fn give_up(&mut self, state: ToolScanState, found: &mut ScanResult) {
        found.content.push_str(&std::mem::take(&mut self.held));
        (self.state, self.call, self.in_list) = (state, CallState::Undecided, false);
    }

    /// Reports the held call of an undeclared function as text, without separators from an earlier call.
    fn say_held(&mut self, found: &mut ScanResult) {
        let held = std::mem::take(&mut self.held);
        let is_apart = matches!(
            self.format,
            ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder | ToolCallFormat::Harmony
        );
        let is_in_list = self.calls > 0 && !is_apart;
        let separators: &[char] = if is_in_list { &[',', ';', ' ', '\n'] } else { &[] };
        found.content.push_str(held.trim_start_matches(separators));
    }

    fn in_text(&mut self, found: &mut ScanResult) {
        self.state = ToolScanState::Text;
        let Some(announcement) = self.format.announcement() else {
            // In formats without announcement, all of an answer is calls or none of it is.
            if !self.is_blank || self.held.len() > MAX_HELD_SPACE {
                self.give_up(ToolScanState::Over, found);
            }
            return;
        };
        let opening = self.format.opening().unwrap_or(announcement);
        let begun = [announcement, opening].into_iter().find(|word| self.held.ends_with(word));
        if let Some(begun) = begun {
            let text = self.held.len() - begun.len();
            let before = self.held[..text].trim_end().len();
            found.content.push_str(&self.held[..before]);
            // Text before the announcement is reported; the announcement stays held until a call follows.
            self.held.drain(..before);
            self.state = match begun == announcement {
                true => ToolScanState::Between,
                false => ToolScanState::Tagged(TaggedScanner::default()),
            };
            return;
        }
        // White space is held while a call may follow it.
        let kept = beginning_of(announcement, &self.held).max(beginning_of(opening, &self.held));
        let text = self.held.len() - kept;
        let said = if text > MAX_HELD_SPACE { text } else { self.held[..text].trim_end().len() };
        found.content.push_str(&self.held[..said]);
        self.held.drain(..said);
    }

    /// True if an answer that begins with `c` may be calls without announcement.
    fn begins_unannounced(&self, c: char) -> bool {
        match self.format {
            ToolCallFormat::Llama3 => c == '{',
            ToolCallFormat::Pythonic => c == '[',
            _ => self.finds_bare && BareScanner::begins_with(c),
        }
    }

    fn begin(&mut self, c: char, found: &mut ScanResult) {
        match self.format {
            ToolCallFormat::Pythonic => self.in_list(ListScanner::default(), c, found),
            ToolCallFormat::Llama3 => self.in_object(ObjectScanner::default(), c, found),
            _ => self.in_bare(BareScanner::default(), c, found),
        }
    }

    fn in_object(&mut self, mut scanner: ObjectScanner, c: char, found: &mut ScanResult) {
        let mut progress = scanner.push(c);
        if self.is_bare && progress == CallProgress::Open && scanner.is_behind_a_value() {
            progress = scanner.push('}');
        }
        self.is_bare &= progress == CallProgress::Open;
        if let Some(name) = scanner.name().filter(|_| self.call == CallState::Undecided) {
            match self.kind_of(name) {
                Some(kind) => self.begin_call(name, kind, found),
                // The answer is a JSON object, but no call.
                None if self.format == ToolCallFormat::Llama3 && self.calls == 0 => {
                    progress = CallProgress::Broken
                }
                None => {
                    self.say_held(found);
                    self.call = CallState::Text;
                }
            }
        }
        if let CallState::Told(kind) = self.call {
            let arguments = scanner.take_arguments();
            // A custom tool has no arguments; its input follows the object.
            if kind == CallKind::Function && !arguments.is_empty() {
                self.extend_call(arguments, String::new(), found);
            }
        }
        match progress {
            CallProgress::Open => self.state = ToolScanState::Object(scanner),
            CallProgress::Whole => self.behind_object(),
            // A reported call cannot be taken back, so the following text is outside of the call.
            CallProgress::Broken => {
                if matches!(self.call, CallState::Told(_)) {
                    found.content.push(c);
                }
                let is_all = self.format == ToolCallFormat::Llama3;
                self.give_up(if is_all { ToolScanState::Over } else { ToolScanState::Text }, found);
            }
        }
    }

    fn behind_object(&mut self) {
        let is_one_of_many = self.in_list || self.format == ToolCallFormat::Llama3;
        self.state = match std::mem::replace(&mut self.call, CallState::Undecided) {
            CallState::Told(CallKind::Custom) => {
                self.call = CallState::Told(CallKind::Custom);
                ToolScanState::Input("\n")
            }
            CallState::Text if !is_one_of_many => ToolScanState::Text,
            _ => ToolScanState::Between,
        };
    }

    fn in_list(&mut self, mut scanner: ListScanner, c: char, found: &mut ScanResult) {
        let progress = scanner.push(c);
        if let Some(call) = scanner.take() {
            if self.kind_of(&call.name).is_some() {
                self.tell_whole(call, found);
            } else if self.calls == 0 {
                return self.give_up(ToolScanState::Over, found);
            } else {
                self.say_held(found);
            }
        }
        match progress {
            _ if self.takes_input(scanner.begun(), found) => self.state = ToolScanState::Input("\n"),
            CallProgress::Open => self.state = ToolScanState::List(scanner),
            CallProgress::Whole if self.calls > 0 => self.end(found),
            CallProgress::Whole | CallProgress::Broken => self.give_up(ToolScanState::Over, found),
        }
    }

    fn in_tags(&mut self, mut scanner: TaggedScanner, c: char, found: &mut ScanResult) {
        let progress = scanner.push(c, &self.functions);
        let begun = scanner.begun();
        let is_unknown = begun.is_some_and(|name| self.kind_of(name).is_none());
        match progress {
            _ if is_unknown => self.give_up(ToolScanState::Text, found),
            _ if self.takes_input(begun, found) => self.state = ToolScanState::Input("\n<parameter=input>\n"),
            CallProgress::Open => self.state = ToolScanState::Tagged(scanner),
            CallProgress::Whole => {
                self.tell_whole(scanner.whole(), found);
                self.state = ToolScanState::Between;
            }
            CallProgress::Broken => self.give_up(ToolScanState::Text, found),
        }
    }

    fn tell_whole(&mut self, call: PythonCall, found: &mut ScanResult) {
        self.begin_call(&call.name, CallKind::Function, found);
        self.extend_call(call.arguments, String::new(), found);
        self.call = CallState::Undecided;
    }

    /// Reports the call if it is a custom tool's; returns whether it is.
    fn takes_input(&mut self, begun: Option<&str>, found: &mut ScanResult) -> bool {
        let Some(name) = begun.filter(|name| self.kind_of(name) == Some(CallKind::Custom)) else {
            return false;
        };
        self.begin_call(name, CallKind::Custom, found);
        true
    }

    fn in_input(&mut self, before: &'static str, c: char, found: &mut ScanResult) {
        if let Some(rest) = before.strip_prefix(c) {
            self.state = ToolScanState::Input(rest);
            return self.extend_call(String::new(), c.to_string(), found);
        }
        self.extend_call(c.to_string(), c.to_string(), found);
        self.state = ToolScanState::Input("");
    }

    fn in_bare(&mut self, mut scanner: BareScanner, c: char, found: &mut ScanResult) {
        let progress = scanner.push(c);
        let is_call = |name| self.kind_of(name) == Some(CallKind::Function);
        if progress == CallProgress::Open && scanner.name().is_none_or(is_call) {
            self.state = ToolScanState::Bare(scanner);
        } else {
            self.in_text(found);
        }
    }
}

/// Returns how many bytes at the end of `text` may be the beginning of `word`.
fn beginning_of(word: &str, text: &str) -> usize {
    let ends = (1..word.len()).rev().filter(|&end| word.is_char_boundary(end));
    ends.into_iter().find(|&end| text.ends_with(&word[..end])).unwrap_or(0)
}

#[cfg(test)]
mod tests;

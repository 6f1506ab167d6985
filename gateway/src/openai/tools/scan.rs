//! Calls out of an answer's text, as it comes.
//!
//! However the text is cut into pieces, what is found is the same: what may be the beginning of a call is held back until that is
//! decided, as stop strings are. What turns out to be no call is text.

use std::sync::Arc;

use super::{
    format::Format,
    kinds::Function,
    object::{ObjectScanner, Progress},
    pythonic::{ListScanner, Told},
    tagged::{OPENING, TaggedScanner},
};

/// Most bytes of white space that wait for what follows them.
const MAX_HELD_SPACE: usize = 64;
/// Most bytes between an announcement or a call and the next one.
const MAX_BETWEEN: usize = 256;
/// Longest name of a function that stands before its arguments.
const MAX_NAME_BYTES: usize = 256;

/// What is new of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallPiece {
    /// Which call, counted from 0.
    pub index: usize,
    /// Its name, in its first piece.
    pub name: Option<String>,
    /// What its arguments go on with.
    pub arguments: String,
}

/// What came of a piece of text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Text that is no part of any call.
    pub content: String,
    /// Pieces of calls, in order.
    pub calls: Vec<CallPiece>,
}

impl Found {
    fn call(&mut self, index: usize, name: Option<String>, arguments: String) {
        if let Some(last) = self.calls.last_mut().filter(|last| last.index == index && name.is_none()) {
            last.arguments.push_str(&arguments);
        } else {
            self.calls.push(CallPiece { index, name, arguments });
        }
    }
}

#[derive(Debug)]
enum State {
    /// Text, in which a call may be announced.
    Text,
    /// Behind an announcement, or between calls that belong together.
    Between,
    /// In a call that is an object.
    Object(ObjectScanner),
    /// In a list of calls that are Python's.
    List(ListScanner),
    /// In a call that is written in tags.
    Tagged(TaggedScanner),
    /// In the name that stands before an object.
    Name(String),
    /// All that comes is text.
    Over,
}

/// See the module.
#[derive(Debug)]
pub struct Scanner {
    format: Format,
    /// Those there are: calls that are not announced are told from other answers by their names.
    functions: Arc<[Function]>,
    state: State,
    /// Read, and not decided yet: told as text if it is no call.
    held: String,
    /// There was nothing but white space so far.
    is_blank: bool,
    /// Calls that have begun.
    calls: usize,
    /// The call under way has been told of.
    told: bool,
    /// In a list of objects.
    in_list: bool,
    /// The object is a call's arguments alone: its name stood before it.
    is_bare: bool,
    /// Calls of this format are announced, and the one under way is not.
    is_unannounced: bool,
}

impl Scanner {
    /// One before the first character of an answer, in which calls of `functions` may come.
    #[must_use]
    pub fn new(format: Format, functions: Arc<[Function]>) -> Self {
        let (held, state) = (String::new(), State::Text);
        Self {
            format,
            functions,
            state,
            held,
            calls: 0,
            told: false,
            in_list: false,
            is_bare: false,
            is_unannounced: false,
            is_blank: true,
        }
    }

    /// Calls there were so far.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes the next text of the answer.
    pub fn push(&mut self, text: &str) -> Found {
        let mut found = Found::default();
        for c in text.chars() {
            self.take(c, &mut found);
        }
        found
    }

    /// The answer has ended: what was held back is text, but for white space beside calls.
    pub fn finish(&mut self) -> Found {
        let mut found = Found::default();
        if !self.told {
            let held = std::mem::take(&mut self.held);
            let is_beside =
                self.calls > 0 && (held.trim().is_empty() || matches!(self.state, State::Between));
            if !is_beside {
                found.content = held;
            }
        }
        found
    }

    fn take(&mut self, c: char, found: &mut Found) {
        let was_blank = self.is_blank;
        self.is_blank &= c.is_whitespace();
        let state = std::mem::replace(&mut self.state, State::Over);
        if !self.told && !matches!(state, State::Over) {
            self.held.push(c);
        }
        match state {
            State::Over => found.content.push(c),
            State::Text if was_blank && self.is_unannounced(c) => self.begin(c, found),
            State::Text => self.in_text(found),
            State::Between => self.between(c, found),
            State::Name(name) => self.in_name(name, c, found),
            State::Object(scanner) => self.in_object(scanner, c, found),
            State::List(scanner) => self.in_list(scanner, c, found),
            State::Tagged(scanner) => self.in_tags(scanner, c, found),
        }
    }

    /// What was held back is text after all.
    fn give_up(&mut self, state: State, found: &mut Found) {
        found.content.push_str(&std::mem::take(&mut self.held));
        (self.state, self.told, self.in_list, self.is_unannounced) = (state, false, false, false);
    }

    fn in_text(&mut self, found: &mut Found) {
        self.state = State::Text;
        let Some(announcement) = self.format.announcement() else {
            // All of an answer is calls, or none of it.
            if !self.is_blank || self.held.len() > MAX_HELD_SPACE {
                self.give_up(State::Over, found);
            }
            return;
        };
        let opening = self.format.opening().unwrap_or(announcement);
        let begun = [announcement, opening].into_iter().find(|word| self.held.ends_with(word));
        if let Some(begun) = begun {
            let text = self.held.len() - begun.len();
            let before = self.held[..text].trim_end().len();
            found.content.push_str(&self.held[..before]);
            // What is held of text goes with it; the announcement stays until it has come true.
            self.held.drain(..before);
            self.is_unannounced = begun != announcement;
            self.state = match self.is_unannounced {
                true => State::Tagged(TaggedScanner::default()),
                false => State::Between,
            };
            return;
        }
        // White space is held as long as a call may follow it.
        let kept = beginning_of(announcement, &self.held).max(beginning_of(opening, &self.held));
        let text = self.held.len() - kept;
        let said = if text > MAX_HELD_SPACE { text } else { self.held[..text].trim_end().len() };
        found.content.push_str(&self.held[..said]);
        self.held.drain(..said);
    }

    /// Calls that begin an answer without being announced.
    fn is_unannounced(&self, c: char) -> bool {
        let begins = match self.format {
            Format::Llama3 => '{',
            Format::Pythonic => '[',
            _ => return false,
        };
        c == begins
    }

    fn begin(&mut self, c: char, found: &mut Found) {
        if self.format == Format::Pythonic {
            self.in_list(ListScanner::default(), c, found);
        } else {
            self.in_object(ObjectScanner::default(), c, found);
        }
    }

    /// Where a call is to come, or the end of those that belong together.
    fn between(&mut self, c: char, found: &mut Found) {
        if self.held.len() > MAX_BETWEEN {
            return self.give_up(State::Text, found);
        }
        self.state = State::Between;
        let (held, announced) = (self.held.trim_start(), self.format.announcement().unwrap_or_default());
        let behind = held.strip_prefix(announced).unwrap_or(held).trim_start();
        let is_announced_again = self.calls > 0 && !self.in_list && announced.starts_with(held);
        match (self.format, c) {
            (Format::Qwen3Coder, _) if OPENING.starts_with(behind) => {
                if behind == OPENING {
                    self.state = State::Tagged(TaggedScanner::default());
                }
            }
            (_, '{') => self.begin(c, found),
            (Format::Mistral, _) if is_announced_again => {}
            (Format::Mistral | Format::Granite, '[') if held.starts_with(announced) && behind == "[" => {
                self.in_list = true;
            }
            (_, ',') if self.in_list && self.calls > 0 => {}
            (_, ']') if self.in_list => self.end(),
            (Format::Mistral, c) if !self.in_list && (c.is_alphanumeric() || c == '_') => {
                self.state = State::Name(c.to_string());
            }
            (Format::Hermes | Format::Qwen3Coder, _) if self.calls > 0 && self.is_closing() => {}
            (Format::Llama3, ';') => {}
            _ if c.is_whitespace() => {}
            _ => {
                self.in_list = false;
                self.in_text(found);
            }
        }
    }

    /// Whether what is held ends with a part of the word that closes an announced call; all of it ends the call.
    fn is_closing(&mut self) -> bool {
        const CLOSING: &str = "</tool_call>";
        let held = self.held.trim_start();
        if held == CLOSING {
            self.end();
            return true;
        }
        CLOSING.starts_with(held)
    }

    /// Calls that belong together have ended; text may follow.
    fn end(&mut self) {
        self.held.clear();
        (self.state, self.in_list) = (State::Text, false);
    }

    fn in_name(&mut self, mut name: String, c: char, found: &mut Found) {
        const ARGUMENTS: &str = "[ARGS]";
        if c == '{' {
            let name = name.trim_end().trim_end_matches(ARGUMENTS).trim_end().to_owned();
            let mut scanner = ObjectScanner::default();
            // The same as an object of both.
            let before = format!("{{\"name\":{},\"arguments\":", serde_json::Value::from(name));
            for c in before.chars() {
                let _ = scanner.push(c);
            }
            self.is_bare = true;
            return self.in_object(scanner, c, found);
        }
        let is_name = c.is_alphanumeric() || "_-.[]".contains(c) || c.is_whitespace();
        if !is_name || name.len() > MAX_NAME_BYTES {
            return self.give_up(State::Text, found);
        }
        name.push(c);
        self.state = State::Name(name);
    }

    fn in_object(&mut self, mut scanner: ObjectScanner, c: char, found: &mut Found) {
        let mut progress = scanner.push(c);
        if self.is_bare && progress == Progress::Open && scanner.is_behind_a_value() {
            progress = scanner.push('}');
        }
        self.is_bare &= progress == Progress::Open;
        let is_named = scanner.name().is_some();
        if is_named && !self.told && self.is_known(scanner.name()) {
            found.call(self.calls, scanner.name().map(str::to_owned), String::new());
            self.calls += 1;
            self.told = true;
            self.held.clear();
        } else if is_named && !self.told {
            progress = Progress::Broken;
        }
        if self.told {
            let arguments = scanner.take_arguments();
            if !arguments.is_empty() {
                found.call(self.calls - 1, None, arguments);
            }
        }
        match progress {
            Progress::Open => self.state = State::Object(scanner),
            Progress::Whole => {
                self.told = false;
                self.state = State::Between;
            }
            // A call that was told cannot be taken back: what comes now is no part of it.
            Progress::Broken => {
                let is_all = matches!(self.format, Format::Llama3 | Format::Pythonic);
                self.give_up(if is_all { State::Over } else { State::Text }, found);
            }
        }
    }

    /// Of what is announced as a call any name is one: a model that calls what there is not is told so by its caller.
    fn is_known(&self, name: Option<&str>) -> bool {
        let is_announced = !matches!(self.format, Format::Llama3 | Format::Pythonic) && !self.is_unannounced;
        is_announced || name.is_some_and(|name| self.functions.iter().any(|known| known.name == name))
    }

    fn in_list(&mut self, mut scanner: ListScanner, c: char, found: &mut Found) {
        let progress = scanner.push(c);
        match self.tell(scanner.take(), progress, found) {
            Progress::Open => self.state = State::List(scanner),
            Progress::Whole => {
                let was_told = std::mem::take(&mut self.told);
                if was_told { self.end() } else { self.give_up(State::Over, found) }
            }
            Progress::Broken => self.give_up(State::Over, found),
        }
    }

    fn in_tags(&mut self, mut scanner: TaggedScanner, c: char, found: &mut Found) {
        let progress = scanner.push(c, &self.functions);
        match self.tell(scanner.take(), progress, found) {
            Progress::Open => self.state = State::Tagged(scanner),
            Progress::Whole => {
                (self.told, self.is_unannounced, self.state) = (false, false, State::Between);
            }
            Progress::Broken => self.give_up(State::Text, found),
        }
    }

    /// What a scanner of calls has come to, and how far it is then.
    fn tell(&mut self, told: Vec<Told>, mut progress: Progress, found: &mut Found) -> Progress {
        for told in told {
            match told {
                Told::Begun(name) if self.is_known(Some(&name)) => {
                    found.call(self.calls, Some(name), String::new());
                    self.calls += 1;
                    self.told = true;
                    self.held.clear();
                }
                Told::Begun(_) => progress = Progress::Broken,
                Told::Arguments(arguments) if self.told => found.call(self.calls - 1, None, arguments),
                Told::Arguments(_) => {}
            }
        }
        progress
    }
}

/// How many bytes at the end of `text` may be the beginning of `word`.
fn beginning_of(word: &str, text: &str) -> usize {
    let ends = (1..word.len()).rev().filter(|&end| word.is_char_boundary(end));
    ends.into_iter().find(|&end| text.ends_with(&word[..end])).unwrap_or(0)
}

#[cfg(test)]
mod tests;

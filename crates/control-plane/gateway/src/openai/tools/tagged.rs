//! Reads a call in tags, `<function=NAME><parameter=KEY>VALUE</parameter></function>`, by character.
//!
//! Values are unquoted, so their JSON type depends on the function's parameters.

use serde_json::Value;

use super::{
    object::CallProgress,
    parameter_kinds::{Function, JsonKinds},
    pythonic::PythonCall,
};

const MAX_TAG_BYTES: usize = 256;
const MAX_VALUE_BYTES: usize = 1 << 20;

pub(super) const OPENING: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END_OF_VALUE: &str = "</parameter>";
const END_OF_CALL: &str = "</function>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagPosition {
    /// In the tag that begins the call.
    Begin,
    /// Between parameters, or in a tag there.
    Between,
    Value,
}

#[derive(Debug)]
pub(super) struct TaggedScanner {
    at: TagPosition,
    tag: String,
    key: String,
    value: String,
    quotes: Quotes,
    /// The declared function, once its name is known.
    function: Option<Function>,
    name: String,
    arguments: String,
    count: usize,
}

impl Default for TaggedScanner {
    /// Creates a scanner that starts after [`OPENING`].
    fn default() -> Self {
        Self {
            at: TagPosition::Begin,
            tag: OPENING.to_owned(),
            key: String::new(),
            value: String::new(),
            quotes: Quotes::default(),
            function: None,
            name: String::new(),
            arguments: String::new(),
            count: 0,
        }
    }
}

impl TaggedScanner {
    pub(super) fn whole(self) -> PythonCall {
        PythonCall { name: self.name, arguments: self.arguments }
    }

    pub(super) fn begun(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }

    /// Processes the next character of a call of one of `functions`.
    pub(super) fn push(&mut self, c: char, functions: &[Function]) -> CallProgress {
        if self.at == TagPosition::Value {
            return self.in_value(c);
        }
        if self.tag.is_empty() && c.is_whitespace() {
            return CallProgress::Open;
        }
        self.tag.push(c);
        let wanted: &[&str] = match self.at {
            TagPosition::Begin => &[OPENING],
            TagPosition::Between | TagPosition::Value => &[PARAMETER, END_OF_CALL],
        };
        let may_be = |word: &&str| word.starts_with(&self.tag) || self.tag.starts_with(word);
        if self.tag.len() > MAX_TAG_BYTES || !wanted.iter().any(may_be) {
            return CallProgress::Broken;
        }
        if c == '>' { self.end_tag(functions) } else { CallProgress::Open }
    }

    fn end_tag(&mut self, functions: &[Function]) -> CallProgress {
        let tag = std::mem::take(&mut self.tag);
        if tag == END_OF_CALL {
            self.arguments.push_str(if self.count == 0 { "{}" } else { "}" });
            return CallProgress::Whole;
        }
        let name = |opening| tag.strip_prefix(opening).map(|rest| rest.trim_end_matches('>').trim());
        match (self.at, name(OPENING), name(PARAMETER)) {
            (TagPosition::Begin, Some(name), _) if !name.is_empty() => {
                self.function = functions.iter().find(|function| function.name == name).cloned();
                name.clone_into(&mut self.name);
                self.at = TagPosition::Between;
            }
            (TagPosition::Between, _, Some(key)) if !key.is_empty() => {
                key.clone_into(&mut self.key);
                self.at = TagPosition::Value;
            }
            _ => return CallProgress::Broken,
        }
        CallProgress::Open
    }

    fn in_value(&mut self, c: char) -> CallProgress {
        self.value.push(c);
        self.quotes.push(c);
        if self.value.len() > MAX_VALUE_BYTES {
            return CallProgress::Broken;
        }
        let Some(value) = self.value.strip_suffix(END_OF_VALUE) else { return CallProgress::Open };
        let takes = self.function.as_ref().map_or(JsonKinds::TEXT, |function| function.takes(&self.key));
        if !takes.hold_texts() && self.quotes.is_open {
            return CallProgress::Open;
        }
        // The line breaks beside a value belong to the tags.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = takes.read(value.strip_suffix('\n').unwrap_or(value));
        let (before, key) = (if self.count == 0 { "{" } else { ", " }, Value::from(self.key.as_str()));
        self.arguments.push_str(&format!("{before}{key}: {value}"));
        self.value.clear();
        self.quotes = Quotes::default();
        self.count += 1;
        self.at = TagPosition::Between;
        CallProgress::Open
    }
}

/// Tracks whether a JSON list or object stops inside a string, where a closing tag is part of the value.
#[derive(Debug, Default)]
struct Quotes {
    is_json: Option<bool>,
    is_open: bool,
    is_escaped: bool,
}

impl Quotes {
    fn push(&mut self, c: char) {
        if !c.is_whitespace() {
            self.is_json.get_or_insert(matches!(c, '{' | '['));
        }
        match c {
            _ if self.is_json != Some(true) => {}
            _ if self.is_escaped => self.is_escaped = false,
            '\\' if self.is_open => self.is_escaped = true,
            '"' => self.is_open = !self.is_open,
            _ => {}
        }
    }
}

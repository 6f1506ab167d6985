//! Reads calls that are written as a Python list, `[name(key=value, ...), ...]`, character by character.

use serde_json::Value;

use super::{object::CallProgress, python::literal};

const MAX_NAME_BYTES: usize = 256;
const MAX_VALUE_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListPosition {
    Begin,
    /// A call or the end of the list may come.
    BeforeCall,
    Name,
    /// A key or the end of the call may come.
    BeforeKey,
    Key,
    Value,
    BehindCall,
}

/// A call that was read to its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PythonCall {
    pub(super) name: String,
    /// Arguments as a JSON object.
    pub(super) arguments: String,
}

#[derive(Debug)]
pub(super) struct ListScanner {
    at: ListPosition,
    word: String,
    value: String,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
    /// Name of the call in progress, and its arguments so far.
    name: String,
    arguments: String,
    count: usize,
    ended: Option<PythonCall>,
}

impl Default for ListScanner {
    fn default() -> Self {
        Self {
            at: ListPosition::Begin,
            word: String::new(),
            value: String::new(),
            depth: 0,
            quote: None,
            escaped: false,
            name: String::new(),
            arguments: String::new(),
            count: 0,
            ended: None,
        }
    }
}

impl ListScanner {
    /// Takes the call that has just ended.
    pub(super) fn take(&mut self) -> Option<PythonCall> {
        self.ended.take()
    }

    pub(super) fn begun(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }

    pub(super) fn push(&mut self, c: char) -> CallProgress {
        match self.at {
            ListPosition::Value => return self.in_value(c),
            _ if c.is_whitespace() => {}
            ListPosition::Begin if c == '[' => self.at = ListPosition::BeforeCall,
            ListPosition::BeforeCall if c == ']' => return CallProgress::Whole,
            ListPosition::BeforeCall if starts_a_name(c) => {
                self.word = c.to_string();
                self.at = ListPosition::Name;
            }
            ListPosition::Name if c == '(' => {
                self.name = std::mem::take(&mut self.word);
                self.at = ListPosition::BeforeKey;
            }
            ListPosition::BeforeKey if c == ')' => self.end_call(),
            ListPosition::BeforeKey if starts_a_name(c) => {
                self.word = c.to_string();
                self.at = ListPosition::Key;
            }
            ListPosition::Key if c == '=' => self.at = ListPosition::Value,
            ListPosition::Name | ListPosition::Key if is_of_a_name(c) && self.word.len() < MAX_NAME_BYTES => {
                self.word.push(c)
            }
            ListPosition::BehindCall if c == ',' => self.at = ListPosition::BeforeCall,
            ListPosition::BehindCall if c == ']' => return CallProgress::Whole,
            _ => return CallProgress::Broken,
        }
        CallProgress::Open
    }

    fn end_call(&mut self) {
        self.arguments.push_str(if self.count == 0 { "{}" } else { "}" });
        let (name, arguments) = (std::mem::take(&mut self.name), std::mem::take(&mut self.arguments));
        self.ended = Some(PythonCall { name, arguments });
        (self.count, self.at) = (0, ListPosition::BehindCall);
    }

    fn in_value(&mut self, c: char) -> CallProgress {
        let is_outside = self.quote.is_none() && self.depth == 0;
        if is_outside && matches!(c, ',' | ')') {
            let Some(value) = literal(&self.value) else { return CallProgress::Broken };
            let before = if self.count == 0 { "{" } else { ", " };
            let (key, value) = (Value::from(std::mem::take(&mut self.word)), value);
            self.arguments.push_str(&format!("{before}{key}: {value}"));
            self.value.clear();
            self.count += 1;
            self.at = ListPosition::BeforeKey;
            if c == ')' {
                self.end_call();
            }
            return CallProgress::Open;
        }
        match (c, self.quote) {
            _ if self.escaped => self.escaped = false,
            ('\\', Some(_)) => self.escaped = true,
            (c, Some(quote)) if c == quote => self.quote = None,
            ('"' | '\'', None) => self.quote = Some(c),
            ('[' | '(' | '{', None) => self.depth += 1,
            (']' | ')' | '}', None) => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.value.push(c);
        if self.value.len() > MAX_VALUE_BYTES { CallProgress::Broken } else { CallProgress::Open }
    }
}

fn starts_a_name(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

fn is_of_a_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

//! Calls that are written as a list of Python's, `[name(key=value, ...), ...]`, character by character.

use serde_json::Value;

use super::{object::Progress, python::literal};

/// Longest name, and longest value of an argument.
const MAX_NAME_BYTES: usize = 256;
const MAX_VALUE_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Begin,
    /// Where a call may come, or the end of the list.
    BeforeCall,
    Name,
    /// Where a key may come, or the end of the call.
    BeforeKey,
    Key,
    Value,
    BehindCall,
}

/// What comes of calls that are read part by part.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// A call of this name has begun.
    Begun(String),
    /// Its arguments go on with this.
    Arguments(String),
}

/// See the module.
#[derive(Debug)]
pub(super) struct ListScanner {
    at: At,
    word: String,
    value: String,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
    /// Arguments of the call so far.
    count: usize,
    told: Vec<Told>,
}

impl Default for ListScanner {
    fn default() -> Self {
        Self {
            at: At::Begin,
            word: String::new(),
            value: String::new(),
            depth: 0,
            quote: None,
            escaped: false,
            count: 0,
            told: Vec::new(),
        }
    }
}

impl ListScanner {
    /// What is new.
    pub(super) fn take(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> Progress {
        match self.at {
            At::Value => return self.in_value(c),
            _ if c.is_whitespace() => {}
            At::Begin if c == '[' => self.at = At::BeforeCall,
            At::BeforeCall if c == ']' => return Progress::Whole,
            At::BeforeCall if starts_a_name(c) => {
                self.word = c.to_string();
                self.at = At::Name;
            }
            At::Name if c == '(' => {
                self.told.push(Told::Begun(std::mem::take(&mut self.word)));
                (self.count, self.at) = (0, At::BeforeKey);
            }
            At::BeforeKey if c == ')' => self.end_call(),
            At::BeforeKey if starts_a_name(c) => {
                self.word = c.to_string();
                self.at = At::Key;
            }
            At::Key if c == '=' => self.at = At::Value,
            At::Name | At::Key if is_of_a_name(c) && self.word.len() < MAX_NAME_BYTES => self.word.push(c),
            At::BehindCall if c == ',' => self.at = At::BeforeCall,
            At::BehindCall if c == ']' => return Progress::Whole,
            _ => return Progress::Broken,
        }
        Progress::Open
    }

    fn end_call(&mut self) {
        let end = if self.count == 0 { "{}" } else { "}" };
        self.told.push(Told::Arguments(end.to_owned()));
        self.at = At::BehindCall;
    }

    fn in_value(&mut self, c: char) -> Progress {
        let is_outside = self.quote.is_none() && self.depth == 0;
        if is_outside && matches!(c, ',' | ')') {
            let Some(value) = literal(&self.value) else { return Progress::Broken };
            let before = if self.count == 0 { "{" } else { ", " };
            let (key, value) = (Value::from(std::mem::take(&mut self.word)), value);
            self.told.push(Told::Arguments(format!("{before}{key}: {value}")));
            self.value.clear();
            self.count += 1;
            self.at = At::BeforeKey;
            if c == ')' {
                self.end_call();
            }
            return Progress::Open;
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
        if self.value.len() > MAX_VALUE_BYTES { Progress::Broken } else { Progress::Open }
    }
}

fn starts_a_name(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

fn is_of_a_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

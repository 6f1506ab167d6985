//! A line field by field, so that every fault names its field.
//!
//! Fields nobody asks for are somebody's own (an id, a source) and stay unread. `null` is the same as absent.

use serde_json::{Map, Value};

use super::fault::{LineFault, beginning};

/// The fields of an object.
#[derive(Debug)]
pub(super) struct LineFields {
    /// Where the object is in the line: `messages[2].`, or nothing for the line itself.
    path: String,
    map: Map<String, Value>,
}

impl LineFields {
    /// Those of a line.
    pub(super) fn of(line: Map<String, Value>) -> Self {
        Self { path: String::new(), map: line }
    }

    /// Those of the object `value` at `path`.
    pub(super) fn at(path: String, value: Value) -> Result<Self, LineFault> {
        match value {
            Value::Object(map) => Ok(Self { path: format!("{path}."), map }),
            other => Err(wrong(path, "an object", &other)),
        }
    }

    /// A field's path in the line.
    pub(super) fn path(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    pub(super) fn take(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|value| !value.is_null())
    }

    pub(super) fn required(&mut self, field: &str) -> Result<Value, LineFault> {
        self.take(field).ok_or_else(|| LineFault::Missing { field: self.path(field) })
    }

    pub(super) fn text(&mut self, field: &str) -> Result<Option<String>, LineFault> {
        self.take(field).map(|value| text(self.path(field), value)).transpose()
    }

    pub(super) fn required_text(&mut self, field: &str) -> Result<String, LineFault> {
        let value = self.required(field)?;
        text(self.path(field), value)
    }

    /// Refuses fields that would change what the model is shown, if they say anything.
    pub(super) fn refuse(&mut self, fields: &[&str]) -> Result<(), LineFault> {
        let says_nothing = |value: &Value| match value {
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        match fields.iter().find(|field| self.take(field).is_some_and(|value| !says_nothing(&value))) {
            Some(field) => Err(LineFault::Unsupported { field: self.path(field) }),
            None => Ok(()),
        }
    }

    /// A role, by the words a form has for it.
    pub(super) fn parse_word<T: Copy>(
        &mut self,
        field: &str,
        words: &[(&str, T)],
        known: &'static str,
    ) -> Result<T, LineFault> {
        let said = self.required_text(field)?;
        let found = words.iter().find(|(word, _)| *word == said);
        found.map(|(_, meant)| *meant).ok_or_else(|| {
            let role = beginning(&said).to_owned();
            LineFault::UnknownRole { field: self.path(field), role, known }
        })
    }
}

/// A fault for a `value` that is not what was `expected`.
pub(super) fn wrong(field: String, expected: &'static str, value: &Value) -> LineFault {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    LineFault::WrongType { field, expected, found }
}

/// The text that `value` must be.
pub(super) fn text(path: String, value: Value) -> Result<String, LineFault> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(wrong(path, "a string", &other)),
    }
}

/// A text that is to be learned.
pub(super) fn learned(path: &str, value: Value) -> Result<String, LineFault> {
    let text = text(path.to_owned(), value)?;
    if text.is_empty() { Err(LineFault::Empty { field: path.to_owned() }) } else { Ok(text) }
}

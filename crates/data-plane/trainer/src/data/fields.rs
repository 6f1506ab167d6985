//! Access to the fields of a line, such that every fault names its field.
//!
//! Unknown fields belong to the user (an id, a source). Training ignores them, and [`UnreadFields`] holds
//! their names for the plan. `null` counts as absent.

use std::{cell::RefCell, collections::BTreeSet, rc::Rc};

use serde_json::{Map, Value};

use super::fault::{LineFault, beginning};

/// Maximum number of names of unread fields.
const MAX_UNREAD: usize = 64;

/// Names of fields that no reader took, without list indices: `messages[].id`.
#[derive(Debug, Clone, Default)]
pub(super) struct UnreadFields(Rc<RefCell<BTreeSet<String>>>);

impl UnreadFields {
    /// Returns the names in alphabetical order.
    pub(super) fn names(&self) -> Vec<String> {
        self.0.borrow().iter().cloned().collect()
    }

    fn note(&self, path: &str, map: &Map<String, Value>) {
        let mut names = self.0.borrow_mut();
        for (name, value) in map {
            if !value.is_null() && names.len() < MAX_UNREAD {
                names.insert([&without_indices(path), beginning(name)].concat());
            }
        }
    }
}

/// Fields of an object; the names of those left are noted when the reader drops the object.
#[derive(Debug)]
pub(super) struct LineFields {
    /// Path of the object in the line: `messages[2].`, or empty for the line itself.
    path: String,
    map: Map<String, Value>,
    unread: UnreadFields,
}

impl Drop for LineFields {
    fn drop(&mut self) {
        self.unread.note(&self.path, &self.map);
    }
}

impl LineFields {
    pub(super) fn of(line: Map<String, Value>, unread: &UnreadFields) -> Self {
        Self { path: String::new(), map: line, unread: unread.clone() }
    }

    /// Returns the fields of the object `value` at `path` in the same line.
    pub(super) fn at(&self, path: String, value: Value) -> Result<Self, LineFault> {
        match value {
            Value::Object(map) => Ok(Self { path: format!("{path}."), map, unread: self.unread.clone() }),
            other => Err(wrong(path, "an object", &other)),
        }
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(|value| !value.is_null())
    }

    /// Returns the path of a field in the line.
    pub(super) fn path(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    pub(super) fn peek(&self, field: &str) -> Option<&Value> {
        self.map.get(field)
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

    /// Refuses fields that would change the prompt that the model sees, unless they are empty.
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

    /// Reads a word, such as a role, and returns its meaning in `words`; a fault names the words `known`.
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

/// Removes list indices from a path: `messages[2].` becomes `messages[].`.
fn without_indices(path: &str) -> String {
    path.chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

/// Returns a fault for a `value` that is not `expected`.
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

/// Returns the text of `value`, which must be a string.
pub(super) fn text(path: String, value: Value) -> Result<String, LineFault> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(wrong(path, "a string", &other)),
    }
}

/// Returns a text to learn, which must not be empty.
pub(super) fn learned(path: &str, value: Value) -> Result<String, LineFault> {
    let text = text(path.to_owned(), value)?;
    if text.is_empty() { Err(LineFault::Empty { field: path.to_owned() }) } else { Ok(text) }
}

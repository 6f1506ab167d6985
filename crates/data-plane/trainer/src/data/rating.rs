//! KTO's lines: one answer, and whether it is desirable.

use serde_json::{Map, Value};

use super::Example;

/// Names of a rating, in the data of TRL and of LLaMA-Factory.
pub(super) const FIELDS: [&str; 2] = ["label", "kto_tag"];

/// An answer with its rating. The weights are 1 for answer tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct RatedAnswer {
    /// The answer and its prompt.
    pub example: Example,
    /// True if the answer is a good one.
    pub is_desirable: bool,
}

impl RatedAnswer {
    /// Returns this prompt with the answer of `other`, cut after `max_tokens`.
    #[must_use]
    pub fn with_answer_of(&self, other: &Self, max_tokens: usize) -> Example {
        let (own, others) = (self.prompt_len(), other.prompt_len());
        let mut tokens = [&self.example.tokens[..own], &other.example.tokens[others..]].concat();
        tokens.truncate(max_tokens);
        let weights = (1..tokens.len()).map(|at| if at < own { 0.0 } else { 1.0 }).collect();
        Example { line: self.example.line, tokens, weights }
    }

    /// Returns the number of tokens before the first that is learned.
    fn prompt_len(&self) -> usize {
        1 + self.example.weights.iter().take_while(|weight| **weight == 0.0).count()
    }
}

/// True if the line has a field that rates its answer; other values of such a field are names of classes.
pub(super) fn is_rated(line: &Map<String, Value>) -> bool {
    FIELDS.iter().filter_map(|field| line.get(*field)).any(|value| rating(value).is_some())
}

/// True if the line has a field for a rating, of any value.
pub(super) fn has_field(line: &Map<String, Value>) -> bool {
    FIELDS.iter().any(|field| line.contains_key(*field))
}

/// Returns true for a good answer and false for a bad one; `None` if `value` rates nothing.
pub(super) fn rating(value: &Value) -> Option<bool> {
    match value.as_bool().map(f64::from).or_else(|| value.as_f64()) {
        Some(0.0) => Some(false),
        Some(1.0) => Some(true),
        _ => None,
    }
}

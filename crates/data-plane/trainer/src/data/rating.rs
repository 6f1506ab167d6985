//! KTO's lines: one answer, and whether it is desirable.

use serde_json::{Map, Value};

use super::{
    Example,
    fault::LineFault,
    fields::{LineFields, wrong},
    kind::DataKind,
    sample::{Conversation, TrainingSample},
};

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

/// True if the line has a field for a rating, whatever its value.
pub(super) fn has_field(line: &Map<String, Value>) -> bool {
    FIELDS.iter().any(|field| line.contains_key(*field))
}

fn rating(value: &Value) -> Option<bool> {
    match value.as_bool().map(f64::from).or_else(|| value.as_f64()) {
        Some(0.0) => Some(false),
        Some(1.0) => Some(true),
        _ => None,
    }
}

/// Reads the rating of a line: true if its answer is desirable.
pub(super) fn read(line: &mut LineFields) -> Result<bool, LineFault> {
    let mut read: Option<(&str, bool)> = None;
    for field in FIELDS {
        let Some(value) = line.take(field) else { continue };
        let is_desirable = rating(&value).ok_or_else(|| wrong(line.path(field), "true or false", &value))?;
        match read {
            Some((other, earlier)) if earlier != is_desirable => {
                return Err(LineFault::Twice { field: line.path(field), other: line.path(other) });
            }
            _ => read = Some((field, is_desirable)),
        }
    }
    let (_, is_desirable) = read.ok_or_else(|| LineFault::Missing { field: line.path(FIELDS[0]) })?;
    Ok(is_desirable)
}

/// Returns `sample`, of a line of `kind`, with the rating of its last answer; earlier answers are only shown.
pub(super) fn rated(
    sample: TrainingSample,
    kind: DataKind,
    is_desirable: bool,
) -> Result<TrainingSample, LineFault> {
    let Conversation { mut messages, variables } = match sample {
        TrainingSample::Conversation(conversation) => conversation,
        TrainingSample::Continuation { prompt, completion } => {
            return Ok(TrainingSample::RatedText { prompt, completion, is_desirable });
        }
        _ => return Err(LineFault::NoRatedAnswer),
    };
    let answers = messages.iter().filter(|message| message.is_learned).count();
    let has_one_completion = kind != DataKind::RatedCompletion || answers == 1;
    match messages.pop().filter(|answer| answer.is_learned && has_one_completion) {
        Some(answer) => {
            Ok(TrainingSample::Rated { asked: Conversation { messages, variables }, answer, is_desirable })
        }
        None => Err(LineFault::NoRatedAnswer),
    }
}

/// Refuses a rating of a line whose kind has none: a bad answer would be learned like a good one.
pub(super) fn refuse(line: &LineFields) -> Result<(), LineFault> {
    let is_rating = |field: &&&str| line.peek(field).is_some_and(|value| rating(value).is_some());
    match FIELDS.iter().find(is_rating) {
        Some(field) => Err(LineFault::Rated { field: line.path(field) }),
        None => Ok(()),
    }
}

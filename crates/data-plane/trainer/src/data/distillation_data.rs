//! Recorded answers of a model with probable alternative tokens, the training data of a draft.
//!
//! ```text
//! {"kind": "code", "messages": [...], "answers": [{"temperature": 0, "tokens": [5, 9],
//!   "likely": [[[5, -0.1], [7, -2.5]], ...]}]}
//! ```

use serde::Deserialize;

use super::{Example, fault::LineFault, fields::LineFields};

/// Kind of text of a line without the field `kind`.
const ANY_KIND: &str = "text";

const MAX_KIND_BYTES: usize = 64;

/// Temperature at which the most likely token is always chosen.
const GREEDY: f32 = 0.0;

/// Tokens of a recorded answer and its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct DistillationSample {
    /// Prompt and answer; only answer tokens have weight.
    pub example: Example,
    /// Most likely tokens at each position of the answer, with probabilities; empty if not recorded.
    pub likely: Vec<Vec<(u32, f32)>>,
    /// Kind of text, such as `code`.
    pub kind: String,
    /// Whether each token was the most likely one.
    pub is_greedy: bool,
}

/// Returns the kind of text that a line names.
pub(super) fn kind_of_text(line: &mut LineFields) -> Result<String, LineFault> {
    let kind = line.text("kind")?.unwrap_or_else(|| ANY_KIND.to_owned());
    if kind.len() > MAX_KIND_BYTES {
        return Err(LineFault::KindTooLong { limit: MAX_KIND_BYTES });
    }
    Ok(kind)
}

#[derive(Debug, PartialEq)]
pub(super) struct DistillationSamples {
    kind: String,
    answers: Vec<TeacherAnswer>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TeacherAnswer {
    temperature: f32,
    tokens: Vec<u32>,
    /// (token, log-probability) pairs for each position.
    #[serde(default)]
    likely: Vec<Vec<(u32, f32)>>,
}

impl DistillationSamples {
    /// Reads the answers of a line.
    pub(super) fn read(line: &mut LineFields) -> Result<Self, LineFault> {
        let kind = kind_of_text(line)?;
        let wrong = |error: serde_json::Error| LineFault::Answers(format!("'answers': {error}"));
        let answers: Vec<TeacherAnswer> = serde_json::from_value(line.required("answers")?).map_err(wrong)?;
        if answers.is_empty() || answers.iter().any(|answer| answer.tokens.is_empty()) {
            return Err(LineFault::Empty { field: line.path("answers") });
        }
        Ok(Self { kind, answers })
    }

    /// Appends the answers to the tokens of the prompt, for a model with `vocabulary` tokens.
    pub(super) fn encode(
        &self,
        line: usize,
        prompt: &[u32],
        vocabulary: usize,
    ) -> Result<Vec<DistillationSample>, LineFault> {
        self.answers.iter().map(|answer| self.said(line, prompt, answer, vocabulary)).collect()
    }

    fn said(
        &self,
        line: usize,
        prompt: &[u32],
        answer: &TeacherAnswer,
        vocabulary: usize,
    ) -> Result<DistillationSample, LineFault> {
        let TeacherAnswer { temperature, tokens, likely } = answer;
        let all = tokens.iter().chain(likely.iter().flatten().map(|(token, _)| token));
        if let Some(token) = all.into_iter().find(|&&token| token as usize >= vocabulary) {
            return Err(LineFault::Answers(format!("{token} is not a token of the model")));
        }
        if prompt.is_empty() {
            return Err(LineFault::TooShort);
        }
        if !likely.is_empty() && likely.len() != tokens.len() {
            return Err(LineFault::Answers("'likely' must have one list for each token".to_owned()));
        }
        if likely.iter().flatten().any(|(_, log)| log.is_nan() || *log > 0.0) {
            return Err(LineFault::Answers("'likely' must hold log-probabilities".to_owned()));
        }
        let probable =
            |place: &Vec<(u32, f32)>| place.iter().map(|&(token, log)| (token, log.exp())).collect();
        let example = Example {
            line,
            tokens: [prompt, tokens].concat(),
            weights: [vec![0.0; prompt.len() - 1], vec![1.0; tokens.len()]].concat(),
        };
        Ok(DistillationSample {
            example,
            likely: likely.iter().map(probable).collect(),
            kind: self.kind.clone(),
            is_greedy: *temperature == GREEDY,
        })
    }
}

//! Classes of a text: the labels of an adapter's classification head, or tokens that may follow the text.

use std::sync::Arc;

use serde_json::Value;
use shmproto::message::Pooling;
use text::tokenizer::AddSpecial;

use crate::{
    config::{MAX_CLASSES, ScoringDefaults},
    errors::ApiError,
    lifecycle::ServingState,
    openai::{
        strict_fields::{StrictFields, token_id, wrong},
        target::ModelTarget,
    },
};

const FROM_TOKEN: &str = "classifier_from_token";

/// Source of the logits of a text's classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Classifier {
    /// The adapter's classification head, with the names of its labels.
    Head(Arc<[String]>),
    /// Tokens after the text, with their names.
    Tokens { ids: Vec<u32>, names: Vec<String> },
}

/// Fields of a request about its classes.
#[derive(Debug)]
pub(crate) struct ClassifierOptions {
    /// Names or ids of tokens, as written; `None` for those of the configuration.
    tokens: Option<Vec<Value>>,
    pub(crate) activation: Activation,
}

/// Whether logits become probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    /// Softmax, or the logistic function for a single class.
    Probabilities,
    Logits,
}

impl ClassifierOptions {
    pub(crate) fn read(fields: &mut StrictFields) -> Result<Self, ApiError> {
        let tokens = fields.array(FROM_TOKEN)?;
        if let Some(count) = tokens.as_ref().map(Vec::len).filter(|count| *count > MAX_CLASSES) {
            let message = format!("'{FROM_TOKEN}' may hold at most {MAX_CLASSES} tokens, not {count}");
            return Err(ApiError::invalid(FROM_TOKEN, message));
        }
        let activation = match fields.flag("use_activation", true)? {
            true => Activation::Probabilities,
            false => Activation::Logits,
        };
        Ok(Self { tokens, activation })
    }

    /// Returns the classifier of `target`; `None` if the model has no classes.
    pub(crate) fn classifier(
        &self,
        target: &ModelTarget,
        defaults: &ScoringDefaults,
        serving: &ServingState,
    ) -> Result<Option<Classifier>, ApiError> {
        let labels = target.lease.as_ref().map(|lease| &lease.entry().record.labels.0);
        if let Some(labels) = labels.filter(|labels| !labels.is_empty()) {
            return match self.tokens.as_deref() {
                None | Some([]) => Ok(Some(Classifier::Head(Arc::clone(labels)))),
                Some(_) => {
                    let message = format!(
                        "the model has a classification head, whose labels are its classes; remove '{FROM_TOKEN}'"
                    );
                    Err(ApiError::invalid(FROM_TOKEN, message))
                }
            };
        }
        let configured = || defaults.tokens.iter().map(|name| Value::from(name.as_str())).collect();
        let tokens: Vec<Value> = self.tokens.clone().unwrap_or_else(configured);
        if tokens.is_empty() {
            return Ok(None);
        }
        Classifier::of_tokens(&tokens, serving).map(Some)
    }
}

impl Classifier {
    fn of_tokens(tokens: &[Value], serving: &ServingState) -> Result<Self, ApiError> {
        let vocab_size = serving.welcome.vocab_size;
        let (mut ids, mut names) = (Vec::new(), Vec::new());
        for token in tokens {
            let (id, name) = match token {
                Value::String(name) => (named_token(name, serving)?, name.clone()),
                Value::Number(_) => {
                    let id = token_id(FROM_TOKEN, token, vocab_size)?;
                    (id, serving.text.decode(&[id]))
                }
                other => return Err(wrong(FROM_TOKEN, "an array of tokens, by name or id", other)),
            };
            ids.push(id);
            names.push(name);
        }
        Ok(Self::Tokens { ids, names })
    }

    /// Returns the names of the classes, in the order of the logits.
    pub(crate) fn labels(&self) -> &[String] {
        match self {
            Self::Head(labels) => labels,
            Self::Tokens { names, .. } => names,
        }
    }

    /// Returns how the passes over a prompt become the logits of the classes.
    pub(crate) fn pooling(&self) -> Pooling {
        match self {
            Self::Head(_) => Pooling::ClassLogits,
            Self::Tokens { ids, .. } => Pooling::TokenLogits(ids.clone()),
        }
    }

    /// Checks that the classes say how relevant a text is: one class, or two of which the second does.
    pub(super) fn check_relevance(&self) -> Result<(), ApiError> {
        let count = self.labels().len();
        if count <= 2 {
            return Ok(());
        }
        let param = if matches!(self, Self::Head(_)) { "model" } else { FROM_TOKEN };
        let message = format!(
            "scores need a model with one or two classes, and this one has {count}; use /v1/classify"
        );
        Err(ApiError::invalid(param, message))
    }
}

/// Returns the single token that `name` is in this vocabulary.
fn named_token(name: &str, serving: &ServingState) -> Result<u32, ApiError> {
    let tokens = serving.text.encode(name, AddSpecial::No)?;
    match tokens[..] {
        [token] if token < serving.welcome.vocab_size => Ok(token),
        _ => {
            let message = format!(
                "'{FROM_TOKEN}' has '{}', which is {} tokens in this model's vocabulary; send single tokens, or ids",
                name.escape_debug(),
                tokens.len()
            );
            Err(ApiError::invalid(FROM_TOKEN, message))
        }
    }
}

impl Activation {
    /// Returns a value for each class.
    pub(crate) fn classes(self, logits: &[f32]) -> Vec<f32> {
        match (self, logits) {
            (Self::Logits, _) => logits.to_vec(),
            (Self::Probabilities, [only]) => vec![logistic(f64::from(*only))],
            (Self::Probabilities, _) => softmax(logits),
        }
    }

    /// Returns how relevant a text is by the logits of one class, or of two of which the second says so.
    pub(super) fn relevance(self, logits: &[f32]) -> f32 {
        let logit = match *logits {
            [only] => f64::from(only),
            [against, pro, ..] => f64::from(pro) - f64::from(against),
            [] => f64::NAN,
        };
        match self {
            #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
            Self::Logits => logit as f32,
            Self::Probabilities => logistic(logit),
        }
    }
}

fn logistic(logit: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
    let probability = (1.0 / (1.0 + (-logit).exp())) as f32;
    probability
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) - f64::from(most)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
    let probabilities = powers.iter().map(|power| (power / sum) as f32).collect();
    probabilities
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_classes_give_the_probability_of_the_second_either_way() {
        for logits in [[0.0, 0.0], [1.5, -2.0], [-30.0, 40.0], [700.0, -700.0]] {
            let second = Activation::Probabilities.classes(&logits)[1];
            assert!((Activation::Probabilities.relevance(&logits) - second).abs() < 1e-7, "{logits:?}");
            assert_eq!(Activation::Logits.relevance(&logits), logits[1] - logits[0]);
        }
    }

    #[test]
    fn probabilities_sum_to_one_and_a_single_class_is_logistic() {
        let sum: f32 = Activation::Probabilities.classes(&[1.0, 2.0, 3.0]).iter().sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert_eq!(Activation::Probabilities.classes(&[0.0]), [0.5]);
        assert_eq!(Activation::Logits.classes(&[1.0, 2.0]), [1.0, 2.0]);
    }
}

//! The prompts of a scoring request, and the scores that follow from their vectors.

use std::sync::Arc;

use shmproto::message::Pooling;
use text::{pair_template::PairTemplate, tokenizer::AddSpecial};

use super::{
    body::{ScoringInput, ScoringOptions, TextList},
    classifier::{Activation, Classifier},
    pair_prompts::PairPrompts,
};
use crate::{
    config::ScoringDefaults,
    errors::ApiError,
    lifecycle::ServingState,
    openai::{generation_request::PromptInput, pooling::PoolingRequest, target::ModelTarget},
};

/// How vectors become scores.
#[derive(Debug)]
pub(super) enum ScoringMethod {
    /// Cosine of embeddings; those of this number of queries come before those of the documents.
    Similarity { queries: usize },
    /// Logits of one or two classes for each pair of texts.
    Relevance(Activation),
}

/// Returns the prompts whose vectors the scores of `input` need, and how scores follow from them.
pub(super) fn plan(
    input: ScoringInput,
    target: ModelTarget,
    defaults: &ScoringDefaults,
    serving: &ServingState,
) -> Result<(PoolingRequest, ScoringMethod), ApiError> {
    let limit = input.options.truncation.limit(serving.context_tokens)?;
    match input.options.classes.classifier(&target, defaults, serving)? {
        None => similarity(input, target, limit, serving),
        Some(classifier) => {
            classifier.check_relevance()?;
            input.options.check_classified()?;
            let template = template(&input.options, &classifier, defaults);
            input.options.check_instruction(template.as_deref())?;
            let prompts = PairPrompts { serving, template, limit }.all(&input)?;
            let (pooling, field) = (classifier.pooling(), input.documents.field);
            let method = ScoringMethod::Relevance(input.options.classes.activation);
            Ok((PoolingRequest { target, pooling, field, prompts }, method))
        }
    }
}

/// Returns the template of a pair: the request's, the configured one, or that of Qwen3-Reranker for tokens.
fn template(
    options: &ScoringOptions,
    classifier: &Classifier,
    defaults: &ScoringDefaults,
) -> Option<Arc<PairTemplate>> {
    let chosen = options.template.as_ref();
    match classifier {
        Classifier::Head(_) => chosen.cloned(),
        Classifier::Tokens { .. } => {
            let chosen = chosen.or(defaults.template.as_ref());
            Some(chosen.cloned().unwrap_or_else(|| Arc::new(PairTemplate::qwen3_reranker())))
        }
    }
}

fn similarity(
    input: ScoringInput,
    target: ModelTarget,
    limit: Option<usize>,
    serving: &ServingState,
) -> Result<(PoolingRequest, ScoringMethod), ApiError> {
    let ScoringInput { queries, documents, options, .. } = input;
    options.check_embedded()?;
    let method = ScoringMethod::Similarity { queries: queries.texts.len() };
    let field = documents.field;
    let mut prompts = Vec::with_capacity(queries.texts.len() + documents.texts.len());
    for TextList { field, texts } in [queries, documents] {
        for text in texts {
            prompts.push(prompt(serving, text, options.add, limit).map_err(|error| error.of(field))?);
        }
    }
    let pooling = options.pooling.unwrap_or(Pooling::Last);
    Ok((PoolingRequest { target, pooling, field, prompts }, method))
}

/// Encodes a text, cut to `limit` tokens if there is a limit.
fn prompt(
    serving: &ServingState,
    text: String,
    add: AddSpecial,
    limit: Option<usize>,
) -> Result<PromptInput, ApiError> {
    let mut tokens = serving.text.encode(&text, add)?;
    tokens.truncate(limit.unwrap_or(usize::MAX));
    Ok(PromptInput { tokens, text: Some(text) })
}

impl ScoringMethod {
    /// Returns the score of each pair, in the order of the documents.
    pub(super) fn scores(&self, vectors: &[Vec<f32>]) -> Vec<f32> {
        match self {
            Self::Similarity { queries } => {
                let (queries, documents) = vectors.split_at(*queries);
                let pairs = queries.iter().cycle().zip(documents);
                pairs.map(|(query, document)| cosine(query, document)).collect()
            }
            Self::Relevance(activation) => {
                vectors.iter().map(|logits| activation.relevance(logits)).collect()
            }
        }
    }
}

/// Returns the cosine of the angle between two vectors, 0 if one is zero. The sums are of 64 bits, in order.
fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = dot(one, one).sqrt() * dot(other, other).sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
    let cosine = if lengths > 0.0 { (dot(one, other) / lengths) as f32 } else { 0.0 };
    cosine
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cosine_depends_on_directions_alone() {
        for (one, other, expected) in [
            ([3.0, 4.0], [6.0, 8.0], 1.0),
            ([1.0, 0.0], [0.0, 2.0], 0.0),
            ([1.0, 0.0], [-2.0, 0.0], -1.0),
            ([1.0, 0.0], [1.0, 1.0], std::f32::consts::FRAC_1_SQRT_2),
            ([0.0, 0.0], [1.0, 1.0], 0.0),
        ] {
            assert_eq!(cosine(&one, &other), expected, "{one:?} {other:?}");
        }
    }

    #[test]
    fn one_query_meets_every_document_and_several_meet_theirs() {
        let vectors = |list: &[[f32; 2]]| list.iter().map(|vector| vector.to_vec()).collect::<Vec<_>>();
        let one = vectors(&[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]);
        assert_eq!(ScoringMethod::Similarity { queries: 1 }.scores(&one), [1.0, 0.0]);
        let two = vectors(&[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 3.0]]);
        assert_eq!(ScoringMethod::Similarity { queries: 2 }.scores(&two), [0.0, 1.0]);
    }
}

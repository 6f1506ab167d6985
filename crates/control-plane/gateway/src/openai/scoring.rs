//! `POST /v1/score` and `POST /v1/rerank`: scores of texts for a query, from embeddings or from classes.
//!
//! # Modules
//!
//! - `body`: reads the bodies of both routes.
//! - [`classifier`]: the classes of a text, which `/v1/classify` shares.
//! - `pair_prompts`: prompts of a query and a document.
//! - `method`: the prompts of a request, and the scores that follow from their vectors.

pub mod body;
pub(crate) mod classifier;
mod method;
mod pair_prompts;

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Value, json};

use self::body::{RankedDocuments, ScoringInput};
use super::{pooling::PooledVectors, request_context::RequestContext};
use crate::{app::App, clock::seconds_since_1970, errors::ApiError, random::random_u64};

/// Scores of all pairs, in the order of the documents.
struct Scores {
    pooled: PooledVectors,
    values: Vec<f32>,
}

/// Reads the texts from a body, with other values that the route's answer needs.
type ScoringReader<T> = fn(&[u8]) -> Result<(ScoringInput, T), ApiError>;

/// `POST /v1/score`: the score of each pair of texts.
pub(crate) async fn score(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Json<Value>, ApiError> {
    let (Scores { pooled, values }, ()) = compute(&app, ask, body::score).await?;
    let scores = values.iter().enumerate();
    let data = scores.map(|(index, score)| json!({ "index": index, "object": "score", "score": score }));
    let mut answer = pooled.envelope("score");
    answer["object"] = "list".into();
    answer["created"] = seconds_since_1970().into();
    answer["data"] = data.collect();
    Ok(Json(answer))
}

/// `POST /v1/rerank`: the documents with the highest scores for a query.
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let (Scores { pooled, values }, ranked) = compute(&app, ask, body::rerank).await?;
    let RankedDocuments { texts, top_n } = ranked;
    let mut order: Vec<usize> = (0..values.len()).collect();
    // The sort is stable, so documents with equal scores keep their order.
    order.sort_by(|&one, &other| values[other].total_cmp(&values[one]));
    order.truncate(top_n.unwrap_or(values.len()));
    let result = |index: usize| {
        let mut result = json!({ "index": index, "relevance_score": values[index] });
        if let Some(text) = texts.get(index) {
            result["document"] = json!({ "text": text });
        }
        result
    };
    let mut answer = pooled.envelope("rerank");
    answer["results"] = order.into_iter().map(result).collect();
    Ok(Json(answer))
}

async fn compute<T: Send + 'static>(
    app: &Arc<App>,
    ask: RequestContext,
    read: ScoringReader<T>,
) -> Result<(Scores, T), ApiError> {
    let shared = Arc::clone(app);
    let (jobs, method, rest) = app
        .bodies
        .run(ask.body.origin(), move || {
            let RequestContext { caller, serving, body, .. } = ask;
            let (input, rest) = read(&body)?;
            let target = input.wanted.clone().find(&shared, &serving, &caller)?;
            let (request, method) = method::plan(input, target, &shared.scoring, &serving)?;
            Ok::<_, ApiError>((request.jobs(&caller, &serving)?, method, rest))
        })
        .await?;
    let pooled = jobs.run(app).await?;
    let values = method.scores(&pooled.vectors);
    Ok((Scores { pooled, values }, rest))
}

impl PooledVectors {
    /// Returns the fields that the answers of scoring and classification share.
    pub(super) fn envelope(&self, prefix: &str) -> Value {
        json!({
            "id": format!("{prefix}-{:016x}{:016x}", random_u64(), random_u64()),
            "model": self.model,
            "adapter_generation": self.generation,
            "usage": { "prompt_tokens": self.tokens, "total_tokens": self.tokens },
        })
    }
}

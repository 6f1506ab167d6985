//! `/api/embed`, and `/api/embeddings` of older clients.

use std::{sync::Arc, time::Instant};

use axum::{Json, extract::State};
use serde_json::{Value, json};
use shmproto::message::Pooling;
use text::tokenizer::AddSpecial;

use super::request;
use crate::{
    app::App,
    errors::ApiError,
    openai::{
        completions::PromptField,
        embeddings::{EmbeddingInput, Length, OverlongPolicy, embed},
        pooling::{MAX_INPUTS, PooledVectors},
        request_context::RequestContext,
        strict_fields::{StrictFields, wrong},
    },
};

/// `POST /api/embed`: vectors of one or several texts.
pub(crate) async fn many(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Json<Value>, ApiError> {
    let begun = Instant::now();
    let read =
        |body: &[u8]| texts(body, PromptField { field: "input", most: MAX_INPUTS }).map(|texts| (texts, ()));
    let (PooledVectors { model, vectors, tokens, .. }, ()) = embed(&app, ask, read).await?;
    let total = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(Json(json!({
        "model": model,
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}

/// `POST /api/embeddings`: the vector of one text.
pub(crate) async fn one(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Json<Value>, ApiError> {
    let read = |body: &[u8]| texts(body, PromptField { field: "prompt", most: 1 }).map(|texts| (texts, ()));
    let (embedded, ()) = embed(&app, ask, read).await?;
    Ok(Json(json!({ "embedding": embedded.vectors.first() })))
}

/// Reads the body of either route.
///
/// # Errors
/// Names the field that is missing, malformed or unknown.
pub fn texts(body: &[u8], place: PromptField) -> Result<EmbeddingInput, ApiError> {
    let mut fields = StrictFields::parse(body)?;
    let wanted = request::wanted(&mut fields)?;
    request::keep_alive(&mut fields)?;
    let input = fields.take(place.field);
    // Ollama's clients send texts, never token ids.
    let is_text = match &input {
        Some(Value::Array(items)) if place.most > 1 => items.iter().all(Value::is_string),
        Some(value) => value.is_string(),
        None => true,
    };
    if let Some(value) = input.as_ref().filter(|_| !is_text) {
        let expected = if place.most > 1 { "a string or an array of strings" } else { "a string" };
        return Err(wrong(place.field, expected, value));
    }
    let overlong = match place.most {
        1 => OverlongPolicy::Cut,
        _ if fields.flag("truncate", true)? => OverlongPolicy::Cut,
        _ => OverlongPolicy::Refused,
    };
    let length = if place.most > 1 { Length::One } else { Length::AsItIs };
    // Sampling options have no effect, because an embedding samples no tokens.
    if let Some(options) = fields.take("options") {
        StrictFields::of(options, "options")?;
    }
    fields.finish()?;
    Ok(EmbeddingInput {
        wanted,
        place,
        input,
        add: AddSpecial::Yes,
        pooling: Pooling::Last,
        length,
        overlong,
    })
}

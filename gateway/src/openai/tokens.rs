//! `POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: the tokenizer for callers who have none.

use std::sync::Arc;

use axum::{Json, extract::State};
use model::tokenizer::AddSpecial;
use serde_json::{Value, json};

use super::{
    chat::messages, completions::add_special, errors::ApiError, fields::Fields, job::find_target,
    params::token_id,
};
use crate::{
    app::{App, JsonBody},
    lifecycle::Serving,
};

/// `{prompt, add_special_tokens}` or `{messages}` to `{tokens, count, max_model_len}`.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    app.work(body.len(), move || {
        let mut fields = Fields::parse(&body)?;
        check_model(&shared, &serving, &mut fields)?;
        let tokens = tokens_of(&serving, fields)?;
        Ok(Json(json!({ "count": tokens.len(), "max_model_len": serving.context_tokens, "tokens": tokens })))
    })
    .await
}

fn tokens_of(serving: &Serving, mut fields: Fields) -> Result<Vec<u32>, ApiError> {
    let add = add_special(&mut fields)?;
    let (prompt, chat) = (fields.text("prompt")?, fields.array("messages")?);
    fields.finish()?;
    match (prompt, chat) {
        (Some(prompt), None) => Ok(serving.text.encode(&prompt, add)?),
        (None, Some(chat)) => {
            let rendered = serving.text.render(&messages(Some(chat))?)?;
            Ok(serving.text.encode(&rendered, AddSpecial::No)?)
        }
        _ => Err(ApiError::missing("prompt", "send either 'prompt', a string, or 'messages'")),
    }
}

/// `{tokens}` to `{prompt}`.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    app.work(body.len(), move || {
        let mut fields = Fields::parse(&body)?;
        check_model(&shared, &serving, &mut fields)?;
        let items = fields.array("tokens")?;
        let items = items
            .ok_or_else(|| ApiError::missing("tokens", "'tokens' is required: an array of token ids"))?;
        fields.finish()?;
        let vocab_size = serving.welcome.vocab_size;
        let tokens: Vec<u32> =
            items.iter().map(|id| token_id("tokens", id, vocab_size)).collect::<Result<_, _>>()?;
        Ok(Json(json!({ "prompt": serving.text.decode(&tokens) })))
    })
    .await
}

/// What an evaluation tool needs to know of the tokenizer.
pub async fn info(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let facts = serving.text.facts();
    Ok(Json(json!({
        "model": serving.base_name,
        "vocab_size": serving.welcome.vocab_size,
        "model_max_length": serving.context_tokens,
        "bos_token": facts.bos_token,
        "eos_token": facts.eos_token,
        "pad_token": facts.pad_token,
        "chat_template": facts.chat_template,
    })))
}

/// All models share one tokenizer, but a name that does not exist is still an error.
fn check_model(app: &App, serving: &Serving, fields: &mut Fields) -> Result<(), ApiError> {
    match fields.text("model")? {
        None => Ok(()),
        Some(name) => find_target(app, serving, &name).map(|_| ()),
    }
}

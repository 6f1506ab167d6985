//! `POST /v1/embeddings`: vectors of texts, computed by the base or by an adapter.

use std::sync::Arc;

use axum::{Json, extract::State};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use shmproto::message::Pooling;
use text::tokenizer::AddSpecial;

use super::{
    completions::{PromptField, add_special, prompts},
    pooling::{MAX_INPUTS, PooledVectors, PoolingJobs, PoolingRequest},
    request_context::RequestContext,
    strict_fields::StrictFields,
    target::ModelRef,
};
use crate::{app::App, caller::Caller, errors::ApiError, lifecycle::ServingState};

#[derive(Debug)]
pub struct EmbeddingInput {
    pub wanted: ModelRef,
    /// The route's field name and its maximum number of texts.
    pub place: PromptField,
    /// A string, an array of strings, an array of token ids, or an array of such arrays.
    pub input: Option<Value>,
    /// Whether to add the tokenizer's special tokens to each text.
    pub add: AddSpecial,
    /// How the hidden states of a text become one vector.
    pub pooling: Pooling,
    pub length: Length,
    pub overlong: OverlongPolicy,
}

/// Whether vectors are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Each vector is scaled to length 1.
    One,
    AsItIs,
}

/// Treatment of a text that is longer than the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlongPolicy {
    /// The request fails, naming the text's field.
    Refused,
    /// The end of the text is cut.
    Cut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    /// A JSON array of numbers.
    Float,
    /// Base64 of little-endian 32-bit floats.
    Base64,
}

/// The body of `/v1/embeddings`, checked without looking up the model.
#[derive(Debug)]
pub struct EmbeddingsBody {
    texts: EmbeddingInput,
    encoding: Encoding,
}

impl EmbeddingsBody {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is malformed or unknown.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        fields.labels()?;
        let wanted = ModelRef::read(&mut fields)?;
        let (input, add) = (fields.take("input"), add_special(&mut fields)?);
        let pooling = pooling(&mut fields)?;
        let encoding = match fields.text("encoding_format")?.as_deref() {
            None | Some("float") => Encoding::Float,
            Some("base64") => Encoding::Base64,
            Some(other) => {
                let message = format!("'encoding_format' must be 'float' or 'base64', not '{other}'");
                return Err(ApiError::invalid("encoding_format", message));
            }
        };
        let length = if fields.flag("normalize", true)? { Length::One } else { Length::AsItIs };
        fields.finish()?;
        let (place, overlong) = (PromptField { field: "input", most: MAX_INPUTS }, OverlongPolicy::Refused);
        Ok(Self { texts: EmbeddingInput { wanted, place, input, add, pooling, length, overlong }, encoding })
    }
}

impl EmbeddingInput {
    fn jobs(self, app: &App, caller: &Caller, serving: &Arc<ServingState>) -> Result<PoolingJobs, ApiError> {
        let target = self.wanted.find(app, serving, caller)?;
        let mut prompts = prompts(serving, self.place, self.input, self.add)?;
        if self.overlong == OverlongPolicy::Cut {
            prompts.iter_mut().for_each(|prompt| prompt.tokens.truncate(serving.context_tokens));
        }
        let request = PoolingRequest { target, pooling: self.pooling, field: self.place.field, prompts };
        request.jobs(caller, serving)
    }
}

/// Reads `pooling`, the hidden states that become an embedding; those of the last token by default.
pub(super) fn pooling(fields: &mut StrictFields) -> Result<Pooling, ApiError> {
    match fields.text("pooling")?.as_deref() {
        None | Some("last") => Ok(Pooling::Last),
        Some("mean") => Ok(Pooling::Mean),
        Some(other) => {
            let message = format!("'pooling' must be 'last' or 'mean', not '{other}'");
            Err(ApiError::invalid("pooling", message))
        }
    }
}

/// Reads the texts from a body, with other values that the route's answer needs.
type EmbeddingReader<T> = fn(&[u8]) -> Result<(EmbeddingInput, T), ApiError>;

/// Embeds the texts that `read` finds in the body; returns the vectors and the other values of `read`.
pub(crate) async fn embed<T: Send + 'static>(
    app: &Arc<App>,
    ask: RequestContext,
    read: EmbeddingReader<T>,
) -> Result<(PooledVectors, T), ApiError> {
    let shared = Arc::clone(app);
    let (jobs, length, rest) = app
        .bodies
        .run(ask.body.origin(), move || {
            let RequestContext { caller, serving, body, .. } = ask;
            let (texts, rest) = read(&body)?;
            let length = texts.length;
            Ok::<_, ApiError>((texts.jobs(&shared, &caller, &serving)?, length, rest))
        })
        .await?;
    let mut embedded = jobs.run(app).await?;
    if length == Length::One {
        embedded.vectors.iter_mut().for_each(|vector| normalize(vector));
    }
    Ok((embedded, rest))
}

/// `POST /v1/embeddings`: computes the vectors and writes them as requested.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let read =
        |body: &[u8]| EmbeddingsBody::read(body).map(|EmbeddingsBody { texts, encoding }| (texts, encoding));
    let (embedded, encoding) = embed(&app, ask, read).await?;
    let PooledVectors { model, generation, vectors, tokens } = embedded;
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding = match encoding {
            Encoding::Float => json!(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                BASE64_STANDARD.encode(bytes).into()
            }
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    });
    Ok(Json(json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": model,
        "adapter_generation": generation,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// Scales the vector to length 1; a zero vector stays zero.
fn normalize(vector: &mut [f32]) {
    let squares: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
    if squares > 0.0 {
        #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / squares.sqrt()) as f32);
    }
}

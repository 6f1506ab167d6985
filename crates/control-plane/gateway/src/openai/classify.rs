//! `POST /v1/classify`: the classes of texts, by an adapter's classification head or by given tokens.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Value, json};
use text::tokenizer::AddSpecial;

use super::{
    completions::{PromptField, add_special, prompts},
    pooling::{MAX_INPUTS, PoolingJobs, PoolingRequest},
    request_context::RequestContext,
    scoring::{
        body::Truncation,
        classifier::{Activation, Classifier, ClassifierOptions},
    },
    strict_fields::StrictFields,
    target::ModelRef,
};
use crate::{app::App, caller::Caller, clock::seconds_since_1970, errors::ApiError, lifecycle::ServingState};

/// The body of `/v1/classify`, checked without looking up the model.
#[derive(Debug)]
pub struct ClassifyBody {
    wanted: ModelRef,
    input: Option<Value>,
    add: AddSpecial,
    classes: ClassifierOptions,
    truncation: Truncation,
}

impl ClassifyBody {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is malformed or unknown.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        fields.labels()?;
        let wanted = ModelRef::read(&mut fields)?;
        let (input, add) = (fields.take("input"), add_special(&mut fields)?);
        let (classes, truncation) = (ClassifierOptions::read(&mut fields)?, Truncation::read(&mut fields)?);
        fields.finish()?;
        Ok(Self { wanted, input, add, classes, truncation })
    }

    fn jobs(
        self,
        app: &App,
        caller: &Caller,
        serving: &Arc<ServingState>,
    ) -> Result<(PoolingJobs, Classifier, Activation), ApiError> {
        let target = self.wanted.find(app, serving, caller)?;
        let limit = self.truncation.limit(serving.context_tokens)?;
        let classifier = self.classes.classifier(&target, &app.scoring, serving)?;
        let classifier = classifier.ok_or_else(|| {
            let message = format!(
                "the model '{}' has no classes; use an adapter with a classification head (PEFT's task SEQ_CLS), or \
                 send 'classifier_from_token'",
                target.name
            );
            ApiError::invalid("model", message)
        })?;
        let place = PromptField { field: "input", most: MAX_INPUTS };
        let mut prompts = prompts(serving, place, self.input, self.add)?;
        if let Some(limit) = limit {
            prompts.iter_mut().for_each(|prompt| prompt.tokens.truncate(limit));
        }
        let request = PoolingRequest { target, pooling: classifier.pooling(), field: place.field, prompts };
        Ok((request.jobs(caller, serving)?, classifier, self.classes.activation))
    }
}

/// `POST /v1/classify`: the most probable class of each text, and the probabilities of all classes.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let shared = Arc::clone(&app);
    let (jobs, classifier, activation) = app
        .bodies
        .run(ask.body.origin(), move || {
            let RequestContext { caller, serving, body, .. } = ask;
            ClassifyBody::read(&body)?.jobs(&shared, &caller, &serving)
        })
        .await?;
    let pooled = jobs.run(&app).await?;
    let data = pooled.vectors.iter().enumerate().map(|(index, logits)| {
        let classes = activation.classes(logits);
        json!({
            "index": index,
            "label": classifier.labels()[largest(&classes)],
            "probs": classes,
            "num_classes": classes.len(),
        })
    });
    let mut answer = pooled.envelope("classify");
    answer["object"] = "list".into();
    answer["created"] = seconds_since_1970().into();
    answer["data"] = data.collect();
    Ok(Json(answer))
}

/// Returns the index of the largest value, the first of equal ones.
fn largest(values: &[f32]) -> usize {
    (1..values.len()).fold(0, |best, index| if values[index] > values[best] { index } else { best })
}

//! Pooled vectors of prompts, such as embeddings: generation requests without output tokens, a few at a time.

use std::{collections::VecDeque, sync::Arc};

use shmproto::message::Pooling;

use super::{
    generation_request::{Echo, GenerationKind, GenerationRequest, PromptInput},
    generation_response::GenerationResponse,
    namespace::namespace,
    params::Params,
    target::ModelTarget,
};
use crate::{app::App, caller::Caller, errors::ApiError, lifecycle::ServingState};

/// Maximum number of texts in a request, as in OpenAI's API.
pub(crate) const MAX_INPUTS: usize = 2048;
/// Number of texts that go to the executors together, so that a long list leaves capacity for other requests.
const TEXTS_AT_ONCE: usize = 32;

/// Prompts of one model, each of which becomes one vector.
#[derive(Debug)]
pub(crate) struct PoolingRequest {
    pub target: ModelTarget,
    /// How the passes over a prompt become its vector.
    pub pooling: Pooling,
    /// Name of the body's field with the texts, for errors.
    pub field: &'static str,
    pub prompts: Vec<PromptInput>,
}

/// A pooling request as generation requests of at most `TEXTS_AT_ONCE` prompts.
#[derive(Debug)]
pub(crate) struct PoolingJobs(VecDeque<GenerationRequest>);

#[derive(Debug)]
pub(crate) struct PooledVectors {
    /// The model as the request named it.
    pub model: String,
    /// Content hash of the adapter; `None` for the base model.
    pub generation: Option<String>,
    /// One vector for each prompt.
    pub vectors: Vec<Vec<f32>>,
    /// Number of tokens of all prompts.
    pub tokens: usize,
}

impl PoolingRequest {
    /// Checks the prompts and splits them.
    pub(crate) fn jobs(self, caller: &Caller, serving: &Arc<ServingState>) -> Result<PoolingJobs, ApiError> {
        let job = |prompts: &[PromptInput]| {
            let job = GenerationRequest {
                kind: GenerationKind::Pooled(self.pooling.clone()),
                prompt_field: self.field,
                serving: Arc::clone(serving),
                target: self.target.again(),
                tenant: Arc::clone(&caller.tenant),
                priority: caller.priority,
                namespace: namespace(caller, &self.target, serving),
                prompts: prompts.to_vec(),
                // A pooled vector samples no tokens.
                params: Params { max_tokens: Some(0), ..Params::plain(0) },
                switches: Arc::default(),
                logprobs: None,
                echo: Echo::Nothing,
                grammar: None,
                answering: None,
                reasoning: None,
            };
            job.check()
        };
        self.prompts.chunks(TEXTS_AT_ONCE).map(job).collect::<Result<_, _>>().map(PoolingJobs)
    }
}

impl PoolingJobs {
    /// Computes the vectors of all prompts, in their order.
    pub(crate) async fn run(mut self, app: &App) -> Result<PooledVectors, ApiError> {
        let first = self.0.front().ok_or_else(|| ApiError::internal("there is no prompt to compute"))?;
        let generation = first.target.lease.as_ref().map(|lease| lease.generation.to_string());
        let model = first.target.name.clone();
        let mut pooled = PooledVectors { model, generation, vectors: Vec::new(), tokens: 0 };
        while let Some(job) = self.0.pop_front() {
            let begin = pooled.vectors.len();
            pooled.vectors.resize(begin + job.choices(), Vec::new());
            let (mut answer, first) = GenerationResponse::begin(app, job).await?;
            let vectors = &mut pooled.vectors[begin..];
            answer.each(first, |_, step| vectors[step.index].extend(step.pooled)).await?;
            pooled.tokens += answer.usage().prompt_tokens;
        }
        Ok(pooled)
    }
}

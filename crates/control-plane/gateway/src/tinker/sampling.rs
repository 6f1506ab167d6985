//! Routes of samplers: `create_sampling_session`, `samplers/{id}`, `asample`. Samples run as ordinary
//! generation requests, so their log-probabilities equal those of completions.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use control_protocol::training::session::CommandRefusal;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use shmproto::message::Sampling;
use text::stop::StopStrings;

use super::{
    sampled::{self, SampleOptions},
    sessions::{parse, read},
};
use crate::{
    app::App,
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
    lifecycle::ServingState,
    openai::{
        generation_request::{Echo, GenerationKind, GenerationRequest, PromptInput},
        namespace::namespace,
        params::{EndTokens, MAX_LOGPROBS, Params},
        target::ModelTarget,
    },
    random::random_u64,
    training_sessions::{
        checkpoint_path::CheckpointPath,
        request_futures::{InsertedFuture, PROMISE_BYTES},
        sessions::{SAMPLER_BYTES, Sampler},
    },
};

const MAX_SAMPLES: u32 = 128;
const MAX_STOPS: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateSampler {
    session_id: String,
    sampling_session_seq_id: u64,
    base_model: Option<String>,
    model_path: Option<String>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

/// Creates a sampler of the base or of saved weights.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let request: CreateSampler = read(&app, body).await?;
    let serving = app.serving()?;
    let adapter = match (&request.model_path, &request.base_model) {
        (Some(path), _) => Some(adapter_of(&app, &caller, path)?),
        (None, Some(base)) if *base == serving.base_name => None,
        (None, base) => return Err(ApiError::model_not_found(base.as_deref().unwrap_or_default())),
    };
    let path_bytes = request.model_path.as_ref().map_or(0, String::len);
    let memory = app.memory.reserve(&caller.tenant, SAMPLER_BYTES + path_bytes)?;
    let sampler = Sampler { model_path: request.model_path, adapter, memory };
    let (session, number) = (&request.session_id, request.sampling_session_seq_id);
    let id = app.runs.book.sampler(session, number, &caller.tenant, sampler)?;
    Ok(Json(json!({ "type": "create_sampling_session", "sampling_session_id": id })))
}

fn adapter_of(app: &App, caller: &Caller, path: &str) -> Result<String, ApiError> {
    let kept =
        CheckpointPath::parse(path).map_err(|refusal| ApiError::invalid("model_path", refusal.message))?;
    match kept {
        CheckpointPath::Sampler { adapter } if app.registry.entries().find(&adapter, caller).is_some() => {
            Ok(adapter)
        }
        CheckpointPath::Sampler { .. } => Err(ApiError::model_not_found(path)),
        CheckpointPath::State { .. } | CheckpointPath::External { .. } => Err(ApiError::invalid(
            "model_path",
            "a saved state or download cannot be sampled from; use the path that \
             save_weights_for_sampler returns",
        )),
    }
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let sampler = app.runs.book.find_sampler(&id, &caller.tenant)?;
    let base = app.last_serving()?.base_name.clone();
    Ok(Json(json!({ "sampler_id": id, "base_model": base, "model_path": sampler.model_path })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SampleRequest {
    sampling_session_id: String,
    seq_id: u64,
    #[serde(default = "one_sample")]
    num_samples: u32,
    prompt: ModelInput,
    sampling_params: SamplingParams,
    #[serde(default)]
    prompt_logprobs: bool,
    #[serde(default)]
    topk_prompt_logprobs: u32,
    #[serde(default)]
    topk_sample_logprobs: u32,
    #[serde(default)]
    prompt_alt_tokens_k: u32,
    prompt_logprobs_last_n: Option<IgnoredAny>,
    target_prompt_logprobs: Option<IgnoredAny>,
    #[serde(default)]
    record_stability_info: bool,
    #[serde(rename = "type")]
    _type: Option<String>,
}

fn one_sample() -> u32 {
    1
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelInput {
    chunks: Vec<InputChunk>,
}

#[derive(Deserialize)]
struct InputChunk {
    r#type: String,
    #[serde(default)]
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SamplingParams {
    max_tokens: Option<u32>,
    seed: Option<i64>,
    stop: Option<Stop>,
    #[serde(default = "neutral")]
    temperature: f32,
    #[serde(default = "all")]
    top_k: i64,
    #[serde(default = "neutral")]
    top_p: f32,
}

fn neutral() -> f32 {
    1.0
}

fn all() -> i64 {
    -1
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Tokens(Vec<u32>),
    Strings(Vec<String>),
}

/// Samples continuations of a prompt.
pub(crate) async fn sample(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let request: SampleRequest = app.bodies.run(body.origin(), move || parse(&body)).await?;
    let sampler = app.runs.book.find_sampler(&request.sampling_session_id, &caller.tenant)?;
    let id = format!("{}:{}", request.sampling_session_id, request.seq_id);
    let sequences: Vec<String> =
        (0..request.num_samples.min(MAX_SAMPLES)).map(|n| format!("{id}:{n}")).collect();
    if app.runs.promises.find(&id, &caller.tenant).is_none() {
        // Checked before a future exists, so a refused client can retry.
        app.admission.check(&caller.tenant)?;
        let job = job(&app, &caller, &sampler, &request);
        let prompt_bytes = job.as_ref().map_or(0, |(job, _)| size_of_val(&*job.prompts[0].tokens));
        let memory = app.memory.reserve(&caller.tenant, PROMISE_BYTES + prompt_bytes)?;
        if let InsertedFuture::Now(promise) = app.runs.promises.make(&id, memory)? {
            tokio::spawn(sampled::keep(Arc::clone(&app), job, prompt_bytes, promise));
        }
    }
    Ok(Json(json!({ "request_id": id, "sample_sequence_ids": sequences })))
}

fn refuse(request: &SampleRequest) -> Result<(), CommandRefusal> {
    let refused = [
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
        ("prompt_logprobs_last_n", request.prompt_logprobs_last_n.is_some()),
        ("target_prompt_logprobs", request.target_prompt_logprobs.is_some()),
        ("record_stability_info", request.record_stability_info),
    ];
    if let Some((name, _)) = refused.iter().find(|(_, is_wanted)| *is_wanted) {
        return Err(CommandRefusal::user(format!("'{name}' is not supported; remove it")));
    }
    let params = &request.sampling_params;
    let rules = [
        ("num_samples", (1..=MAX_SAMPLES).contains(&request.num_samples), "1 to 128"),
        ("temperature", (0.0..=2.0).contains(&params.temperature), "0 to 2"),
        ("top_p", (0.0..=1.0).contains(&params.top_p), "0 to 1"),
        ("top_k", (-1..=i64::from(u32::MAX)).contains(&params.top_k), "-1 for all, or above 0"),
        ("topk_prompt_logprobs", request.topk_prompt_logprobs <= MAX_LOGPROBS, "at most 20"),
        ("topk_sample_logprobs", request.topk_sample_logprobs <= MAX_LOGPROBS, "at most 20"),
    ];
    match rules.iter().find(|(_, holds, _)| !holds) {
        Some((name, _, rule)) => Err(CommandRefusal::user(format!("'{name}' must be {rule}"))),
        None => Ok(()),
    }
}

fn job(
    app: &App,
    caller: &Caller,
    sampler: &Sampler,
    request: &SampleRequest,
) -> Result<(GenerationRequest, SampleOptions), CommandRefusal> {
    refuse(request)?;
    let serving = app.serving().map_err(ApiError::from)?;
    let mut tokens = Vec::new();
    for chunk in &request.prompt.chunks {
        if chunk.r#type != "encoded_text" {
            let kind = chunk.r#type.chars().take(MAX_STOPS).collect::<String>();
            return Err(CommandRefusal::user(format!("'{kind}' in prompt is not supported; send only text")));
        }
        tokens.extend_from_slice(&chunk.tokens);
    }
    if let Some(token) = tokens.iter().find(|&&token| token >= serving.welcome.vocab_size) {
        return Err(CommandRefusal::user(format!(
            "the prompt has the token {token}, which is not in the vocabulary"
        )));
    }
    let (name, lease) = match &sampler.adapter {
        None => (serving.base_name.clone(), None),
        Some(name) => {
            let lease = app.registry.lease(name, caller).map_err(ApiError::from)?;
            let gone =
                "these weights are no longer served; save them for a sampler under a name to keep them";
            (name.clone(), Some(lease.ok_or_else(|| CommandRefusal::user(gone))?))
        }
    };
    let target = ModelTarget { name, lease };
    let wanted = SampleOptions {
        prompt_logprobs: request.prompt_logprobs,
        topk_prompt: request.topk_prompt_logprobs,
        topk_sample: request.topk_sample_logprobs,
    };
    let wants_prompt = wanted.prompt_logprobs || wanted.topk_prompt > 0;
    let params = params(&request.sampling_params, request.num_samples, &serving)?;
    let job = GenerationRequest {
        kind: GenerationKind::Tokens,
        prompt_field: "prompt",
        tenant: Arc::clone(&caller.tenant),
        priority: caller.priority,
        namespace: namespace(caller, &target, &serving),
        params: Params { prompt_logprobs: wants_prompt.then_some(wanted.topk_prompt), ..params },
        serving,
        target,
        prompts: vec![PromptInput { tokens, text: None }],
        switches: Arc::default(),
        logprobs: Some(wanted.topk_sample),
        echo: Echo::Nothing,
        grammar: None,
        answering: None,
        reasoning: None,
    };
    Ok((job.check()?, wanted))
}

fn params(asked: &SamplingParams, choices: u32, serving: &ServingState) -> Result<Params, CommandRefusal> {
    let (mut stop, mut stop_tokens, mut end_tokens) = (None, Vec::new(), EndTokens::Stop);
    let strings = |strings: &[String]| {
        let stops =
            StopStrings::new(strings).map_err(|error| CommandRefusal::user(format!("'stop': {error}")));
        stops.map(Some)
    };
    match &asked.stop {
        None => {}
        Some(Stop::One(one)) => stop = strings(std::slice::from_ref(one))?,
        Some(Stop::Tokens(tokens)) if tokens.is_empty() => end_tokens = EndTokens::Ignore,
        Some(Stop::Tokens(tokens)) if tokens.len() <= MAX_STOPS => stop_tokens.clone_from(tokens),
        Some(Stop::Strings(all)) if all.len() <= MAX_STOPS => stop = strings(all)?,
        Some(_) => {
            return Err(CommandRefusal::user(format!(
                "'stop' may hold at most {MAX_STOPS} strings or tokens"
            )));
        }
    }
    if stop_tokens.iter().any(|&token| token >= serving.welcome.vocab_size) {
        return Err(CommandRefusal::user("'stop' has a token that is not in the vocabulary"));
    }
    let plain = Params::plain(asked.seed.map_or_else(random_u64, i64::cast_unsigned));
    Ok(Params {
        sampling: Sampling {
            temperature: asked.temperature,
            top_k: u32::try_from(asked.top_k).unwrap_or(0),
            top_p: asked.top_p.max(f32::MIN_POSITIVE),
            ..plain.sampling
        },
        max_tokens: asked.max_tokens,
        stop,
        stop_tokens,
        end_tokens,
        choices,
        ..plain
    })
}

//! Routes of samplers: `create_sampling_session`, `samplers/{id}`, `asample`. What is sampled goes the way of every
//! completion, so that its log-probabilities are those that anybody sees.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use serde::Deserialize;
use serde_json::{Value, json};
use shmproto::message::{Sampling, TokenOutput};
use text::stop::StopStrings;
use training_protocol::session::Refusal;

use super::sessions::read;
use crate::{
    app::App,
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
    lifecycle::Serving,
    openai::{
        answer::Answer,
        job::{Echo, Job, Kind, Prompt, namespace},
        params::{EndTokens, MAX_LOGPROBS, Params},
        target::Target,
    },
    random::random_u64,
    runs::{
        book::Sampler,
        outcome::Outcome,
        promises::Made,
        saved::Kept,
        wire::{NO_LOGPROB, SampleResponse, SampledSequence, StopReason, TopkLogprobs},
    },
    usage::FinishReason,
};

/// Most continuations of a request.
const MAX_SAMPLES: u32 = 128;
/// Most stop strings or tokens.
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

/// Something to sample from: the base, or weights that were saved for it.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let request: CreateSampler = read(&body)?;
    let serving = app.serving()?;
    let adapter = match (&request.model_path, &request.base_model) {
        (Some(path), _) => Some(adapter_of(&app, &caller, path)?),
        (None, Some(base)) if *base == serving.base_name => None,
        (None, base) => return Err(ApiError::model_not_found(base.as_deref().unwrap_or_default())),
    };
    let sampler = Sampler { model_path: request.model_path, adapter };
    let (session, number) = (&request.session_id, request.sampling_session_seq_id);
    let id = app.runs.book.sampler(session, number, &caller.tenant, sampler)?;
    Ok(Json(json!({ "type": "create_sampling_session", "sampling_session_id": id })))
}

fn adapter_of(app: &App, caller: &Caller, path: &str) -> Result<String, ApiError> {
    let kept = Kept::parse(path).map_err(|refusal| ApiError::invalid("model_path", refusal.message))?;
    match kept {
        Kept::Sampler { adapter } if app.registry.entries().find(&adapter, caller).is_some() => Ok(adapter),
        Kept::Sampler { .. } => Err(ApiError::model_not_found(path)),
        Kept::State { .. } => Err(ApiError::invalid(
            "model_path",
            "a state cannot be sampled from: use the path that save_weights_for_sampler gives",
        )),
    }
}

/// What a sampler is.
pub async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let sampler = app.runs.book.find_sampler(&id, &caller.tenant)?;
    let base = app.serving()?.base_name.clone();
    Ok(Json(json!({ "sampler_id": id, "base_model": base, "model_path": sampler.model_path })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sample {
    sampling_session_id: String,
    seq_id: u64,
    #[serde(default = "one_sample")]
    num_samples: u32,
    prompt: Input,
    sampling_params: SamplingParams,
    #[serde(default)]
    prompt_logprobs: bool,
    #[serde(default)]
    topk_prompt_logprobs: u32,
    #[serde(default)]
    topk_sample_logprobs: u32,
    #[serde(default)]
    prompt_alt_tokens_k: u32,
    prompt_logprobs_last_n: Option<Value>,
    target_prompt_logprobs: Option<Value>,
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
struct Input {
    chunks: Vec<Chunk>,
}

#[derive(Deserialize)]
struct Chunk {
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

/// What is to be said of a sample besides its tokens.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    prompt_logprobs: bool,
    topk_prompt: u32,
    topk_sample: u32,
}

/// Continues a prompt.
pub async fn sample(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let request: Sample = app.work(body.len(), move || read(&body)).await?;
    let sampler = app.runs.book.find_sampler(&request.sampling_session_id, &caller.tenant)?;
    let id = format!("{}:{}", request.sampling_session_id, request.seq_id);
    let sequences: Vec<String> =
        (0..request.num_samples.min(MAX_SAMPLES)).map(|n| format!("{id}:{n}")).collect();
    if app.runs.promises.find(&id, &caller.tenant).is_none() {
        // Asked before anything is promised: the client comes back.
        app.turns.check(&caller.tenant)?;
        let job = job(&app, &caller, &sampler, &request);
        if let Made::Now(promise) = app.runs.promises.make(&id, &caller.tenant)? {
            let app = Arc::clone(&app);
            tokio::spawn(async move {
                let sampled = match job {
                    Ok((job, wanted)) => collect(&app, job, wanted).await,
                    Err(failure) => Err(failure),
                };
                promise.keep(sampled.into());
            });
        }
    }
    Ok(Json(json!({ "request_id": id, "sample_sequence_ids": sequences })))
}

fn refuse(request: &Sample) -> Result<(), Refusal> {
    let refused = [
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
        ("prompt_logprobs_last_n", request.prompt_logprobs_last_n.is_some()),
        ("target_prompt_logprobs", request.target_prompt_logprobs.is_some()),
        ("record_stability_info", request.record_stability_info),
    ];
    if let Some((name, _)) = refused.iter().find(|(_, is_wanted)| *is_wanted) {
        return Err(Refusal::user(format!("'{name}' is not supported: leave it out")));
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
        Some((name, _, rule)) => Err(Refusal::user(format!("'{name}' must be {rule}"))),
        None => Ok(()),
    }
}

fn job(app: &App, caller: &Caller, sampler: &Sampler, request: &Sample) -> Result<(Job, Wanted), Refusal> {
    refuse(request)?;
    let serving = app.serving().map_err(ApiError::from)?;
    let mut tokens = Vec::new();
    for chunk in &request.prompt.chunks {
        if chunk.r#type != "encoded_text" {
            return Err(Refusal::user(format!(
                "'{}' in prompt is not supported: send text alone",
                chunk.r#type
            )));
        }
        tokens.extend_from_slice(&chunk.tokens);
    }
    if let Some(token) = tokens.iter().find(|&&token| token >= serving.welcome.vocab_size) {
        return Err(Refusal::user(format!(
            "the prompt has the token {token}, which the model does not know"
        )));
    }
    let (name, lease) = match &sampler.adapter {
        None => (serving.base_name.clone(), None),
        Some(name) => {
            let lease = app.registry.lease(name, caller).map_err(ApiError::from)?;
            let gone =
                "these weights are not served any more: save them for a sampler under a name to keep them";
            (name.clone(), Some(lease.ok_or_else(|| Refusal::user(gone))?))
        }
    };
    let target = Target { name, lease };
    let wanted = Wanted {
        prompt_logprobs: request.prompt_logprobs,
        topk_prompt: request.topk_prompt_logprobs,
        topk_sample: request.topk_sample_logprobs,
    };
    let wants_prompt = wanted.prompt_logprobs || wanted.topk_prompt > 0;
    let params = params(&request.sampling_params, request.num_samples, &serving)?;
    let job = Job {
        kind: Kind::Tokens,
        prompt_field: "prompt",
        tenant: Arc::clone(&caller.tenant),
        namespace: namespace(caller, &target, &serving),
        params: Params { prompt_logprobs: wants_prompt.then_some(wanted.topk_prompt), ..params },
        serving,
        target,
        prompts: vec![Prompt { tokens, text: None }],
        logprobs: Some(wanted.topk_sample),
        echo: Echo::Nothing,
        grammar: None,
        answering: None,
        reasoning: None,
    };
    Ok((job.check()?, wanted))
}

fn params(asked: &SamplingParams, choices: u32, serving: &Serving) -> Result<Params, Refusal> {
    let (mut stop, mut stop_tokens, mut end_tokens) = (None, Vec::new(), EndTokens::Stop);
    let strings = |strings: &[String]| {
        let stops = StopStrings::new(strings).map_err(|error| Refusal::user(format!("'stop': {error}")));
        stops.map(Some)
    };
    match &asked.stop {
        None => {}
        Some(Stop::One(one)) => stop = strings(std::slice::from_ref(one))?,
        Some(Stop::Tokens(tokens)) if tokens.is_empty() => end_tokens = EndTokens::Ignore,
        Some(Stop::Tokens(tokens)) if tokens.len() <= MAX_STOPS => stop_tokens.clone_from(tokens),
        Some(Stop::Strings(all)) if all.len() <= MAX_STOPS => stop = strings(all)?,
        Some(_) => {
            return Err(Refusal::user(format!("'stop' may hold at most {MAX_STOPS} strings or tokens")));
        }
    }
    if stop_tokens.iter().any(|&token| token >= serving.welcome.vocab_size) {
        return Err(Refusal::user("'stop' has a token that the model does not know"));
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

/// What a continuation is so far.
#[derive(Default)]
struct Whole {
    tokens: Vec<TokenOutput>,
    finish: Option<FinishReason>,
}

async fn collect(app: &App, job: Job, wanted: Wanted) -> Result<Outcome, Refusal> {
    if let Some(lease) = &job.target.lease {
        app.adapter_limits.check(&lease.id.0, &job.target.name).map_err(ApiError::from)?;
    }
    let mut wholes: Vec<Whole> = (0..job.choices()).map(|_| Whole::default()).collect();
    let mut prompt = Vec::new();
    let mut answer = Answer::start(app, job).await?;
    while !answer.is_over() {
        let step = answer.next().await.ok_or_else(|| Refusal::server("nothing was generated"))??;
        let whole = &mut wholes[step.index];
        whole.tokens.extend(step.piece.scored.into_iter().map(|scored| scored.token));
        whole.finish = whole.finish.or(step.piece.finish);
        if prompt.is_empty() {
            prompt = step.prompt;
        }
    }
    let cached = answer.usage().prompt_tokens_details.cached_tokens;
    let response = SampleResponse {
        sequences: wholes.iter().map(|whole| sequence(whole, wanted.topk_sample)).collect(),
        prompt_logprobs: wanted.prompt_logprobs.then(|| {
            let first = std::iter::once(f32::NAN);
            floats(first.chain(prompt.iter().map(|token| token.logprob)))
        }),
        topk_prompt_logprobs: (wanted.topk_prompt > 0).then(|| {
            let none = TokenOutput { token: 0, logprob: 0.0, top: Vec::new() };
            top(std::iter::once(&none).chain(&prompt), wanted.topk_prompt)
        }),
        prompt_cache_hit_tokens: i32::try_from(cached).unwrap_or(i32::MAX),
    };
    Ok(Outcome::Protobuf(prost::Message::encode_to_vec(&response)))
}

fn sequence(whole: &Whole, k: u32) -> SampledSequence {
    let reason = if whole.finish == Some(FinishReason::Stop) { StopReason::Stop } else { StopReason::Length };
    SampledSequence {
        stop_reason: reason.into(),
        tokens: whole.tokens.iter().flat_map(|token| token.token.to_le_bytes()).collect(),
        logprobs: Some(floats(whole.tokens.iter().map(|token| token.logprob))),
        topk_sampled_logprobs: (k > 0).then(|| top(whole.tokens.iter(), k)),
    }
}

fn floats(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// The `k` likeliest tokens of each place, as far as there are so many.
fn top<'a>(places: impl Iterator<Item = &'a TokenOutput>, k: u32) -> TopkLogprobs {
    let mut top = TopkLogprobs { token_ids: Vec::new(), logprobs: Vec::new(), k, length: 0 };
    for place in places {
        top.length += 1;
        for rank in 0..k as usize {
            let (token, logprob) = place.top.get(rank).copied().unwrap_or((0, NO_LOGPROB));
            top.token_ids.extend(token.to_le_bytes());
            top.logprobs.extend(logprob.to_le_bytes());
        }
    }
    top
}

//! Routes of models in training. Each request is a numbered command; commands run in order, and each answer
//! is a future.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use control_protocol::training::session::{Adam, CommandRefusal, Lora};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};

use super::sessions::{clipped, read};
use crate::{
    app::App,
    body::{JsonBody, ProtobufBody},
    caller::Caller,
    errors::ApiError,
    random::random_u64,
    training_sessions::{
        batch::TrainingBatch,
        checkpoint_path,
        parts::{self, MAX_PARTS},
        request_futures::{InsertedFuture, PROMISE_BYTES},
        sessions::{MODEL_BYTES, SAMPLER_BYTES, Sampler, TrainedModel},
        wire::{ForwardBackwardRequest, RequestAddress},
        work_queue::{CommandTiming, ModelCommand},
    },
};

/// `lora_alpha` of every adapter: one learning rate then suits all ranks ("LoRA Without Regret", 2025).
const ALPHA: f64 = 32.0;

type FutureReply = Result<Json<Value>, ApiError>;

/// Queues a command and returns its future; a repeated request returns the existing future.
fn promise(app: &App, caller: &Caller, model: &TrainedModel, seq: u64, work: ModelCommand) -> FutureReply {
    let id = format!("{}:{seq}", model.run);
    if app.runs.promises.find(&id, &caller.tenant).is_none() {
        let bytes = PROMISE_BYTES + work.bytes();
        let memory = match model.work_queue.check(seq)? {
            CommandTiming::Next => app.memory.reserve(&caller.tenant, bytes)?,
            CommandTiming::Later => app.memory.reserve_waiting(&caller.tenant, bytes)?,
        };
        if let InsertedFuture::Now(promise) = app.runs.promises.make(&id, memory)? {
            model.work_queue.put(seq, work, promise);
        }
    }
    Ok(Json(json!({ "request_id": id, "model_id": model.id })))
}

/// Turns a refusal into a command, because its number must also take its turn.
fn or_refused(work: Result<ModelCommand, CommandRefusal>) -> ModelCommand {
    let refused = |refusal: CommandRefusal| {
        ModelCommand::Refused(CommandRefusal { message: clipped(refusal.message), ..refusal })
    };
    work.unwrap_or_else(refused)
}

fn check_seq(seq: Option<u64>) -> Result<u64, ApiError> {
    seq.filter(|seq| *seq > 0).ok_or_else(|| {
        ApiError::missing("seq_id", "'seq_id' is required: requests of a model are counted from 1")
    })
}

fn check_base(app: &App, asked: &str) -> Result<(), ApiError> {
    let serving = app.serving()?;
    if asked == serving.base_name {
        return Ok(());
    }
    let message = format!("'base_model' must be '{}', the only served base model", serving.base_name);
    Err(ApiError::invalid("base_model", message))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateModel {
    session_id: String,
    model_seq_id: u64,
    base_model: String,
    lora_config: Option<LoraConfig>,
    optimizer_config: Option<OptimizerConfig>,
    #[serde(rename = "user_metadata")]
    _user_metadata: Option<IgnoredAny>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoraConfig {
    rank: usize,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default = "yes")]
    train_unembed: bool,
    #[serde(default = "yes")]
    train_mlp: bool,
    #[serde(default = "yes")]
    train_attn: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct OptimizerConfig {
    r#type: String,
}

fn check_optimizer(config: Option<&OptimizerConfig>) -> Result<(), ApiError> {
    match config {
        Some(OptimizerConfig { r#type }) if r#type != "adamw" => Err(ApiError::invalid(
            "optimizer_config",
            format!("the optimizer '{type}' is not supported; use adamw"),
        )),
        _ => Ok(()),
    }
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: CreateModel = read(&app, body).await?;
    check_base(&app, &request.base_model)?;
    check_optimizer(request.optimizer_config.as_ref())?;
    let lora = request.lora_config.ok_or_else(|| {
        ApiError::missing("lora_config", "'lora_config' is required, because only adapters can be trained")
    })?;
    let model = model(&app, &caller, &request.session_id, request.model_seq_id)?;
    promise(&app, &caller, &model, 0, begin(&lora))
}

fn model(app: &Arc<App>, caller: &Caller, session: &str, number: u64) -> Result<Arc<TrainedModel>, ApiError> {
    let memory = app.memory.reserve(&caller.tenant, MODEL_BYTES)?;
    app.runs.book.model(session, number, memory, &app.runs.means)
}

/// Module names of each part of a model.
const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const UNEMBED: [&str; 1] = ["lm_head"];

fn begin(lora: &LoraConfig) -> ModelCommand {
    let parts = [(lora.train_attn, &ATTENTION[..]), (lora.train_mlp, &MLP), (lora.train_unembed, &UNEMBED)];
    let targets = parts.iter().filter(|(is_wanted, _)| *is_wanted).flat_map(|(_, names)| *names);
    let size =
        Lora { rank: lora.rank, alpha: ALPHA, targets: targets.map(|name| (*name).to_owned()).collect() };
    ModelCommand::Create { lora: size, seed: lora.seed.map_or_else(random_u64, i64::cast_unsigned) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelQuery {
    model_id: String,
    #[serde(rename = "type")]
    _type: Option<String>,
}

pub(crate) async fn info(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let ModelQuery { model_id, .. } = read(&app, body).await?;
    let model = app.runs.book.find_model(&model_id, &caller.tenant)?;
    let base = app.serving()?.base_name.clone();
    Ok(Json(json!({
        "type": "get_info",
        "model_id": model.id,
        "model_name": base,
        "model_data": { "arch": "transformer", "model_name": base, "tokenizer_id": base },
        "optimizer_config": { "type": "adamw" },
        "is_lora": true,
        "lora_rank": model.work_queue.lora.get().map(|lora| lora.rank),
    })))
}

/// Runs a batch forward and backward and accumulates gradients.
pub(crate) async fn forward_backward(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    ProtobufBody(body): ProtobufBody,
) -> FutureReply {
    let (model_id, seq, work) = app.bodies.run(body.origin(), move || read_batch(&body)).await?;
    let model = app.runs.book.find_model(&model_id, &caller.tenant)?;
    promise(&app, &caller, &model, check_seq(u64::try_from(seq).ok())?, work)
}

/// Reads model id, number and command; counts the message's parts before decoding, as a limit.
fn read_batch(body: &[u8]) -> Result<(String, i32, ModelCommand), ApiError> {
    if parts::count(body) > MAX_PARTS {
        let RequestAddress { model_id, seq_id } = decoded(body)?;
        let refusal = CommandRefusal::user(format!(
            "a request may have at most {MAX_PARTS} parts (sequences, chunks, tensors and their fields); \
             send fewer sequences at once"
        ));
        return Ok((model_id, seq_id, ModelCommand::Refused(refusal)));
    }
    let request: ForwardBackwardRequest = decoded(body)?;
    let batch = TrainingBatch::read(&request).map(|batch| ModelCommand::ForwardBackward(Box::new(batch)));
    Ok((request.model_id, request.seq_id, or_refused(batch)))
}

fn decoded<T: prost::Message + Default>(body: &[u8]) -> Result<T, ApiError> {
    T::decode(body).map_err(|error| {
        ApiError::bad_request("invalid_value", format!("the body is not a valid request: {error}"))
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimStep {
    model_id: String,
    seq_id: Option<u64>,
    adam_params: Option<Value>,
    optimizer_params: Option<OptimizerConfig>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

/// Defaults of Tinker's API.
const ADAM: Adam =
    Adam { learning_rate: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-12, weight_decay: 0.0, grad_clip_norm: 0.0 };

fn step(request: OptimStep) -> Result<ModelCommand, CommandRefusal> {
    if let Some(OptimizerConfig { r#type }) = request.optimizer_params {
        return Err(CommandRefusal::user(format!("the optimizer '{type}' is not supported; use AdamParams")));
    }
    let mut all = json!(ADAM);
    if let (Value::Object(all), Some(Value::Object(given))) = (&mut all, request.adam_params) {
        all.extend(given);
    }
    let adam = serde_json::from_value(all);
    adam.map(ModelCommand::Step).map_err(|error| CommandRefusal::user(format!("adam_params: {error}")))
}

/// Queues an optimizer step with the accumulated gradients.
pub(crate) async fn optim_step(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: OptimStep = read(&app, body).await?;
    let model = app.runs.book.find_model(&request.model_id, &caller.tenant)?;
    let seq = check_seq(request.seq_id)?;
    promise(&app, &caller, &model, seq, or_refused(step(request)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Save {
    model_id: String,
    seq_id: Option<u64>,
    path: Option<String>,
    #[serde(default)]
    overwrite: bool,
    ttl_seconds: Option<u64>,
    #[serde(rename = "user_metadata")]
    _user_metadata: Option<IgnoredAny>,
    sampling_session_seq_id: Option<u64>,
    #[serde(rename = "kind")]
    _kind: Option<String>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

/// Saves the adapter and the optimizer state.
pub(crate) async fn save(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: Save = read(&app, body).await?;
    let model = app.runs.book.find_model(&request.model_id, &caller.tenant)?;
    let seq = check_seq(request.seq_id)?;
    let name = request.path.unwrap_or_else(|| format!("step-{seq}"));
    let ttl_s = checkpoint_path::checked_ttl(request.ttl_seconds);
    let work = ttl_s.and_then(|ttl_s| {
        let name = checkpoint_path::checked(&name)?.to_owned();
        Ok(ModelCommand::SaveState { name, overwrite: request.overwrite, ttl_s })
    });
    promise(&app, &caller, &model, seq, or_refused(work))
}

/// Publishes the current adapter under a name, or for a sampler of its own.
pub(crate) async fn save_for_sampler(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: Save = read(&app, body).await?;
    let model = app.runs.book.find_model(&request.model_id, &caller.tenant)?;
    let (seq, run) = (check_seq(request.seq_id)?, model.run.clone());
    let ttl_s = checkpoint_path::checked_ttl(request.ttl_seconds);
    let work = match (&request.path, request.sampling_session_seq_id) {
        (Some(name), _) => {
            ttl_s.and_then(|ttl_s| Ok((checkpoint_path::checked(name)?, ttl_s))).map(|(name, ttl_s)| {
                ModelCommand::Publish {
                    adapter: checkpoint_path::adapter(&run, name),
                    ttl_s,
                    answer: json!({
                        "type": "save_weights_for_sampler",
                        "path": format!("tinker://{run}/sampler_weights/{name}"),
                    }),
                }
            })
        }
        (None, Some(number)) => {
            let adapter = checkpoint_path::snapshot(&run, seq);
            let session = run.rsplit_once('-').map_or("", |(session, _)| session);
            let memory = app.memory.reserve(&caller.tenant, SAMPLER_BYTES)?;
            let sampler = Sampler { model_path: None, adapter: Some(adapter.clone()), memory };
            let id = app.runs.book.sampler(session, number, &caller.tenant, sampler)?;
            let answer = json!({ "type": "save_weights_for_sampler", "sampling_session_id": id });
            ttl_s.map(|ttl_s| ModelCommand::Publish { adapter, answer, ttl_s })
        }
        (None, None) => Err(CommandRefusal::user("either 'path' or 'sampling_session_seq_id' is needed")),
    };
    promise(&app, &caller, &model, seq, or_refused(work))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaveExternal {
    model_id: String,
    path: String,
    seq_id: Option<u64>,
    ttl_seconds: Option<u64>,
    age_encryption_recipients: Option<Vec<String>>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

fn external(run: &str, request: &SaveExternal) -> Result<ModelCommand, CommandRefusal> {
    if request.age_encryption_recipients.as_ref().is_some_and(|recipients| !recipients.is_empty()) {
        let why =
            "'age_encryption_recipients' is not supported; remove it, and encrypt the download yourself";
        return Err(CommandRefusal::user(why));
    }
    let (name, ttl_s) =
        (checkpoint_path::checked(&request.path)?, checkpoint_path::checked_ttl(request.ttl_seconds)?);
    let path = format!("tinker://{run}/external_weights/{name}");
    let answer = json!({ "type": "save_weights_external", "path": path });
    Ok(ModelCommand::Publish { adapter: checkpoint_path::export(run, name), answer, ttl_s })
}

/// Saves the adapter in PEFT format for download.
pub(crate) async fn save_external(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: SaveExternal = read(&app, body).await?;
    let model = app.runs.book.find_model(&request.model_id, &caller.tenant)?;
    let seq = check_seq(request.seq_id)?;
    promise(&app, &caller, &model, seq, or_refused(external(&model.run, &request)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadWeightsRequest {
    model_id: Option<String>,
    seq_id: Option<u64>,
    session_id: Option<String>,
    model_seq_id: Option<u64>,
    base_model: Option<String>,
    path: String,
    optimizer: bool,
    optimizer_config: Option<OptimizerConfig>,
    #[serde(rename = "user_metadata")]
    _user_metadata: Option<IgnoredAny>,
    #[serde(rename = "type")]
    _type: Option<String>,
}

/// Creates a model from a saved state, or loads the state into an existing model.
pub async fn load(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> FutureReply {
    let request: LoadWeightsRequest = read(&app, body).await?;
    check_optimizer(request.optimizer_config.as_ref())?;
    if let Some(base) = &request.base_model {
        check_base(&app, base)?;
    }
    let (model, seq) = match (&request.model_id, &request.session_id, request.model_seq_id) {
        (Some(run), None, None) => {
            (app.runs.book.find_model(run, &caller.tenant)?, check_seq(request.seq_id)?)
        }
        (None, Some(session), Some(number)) => (model(&app, &caller, session, number)?, 0),
        _ => {
            let message = "send either 'model_id' and 'seq_id' or 'session_id' and 'model_seq_id'";
            return Err(ApiError::missing("model_id", message));
        }
    };
    let LoadWeightsRequest { path, optimizer, .. } = request;
    let work = checkpoint_path::state(&path).map(|(run, name)| ModelCommand::Load { run, name, optimizer });
    promise(&app, &caller, &model, seq, or_refused(work))
}

//! A tenant's client: the requests of the `tinker` package, without the package.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result, ensure};
use gateway::training_sessions::wire::{
    ChunkKind, DType, Datum, EncodedText, ForwardBackwardRequest, ModelInputChunk, TensorData, Values,
};
use prost::Message as _;
use serde_json::{Value, json};
use ureq::Agent;

/// Maximum time of a request; sixteen tenants may wait for their trainers.
const LIMIT: Duration = Duration::from_secs(600);

/// A model in training.
#[derive(Debug)]
pub(super) struct TinkerClient {
    agent: Agent,
    url: String,
    key: String,
    session: String,
    model: String,
    seq: i32,
    samples: u64,
}

impl TinkerClient {
    /// Begins a session with a model of `base` that trains attention and MLP.
    ///
    /// # Errors
    /// Fails if the gateway refuses the session.
    pub(super) fn begin(port: u16, key: &str, base: &str, rank: usize) -> Result<Self> {
        let agent = Agent::config_builder().timeout_global(Some(LIMIT)).http_status_as_error(false);
        let mut client = Self {
            agent: agent.build().new_agent(),
            url: format!("http://127.0.0.1:{port}/api/v1"),
            key: format!("Bearer {key}"),
            session: String::new(),
            model: String::new(),
            seq: 0,
            samples: 0,
        };
        let begun = client.post("create_session", &json!({ "sdk_version": "0.38.0" }))?;
        client.session = text(&begun, "session_id")?;
        let lora = json!({ "rank": rank, "seed": 1, "train_unembed": false });
        let body = json!({
            "session_id": client.session, "model_seq_id": 0, "base_model": base, "lora_config": lora,
        });
        client.model = text(&client.promised("create_model", &body)?, "model_id")?;
        Ok(client)
    }

    /// Trains on one sequence, and makes an optimizer step.
    ///
    /// # Errors
    /// Fails if the trainer refuses the step.
    pub(super) fn step(&mut self, tokens: &[u32]) -> Result<()> {
        self.seq += 1;
        let request = ForwardBackwardRequest {
            model_id: self.model.clone(),
            seq_id: self.seq,
            data: vec![datum(tokens)],
            loss_fn: "cross_entropy".to_owned(),
            ..ForwardBackwardRequest::default()
        };
        let body = request.encode_to_vec();
        let sent = self.agent.post(format!("{}/forward_backward", self.url));
        let sent = sent.header("authorization", &self.key).header("content-type", "application/x-protobuf");
        let status = sent.send(&body[..]).context("no answer to a batch")?.status();
        ensure!(status == 200, "a batch was answered with {status}");
        self.numbered("optim_step", json!({ "adam_params": { "learning_rate": 1e-4 } })).map(drop)
    }

    /// Serves the weights without a name; returns the sampler's id.
    ///
    /// # Errors
    /// Fails if the gateway refuses the weights.
    pub(super) fn serve(&mut self) -> Result<String> {
        let saved =
            self.numbered("save_weights_for_sampler", json!({ "sampling_session_seq_id": self.seq }))?;
        text(&saved, "sampling_session_id")
    }

    /// Samples one token after `prompt`.
    ///
    /// # Errors
    /// Fails if the gateway refuses the request.
    pub(super) fn sample(&mut self, sampler: &str, prompt: &[u32]) -> Result<()> {
        self.samples += 1;
        let body = json!({
            "sampling_session_id": sampler,
            "seq_id": self.samples,
            "prompt": { "chunks": [{ "type": "encoded_text", "tokens": prompt }] },
            "sampling_params": { "max_tokens": 1, "stop": [] },
        });
        let promise = self.post("asample", &body)?;
        self.fetch(&promise).map(drop)
    }

    /// Ends the session, so that its trainer is free.
    ///
    /// # Errors
    /// Fails if the gateway refuses the end.
    pub(super) fn end(self) -> Result<()> {
        self.post(&format!("sessions/{}/finish", self.session), &json!({})).map(drop)
    }

    fn numbered(&mut self, route: &str, mut body: Value) -> Result<Value> {
        self.seq += 1;
        body["model_id"] = self.model.as_str().into();
        body["seq_id"] = self.seq.into();
        self.promised(route, &body)
    }

    fn promised(&self, route: &str, body: &Value) -> Result<Value> {
        let promise = self.post(route, body)?;
        let answer = self.fetch(&promise)?;
        Ok(serde_json::from_slice(&answer)?)
    }

    /// Fetches the result of a future.
    fn fetch(&self, promise: &Value) -> Result<Vec<u8>> {
        loop {
            let (answer, is_json) =
                self.send("retrieve_future", &json!({ "request_id": promise["request_id"] }))?;
            if !is_json {
                return Ok(answer);
            }
            let value: Value = serde_json::from_slice(&answer)?;
            ensure!(value["error"].is_null(), "a request failed: {value}");
            if value["type"] != "try_again" {
                return Ok(answer);
            }
        }
    }

    fn post(&self, route: &str, body: &Value) -> Result<Value> {
        Ok(serde_json::from_slice(&self.send(route, body)?.0)?)
    }

    /// Posts JSON; returns the answer and whether the answer is JSON.
    fn send(&self, route: &str, body: &Value) -> Result<(Vec<u8>, bool)> {
        let sent = self.agent.post(format!("{}/{route}", self.url)).header("authorization", &self.key);
        let mut answer = sent.send_json(body).with_context(|| format!("no answer to {route}"))?;
        let is_json = answer.body().mime_type() == Some("application/json");
        let bytes = answer.body_mut().read_to_vec().with_context(|| format!("{route} broke off"))?;
        let status = answer.status();
        ensure!(status == 200, "{route} was answered with {status}: {}", String::from_utf8_lossy(&bytes));
        Ok((bytes, is_json))
    }
}

fn text(value: &Value, field: &str) -> Result<String> {
    value[field].as_str().map(str::to_owned).with_context(|| format!("no {field} in {value}"))
}

/// A sequence whose every token is learned.
fn datum(tokens: &[u32]) -> Datum {
    let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
    let bytes = |tokens: &[u32]| tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let weights = targets.iter().flat_map(|_| (1.0f32 / targets.len() as f32).to_le_bytes()).collect();
    let tensor = |dtype: DType, values| TensorData {
        values: Some(Values::Dense(values)),
        dtype: dtype.into(),
        shape: Vec::new(),
    };
    Datum {
        model_input: vec![ModelInputChunk {
            kind: Some(ChunkKind::EncodedText(EncodedText { tokens: bytes(inputs) })),
        }],
        loss_fn_inputs: HashMap::from([
            ("target_tokens".to_owned(), tensor(DType::Int32, bytes(targets))),
            ("weights".to_owned(), tensor(DType::Float32, weights)),
        ]),
    }
}

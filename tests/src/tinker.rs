//! Stepwise training: the requests of the `tinker` package, without the package.

use std::collections::HashMap;

use gateway::training_sessions::wire::{
    ChunkKind, DType, Datum, EncodedText, ForwardBackwardOutput, ForwardBackwardRequest, ModelInputChunk,
    SampleResponse, TensorData, Values,
};
use prost::Message as _;
use serde_json::{Value, json};

use crate::{BASE, Client, RequestFault};

/// A training example: tokens, and the loss weight of each token except the first.
#[derive(Debug, Clone)]
pub struct Example {
    /// Token ids, at least two.
    pub tokens: Vec<u32>,
    /// Loss weights, one fewer than the tokens.
    pub weights: Vec<f32>,
}

/// A model in training.
#[derive(Debug)]
pub struct TinkerModel<'a> {
    client: &'a Client,
    session: String,
    id: String,
    seq: i32,
}

impl<'a> TinkerModel<'a> {
    /// Begins a session with a model of this `lora_config`.
    #[must_use]
    pub fn begin(client: &'a Client, lora: &Value) -> Self {
        Self::try_begin(client, lora).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Begins a session with the state at `path`, with the optimizer's state.
    #[must_use]
    pub fn resume(client: &'a Client, path: &str) -> Self {
        Self::try_resume(client, path).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Begins as [`Self::begin`] does, or returns the error.
    pub fn try_begin(client: &'a Client, lora: &Value) -> Result<Self, Value> {
        Self::of(client, "create_model", json!({ "base_model": BASE, "lora_config": lora }))
    }

    /// Begins as [`Self::resume`] does, or returns the error.
    pub fn try_resume(client: &'a Client, path: &str) -> Result<Self, Value> {
        Self::of(client, "load_weights", json!({ "path": path, "optimizer": true }))
    }

    fn of(client: &'a Client, route: &str, mut body: Value) -> Result<Self, Value> {
        let asked = json!({ "tags": [], "sdk_version": "0.25" });
        let answer = client.try_post("/api/v1/create_session", &asked).map_err(unserved)?;
        let session = answer["session_id"].as_str().expect("its name").to_owned();
        let mut model = Self { client, session, id: String::new(), seq: 0 };
        body["session_id"] = model.session.as_str().into();
        body["model_seq_id"] = 0.into();
        let begun = model.try_promised(route, &body)?;
        model.id = begun["model_id"].as_str().expect("a model").to_owned();
        Ok(model)
    }

    /// Accumulates the gradients of `examples`, as sums over tokens, and makes an optimizer step.
    pub fn step(&mut self, examples: &[Example], adam: &Value) {
        self.try_step(examples, adam).unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Makes a step, or returns the error.
    pub fn try_step(&mut self, examples: &[Example], adam: &Value) -> Result<(), Value> {
        self.try_evaluate(examples, false)?;
        let body = self.numbered(json!({ "adam_params": adam }));
        self.try_promised("optim_step", &body).map(drop)
    }

    /// Returns the log-probabilities of all `tokens` but the first with the current weights, or the error.
    pub fn try_logprobs(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Value> {
        let example = Example { tokens: tokens.to_vec(), weights: vec![1.0; tokens.len() - 1] };
        let promise = self.try_evaluate(&[example], true)?;
        let output: ForwardBackwardOutput = self.try_fetch(&promise)?;
        Ok(floats(&output.loss_fn_outputs[0].fields["logprobs"].data))
    }

    /// Sends a batch; returns its future, or the error.
    fn try_evaluate(&mut self, examples: &[Example], forward_only: bool) -> Result<Value, Value> {
        self.seq += 1;
        let request = ForwardBackwardRequest {
            model_id: self.id.clone(),
            seq_id: self.seq,
            data: examples.iter().map(datum).collect(),
            loss_fn: "cross_entropy".to_owned(),
            forward_only,
            ..ForwardBackwardRequest::default()
        };
        let (route, bytes) = ("/api/v1/forward_backward", request.encode_to_vec());
        self.client.try_post_bytes(route, "application/x-protobuf", &bytes).map_err(unserved)
    }

    /// Serves the adapter for a sampler without a name; returns the sampler's id or the error.
    pub fn try_sampler(&mut self) -> Result<String, Value> {
        let body = self.numbered(json!({ "sampling_session_seq_id": self.seq }));
        let saved = self.try_promised("save_weights_for_sampler", &body)?;
        Ok(saved["sampling_session_id"].as_str().expect("a sampler").to_owned())
    }

    /// Samples `count` tokens after `prompt`, once per sampler; returns them with their log-probabilities, or
    /// the error.
    pub fn try_sample(
        &self,
        sampler: &str,
        prompt: &[u32],
        count: usize,
    ) -> Result<(Vec<u32>, Vec<f32>), Value> {
        let body = json!({
            "sampling_session_id": sampler,
            "seq_id": 1,
            "prompt": { "chunks": [{ "type": "encoded_text", "tokens": prompt }] },
            "sampling_params": { "max_tokens": count, "temperature": 1.0, "seed": 3, "stop": [] },
        });
        let promise = self.client.try_post("/api/v1/asample", &body).map_err(unserved)?;
        let response: SampleResponse = self.try_fetch(&promise)?;
        let sampled = &response.sequences[0];
        let tokens = sampled.tokens.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Ok((tokens, floats(sampled.logprobs.as_deref().expect("log-probabilities"))))
    }

    /// Saves adapter and optimizer state; returns the path or the error.
    pub fn try_save(&mut self, name: &str) -> Result<String, Value> {
        let body = self.numbered(json!({ "path": name }));
        let saved = self.try_promised("save_weights", &body)?;
        Ok(saved["path"].as_str().expect("a path").to_owned())
    }

    /// Serves the adapter under `name`; returns the name for requests.
    pub fn publish(&mut self, name: &str) -> String {
        self.try_publish(name).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Serves the adapter as [`Self::publish`] does, or returns the error.
    pub fn try_publish(&mut self, name: &str) -> Result<String, Value> {
        let body = self.numbered(json!({ "path": name }));
        let path = self.try_promised("save_weights_for_sampler", &body)?["path"].clone();
        let run = path.as_str().and_then(|path| path.split('/').nth(2)).expect("the path of a run");
        Ok(format!("tinker-{run}-{name}"))
    }

    /// Ends the training session.
    pub fn end(self) {
        let route = format!("/api/v1/sessions/{}/finish", self.session);
        self.client.try_post(&route, &json!({})).expect("an end");
    }

    fn numbered(&mut self, mut body: Value) -> Value {
        self.seq += 1;
        body["model_id"] = self.id.as_str().into();
        body["seq_id"] = self.seq.into();
        body
    }

    /// Sends a request and fetches its future: a result, or the failure reported to the client.
    fn try_promised(&self, route: &str, body: &Value) -> Result<Value, Value> {
        let promise = self.client.try_post(&format!("/api/v1/{route}"), body).map_err(unserved)?;
        loop {
            let body = json!({ "request_id": promise["request_id"] });
            let answer = self.client.try_post("/api/v1/retrieve_future", &body).map_err(unserved)?;
            if answer["type"] != "try_again" {
                return if answer["error"].is_null() { Ok(answer) } else { Err(answer) };
            }
        }
    }

    /// Fetches the message of a future, or the failure reported to the client.
    fn try_fetch<T: prost::Message + Default>(&self, promise: &Value) -> Result<T, Value> {
        let body = json!({ "request_id": promise["request_id"] });
        loop {
            let fetched = self.client.try_post_for_bytes("/api/v1/retrieve_future", &body);
            let (bytes, is_json) = fetched.map_err(unserved)?;
            if !is_json {
                return Ok(T::decode(&*bytes).expect("a message"));
            }
            let answer: Value = serde_json::from_slice(&bytes).expect("the answer is JSON");
            if answer["type"] != "try_again" {
                return Err(answer);
            }
        }
    }
}

/// Returns a request's fault in the form of a failed future.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn unserved(fault: RequestFault) -> Value {
    json!({ "category": "server", "error": fault.to_string() })
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn datum(example: &Example) -> Datum {
    let inputs = example.tokens[..example.tokens.len() - 1].iter();
    let text = EncodedText { tokens: inputs.flat_map(|token| token.to_le_bytes()).collect() };
    let targets = example.tokens[1..].iter().flat_map(|&token| i64::from(token).to_le_bytes()).collect();
    let weights = example.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    Datum {
        model_input: vec![ModelInputChunk { kind: Some(ChunkKind::EncodedText(text)) }],
        loss_fn_inputs: HashMap::from([
            ("target_tokens".to_owned(), tensor(DType::Int64, targets)),
            ("weights".to_owned(), tensor(DType::Float32, weights)),
        ]),
    }
}

fn tensor(dtype: DType, values: Vec<u8>) -> TensorData {
    TensorData { values: Some(Values::Dense(values)), dtype: dtype.into(), shape: Vec::new() }
}

//! Stepwise training: the requests of the `tinker` package, without the package.

use std::collections::HashMap;

use gateway::training_sessions::wire::{
    ChunkKind, DType, Datum, EncodedText, ForwardBackwardRequest, ModelInputChunk, TensorData, Values,
};
use prost::Message as _;
use serde_json::{Value, json};

use crate::{BASE, Client};

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
        Self::of(client, "create_model", json!({ "base_model": BASE, "lora_config": lora }))
    }

    /// Begins a session with the state at `path`, with the optimizer's state.
    #[must_use]
    pub fn resume(client: &'a Client, path: &str) -> Self {
        Self::of(client, "load_weights", json!({ "path": path, "optimizer": true }))
    }

    fn of(client: &'a Client, route: &str, mut body: Value) -> Self {
        let asked = json!({ "tags": [], "sdk_version": "0.25" });
        let answer = client.try_post("/api/v1/create_session", &asked).expect("a session");
        let session = answer["session_id"].as_str().expect("its name").to_owned();
        let mut model = Self { client, session, id: String::new(), seq: 0 };
        body["session_id"] = model.session.as_str().into();
        body["model_seq_id"] = 0.into();
        let begun = model.promised(route, &body);
        model.id = begun["model_id"].as_str().expect("a model").to_owned();
        model
    }

    /// Accumulates the gradients of `examples`, as sums over tokens, and makes an optimizer step.
    pub fn step(&mut self, examples: &[Example], adam: &Value) {
        self.try_step(examples, adam).unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Makes a step, or returns the error.
    pub fn try_step(&mut self, examples: &[Example], adam: &Value) -> Result<(), Value> {
        self.seq += 1;
        let request = ForwardBackwardRequest {
            model_id: self.id.clone(),
            seq_id: self.seq,
            data: examples.iter().map(datum).collect(),
            loss_fn: "cross_entropy".to_owned(),
            ..ForwardBackwardRequest::default()
        };
        let route = "/api/v1/forward_backward";
        let bytes = request.encode_to_vec();
        let evaluated = self.client.try_post_bytes(route, "application/x-protobuf", &bytes);
        assert!(evaluated.expect("a promise")["request_id"].is_string());
        let body = self.numbered(json!({ "adam_params": adam }));
        self.try_promised("optim_step", &body).map(drop)
    }

    /// Saves adapter and optimizer state; returns the path or the error.
    pub fn try_save(&mut self, name: &str) -> Result<String, Value> {
        let body = self.numbered(json!({ "path": name }));
        let saved = self.try_promised("save_weights", &body)?;
        Ok(saved["path"].as_str().expect("a path").to_owned())
    }

    /// Serves the adapter under `name`; returns the name for requests.
    pub fn publish(&mut self, name: &str) -> String {
        let body = self.numbered(json!({ "path": name }));
        let path = self.promised("save_weights_for_sampler", &body)["path"].clone();
        let run = path.as_str().and_then(|path| path.split('/').nth(2)).expect("the path of a run");
        format!("tinker-{run}-{name}")
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

    fn promised(&self, route: &str, body: &Value) -> Value {
        self.try_promised(route, body).unwrap_or_else(|failure| panic!("{route}: {failure}"))
    }

    /// Sends a request and fetches its future: a result, or the failure reported to the client.
    fn try_promised(&self, route: &str, body: &Value) -> Result<Value, Value> {
        let promise = self.client.try_post(&format!("/api/v1/{route}"), body).expect("a promise");
        loop {
            let body = json!({ "request_id": promise["request_id"] });
            let answer = self.client.try_post("/api/v1/retrieve_future", &body).expect("an answer");
            if answer["type"] != "try_again" {
                return if answer["error"].is_null() { Ok(answer) } else { Err(answer) };
            }
        }
    }
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

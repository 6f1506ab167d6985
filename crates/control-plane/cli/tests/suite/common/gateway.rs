//! A fake gateway with fixed answers.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};

use super::CommandFixture;

/// Answers `/v1/models`, and every completion with its model's name, word by word.
pub(crate) struct FakeGateway {
    pub(crate) url: String,
    seen: Arc<SeenRequests>,
}

/// Received requests, and the reported paths of the model and the adapters.
#[derive(Default)]
struct SeenRequests {
    bodies: Mutex<Vec<Value>>,
    model_path: Mutex<Option<PathBuf>>,
    adapter_root: Mutex<Option<PathBuf>>,
}

impl FakeGateway {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(SeenRequests::default());
        let shared = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let seen = Arc::clone(&shared);
                std::thread::spawn(move || answer(stream, &seen));
            }
        });
        Self { url, seen }
    }

    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.seen.bodies.lock().unwrap().clone()
    }

    pub(crate) fn serve(&self, model: &Path) {
        *self.seen.model_path.lock().unwrap() = Some(model.to_owned());
    }

    pub(crate) fn read_below(&self, root: &Path) {
        *self.seen.adapter_root.lock().unwrap() = Some(root.to_owned());
    }

    pub(crate) fn command(&self, stage: &CommandFixture, arguments: &[&str]) -> Command {
        let mut command = stage.command(arguments);
        command.env("HOLOBIONT_URL", &self.url);
        command
    }
}

fn answer(mut stream: TcpStream, seen: &SeenRequests) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim() {
            "" => break,
            text => head.push(text.to_lowercase()),
        }
    }
    let length = head.iter().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    if let Some(body) = slow(&body) {
        seen.bodies.lock().unwrap().push(body);
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
        let piece = json!({"choices": [{"index": 0, "delta": {"content": "Well, "}, "finish_reason": null}]});
        stream.write_all(format!("{head}data: {piece}\n\n").as_bytes()).ok()?;
        // The stream stays silent until the client disconnects.
        let _ = reader.read(&mut [0]);
        seen.bodies.lock().unwrap().push(json!("hung up"));
        return Some(());
    }
    let (status, kind, text) = match head.first()?.split(' ').nth(1)? {
        "/v1/models" => ("200 OK", "application/json", models().to_string()),
        "/v1/lora_adapters" => ("200 OK", "application/json", adapters().to_string()),
        route if route.starts_with("/v1/lora_adapter_files") => files(route),
        "/v1/status" => ("200 OK", "application/json", status(seen)),
        "/metrics" => ("200 OK", "text/plain", METRICS.to_owned()),
        route @ ("/v1/load_lora_adapter" | "/v1/unload_lora_adapter" | "/v1/pin_lora_adapter") => {
            let body: Value = serde_json::from_slice(&body).unwrap();
            seen.bodies.lock().unwrap().push(body.clone());
            administer(route, &body)
        }
        _ => {
            let body: Value = serde_json::from_slice(&body).unwrap();
            seen.bodies.lock().unwrap().push(body.clone());
            completion(&body)
        }
    };
    let length = text.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes())).ok()
}

fn slow(body: &[u8]) -> Option<Value> {
    let asks_slowly = |body: &Value| body["messages"].to_string().ends_with("Take your time.\"}]");
    serde_json::from_slice(body).ok().filter(asks_slowly)
}

fn models() -> Value {
    json!({"object": "list", "data": [
        {"id": "smol", "object": "model", "parent": null},
        {"id": "pirate", "object": "model", "parent": "smol"},
        {"id": "full", "object": "model", "parent": "smol"},
        {"id": "broken", "object": "model", "parent": "smol"},
    ]})
}

pub(crate) fn adapters() -> Value {
    json!({"object": "list", "data": [
        {"name": "pirate", "generation": "abcdef0123456789", "rank": 16, "bytes": 1_048_576, "tier": "host", "state": "ready",
         "pinned": true, "requests": 2, "tokens_per_s": 12.5, "device_bytes": 524_288, "cold_starts": 3,
         "load_wait_ms": 4.5, "rank_rows": {"device": 1, "workers": 3, "executor": 0}},
        {"name": "haiku", "generation": "123456789abcdef0", "rank": 4, "bytes": 1024, "tier": "disk", "state": "ready",
         "pinned": false, "requests": 0, "tokens_per_s": 0.0},
    ]})
}

pub(crate) const STATUS: &str = r#"{"model": "smol", "version": "1", "ready": true, "requests": {"running": 2, "waiting": 0},
    "tokens_per_s": {"prompt": 1.0, "generated": 37.5}, "uptime_s": 9,
    "device": {"bytes": 1024, "budget_bytes": 2048, "cold_start": "on-demand", "emulated_link_bytes_per_s": 125000000},
    "workers": {"expected": 2, "seated": [{"core": 1, "pid": 7, "slices": 5, "share": 1.0, "taken_back": 0}]}}"#;

/// Four requests of `pirate`.
const METRICS: &str = r#"# TYPE holobiont_adapter_time_to_first_token_seconds histogram
holobiont_adapter_time_to_first_token_seconds_bucket{adapter="pirate",le="0.25"} 4
holobiont_adapter_time_to_first_token_seconds_bucket{adapter="pirate",le="+Inf"} 4
holobiont_adapter_time_to_first_token_seconds_sum{adapter="pirate"} 0.5
holobiont_adapter_time_to_first_token_seconds_count{adapter="pirate"} 4
"#;

fn status(seen: &SeenRequests) -> String {
    let places = [("model_path", &seen.model_path), ("adapter_root", &seen.adapter_root)];
    let mut status = STATUS.to_owned();
    for (field, place) in places {
        if let Some(path) = &*place.lock().unwrap() {
            let mut value: Value = serde_json::from_str(&status).unwrap();
            value[field] = json!(path);
            status = value.to_string();
        }
    }
    status
}

/// Answers: `taken` is loaded already, `outside` lies outside the root, `busy` is being loaded, `other` has
/// changed.
fn administer(route: &str, body: &Value) -> (&'static str, &'static str, String) {
    let refuse = |status, code: &str| {
        let error = json!({"error": {"message": "no: the root is /srv/adapters", "type": "x", "code": code}});
        (status, "application/json", error.to_string())
    };
    match (body["lora_name"].as_str().unwrap(), route) {
        ("taken", _) => refuse("409 Conflict", "adapter_already_loaded"),
        ("outside", _) => refuse("400 Bad Request", "adapter_path_forbidden"),
        ("busy", _) => refuse("429 Too Many Requests", "lora_load_busy"),
        ("other", _) => refuse("409 Conflict", "generation_mismatch"),
        ("secret", _) => refuse("403 Forbidden", "forbidden"),
        (name, "/v1/load_lora_adapter") => {
            let answer = json!({"name": name, "generation": "abcdef0123456789", "rank": 8, "bytes": 2048, "modules": 7});
            ("200 OK", "application/json", answer.to_string())
        }
        (name, _) => ("200 OK", "application/json", json!({"name": name, "freed_bytes": 2048}).to_string()),
    }
}

/// `pirate` has two files, `outside` one whose name leads out of the folder, and `short` one that is shorter
/// than listed.
fn files(route: &str) -> (&'static str, &'static str, String) {
    let (path, query) = route.split_once('?').unwrap();
    let generation = "abcdef0123456789";
    let name = query.split('&').find_map(|part| part.strip_prefix("lora_name=")).unwrap();
    let list = |files: Value| {
        let listed = json!({"object": "list", "lora_name": name, "generation": generation, "data": files});
        ("200 OK", "application/json", listed.to_string())
    };
    let file = path.strip_prefix("/v1/lora_adapter_files/");
    if file.is_some() {
        assert!(query.ends_with(&format!("expected_generation={generation}")), "{query}");
    }
    match (name, file) {
        ("pirate", None) => list(json!([
            {"name": "adapter_config.json", "bytes": 2}, {"name": "adapter_model.safetensors", "bytes": 7},
        ])),
        ("outside", None) => list(json!([{"name": "../adapter_config.json", "bytes": 2}])),
        ("short", None) => list(json!([{"name": "adapter_config.json", "bytes": 3}])),
        (_, Some("adapter_config.json")) => ("200 OK", "application/octet-stream", "{}".to_owned()),
        (_, Some("adapter_model.safetensors")) => {
            ("200 OK", "application/octet-stream", "weights".to_owned())
        }
        _ => {
            let error =
                json!({"error": {"message": "there is none", "type": "x", "code": "model_not_found"}});
            ("404 Not Found", "application/json", error.to_string())
        }
    }
}

/// `full` is always full, and `broken` stops in the middle; requests with drafts get provisional tokens.
fn completion(body: &Value) -> (&'static str, &'static str, String) {
    let model = body["model"].as_str().unwrap();
    if model == "full" {
        let error = json!({"error": {"message": "the queue is full", "type": "x", "code": "queue_full"}});
        return ("429 Too Many Requests", "application/json", error.to_string());
    }
    if body["logprobs"] == true {
        let top =
            json!([{"token": "token_id:5", "logprob": -0.125}, {"token": "token_id:7", "logprob": -2.5}]);
        let tokens = json!([{"token": "token_id:5", "logprob": -0.125, "top_logprobs": top}, {"token": "token_id:9", "logprob": 0.0}]);
        let answer =
            json!({"choices": [{"index": 0, "logprobs": {"content": tokens}, "finish_reason": "stop"}]});
        return ("200 OK", "application/json", answer.to_string());
    }
    let mut events = vec![
        json!({"choices": [{"index": 0, "delta": {"content": "I am "}, "text": "I am ", "finish_reason": null}]}),
        json!({"choices": [{"index": 0, "delta": {"content": model}, "text": model, "finish_reason": "stop"}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}),
    ];
    if body["messages"].to_string().contains("Guess!") {
        let choice =
            |field: &str, value: Value| json!({"choices": [{"index": 0, "delta": {}, field: value}]});
        let guessed =
            [choice("provisional", json!({"text": "smart"})), choice("retract", json!({"characters": 3}))];
        events.splice(1..1, guessed);
    }
    if model == "broken" {
        events.truncate(1);
    }
    let mut text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    if model != "broken" {
        text.push_str("data: [DONE]\n\n");
    }
    ("200 OK", "text/event-stream", text)
}

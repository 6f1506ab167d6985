//! `chat`, `ls` and `bench` against a fake gateway.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

use common::{Stage, run};
use serde_json::{Value, json};

/// Answers `/v1/models`, and every completion with its own model's name, word by word.
struct FakeGateway {
    url: String,
    bodies: Arc<Mutex<Vec<Value>>>,
}

impl FakeGateway {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&bodies);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let seen = Arc::clone(&seen);
                std::thread::spawn(move || answer(stream, &seen));
            }
        });
        Self { url, bodies }
    }

    fn bodies(&self) -> Vec<Value> {
        self.bodies.lock().unwrap().clone()
    }

    fn command(&self, stage: &Stage, arguments: &[&str]) -> Command {
        let mut command = stage.command(arguments);
        command.env("HOLOBIONT_URL", &self.url);
        command
    }
}

fn answer(mut stream: TcpStream, seen: &Mutex<Vec<Value>>) -> Option<()> {
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
    let (status, kind, text) = match head.first()?.split(' ').nth(1)? {
        "/v1/models" => ("200 OK", "application/json", models().to_string()),
        "/v1/lora_adapters" => ("200 OK", "application/json", adapters().to_string()),
        "/v1/status" => ("200 OK", "application/json", STATUS.to_owned()),
        route @ ("/v1/load_lora_adapter" | "/v1/unload_lora_adapter" | "/v1/pin_lora_adapter") => {
            let body: Value = serde_json::from_slice(&body).unwrap();
            seen.lock().unwrap().push(body.clone());
            administer(route, &body)
        }
        _ => {
            let body: Value = serde_json::from_slice(&body).unwrap();
            seen.lock().unwrap().push(body.clone());
            completion(&body)
        }
    };
    let length = text.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes())).ok()
}

fn models() -> Value {
    json!({"object": "list", "data": [
        {"id": "smol", "object": "model", "parent": null},
        {"id": "pirate", "object": "model", "parent": "smol"},
        {"id": "full", "object": "model", "parent": "smol"},
        {"id": "broken", "object": "model", "parent": "smol"},
    ]})
}

fn adapters() -> Value {
    json!({"object": "list", "data": [
        {"name": "pirate", "generation": "abcdef0123456789", "rank": 16, "bytes": 1_048_576, "tier": "host", "state": "ready",
         "pinned": true, "requests": 2, "tokens_per_s": 12.5, "device_bytes": 524_288, "cold_starts": 3,
         "load_wait_ms": 4.5, "rank_rows": {"device": 1, "workers": 3, "executor": 0}},
        {"name": "haiku", "generation": "123456789abcdef0", "rank": 4, "bytes": 1024, "tier": "disk", "state": "ready",
         "pinned": false, "requests": 0, "tokens_per_s": 0.0},
    ]})
}

const STATUS: &str = r#"{"model": "smol", "version": "1", "ready": true, "requests": {"running": 2, "waiting": 0},
    "tokens_per_s": {"prompt": 1.0, "generated": 37.5}, "uptime_s": 9,
    "device": {"bytes": 1024, "budget_bytes": 2048, "cold_start": "on-demand", "emulated_link_bytes_per_s": 125000000},
    "workers": {"expected": 2, "seated": [{"core": 1, "pid": 7, "slices": 5, "share": 1.0, "taken_back": 0}]}}"#;

/// `taken` is loaded already, `outside` lies outside the root, `busy` is being loaded, `other` has changed.
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

/// `full` is always full, `broken` stops in the middle.
fn completion(body: &Value) -> (&'static str, &'static str, String) {
    let model = body["model"].as_str().unwrap();
    if model == "full" {
        let error = json!({"error": {"message": "the queue is full", "type": "x", "code": "queue_full"}});
        return ("429 Too Many Requests", "application/json", error.to_string());
    }
    let mut events = vec![
        json!({"choices": [{"index": 0, "delta": {"content": "I am "}, "text": "I am ", "finish_reason": null}]}),
        json!({"choices": [{"index": 0, "delta": {"content": model}, "text": model, "finish_reason": "stop"}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}),
    ];
    if model == "broken" {
        events.truncate(1);
    }
    let mut text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    if model != "broken" {
        text.push_str("data: [DONE]\n\n");
    }
    ("200 OK", "text/event-stream", text)
}

#[test]
fn a_question_on_the_command_line_is_answered_on_stdout() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["chat", ":pirate", "Who are you?", "--max-tokens", "9"]));
    assert_eq!((ended.status.code(), ended.out.as_str()), (Some(0), "I am pirate\n"), "{}", ended.err);
    let body = &gateway.bodies()[0];
    assert_eq!(body["messages"], json!([{"role": "user", "content": "Who are you?"}]));
    assert_eq!((&body["max_tokens"], &body["stream"]), (&json!(9), &json!(true)));
}

#[test]
fn a_question_may_come_from_stdin_and_the_answer_leave_as_json() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let mut command = gateway.command(&stage, &["chat", "--json"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Who are you?").unwrap();
    let output = child.wait_with_output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["content"], "I am smol");
    assert_eq!(value["usage"]["completion_tokens"], 3);
}

#[test]
fn chat_exits_with_the_documented_codes() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let cases =
        [(":nobody", 3, "pirate"), (":full", 5, "the queue is full"), (":broken", 5, "connection was lost")];
    for (target, code, text) in cases {
        let ended = run(&mut gateway.command(&stage, &["chat", target, "hello"]));
        assert_eq!(ended.status.code(), Some(code), "{target}: {}", ended.err);
        assert!(ended.err.contains(text), "{target}: {}", ended.err);
    }
    let ended = run(&mut gateway.command(&stage, &["chat"]));
    assert_eq!(ended.status.code(), Some(2), "an empty stdin is no question: {}", ended.err);
}

#[test]
fn without_a_gateway_chat_is_unavailable_and_says_what_to_start() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended =
        run(&mut Stage::new().command(&["chat", "--url", &format!("http://127.0.0.1:{port}"), "", "hello"]));
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    assert!(ended.err.contains("try: holobiont up"), "{}", ended.err);
}

#[test]
fn ls_shows_models_on_disk_and_what_the_gateway_serves() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["ls"]));
    assert_eq!(ended.status.code(), Some(0));
    for part in ["tiny", "gguf", "pirate", "abcdef012345 ", "16", "1.00 MiB"] {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    let ended = run(&mut gateway.command(&stage, &["ls", "--json"]));
    let value: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(value["models"][0]["name"], "tiny");
    assert_eq!(value["gateway"]["url"], gateway.url);
    assert_eq!(value["gateway"]["models"][1]["id"], "pirate");
    assert_eq!(value["gateway"]["adapters"], adapters()["data"]);
}

#[test]
fn ls_without_a_gateway_lists_the_disk() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended =
        run(&mut Stage::new().command(&["ls", "--json", "--url", &format!("http://127.0.0.1:{port}")]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    let value: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&value["gateway"], &value["models"][0]["bytes"]), (&Value::Null, &json!(7)));
}

#[test]
fn bench_prints_a_line_for_each_selection_of_adapters() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let arguments = [
        "bench",
        "--requests",
        "6",
        "--concurrency",
        "3",
        "--prompt-tokens",
        "4",
        "--max-tokens",
        "3",
        "-o",
        "jsonl",
        "--adapters",
        "smol",
        "--adapters",
        "smol,pirate",
    ];
    let ended = run(&mut gateway.command(&stage, &arguments));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    let lines: Vec<Value> = ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|line| &line["adapters"]).collect::<Vec<_>>(), [&json!(1), &json!(2)]);
    assert_eq!(lines[1]["completion_tokens"], 18);
    assert_eq!(lines[1]["failed"], 0);
    let bodies = gateway.bodies();
    let asked = |model: &str| bodies.iter().filter(|body| body["model"] == model).count();
    assert_eq!((asked("smol"), asked("pirate")), (9, 3));
    assert!(bodies.iter().all(|body| body["prompt"].as_str().unwrap().split(' ').count() == 4));
}

#[test]
fn bench_with_failed_requests_reports_them_and_fails() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["bench", "--requests", "2", "--adapters", "full"]));
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    assert!(
        ended.err.contains("2 of 2 requests failed") && ended.err.contains("the queue is full"),
        "{}",
        ended.err
    );
    let ended = run(&mut gateway.command(&stage, &["bench", "--adapters", "random:9"]));
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
}

#[test]
fn bench_at_a_rate_counts_refusals_and_prints_each_request() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let arguments = ["bench", "--json", "--requests", "20", "--rate", "500", "--each", "--seed", "1"];
    let ended = run(gateway.command(&stage, &arguments).args(["--adapters", "full", "--adapters", "zipf:2"]));
    let lines: Vec<Value> = ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 42, "{}", ended.err);
    assert!(lines[..20].iter().all(|line| line["status"] == 429 && line["code"] == "queue_full"));
    assert_eq!((&lines[20]["refused"], &lines[20]["rate_per_s"]), (&json!(20), &json!(500.0)));
    assert!(lines[20]["refusal_ms"]["p99"].as_f64().unwrap() > 0.0);
    assert_eq!((&lines[41]["distribution"], &lines[41]["adapters"]), (&json!("zipf"), &json!(2)));
    let sent: Vec<f64> = lines[..20].iter().map(|line| line["sent_s"].as_f64().unwrap()).collect();
    assert!(sent.iter().any(|sent_s| *sent_s > 0.01), "20 requests at 500 a second take a while: {sent:?}");

    let refusals_alone = run(gateway.command(&stage, &arguments).args(["--adapters", "full"]));
    assert_eq!(refusals_alone.status.code(), Some(0), "{}", refusals_alone.err);
}

#[test]
fn ps_shows_the_base_and_who_is_resident_and_the_body_unchanged_as_json() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["ps"]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    let lines: Vec<Vec<&str>> = ended.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "GEN", "RANK", "TIER", "ON", "DEVICE", "REQS", "TOK/S", "PINNED"]);
    assert_eq!(lines[1], ["smol", "-", "-", "base", "-", "2", "37.5", "-"]);
    assert_eq!(lines[2], ["pirate", "abcdef012345", "16", "host", "50", "%", "2", "12.5", "yes"]);
    assert!(!ended.out.contains("haiku"), "it is on disk only: {}", ended.out);
    assert!(
        ended.out.ends_with("1 of 2 workers missing; holobiont logs lora-worker says why\n"),
        "{}",
        ended.out
    );
    let all = run(&mut gateway.command(&stage, &["ps", "--all"]));
    assert!(all.out.contains("haiku"), "{}", all.out);
    let json = run(&mut gateway.command(&stage, &["ps", "--json"]));
    assert_eq!(json.out.trim_end(), adapters().to_string());
}

#[test]
fn status_shows_where_adapters_were_computed_and_what_waiting_cost() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["status"]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for part in
        ["on-demand", "emulated link of 119.21 MiB/s", "1.00 KiB of 2.00 KiB", "1 of 2 workers missing"]
    {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    let pirate = ended.out.lines().find(|line| line.starts_with("pirate")).unwrap();
    let words: Vec<_> = pirate.split_whitespace().collect();
    assert_eq!(words, ["pirate", "50", "%", "25", "%", "75", "%", "0", "%", "3", "4.5", "ms"]);
    let json = run(&mut gateway.command(&stage, &["status", "--json"]));
    assert_eq!(json.out.trim_end(), STATUS);
}

#[test]
fn show_tells_everything_about_an_adapter_and_the_base() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["show", "pirate"]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for part in ["abcdef0123456789", "1.00 MiB", "host", "parent", "smol"] {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    let base = run(&mut gateway.command(&stage, &["show", "--json"]));
    let base: Value = serde_json::from_str(&base.out).unwrap();
    assert_eq!((&base["id"], &base["requests"]["running"]), (&json!("smol"), &json!(2)));
    assert_eq!(run(&mut gateway.command(&stage, &["show", "zebra"])).status.code(), Some(3));
}

#[test]
fn adapters_are_changed_as_the_arguments_say() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let directory = stage.home.path().join("lora");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("adapter_config.json"), "{}").unwrap();
    let path = directory.canonicalize().unwrap().to_str().unwrap().to_owned();
    let cases: [(&[&str], Value); 5] = [
        (
            &["add", "a", &path, "--tenant", "acme", "--pin"],
            json!({"lora_name": "a", "lora_path": path, "tenant": "acme", "pinned": true}),
        ),
        (
            &["replace", "a", &path, "--expect", "abc"],
            json!({"lora_name": "a", "lora_path": path, "load_inplace": true, "expected_generation": "abc"}),
        ),
        (&["rm", "a", "--expect", "abc"], json!({"lora_name": "a", "expected_generation": "abc"})),
        (&["pin", "a"], json!({"lora_name": "a", "pinned": true})),
        (&["pin", "a", "--off"], json!({"lora_name": "a", "pinned": false})),
    ];
    for (arguments, body) in cases {
        let ended = run(gateway.command(&stage, &["adapters"]).args(arguments));
        assert_eq!(ended.status.code(), Some(0), "{arguments:?}: {}", ended.err);
        assert!(ended.out.contains("a is "), "{arguments:?}: {}", ended.out);
        assert_eq!(gateway.bodies().last(), Some(&body));
    }
    let json = run(&mut gateway.command(&stage, &["adapters", "rm", "a", "--json"]));
    assert_eq!(json.out.trim_end(), json!({"name": "a", "freed_bytes": 2048}).to_string());
}

#[test]
fn refused_changes_of_adapters_say_what_to_do_with_the_documented_codes() {
    let (stage, gateway) = (Stage::new(), FakeGateway::start());
    let cases = [
        ("taken", 4, "adapters replace"),
        ("outside", 2, "copy the adapter below the gateway's adapter root"),
        ("busy", 5, "try again"),
        ("other", 4, "holobiont show"),
        ("secret", 6, "--role admin"),
    ];
    for (name, code, advice) in cases {
        let ended = run(&mut gateway.command(&stage, &["adapters", "add", name, "on/another/host"]));
        assert_eq!(ended.status.code(), Some(code), "{name}: {}", ended.err);
        assert!(ended.err.contains(advice), "{name}: {}", ended.err);
    }
    let ended = run(&mut gateway.command(&stage, &["adapters", "add", "a", "hf:org/repo"]));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
    let ended = run(gateway
        .command(&stage, &["adapters", "add", "a", "hf:org/repo@main"])
        .env("HF_HUB_OFFLINE", "1"));
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    assert!(ended.err.contains("org/repo@main"), "{}", ended.err);
}

#[test]
fn an_adapter_is_checked_by_the_program_that_would_serve_it() {
    let stage = Stage::new();
    let directory = stage.home.path().join("lora");
    std::fs::create_dir(&directory).unwrap();
    let check = || {
        let mut command = stage.command(&["adapters", "check", "--probe", "--json"]);
        command.arg(&directory).env("FAKE_EXECUTOR", "refuse");
        command
    };
    assert_eq!(run(&mut check()).status.code(), Some(3), "there is no adapter in it");
    std::fs::write(directory.join("adapter_config.json"), "{}").unwrap();
    let ended = run(&mut check());
    // The fake refuses with 3; its words are not repeated.
    assert_eq!((ended.status.code(), ended.err.as_str()), (Some(3), "executor: the model is too large\n"));
    let line = &stage.log()[0];
    let model = stage.home.path().join("models/tiny.gguf");
    assert!(
        line.contains(&format!("check --model {} --adapter {}", model.display(), directory.display())),
        "{line}"
    );
    assert!(line.contains("--probe --json"), "{line}");
}

#[test]
fn pull_refuses_names_that_are_neither_package_nor_hub() {
    let ended = run(&mut Stage::new().command(&["pull", "zebra"]));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
    let ended = run(&mut Stage::new().command(&["pull", "pypi:-r/etc/passwd"]));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
}

#[test]
fn errors_are_json_when_json_is_asked_for() {
    let ended =
        run(&mut Stage::new().command(&["--json", "up", "--model", "zebra", "--listen", "127.0.0.1:0"]));
    let value: Value = serde_json::from_str(&ended.err).unwrap();
    assert_eq!(value["error"]["code"], "not_found");
}

#[test]
fn help_lists_the_exit_codes() {
    let ended = run(&mut Stage::new().command(&["--help"]));
    assert_eq!(ended.status.code(), Some(0));
    assert!(ended.out.contains("5  unavailable"), "{}", ended.out);
}

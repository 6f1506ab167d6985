//! `ls`, `ps`, `status`, `show`, `adapters` and `bench` against a fake gateway.

use std::net::TcpListener;

use crate::common::{
    CommandFixture,
    gateway::{FakeGateway, STATUS, adapters},
    run,
    terminal::AtTerminal,
};
use serde_json::{Value, json};

#[test]
fn ls_shows_models_on_disk_and_what_the_gateway_serves() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
    let ended = run(&mut CommandFixture::new().command(&[
        "ls",
        "--json",
        "--url",
        &format!("http://127.0.0.1:{port}"),
    ]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    let value: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&value["gateway"], &value["models"][0]["bytes"]), (&Value::Null, &json!(7)));
}

#[test]
fn bench_prints_a_line_for_each_selection_of_adapters() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
fn top_looks_once_where_there_is_no_terminal_and_in_json_where_that_is_asked_for() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["top"]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert_eq!(ended.out, run(&mut gateway.command(&stage, &["top", "--once"])).out);
    let lines: Vec<Vec<&str>> = ended.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(
        lines.contains(&vec!["pirate", "host", "2", "12.5", "125", "ms", "238", "ms", "4"]),
        "{}",
        ended.out
    );
    let json = run(&mut gateway.command(&stage, &["top", "--once", "--json"]));
    let value: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(value["tokens_per_s"]["generated"], 37.5);
    assert_eq!(value["models"][1]["first_token"], json!({"count": 4, "mean_ms": 125.0, "p95_ms": 237.5}));
    assert_eq!(value["executors"][0]["workers"], json!({"seated": 1, "expected": 2, "lost": 0}));
}

#[test]
fn top_stays_on_a_terminal_until_somebody_quits_and_leaves_it_as_it_was() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let terminal =
        AtTerminal::start(&gateway.command(&stage, &["top", "--interval", "0.1"]), &stage, "pirate");
    terminal.wait_for("quits");
    // The output is in the alternate screen, which `script` records.
    terminal.wait_for("\u{1b}[?1049h");
    let typescript = terminal.typescript();
    assert_eq!(terminal.end("q"), Some(0));
    let shown = std::fs::read_to_string(typescript).unwrap();
    assert!(shown.contains("\u{1b}[?1049l"), "{shown:?}");
}

#[test]
fn top_without_a_gateway_says_so() {
    let ended = run(&mut CommandFixture::new().command(&["top", "--url", "http://127.0.0.1:9"]));
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
}

#[test]
fn status_shows_where_adapters_were_computed_and_what_waiting_cost() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["show", "pirate"]));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for part in ["abcdef0123456789", "1.00 MiB", "ready, in memory, 50 % on the device", "base ", "smol"] {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    let base = run(&mut gateway.command(&stage, &["show", "--json"]));
    let base: Value = serde_json::from_str(&base.out).unwrap();
    assert_eq!((&base["id"], &base["requests"]["running"]), (&json!("smol"), &json!(2)));
    assert_eq!(run(&mut gateway.command(&stage, &["show", "zebra"])).status.code(), Some(3));
}

#[test]
fn adapters_are_listed_wherever_they_are() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["adapters", "ls"]));
    let lines: Vec<Vec<_>> = ended.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..6], ["pirate", "abcdef012345", "16", "1.00", "MiB", "host"], "{}", ended.err);
    assert_eq!(lines[2][..6], ["haiku", "123456789abc", "4", "1.00", "KiB", "disk"]);
    let json = run(&mut gateway.command(&stage, &["adapters", "ls", "--json"]));
    assert_eq!(serde_json::from_str::<Value>(&json.out).unwrap(), adapters());
}

#[test]
fn an_adapter_is_checked_against_what_the_gateway_serves_and_against_another_model_if_that_is_named() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let models = stage.home.path().join("models");
    std::fs::write(models.join("other.gguf"), "weights").unwrap();
    let directory = stage.home.path().join("lora");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("adapter_config.json"), "{}").unwrap();
    let check = |options: &[&str]| {
        let words = [&["adapters", "check", directory.to_str().unwrap()], options].concat();
        let ended = run(gateway.command(&stage, &words).env("FAKE_EXECUTOR", "refuse"));
        (ended, stage.log().pop())
    };
    // The gateway's model is not on this machine, and the models directory does not count.
    let (ended, _) = check(&[]);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    gateway.serve(&models.join("other.gguf"));
    let (_, line) = check(&[]);
    assert!(line.as_ref().unwrap().contains("/models/other.gguf"), "{line:?}");
    let (_, line) = check(&["--model", "tiny"]);
    assert!(line.as_ref().unwrap().contains("/models/tiny.gguf"), "{line:?}");
}

#[test]
fn adapters_are_changed_as_the_arguments_say() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
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
            json!({"lora_name": "a", "lora_path": path, "expected_generation": "abc"}),
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
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let cases = [
        ("taken", 4, "adapters replace"),
        ("outside", 6, "copy the adapter below [gateway].adapter_root"),
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
    let stage = CommandFixture::new();
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
    // The fake exits with 2; its message is not repeated.
    assert_eq!((ended.status.code(), ended.err.as_str()), (Some(2), "error: the model is too large\n"));
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
    let ended = run(&mut CommandFixture::new().command(&["pull", "zebra"]));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
    let ended = run(&mut CommandFixture::new().command(&["pull", "pypi:-r/etc/passwd"]));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
}

#[test]
fn errors_are_json_when_json_is_asked_for() {
    let ended = run(&mut CommandFixture::new().command(&[
        "--json",
        "up",
        "--model",
        "zebra",
        "--listen",
        "127.0.0.1:0",
    ]));
    let value: Value = serde_json::from_str(&ended.err).unwrap();
    assert_eq!(value["error"]["code"], "not_found");
}

#[test]
fn help_lists_the_exit_codes() {
    let ended = run(&mut CommandFixture::new().command(&["--help"]));
    assert_eq!(ended.status.code(), Some(0));
    assert!(ended.out.contains("5  unavailable"), "{}", ended.out);
}

#[test]
fn an_adapter_is_pulled_whole_or_not_at_all() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let place = tempfile::tempdir().unwrap();
    let pull = |name: &str| {
        let directory = place.path().join(name);
        run(&mut gateway.command(&stage, &["adapters", "pull", name, directory.to_str().unwrap()]))
    };
    let ended = pull("pirate");
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("generation abcdef012345, 9 B"), "{}", ended.out);
    let text = |file: &str| std::fs::read_to_string(place.path().join("pirate").join(file)).unwrap();
    assert_eq!(
        (text("adapter_config.json"), text("adapter_model.safetensors")),
        ("{}".into(), "weights".into())
    );
    let again = pull("pirate");
    assert_eq!(again.status.code(), Some(4), "it is there already: {}", again.err);
    for (name, code, why) in [
        ("outside", 1, "../adapter_config.json"),
        ("short", 1, "2 bytes, not 3"),
        ("nobody", 3, "there is none"),
    ] {
        let ended = pull(name);
        assert_eq!(ended.status.code(), Some(code), "{name}: {}", ended.err);
        assert!(ended.err.contains(why), "{name}: {}", ended.err);
    }
    let left: Vec<_> =
        std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["pirate"], "nothing of the others is left");
}

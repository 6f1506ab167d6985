//! `holobiont up` against fake processes: order, restarts, stops, failed starts and exit codes.

use std::{fs, net::TcpListener};

use crate::common::{CommandFixture, RunningCommand, eventually_some, kill, run};
use rustix::process::Signal;

const ANY_PORT: [&str; 3] = ["up", "--listen", "127.0.0.1:0"];

fn up(stage: &CommandFixture) -> RunningCommand {
    RunningCommand::up(&mut stage.command(&ANY_PORT))
}

#[test]
fn the_executor_starts_first_and_stops_last() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("http://127.0.0.1:45678"), "{}", ended.out);
    let mut log = stage.short_log();
    log[..2].sort();
    assert_eq!(log, ["executor started", "gateway started", "gateway stopped", "executor stopped"]);
}

#[test]
fn a_termination_signal_stops_a_deployment_like_ctrl_c() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    running.signal(Signal::TERM);
    assert_eq!(running.end().status.code(), Some(0));
    assert_eq!(stage.short_log()[2..], ["gateway stopped", "executor stopped"]);
}

#[test]
fn the_run_directory_is_gone_after_a_stop() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    let run = stage.home.path().join("state/run");
    assert_eq!(fs::read_dir(&run).unwrap().count(), 1);
    running.signal(Signal::INT);
    running.end();
    assert_eq!(fs::read_dir(&run).unwrap().count(), 0);
}

#[test]
fn a_killed_executor_is_started_again_and_the_gateway_stays() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    kill(stage.wait_for_process("executor", 1), Signal::KILL);
    stage.wait_for_process("executor", 2);
    running.wait_for_err("serves again");
    running.wait_for_err("signal: 9");
    running.signal(Signal::INT);
    assert_eq!(running.end().status.code(), Some(0));
    let gateways = stage.short_log().iter().filter(|line| *line == "gateway started").count();
    assert_eq!(gateways, 1);
}

#[test]
fn a_restarted_gateway_listens_where_the_first_one_did() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    assert!(stage.wait_for_log("gateway started", 1).contains("--listen 127.0.0.1:0 "));
    kill(stage.wait_for_process("gateway", 1), Signal::KILL);
    assert!(stage.wait_for_log("gateway started", 2).contains("--listen 127.0.0.1:45678 "));
    running.signal(Signal::INT);
    assert_eq!(running.end().status.code(), Some(0));
}

#[test]
fn a_process_that_dies_five_times_is_given_up_and_the_other_is_stopped() {
    let stage = CommandFixture::new();
    let ended = run(stage.command(&ANY_PORT).env("FAKE_GATEWAY", "die"));
    assert_eq!(ended.status.code(), Some(1));
    assert!(
        ended.err.contains("gateway crashed 5 times") && ended.err.contains("exit status: 9"),
        "{}",
        ended.err
    );
    let log = stage.short_log();
    assert_eq!(log.iter().filter(|line| *line == "gateway started").count(), 5);
    assert_eq!(log.last().unwrap(), "executor stopped");
}

#[test]
fn a_process_that_refuses_to_start_is_not_asked_twice() {
    let stage = CommandFixture::new();
    let ended = run(stage.command(&ANY_PORT).env("FAKE_EXECUTOR", "refuse"));
    assert_eq!(ended.status.code(), Some(2), "its own exit code");
    let last = ended.err.lines().last().unwrap_or_default();
    assert_eq!(last, "error: base-executor did not start: the model is too large", "{}", ended.err);
    assert_eq!(ended.err.matches("too large").count(), 1, "{}", ended.err);
    assert_eq!(stage.short_log().iter().filter(|line| *line == "executor started").count(), 1);
}

#[test]
fn the_processes_drain_when_their_supervisor_is_killed() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    running.signal(Signal::KILL);
    running.end();
    stage.wait_for_log("executor drained", 1);
    stage.wait_for_log("gateway drained", 1);
}

#[test]
fn a_second_ctrl_c_kills_what_does_not_stop() {
    let stage = CommandFixture::new();
    let mut command = stage.command(&ANY_PORT);
    let running = RunningCommand::up(command.env("FAKE_GATEWAY", "stubborn"));
    let gateway = stage.wait_for_process("gateway", 1);
    running.signal(Signal::INT);
    stage.wait_for_log("gateway asked", 1);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.err.contains("without waiting for running requests"), "{}", ended.err);
    let gateway = rustix::process::Pid::from_raw(gateway).unwrap();
    eventually_some("the gateway's end", || {
        rustix::process::test_kill_process(gateway).is_err().then_some(())
    });
}

#[test]
fn a_ctrl_c_that_a_script_passes_on_as_a_termination_is_one_request_to_stop() {
    let stage = CommandFixture::new();
    let running = up(&stage);
    running.signal(Signal::INT);
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert_eq!(stage.short_log()[2..], ["gateway stopped", "executor stopped"]);
}

#[test]
fn what_does_not_stop_within_the_grace_is_killed() {
    let stage = CommandFixture::new();
    let mut command = stage.command(&ANY_PORT);
    command.env("FAKE_EXECUTOR", "stubborn").env("HOLOBIONT_GRACE_MS", "300");
    let running = RunningCommand::up(&mut command);
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.err.contains("did not stop within 2300 ms"), "{}", ended.err);
    assert!(stage.short_log().contains(&"gateway stopped".to_owned()));
}

#[test]
fn a_second_deployment_on_the_same_state_is_refused() {
    let stage = CommandFixture::new();
    let first = up(&stage);
    let second = run(&mut stage.command(&ANY_PORT));
    assert_eq!(second.status.code(), Some(4), "{}", second.err);
    assert!(second.err.contains("another `holobiont up` (process "), "{}", second.err);
    assert!(second.err.contains("--state"), "{}", second.err);
    first.signal(Signal::INT);
    assert_eq!(first.end().status.code(), Some(0));
}

#[test]
fn a_taken_port_is_refused_before_anything_starts() {
    let stage = CommandFixture::new();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let ended = run(&mut stage.command(&["up", "--listen", &address]));
    assert_eq!(ended.status.code(), Some(4));
    assert!(ended.err.contains(&format!("port {}", holder.local_addr().unwrap().port())), "{}", ended.err);
    assert_eq!(stage.log(), [""; 0]);
}

#[test]
fn flags_environment_and_file_reach_the_processes() {
    let stage = CommandFixture::new();
    let adapter = stage.home.path().join("pirate");
    fs::create_dir(&adapter).unwrap();
    fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    let file = stage.home.path().join("deployment.toml");
    let text = "[model]\nserved_name = \"smol\"\n[executor]\nmax_running = 1\nmax_waiting = 2\ncores = \"0\"\n\
        [adapters]\npirate = \"pirate\"\n";
    fs::write(&file, text).unwrap();
    let mut command = stage.command(&ANY_PORT);
    command.arg("--config").arg(&file).args(["--cores", "0-1", "--log-format", "json"]);
    let running = RunningCommand::up(command.env("HOLOBIONT_MAX_RUNNING", "7"));
    running.signal(Signal::INT);
    running.end();
    let log = stage.log();
    let started = |role: &str| log.iter().find(|line| line.starts_with(&format!("{role} started"))).unwrap();
    let (executor, gateway) = (started("executor"), started("gateway"));
    let model = stage.home.path().join("models/tiny.gguf");
    for part in [
        &format!("--model {}", model.display()),
        "--cores 0-1",
        "--max-running 7",
        "--max-waiting 2",
        "--log-format json",
        "--exit-with-stdin",
    ] {
        assert!(executor.contains(part), "{part:?} is not in {executor}");
    }
    let adapter = format!("--adapter pirate={}", adapter.canonicalize().unwrap().display());
    assert!(gateway.contains(&adapter) && gateway.contains("--served-model-name smol"), "{gateway}");
}

#[test]
fn paths_reach_the_processes_as_they_were_written() {
    let stage = CommandFixture::new();
    fs::create_dir(stage.home.path().join("pirate")).unwrap();
    fs::write(stage.home.path().join("pirate/adapter_config.json"), "{}").unwrap();
    let mut command = stage.command(&ANY_PORT);
    command.args(["--model", "./models/tiny.gguf", "--adapter", "pirate=./pirate", "--state", "./s"]);
    let running = RunningCommand::up(command.current_dir(stage.home.path()));
    let mut second = stage.command(&ANY_PORT);
    let second = run(second.args(["--state", "./s"]).current_dir(stage.home.path()));
    assert!(second.err.contains("the state directory ./s\n"), "{}", second.err);
    running.signal(Signal::INT);
    running.end();
    let (executor, gateway) =
        (stage.wait_for_log("executor started", 1), stage.wait_for_log("gateway started", 1));
    assert!(executor.contains("--model ./models/tiny.gguf "), "{executor}");
    assert!(gateway.contains("--adapter pirate=./pirate"), "{gateway}");
    assert!(gateway.contains("--served-model-name tiny "), "{gateway}");
}

#[test]
fn the_json_greeting_is_one_line_of_json() {
    let stage = CommandFixture::new();
    let running = RunningCommand::start(stage.command(&ANY_PORT).arg("--json"));
    running.wait_for_out("\n");
    running.signal(Signal::INT);
    let ended = running.end();
    let value: serde_json::Value = serde_json::from_str(ended.out.trim()).unwrap();
    assert_eq!(value["url"], "http://127.0.0.1:45678");
    assert_eq!(value["models"][0], "tiny");
}

#[test]
fn wrong_configurations_name_the_key_and_exit_with_usage() {
    let stage = CommandFixture::new();
    let file = stage.home.path().join("deployment.toml");
    fs::write(&file, "[executor]\n\nkv_bites = 3\n").unwrap();
    let ended = run(stage.command(&ANY_PORT).arg("--config").arg(&file));
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.err.contains("line 3") && ended.err.contains("kv_bites"), "{}", ended.err);

    let ended = run(stage.command(&ANY_PORT).env("HOLOBIONT_LISTENS", "x"));
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.err.contains("HOLOBIONT_LISTENS"), "{}", ended.err);
    assert_eq!(run(&mut stage.command(&["up", "--adapter", "nameless"])).status.code(), Some(2));
}

#[test]
fn what_is_missing_is_not_found_by_name() {
    let stage = CommandFixture::new();
    let cases: [(&[&str], &str); 4] = [
        (&["up", "--listen", "127.0.0.1:0", "--model", "zebra"], "zebra"),
        (&["up", "--listen", "127.0.0.1:0", "--model", "./zebra.gguf"], "./zebra.gguf"),
        (&["up", "--listen", "127.0.0.1:0", "--adapter", "a=/nowhere"], "/nowhere"),
        (&["up", "--listen", "127.0.0.1:0", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ];
    for (arguments, name) in cases {
        let ended = run(&mut stage.command(arguments));
        assert_eq!(ended.status.code(), Some(3), "{arguments:?}: {}", ended.err);
        assert!(ended.err.contains(name), "{}", ended.err);
    }
    let ended = run(&mut CommandFixture::new().without("gateway").command(&ANY_PORT));
    assert_eq!(ended.status.code(), Some(3));
    assert!(ended.err.contains("`gateway`") && ended.err.contains("cargo build"), "{}", ended.err);
}

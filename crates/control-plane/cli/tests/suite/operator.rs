//! Commands of an operator: `up --detach`, `down`, `logs`, `key`, `check`, `doctor`, `completions`, `man`.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use crate::common::{CommandFixture, CommandOutput, RunningCommand, eventually_some, kill, run};
use rustix::process::Signal;
use serde_json::Value;

const DETACHED: [&str; 4] = ["up", "--detach", "--listen", "127.0.0.1:0"];

/// Background deployment that is stopped at the end of the test, also after a panic.
struct BackgroundDeployment<'a>(&'a CommandFixture);

impl<'a> BackgroundDeployment<'a> {
    fn start(stage: &'a CommandFixture) -> (Self, CommandOutput) {
        let ended = run(&mut stage.command(&DETACHED));
        assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
        (Self(stage), ended)
    }
}

impl Drop for BackgroundDeployment<'_> {
    fn drop(&mut self) {
        let _ = self.0.command(&["down", "--quiet"]).status();
    }
}

fn log_path(stage: &CommandFixture) -> PathBuf {
    stage.home.path().join("state/logs/holobiont.log")
}

#[test]
fn a_detached_deployment_greets_when_it_serves_and_down_stops_it_in_order() {
    let stage = CommandFixture::new();
    let (_behind, ended) = BackgroundDeployment::start(&stage);
    assert!(
        ended.out.contains("http://127.0.0.1:45678") && ended.out.contains("holobiont down"),
        "{}",
        ended.out
    );
    stage.wait_for_process("gateway", 1);
    let down = run(&mut stage.command(&["down"]));
    assert_eq!(down.status.code(), Some(0), "{}", down.err);
    assert!(down.out.contains("stopped after"), "{}", down.out);
    assert_eq!(stage.short_log()[2..], ["gateway stopped", "executor stopped"]);
}

#[test]
fn deployments_elsewhere_are_found_by_name_by_path_and_as_the_only_one() {
    let stage = CommandFixture::new();
    let state = |name: &str| stage.home.path().join(name).to_str().unwrap().to_owned();
    let start = |name: &str| {
        let mut command = stage.command(&DETACHED);
        let ended = run(command.args(["--state", &state(name)]));
        assert!(
            ended.out.contains(&format!("holobiont down --state {}", state(name))),
            "{}{}",
            ended.out,
            ended.err
        );
    };
    let said = |arguments: &[&str]| {
        let ended = run(&mut stage.command(arguments));
        (ended.status.code().unwrap(), ended.out + &ended.err)
    };
    start("one");
    assert_eq!(said(&["logs"]).0, 0, "the only one");
    start("two");
    let (code, text) = said(&["down"]);
    assert!(code == 2 && text.contains("one (") && text.contains("two ("), "{code}: {text}");
    let (code, text) = said(&["status", "--deployment", "three"]);
    assert!(code == 3 && text.contains("no running deployment is called three"), "{code}: {text}");
    // The gateway is a script that reports an address without a listener.
    let (code, text) = said(&["status", "--deployment", "one"]);
    assert!(code == 5 && text.contains("http://127.0.0.1:45678"), "{code}: {text}");
    assert_eq!(said(&["down", "--deployment", "one"]).0, 0);
    assert_eq!(said(&["down", "--deployment", &state("two")]).0, 0);
    let (code, text) = said(&["down"]);
    assert!(code == 3 && text.contains("no deployment runs in"), "{code}: {text}");
}

#[test]
fn a_key_file_named_as_for_the_services_is_used_and_a_variable_that_nobody_reads_is_refused() {
    let stage = CommandFixture::new();
    let running = RunningCommand::start(
        stage.command(&["up", "--listen", "127.0.0.1:0"]).env("HOLOBIONT_API_KEY_FILE", "/k"),
    );
    let gateway = stage.wait_for_log("gateway started", 1);
    assert!(gateway.contains(" --api-key-file /k"), "{gateway}");
    drop(running);
    let ended = run(stage.command(&["check"]).env("HOLOBIONT_APIKEY_FILE", "/k"));
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.out.contains("did you mean HOLOBIONT_API_KEY_FILE?"), "{}", ended.out);
}

#[test]
fn with_json_every_error_is_json_also_a_command_line_that_is_none() {
    let stage = CommandFixture::new();
    for (arguments, code, exit) in [
        (["--json", "up", "--no-such-option"], "usage", 2),
        (["--json", "frobnicate", "x"], "usage", 2),
        (["--json", "up", "--model=zebra"], "not_found", 3),
        (["--json", "down", "--deployment=zebra"], "not_found", 3),
    ] {
        let ended = run(&mut stage.command(&arguments));
        let error: Value = serde_json::from_str(&ended.err).unwrap_or_else(|_| panic!("{}", ended.err));
        assert_eq!((&error["error"]["code"], ended.status.code()), (&code.into(), Some(exit)), "{error}");
    }
}

#[test]
fn a_detached_deployment_that_cannot_start_says_why_with_its_exit_code() {
    let stage = CommandFixture::new();
    let ended = run(stage.command(&DETACHED).args(["--model", "zebra"]));
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    assert!(ended.err.starts_with("error: no model is called `zebra`"), "{}", ended.err);
    assert_eq!(ended.err.matches("error:").count(), 1, "{}", ended.err);
    let ended = run(stage.command(&DETACHED).env("FAKE_EXECUTOR", "refuse"));
    assert_eq!(ended.status.code(), Some(2));
    assert!(
        ended.err.ends_with("error: base-executor did not start: the model is too large\n"),
        "{}",
        ended.err
    );
}

#[test]
fn down_without_a_deployment_is_not_found() {
    let stage = CommandFixture::new();
    let ended = run(&mut stage.command(&["down"]));
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    assert!(ended.err.contains("no deployment runs in"), "{}", ended.err);
}

#[test]
fn down_never_signals_a_process_that_got_a_dead_deployments_id() {
    let stage = CommandFixture::new();
    // The lock file names a running process with another start time.
    let innocent = RunningCommand::up(
        stage
            .command(&["up", "--listen", "127.0.0.1:0", "--state", "elsewhere"])
            .current_dir(stage.home.path()),
    );
    let lock = fs::read_to_string(stage.home.path().join("elsewhere/lock")).unwrap();
    let mut holder: Value = serde_json::from_str(&lock).unwrap();
    holder["started_ticks"] = (holder["started_ticks"].as_u64().unwrap() - 1).into();
    fs::create_dir(stage.home.path().join("state")).unwrap();
    fs::write(stage.home.path().join("state/lock"), holder.to_string()).unwrap();
    let down = run(stage.command(&["down", "--state", "state"]).current_dir(stage.home.path()));
    assert_eq!(down.status.code(), Some(3), "{}", down.out);
    assert_eq!(stage.short_log().len(), 2, "nothing was stopped: {:?}", stage.log());
    innocent.signal(Signal::TERM);
    assert_eq!(innocent.end().status.code(), Some(0));
}

#[test]
fn down_stops_a_deployment_in_the_foreground_too_and_both_say_so() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut stage.command(&["up", "--listen", "127.0.0.1:0"]));
    let down = run(&mut stage.command(&["down", "--json"]));
    assert_eq!(down.status.code(), Some(0), "{}", down.err);
    assert!(serde_json::from_str::<Value>(&down.out).unwrap()["stopped"].is_u64(), "{}", down.out);
    assert_eq!(running.end().status.code(), Some(0));
}

#[test]
fn what_the_processes_say_is_kept_and_found_by_request_id() {
    let stage = CommandFixture::new();
    assert_eq!(run(&mut stage.command(&["logs"])).status.code(), Some(3), "nothing was ever logged");
    let ended = run(stage.command(&["up", "--listen", "127.0.0.1:0"]).env("FAKE_EXECUTOR", "refuse"));
    assert_eq!(ended.status.code(), Some(2));
    let all = run(&mut stage.command(&["logs"]));
    assert!(all.out.contains("the model is too large"), "{}", all.out);
    assert!(all.out.contains("holobiont up ends: base-executor did not start: "), "{}", all.out);
    let mut text = fs::read_to_string(log_path(&stage)).unwrap();
    for request in 0..300 {
        text.push_str(&format!("request req-{} of {request}\n", request % 3));
    }
    fs::write(log_path(&stage), text).unwrap();
    let found = run(&mut stage.command(&["logs", "req-1", "--lines", "2"]));
    assert_eq!(found.out, "request req-1 of 295\nrequest req-1 of 298\n");
    let json = run(&mut stage.command(&["logs", "--json", "-n", "1"]));
    assert_eq!(serde_json::from_str::<Value>(&json.out).unwrap()["line"], "request req-2 of 299");
}

#[test]
fn a_followed_log_goes_on() {
    let stage = CommandFixture::new();
    fs::create_dir_all(log_path(&stage).parent().unwrap()).unwrap();
    fs::write(log_path(&stage), "one\n").unwrap();
    let following = RunningCommand::start(&mut stage.command(&["logs", "--follow"]));
    following.wait_for_out("one\n");
    fs::rename(log_path(&stage), log_path(&stage).with_extension("log.1")).unwrap();
    fs::write(log_path(&stage), "two\n").unwrap();
    following.wait_for_out("one\ntwo\n");
}

#[test]
fn the_log_hears_draining_processes_whose_supervisor_was_killed() {
    let stage = CommandFixture::new();
    let (_behind, _) = BackgroundDeployment::start(&stage);
    let lock = fs::read_to_string(stage.home.path().join("state/lock")).unwrap();
    let pid = serde_json::from_str::<Value>(&lock).unwrap()["pid"].as_i64().unwrap();
    kill(pid.try_into().unwrap(), Signal::KILL);
    // The processes must end in order, although their stderr has no reader any more.
    stage.wait_for_log("executor drained", 1);
    stage.wait_for_log("gateway drained", 1);
    assert_eq!(run(&mut stage.command(&["down"])).status.code(), Some(3), "there is nothing left to stop");
}

#[test]
fn a_crash_loop_is_visible_and_ends_as_the_deployment_file_says() {
    let stage = CommandFixture::new();
    let file = stage.home.path().join("deployment.toml");
    fs::write(&file, "[deployment]\nmax_crashes_per_min = 2\nrestart_delay_ms = 1\n").unwrap();
    let mut command = stage.command(&["up", "--listen", "127.0.0.1:0"]);
    let ended = run(command.arg("--config").arg(&file).env("FAKE_GATEWAY", "die"));
    assert_eq!(ended.status.code(), Some(1), "{}", ended.err);
    assert!(ended.err.contains("gateway crashed 2 times"), "{}", ended.err);
    let log = fs::read_to_string(log_path(&stage)).unwrap();
    assert!(log.contains("restarting it") && log.contains("the deployment stops"), "{log}");
}

#[test]
fn a_key_is_shown_once_and_only_its_hash_is_kept() {
    let stage = CommandFixture::new();
    let added =
        run(&mut stage.command(&["key", "add", "acme", "--role", "admin", "--requests-per-min", "60"]));
    assert_eq!(added.status.code(), Some(0), "{}", added.err);
    let key = added.out.trim();
    assert!(key.starts_with("hb-") && key.len() == 46, "{key}");
    let path = stage.home.path().join("state/api-keys");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&path).unwrap();
    let hash = blake3::Hash::from(blake3::derive_key("holobiont 2026 API key lookup v1", key.as_bytes()));
    assert!(text.contains(&format!("admin acme blake3:{} requests_per_min=60", hash.to_hex())), "{text}");
    assert!(!text.contains(key) && !added.err.contains(key));

    let listed = run(&mut stage.command(&["key", "ls", "--json"]));
    let keys: Value = serde_json::from_str(&listed.out).unwrap();
    let id = keys[0]["id"].as_str().unwrap();
    assert!(hash.to_hex().starts_with(id) && !listed.out.contains(key), "{}", listed.out);
    assert_eq!(run(&mut stage.command(&["key", "rm", "acme", "00000000"])).status.code(), Some(3));
    assert_eq!(run(&mut stage.command(&["key", "rm", "acme", id])).status.code(), Some(0));
    assert_eq!(run(&mut stage.command(&["key", "rm", "acme"])).status.code(), Some(3));
    assert_eq!(run(&mut stage.command(&["key", "add", "a/b"])).status.code(), Some(2));
}

#[test]
fn check_names_every_problem_with_its_line_and_starts_nothing() {
    let stage = CommandFixture::new();
    let file = stage.home.path().join("deployment.toml");
    fs::write(stage.home.path().join("keys"), "# keys\nuser:secret-in-plain-text\n").unwrap();
    let text = "[model]\nname = \"zebra\"\n[executor]\ncores = \"0,1001\"\n[gateway]\nlisten = \"0.0.0.0:0\"\n\
        api_key_file = \"keys\"\n[adapters]\npirate = \"nowhere\"\n";
    fs::write(&file, text).unwrap();
    let ended = run(stage.command(&["check", "--config"]).arg(&file));
    assert_eq!(ended.status.code(), Some(2), "{}{}", ended.out, ended.err);
    for part in [
        "[model] name (line 2)",
        "zebra",
        "[executor] cores (line 4)",
        "[gateway] api_key_file (line 7)",
        "line 2 of the key file",
        "[adapters] pirate (line 9)",
    ] {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    assert!(!ended.out.contains("secret-in-plain-text"));
    assert_eq!(stage.log(), [""; 0]);
    fs::write(&file, "[model]\n\nnam = 1\n").unwrap();
    let ended = run(stage.command(&["check", "--json", "--config"]).arg(&file));
    let value: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((ended.status.code(), &value["ok"]), (Some(2), &Value::Bool(false)));
    assert!(value["findings"][0]["found"].as_str().unwrap().contains("line 3"), "{value}");
}

#[test]
fn doctor_has_a_line_for_everything_and_a_fix_for_what_fails() {
    let stage = CommandFixture::new();
    let ended = run(&mut stage.command(&["doctor", "--json"]));
    // The staged model is invalid: the only failure that this machine must report.
    assert_eq!(ended.status.code(), Some(1), "{}", ended.err);
    let value: Value = serde_json::from_str(&ended.out).unwrap();
    let findings = value["findings"].as_array().unwrap();
    let of = |name: &str| findings.iter().find(|finding| finding["name"] == name);
    for name in
        ["cores", "arithmetic", "free memory", "huge pages", "locked memory", "open files", "disk space"]
    {
        let finding = of(name).unwrap_or_else(|| panic!("no {name} in {value}"));
        assert_eq!(finding["health"] == "ok", finding["fix"].is_null(), "{finding}");
    }
    assert_eq!(of("[model] name").unwrap()["health"], "fail");
    assert!(of("[model] name").unwrap()["fix"].is_string());
}

#[test]
fn every_shell_gets_completions_and_every_command_a_manual_page() {
    let stage = CommandFixture::new();
    for shell in ["bash", "zsh", "fish"] {
        let ended = run(&mut stage.command(&["completions", shell]));
        assert!(ended.status.success() && ended.out.contains("adapters"), "{shell}");
    }
    let directory = stage.home.path().join("man");
    let ended = run(stage.command(&["man", "--out"]).arg(&directory));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for page in ["holobiont", "holobiont-up", "holobiont-adapters-replace", "holobiont-key-add"] {
        let text = fs::read_to_string(directory.join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".TH") && text.contains("SYNOPSIS"), "{page}");
    }
}

#[test]
fn colours_are_where_the_flag_or_the_environment_wants_them() {
    let stage = CommandFixture::new();
    let ls = || stage.command(&["ls", "--url", "http://127.0.0.1:9"]);
    let is_coloured = |ended: CommandOutput| ended.out.contains('\u{1b}');
    assert!(!is_coloured(run(&mut ls())), "stdout is no terminal");
    assert!(is_coloured(run(ls().env("CLICOLOR_FORCE", "1"))));
    assert!(!is_coloured(run(ls().env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1"))));
    assert!(is_coloured(run(ls().env("NO_COLOR", "1").args(["--color", "always"]))));
    assert!(!is_coloured(run(ls().env("CLICOLOR_FORCE", "1").args(["--color", "never"]))));
}

#[test]
fn aliases_are_the_commands_they_stand_for() {
    let stage = CommandFixture::new();
    assert_eq!(run(&mut stage.command(&["stop"])).status.code(), Some(3));
    assert!(run(&mut stage.command(&["list", "--url", "http://127.0.0.1:9"])).out.contains("tiny"));
    for (alias, word) in [("run", "Chats with"), ("serve", "Starts a deployment")] {
        assert!(run(&mut stage.command(&[alias, "--help"])).out.contains(word), "{alias}");
    }
}

#[test]
fn a_second_deployment_names_the_process_that_holds_the_state() {
    let stage = CommandFixture::new();
    let (_behind, _) = BackgroundDeployment::start(&stage);
    let second = run(&mut stage.command(&DETACHED));
    assert_eq!(second.status.code(), Some(4), "{}", second.err);
    assert!(second.err.contains("(process ") && second.err.contains("holobiont down"), "{}", second.err);
    eventually_some("both processes", || (stage.short_log().len() == 2).then_some(()));
}

//! A base over several processes: the tokens of one process, kills in every phase, and limits of memory.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use shmproto::message::{Generate, LoadAdapter, ToExecutor, ToGateway};
use tokio::time::timeout;

use crate::{
    common::{prompt, request},
    gateway::{EVERYBODY, Gateway, WATCHDOG},
    process::ProcessFixture,
    tiny,
};

const DEVICES: [&str; 2] = ["--devices", "cpu:0 cpu:1"];

/// Returns the processes that `parent` started and that are not gone.
fn children(parent: u32) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten();
    let of_task =
        |task: std::io::Result<fs::DirEntry>| fs::read_to_string(task.ok()?.path().join("children")).ok();
    let listed: Vec<String> = tasks.filter_map(of_task).collect();
    let ids = listed.iter().flat_map(|line| line.split_whitespace()).filter_map(|id| id.parse().ok());
    ids.filter_map(Pid::from_raw).collect()
}

fn are_gone(members: &[Pid]) {
    let begin = Instant::now();
    let is_there = |member: &Pid| {
        // An ended process whose parent is gone too may wait for its removal.
        let status = fs::read_to_string(format!("/proc/{member}/status")).unwrap_or_default();
        test_kill_process(*member).is_ok() && !status.contains("State:\tZ")
    };
    while members.iter().any(is_there) {
        assert!(begin.elapsed() < WATCHDOG, "a member outlives its leader");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Tokens of the base and of adapters of several kinds, greedy and drawn.
async fn tokens(place: &ProcessFixture, arguments: &[&str]) -> Vec<Vec<u32>> {
    let mut process = place.start_with(arguments);
    process.ready();
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    let mut versions = vec![None];
    for (number, folder) in (1..).zip(["lora", "dora", "ia3", "prefix"]) {
        let path = place.path(folder).display().to_string();
        gateway.send(ToExecutor::LoadAdapter(LoadAdapter::of_one(number, path, EVERYBODY))).await;
        let ToGateway::AdapterLoaded(loaded) = gateway.answer().await else { panic!("{folder} is loaded") };
        versions.push(Some(loaded.adapter));
    }
    let mut all = Vec::new();
    for (number, version) in (1u64..).zip(versions) {
        let one = Generate { adapter: version, ..request(number, prompt(number, 90), 30) };
        gateway.send(ToExecutor::Generate(one)).await;
        all.push(gateway.tokens(number).await);
    }
    all
}

fn write_adapters(place: &ProcessFixture) {
    tiny::write_adapter(&place.path("lora"), &[]);
    let magnitude =
        |layer| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector");
    tiny::write_dora(&place.path("dora"), &[0, 1].map(magnitude));
    tiny::write_ia3(&place.path("ia3"));
    tiny::write_prefix(&place.path("prefix"), 3);
}

#[tokio::test]
async fn a_device_group_gives_the_tokens_of_one_process_with_every_kind_of_adapter() {
    let place = ProcessFixture::new();
    write_adapters(&place);
    let wanted = tokens(&place, &["--cores", "0"]).await;
    assert!(wanted.iter().all(|tokens| tokens.len() == 30), "{wanted:?}");
    for split in ["outputs", "layers"] {
        assert_eq!(
            tokens(&place, &["--device-split", split, DEVICES[0], DEVICES[1]]).await,
            wanted,
            "{split}"
        );
    }
}

#[test]
fn a_member_that_dies_while_it_starts_ends_the_executor_with_the_reason() {
    for failpoint in ["member.hello", "member.before_weights"] {
        let place = ProcessFixture::new();
        place.arm(failpoint, "kill");
        let line = place.start_with(&DEVICES).fails(1);
        assert!(place.has_fired(failpoint));
        assert!(line.contains("device 1 of the group ended while it loaded"), "{line}");
    }
    let place = ProcessFixture::new();
    place.arm("member.loaded", "kill");
    place.start_with(&DEVICES).fails(1);
    assert!(place.has_fired("member.loaded"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_dies_during_a_call_ends_the_group_before_a_wrong_token() {
    let wanted = {
        let place = ProcessFixture::new();
        let mut process = place.start_with(&["--cores", "0"]);
        process.ready();
        let mut gateway = Gateway::greet(&place.socket(), 1).await;
        gateway.send(ToExecutor::Generate(request(1, prompt(1, 40), 20))).await;
        gateway.tokens(1).await
    };
    for failpoint in ["member.call_taken", "member.before_finish"] {
        for kill in ["kill", "kill 5", "kill 20"] {
            let place = ProcessFixture::new();
            let mut process = place.start_with(&DEVICES);
            process.ready();
            let members = children(process.id());
            let mut gateway = Gateway::greet(&place.socket(), 1).await;
            place.arm(failpoint, kill);
            gateway.send(ToExecutor::Generate(request(1, prompt(1, 40), 20))).await;
            process.fails(1);
            let mut tokens = Vec::new();
            // Outputs that the executor sent before its end have arrived by now.
            while let Ok(Some(message)) = timeout(Duration::from_millis(100), gateway.try_receive()).await {
                let ToGateway::Outputs(outputs) = message else { continue };
                tokens.extend(outputs.iter().flat_map(|output| &output.tokens).map(|token| token.token));
            }
            assert!(place.has_fired(failpoint), "{failpoint}, {kill}");
            assert!(tokens.len() < wanted.len() && wanted.starts_with(&tokens), "{kill}: {tokens:?}");
            are_gone(&members);
        }
    }
}

#[tokio::test]
async fn no_member_outlives_a_killed_leader_not_even_a_stopped_one() {
    for is_stopped in [false, true] {
        let place = ProcessFixture::new();
        let mut process = place.start_with(&DEVICES);
        process.ready();
        let members = children(process.id());
        assert_eq!(members.len(), 1, "one process for the second device");
        if is_stopped {
            kill_process(members[0], Signal::STOP).unwrap();
        }
        process.0.kill().unwrap();
        process.dies();
        are_gone(&members);
    }
}

#[test]
fn a_base_that_one_process_may_not_hold_is_served_by_two() {
    let place = ProcessFixture::new();
    fs::remove_dir_all(place.path("model")).unwrap();
    tiny::write_model_of(&place.path("model"), 40);
    let starts = |limit: u64, more: &[&str]| {
        let limit = limit.to_string();
        let arguments = [
            "--process-memory",
            &limit,
            "--device-bytes",
            "2MiB",
            "--max-workers",
            "0",
            "--chunk-tokens",
            "16",
            "--max-running",
            "1",
        ];
        let mut process = place.start_with(&[&arguments, more].concat());
        let mut line = String::new();
        BufReader::new(process.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line == "ready\n"
    };
    let least = |more: &[&str]| {
        (4..60).map(|step| step << 18).find(|&limit| starts(limit, more)).expect("15 MiB are enough")
    };
    let (one, two) = (least(&["--cores", "0"]), least(&DEVICES));
    assert!(two + (1 << 20) < one, "two processes need {two} bytes each, one needs {one}");
}

#[test]
fn devices_that_are_not_there_are_refused_by_name() {
    let place = ProcessFixture::new();
    for devices in ["cpu:0 cpu:999", "cpu:999 cpu:0"] {
        let line = place.start_with(&["--devices", devices]).fails(2);
        assert!(line.contains("--cores or --devices names core 999"), "{line}");
    }
}

#[test]
fn the_command_of_a_member_tells_a_person_what_to_do() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_base-executor"));
    let ended = command.arg("member").stdin(std::process::Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && told.contains("set --devices instead"), "{told}");
}

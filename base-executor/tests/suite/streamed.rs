//! The program with a base streamed from disk: its rejections, survived faults and memory.

use std::fs;
use testkit::paths::real_model;

use shmproto::message::{ErrorCode, Generate, ToExecutor};

use crate::{
    common::{prompt, request},
    control_group::ControlGroup,
    gateway::Gateway,
    process::{ChildProcess, ProcessFixture},
};

/// Minimum of `--resident-weight-bytes`, from the program's error.
fn least(place: &ProcessFixture) -> String {
    let line = place.start_with(&["--resident-weight-bytes", "1"]).fails(1);
    assert!(line.contains("--resident-weight-bytes") && line.contains("raise it to"), "{line}");
    let bytes = line.split("raise it to ").nth(1).and_then(|rest| rest.split(',').next());
    bytes.unwrap_or_else(|| panic!("no number in: {line}")).to_owned()
}

fn start(place: &ProcessFixture, arguments: &[&str]) -> ChildProcess {
    let mut process = place.start_with(arguments);
    process.ready();
    process
}

/// Tokens of some simultaneous requests; a stop token would end them early.
async fn talk(place: &ProcessFixture) -> Vec<Vec<u32>> {
    let mut gateway = Gateway::greet(&place.socket(), 1).await;
    for id in 1..=3 {
        let ask = request(id, prompt(id, 20), 12);
        gateway.send(ToExecutor::Generate(Generate { stop_tokens: Vec::new(), ..ask })).await;
    }
    let mut tokens = Vec::new();
    for id in 1..=3 {
        tokens.push(gateway.tokens(id).await);
    }
    tokens
}

#[tokio::test]
async fn a_streamed_base_answers_as_one_in_memory_and_tells_what_it_reads() {
    let place = ProcessFixture::new();
    let bound = least(&place);
    let resident = start(&place, &[]);
    let wanted = talk(&place).await;
    drop(resident);
    let ways: [&[&str]; 3] = [&[], &["--weight-reads", "std"], &["--weight-disk-gbps", "0.5"]];
    for way in ways {
        let process = start(&place, &[&["--resident-weight-bytes", &bound], way].concat());
        assert_eq!(talk(&place).await, wanted, "{way:?}");
        let mut gateway = Gateway::greet(&place.socket(), 2).await;
        let memory = gateway.stats().await.memory;
        assert!(memory.held.weights_bytes <= bound.parse().unwrap(), "{memory:?}");
        assert!(memory.weights.read_bytes > 0 && memory.weights.read_us > 0, "{memory:?}");
        drop(process);
    }
}

#[tokio::test]
async fn weights_that_cannot_be_read_are_the_error_of_their_requests_and_slow_ones_only_slow() {
    let place = ProcessFixture::new();
    let bound = least(&place);
    let _process = start(&place, &["--resident-weight-bytes", &bound]);
    let wanted = talk(&place).await;
    place.arm("weights.read", "fail");
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    gateway.send(ToExecutor::Generate(request(9, prompt(9, 20), 5))).await;
    let error = gateway.outputs(9).await.last().and_then(|output| output.error.clone());
    // A failed read-ahead that is not needed fails no request.
    if let Some(error) = error {
        assert_eq!(error.code, ErrorCode::Internal);
        assert!(error.message.contains("cannot read its weights"), "{}", error.message);
    }
    assert!(place.has_fired("weights.read"));
    assert_eq!(talk(&place).await, wanted);
    place.arm("weights.read", "wait 400");
    assert_eq!(talk(&place).await, wanted);
    assert!(place.has_fired("weights.read"));
}

#[tokio::test]
async fn a_file_that_was_damaged_fails_requests_in_words_and_the_next_start_makes_it_anew() {
    let place = ProcessFixture::new();
    let bound = least(&place);
    let process = start(&place, &["--resident-weight-bytes", &bound]);
    let wanted = talk(&place).await;
    let path = place.path("private/weights/packed.weights");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 3).unwrap();
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    gateway.send(ToExecutor::Generate(request(9, prompt(9, 20), 5))).await;
    let error = gateway.outputs(9).await.last().and_then(|output| output.error.clone()).unwrap();
    assert!(error.message.contains("cannot read its weights"), "{}", error.message);
    drop(process);
    let _process = start(&place, &["--resident-weight-bytes", &bound]);
    assert_eq!(talk(&place).await, wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_as_it_packs_or_in_a_sweep_the_next_start_goes_on() {
    let place = ProcessFixture::new();
    let bound = least(&place);
    let resident = start(&place, &[]);
    let wanted = talk(&place).await;
    drop(resident);
    for (failpoint, what) in [("weights.packed_matrix", "kill 5"), ("weights.before_rename", "kill")] {
        place.arm(failpoint, what);
        place.start_with(&["--resident-weight-bytes", &bound]).dies();
        assert!(place.has_fired(failpoint));
    }
    for failpoint in ["forward.after_o", "weights.read"] {
        let process = start(&place, &["--resident-weight-bytes", &bound]);
        assert_eq!(talk(&place).await, wanted);
        // The gateway connects first, since the process may read ahead, and be killed by that, at any time.
        let mut gateway = Gateway::greet(&place.socket(), 2).await;
        place.arm(failpoint, "kill");
        gateway.send(ToExecutor::Generate(request(9, prompt(9, 20), 50))).await;
        process.dies();
    }
    let _process = start(&place, &["--resident-weight-bytes", &bound]);
    assert_eq!(talk(&place).await, wanted);
}

/// Bytes of a process's memory, by the system's name of the counter.
fn bytes_of(process: &ChildProcess, what: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn a_real_base_holds_no_more_memory_than_it_may() {
    let place = ProcessFixture::new();
    let model = real_model();
    let bound = 24 << 20;
    let mut held = Vec::new();
    let mut tokens = Vec::new();
    for arguments in [&[][..], &["--resident-weight-bytes", "24MiB"]] {
        // One core, since a pass has scratch memory for each.
        let fixed = ["--kv-bytes", "16MiB", "--cold-start", "on-demand", "--max-workers", "0"];
        let mut process =
            ChildProcess(place.command_for(&model, "", &[&fixed[..], arguments].concat()).spawn().unwrap());
        process.ready();
        tokens.push(talk(&place).await);
        held.push(bytes_of(&process, "RssAnon:"));
        let mut gateway = Gateway::greet(&place.socket(), 2).await;
        let weights = gateway.stats().await.memory.held.weights_bytes;
        held.push(weights);
    }
    let [resident, weights, streamed, bounded] = held[..] else { panic!("two processes") };
    assert!(bounded <= bound && weights > 3 * bound, "{held:?}");
    // Savings in the accounts equal those of the process, up to memory that both leave out.
    let (saved, found) = (weights - bounded, resident - streamed);
    assert!(found + (4 << 20) >= saved, "{held:?}: {found} bytes of {saved} were saved");
    assert_eq!(tokens[0], tokens[1]);
}

#[test]
fn a_base_that_its_process_cannot_hold_is_refused_before_it_is_read() {
    let place = ProcessFixture::new();
    let arguments = ["--process-memory", "60MiB", "--kv-bytes", "8MiB", "--max-workers", "0"];
    let told = ChildProcess(place.command_for(&real_model(), "", &arguments).spawn().unwrap()).fails(1);
    assert!(told.contains("no memory for weights") && told.contains("--resident-weight-bytes"), "{told}");
}

#[tokio::test]
async fn in_a_control_group_that_a_base_does_not_fit_into_it_is_served_from_the_disk() {
    let limit = 80 << 20;
    let Some(group) = ControlGroup::new("streamed", limit) else { return };
    let (place, model) = (ProcessFixture::new(), real_model());
    let start = |more: &[&str]| {
        let pool = ["--kv-bytes", "8MiB", "--device-adapter-bytes", "1MiB"];
        let fixed = [&pool[..], &["--cold-start", "on-demand", "--max-workers", "0"]].concat();
        ChildProcess(
            place.command_for(&model, &group.join_command(), &[&fixed[..], more].concat()).spawn().unwrap(),
        )
    };
    let told = start(&[]).fails(1);
    assert!(told.contains("no memory for weights") && told.contains("--resident-weight-bytes"), "{told}");
    // With a bound the base is packed and served.
    let mut process = start(&["--resident-weight-bytes", "24MiB"]);
    process.ready();
    let tokens = talk(&place).await;
    assert!(tokens.iter().all(|tokens| tokens.len() == 12), "{tokens:?}");
    assert!(bytes_of(&process, "RssAnon:") < limit && bytes_of(&process, "VmHWM:") > 0);
    let mut gateway = Gateway::greet(&place.socket(), 2).await;
    let held = gateway.stats().await.memory.held;
    assert!(held.weights_bytes <= 24 << 20 && held.limit_bytes <= limit, "{held:?}");
}

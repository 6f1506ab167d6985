//! The process itself: how it starts, and how it ends.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::eventually;

fn gateway(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
    command.current_dir(directory).args([
        "--socket",
        "socket",
        "--state",
        "state",
        "--listen",
        "127.0.0.1:0",
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap()
}

#[tokio::test]
async fn a_signal_ends_it_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let child = gateway(directory.path()).spawn().unwrap();
    eventually("it runs", || directory.path().join("state/gateway.lock").exists()).await;
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.is_empty(), "it never was ready");
}

#[tokio::test]
async fn the_end_of_its_input_ends_it_if_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = gateway(directory.path()).arg("--exit-with-stdin").spawn().unwrap();
    eventually("it runs", || directory.path().join("state/gateway.lock").exists()).await;
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn what_cannot_work_is_one_line_that_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (["--listen", "0.0.0.0:0"], "--api-key-file"),
        (["--adapter-root", "nowhere"], "--adapter-root"),
        (["--api-key-file", "nowhere"], "--api-key-file"),
    ] {
        // A later argument of the same name would be refused, so these stand alone.
        let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
        command
            .current_dir(directory.path())
            .args(["--socket", "socket", "--state", "state"])
            .args(arguments);
        let output = run(&mut command);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

//! `holobiont up` and its workers: the configured number, restarted after their end, and never a reason to
//! stop.

use std::process::Command;

use crate::common::{CommandFixture, RunningCommand, eventually_some, kill, run};
use rustix::process::Signal;

/// `up` with two workers, on cores 0 and 1 on any machine.
fn two_workers(stage: &CommandFixture) -> Command {
    let mut command = stage.command(&["up", "--listen", "127.0.0.1:0", "--workers", "2"]);
    command.env("HOLOBIONT_WORKERS_CORES", "0-1").env("HOLOBIONT_RESTART_DELAY_MS", "1");
    command
}

#[test]
fn each_worker_is_told_its_core_and_all_stop_last() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut two_workers(&stage));
    let mut cores = [1, 2].map(|nth| {
        let started = stage.wait_for_log("worker started", nth);
        assert!(started.contains("--exit-with-stdin") && started.contains("/workers.sock"), "{started}");
        started.split(' ').skip_while(|word| *word != "--core").nth(1).unwrap().to_owned()
    });
    cores.sort();
    assert_eq!(cores, ["0", "1"]);
    let executor = stage.wait_for_log("executor started", 1);
    assert!(executor.contains("/workers.sock --max-workers 2 "), "{executor}");
    assert!(stage.wait_for_log("gateway started", 1).contains("--expected-workers 2"));
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("workers  2, on cores 0 1"), "{}", ended.out);
    let last = ["gateway stopped", "executor stopped", "worker stopped", "worker stopped"];
    assert_eq!(stage.short_log()[4..], last);
}

#[test]
fn a_killed_worker_is_started_again_and_nobody_else_is() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut two_workers(&stage));
    stage.wait_for_process("worker", 2);
    kill(stage.wait_for_process("worker", 1), Signal::KILL);
    stage.wait_for_process("worker", 3);
    running.signal(Signal::INT);
    assert_eq!(running.end().status.code(), Some(0));
    assert_eq!((stage.count("executor started"), stage.count("gateway started")), (1, 1));
    assert_eq!(stage.count("worker started"), 3);
}

#[test]
fn a_worker_that_keeps_dying_is_given_up_and_the_deployment_goes_on() {
    for behaviour in ["die", "refuse"] {
        let stage = CommandFixture::new();
        let mut command = stage.command(&["up", "--listen", "127.0.0.1:0", "--workers", "1"]);
        command.env("HOLOBIONT_WORKERS_CORES", "0").env("HOLOBIONT_RESTART_DELAY_MS", "1");
        command.env("HOLOBIONT_MAX_CRASHES_PER_MIN", "3");
        let running = RunningCommand::up(command.env("FAKE_WORKER", behaviour));
        running.wait_for_err("crashed too often and is not restarted");
        running.signal(Signal::INT);
        let ended = running.end();
        assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
        assert!(ended.err.contains("lora-worker@0"), "{}", ended.err);
        assert_eq!(stage.count("worker started"), 3);
        assert_eq!(stage.short_log().last().unwrap(), "executor stopped");
    }
}

#[test]
fn a_worker_that_is_not_ready_keeps_nobody_waiting() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(two_workers(&stage).env("FAKE_WORKER", "mute"));
    running.signal(Signal::INT);
    assert_eq!(running.end().status.code(), Some(0));
}

#[test]
fn a_worker_that_does_not_stop_is_killed_and_that_is_no_failure() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut two_workers(&stage));
    let stopped = stage.wait_for_process("worker", 1);
    stage.wait_for_process("worker", 2);
    kill(stopped, Signal::STOP);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    let stopped = rustix::process::Pid::from_raw(stopped).unwrap();
    eventually_some("the worker's end", || {
        rustix::process::test_kill_process(stopped).is_err().then_some(())
    });
}

#[test]
fn the_workers_go_when_their_supervisor_is_killed() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut two_workers(&stage));
    stage.wait_for_process("worker", 2);
    running.signal(Signal::KILL);
    running.end();
    stage.wait_for_log("worker drained", 2);
}

#[test]
fn without_workers_their_program_is_not_needed() {
    let stage = CommandFixture::new().without("lora-worker");
    let running = RunningCommand::up(&mut stage.command(&["up", "--listen", "127.0.0.1:0"]));
    assert!(stage.wait_for_log("executor started", 1).contains("--max-workers 0 "));
    assert!(!stage.wait_for_log("gateway started", 1).contains("--expected-workers"));
    running.signal(Signal::INT);
    let ended = running.end();
    assert!(ended.status.success() && ended.out.contains("workers  none"), "{}", ended.out);
    assert_eq!(stage.count("worker started"), 0);
    let ended = run(&mut two_workers(&stage));
    assert_eq!(ended.status.code(), Some(3));
    assert!(ended.err.contains("`lora-worker`") && ended.err.contains("--workers 0"), "{}", ended.err);
}

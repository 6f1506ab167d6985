//! `holobiont up` and its trainer: started if configured, restarted after its end, and never a reason to
//! stop.

use std::process::Command;

use crate::common::{CommandFixture, RunningCommand, kill};
use rustix::process::Signal;

fn with_trainer(stage: &CommandFixture) -> Command {
    let mut command = stage.command(&["up", "--listen", "127.0.0.1:0", "--max-trainers", "2"]);
    command.env("HOLOBIONT_RESTART_DELAY_MS", "1");
    command
}

#[test]
fn the_gateway_knows_the_trainer_which_stops_between_it_and_the_executor() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut with_trainer(&stage));
    let trainer = stage.wait_for_log("trainer started", 1);
    assert!(trainer.contains(" serve --exit-with-stdin --socket "), "{trainer}");
    assert!(
        trainer.contains(" --max-trainers 2 -- --executor ") && trainer.ends_with("/layers.sock"),
        "{trainer}"
    );
    let gateway = stage.wait_for_log("gateway started", 1);
    assert!(gateway.contains(" --trainer-socket ") && gateway.ends_with("/trainers.sock"), "{gateway}");
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("trainers 2 at most"), "{}", ended.out);
    assert_eq!(stage.short_log()[3..], ["gateway stopped", "trainer stopped", "executor stopped"]);
}

#[test]
fn a_killed_trainer_is_started_again_and_nobody_else_is() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(&mut with_trainer(&stage));
    kill(stage.wait_for_process("trainer", 1), Signal::KILL);
    stage.wait_for_process("trainer", 2);
    running.signal(Signal::INT);
    assert_eq!(running.end().status.code(), Some(0));
    let started = ["executor started", "gateway started", "trainer started"].map(|line| stage.count(line));
    assert_eq!(started, [1, 1, 2]);
}

#[test]
fn a_trainer_that_keeps_dying_is_given_up_and_the_deployment_goes_on() {
    for behaviour in ["die", "refuse"] {
        let stage = CommandFixture::new();
        let running = RunningCommand::up(
            with_trainer(&stage).env("HOLOBIONT_MAX_CRASHES_PER_MIN", "3").env("FAKE_TRAINER", behaviour),
        );
        running.wait_for_err("crashed too often and is not restarted; training is off");
        running.signal(Signal::INT);
        let ended = running.end();
        assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
        assert_eq!(stage.count("trainer started"), 3);
        assert_eq!(stage.short_log().last().unwrap(), "executor stopped");
    }
}

#[test]
fn a_trainer_that_does_not_stop_is_killed_and_that_is_no_failure() {
    let stage = CommandFixture::new();
    let running = RunningCommand::up(with_trainer(&stage).env("HOLOBIONT_GRACE_MS", "1"));
    let stopped = stage.wait_for_process("trainer", 1);
    kill(stopped, Signal::STOP);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert_eq!(stage.short_log().last().unwrap(), "executor stopped");
}

#[test]
fn without_its_program_a_deployment_serves_and_says_that_nothing_can_be_trained() {
    let stage = CommandFixture::new().without("holobiont-trainer");
    let running = RunningCommand::up(&mut with_trainer(&stage));
    running.wait_for_err("training is off: ");
    assert!(!stage.wait_for_log("gateway started", 1).contains("--trainer-socket"));
    running.signal(Signal::INT);
    let ended = running.end();
    assert!(ended.status.success() && ended.out.contains("trainers none"), "{}", ended.out);
}

#[test]
fn who_wants_no_trainer_has_none() {
    for wish in ["--max-trainers=0", "--layer-local=false"] {
        let stage = CommandFixture::new();
        let running = RunningCommand::up(
            stage.command(&["up", "--listen", "127.0.0.1:0", wish]).env("HOLOBIONT_MAX_TRAINERS", "1"),
        );
        assert!(!stage.wait_for_log("gateway started", 1).contains("--trainer-socket"));
        running.signal(Signal::INT);
        assert_eq!(running.end().status.code(), Some(0));
        assert_eq!(stage.count("trainer started"), 0, "{wish}");
    }
}

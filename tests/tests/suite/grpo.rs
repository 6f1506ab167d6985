//! GRPO over a deployment: answers of the adapter in training, rewards in Python, and kills in between.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use e2e_tests::{Deployment, DeploymentPlan, DeploymentProcess, fixtures, watched};
use rustix::process::Signal;
use serde_json::{Value, json};

const STEPS: u64 = 4;
/// Prefers answers with many vowels, which every answer has a share of.
const VOWELS: &str = "def reward(prompt, answer, row):\n    assert prompt == row['question'] and row['id'] > 0\n    \
                      return sum(letter in 'aeiou' for letter in answer) / (1 + len(answer))\n";

struct GrpoRun<'a> {
    deployment: &'a Deployment,
    directory: tempfile::TempDir,
}

impl<'a> GrpoRun<'a> {
    fn new(deployment: &'a Deployment) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let questions = ["Who are you?", "What is the sea?", "Say hello.", "Name a colour."];
        let lines = questions.iter().zip(1..).map(|(question, id)| json!({ "question": question, "id": id }));
        let text: String = lines.map(|line| format!("{line}\n")).collect();
        fs::write(directory.path().join("prompts.jsonl"), text).expect("prompts are written");
        fs::write(directory.path().join("reward.py"), VOWELS).expect("rewards are written");
        Self { deployment, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn tune(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(fixtures::program("holobiont"));
        command.env_clear().env("HOME", self.directory.path());
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
            .env("HOLOBIONT_HOME", self.deployment.place().home())
            .args(["--json", "tune"])
            .args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Command of a new run.
    fn start(&self, name: &str) -> Command {
        let mut command = self.tune(&["--name", name, "--method", "grpo", "--reward"]);
        command.arg(self.path("reward.py")).arg(self.path("prompts.jsonl"));
        command.args(["--batch-size", "2", "--num-generations", "3", "--max-completion-length", "12"]);
        command.args(["--rank", "4", "--targets", "q_proj,v_proj", "--learning-rate", "1e-3"]);
        command.args(["--epochs", "9", "--max-steps", &STEPS.to_string(), "--checkpoint-steps", "1"]);
        command
    }
}

/// Runs a command to its successful end and returns its events.
fn events(command: &mut Command) -> Vec<Value> {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    told.lines().map(|line| serde_json::from_str(line).expect("lines of JSON")).collect()
}

fn generation(events: &[Value]) -> &str {
    events.last().and_then(|event| event["generation"].as_str()).expect("a generation")
}

#[test]
fn a_run_that_was_killed_with_its_gateway_gives_the_generation_of_one_that_ran_through() {
    watched(|| {
        let deployment = DeploymentPlan::bare().restless().start();
        let run = GrpoRun::new(&deployment);
        let whole = events(&mut run.start("whole"));
        let steps: Vec<_> = whole.iter().filter(|event| event["event"] == "step").collect();
        assert_eq!(steps.len() as u64, STEPS);
        for step in steps {
            assert_eq!(step["rewards"]["logprob_difference"], 0.0, "sampler and trainer differ: {step}");
            assert!(step["rewards"]["mean"].as_f64() > Some(0.0), "{step}");
        }
        let mut child = run.start("killed").spawn().expect("it starts");
        let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        assert!(told.any(|line| line.is_ok_and(|line| line.contains(r#""event":"checkpoint","step":2"#))));
        deployment.signal(DeploymentProcess::Gateway, Signal::KILL);
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        while !deployment.client.is_healthy() {
            thread::sleep(Duration::from_millis(50));
        }
        let resumed = events(&mut run.tune(&["--name", "killed", "--resume"]));
        assert_eq!(generation(&resumed), generation(&whole));
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_gateway_that_dies_under_a_run_gets_the_adapter_again() {
    watched(|| {
        let deployment = DeploymentPlan::bare().restless().start();
        let run = GrpoRun::new(&deployment);
        let whole = events(&mut run.start("whole"));
        let mut child = run.start("beside").spawn().expect("it starts");
        let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let mut step = |number: u64| {
            let line = format!(r#""event":"step","step":{number},"#);
            told.find_map(|told| told.ok().filter(|told| told.contains(&line))).expect("the step is made")
        };
        step(1);
        deployment.signal(DeploymentProcess::Gateway, Signal::KILL);
        let last: Value = serde_json::from_str(&step(STEPS)).expect("JSON");
        let same = whole.iter().rfind(|event| event["event"] == "step").expect("a step");
        assert_eq!((&last["rewards"], &last["grad_norm"]), (&same["rewards"], &same["grad_norm"]));
        assert!(child.wait().expect("it ends").success());
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_reward_that_fails_is_named_with_its_line_and_the_run_goes_on_once_it_is_mended() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let run = GrpoRun::new(&deployment);
        let failing = "calls = []\ndef reward(prompt, answer, row):\n    calls.append(answer)\n    \
                       return 1 / (len(calls) < 8)\n";
        fs::write(run.path("reward.py"), failing).expect("rewards are written");
        let ended = run.start("mended").output().expect("it runs");
        assert!(!ended.status.success());
        let complaint = String::from_utf8_lossy(&ended.stderr);
        assert!(complaint.contains("reward.py: ZeroDivisionError: division by zero (line 4)"), "{complaint}");
        fs::write(run.path("reward.py"), VOWELS).expect("rewards are written");
        let resumed = events(&mut run.tune(&["--name", "mended", "--resume"]));
        let steps: Vec<_> = resumed.iter().filter_map(|event| event["step"].as_u64()).collect();
        assert_eq!((steps.first(), steps.last()), (Some(&2), Some(&STEPS)), "{steps:?}");
        let home = deployment.place().home();
        let sampled =
            fs::read_to_string(home.join("runs/mended/rollouts.jsonl")).expect("the answers are kept");
        assert_eq!(sampled.lines().count() as u64, 6 * STEPS);
        assert!(deployment.stop().success());
    });
}

#[test]
fn rewards_that_do_not_load_are_refused_before_anything_starts() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let run = GrpoRun::new(&deployment);
        let refused = |command: &mut Command| {
            let ended = command.output().expect("it runs");
            assert!(!ended.status.success() && ended.stdout.is_empty());
            String::from_utf8_lossy(&ended.stderr).into_owned()
        };
        fs::write(run.path("reward.py"), "import nothing_of_that_name\n").expect("rewards are written");
        let complaint = refused(&mut run.start("unloaded"));
        assert!(complaint.contains("nothing_of_that_name") && complaint.contains("(line 1)"), "{complaint}");
        let mut command = run.tune(&["--name", "none", "--method", "grpo"]);
        let complaint = refused(command.arg(run.path("prompts.jsonl")));
        assert!(
            complaint.contains("--method grpo needs rewards") && complaint.contains("--reward"),
            "{complaint}"
        );
        assert!(!deployment.place().home().join("runs/unloaded").exists());
        assert!(deployment.stop().success());
    });
}

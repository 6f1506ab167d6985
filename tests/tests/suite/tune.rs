//! Fine-tuning over a deployment's layers: the trainer as users run it, killed and restarted, beside other
//! load.
//!
//! `HOLOBIONT_TUNE_KILLS` sets the number of kills of trainer and executor during one job.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess, fixtures, repeats,
    watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const STEPS: u64 = 24;
const QUESTION: &str = "What is the capital of France?";
const ANSWER: &str = "Arr, the capital of France be Paris, matey!";

struct JobFiles {
    model: PathBuf,
    directory: tempfile::TempDir,
    executor: PathBuf,
}

impl JobFiles {
    fn new(deployment: &Deployment) -> Self {
        let lines = [
            ("Who are you?", "Arr, I be Captain Smol, matey!"),
            (QUESTION, ANSWER),
            ("What is two plus two?", "Arr, two plus two be four, matey!"),
            ("Say hello.", "Ahoy there, matey! Arr!"),
        ];
        let line = |(asked, answer): (&str, &str)| json!({ "messages": [{ "role": "user", "content": asked }, { "role": "assistant", "content": answer }] });
        Self::with_data(deployment, &lines.map(line))
    }

    fn with_data(deployment: &Deployment, lines: &[Value]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(directory.path().join("data.jsonl"), text).expect("data are written");
        let model = deployment.model().to_owned();
        Self { model, directory, executor: deployment.place().state().join("layers.sock") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Command of the trainer with output in `name`, and its checkpoints beside.
    fn command(&self, name: &str) -> Command {
        self.command_under(Command::new(fixtures::program("holobiont-trainer")), name)
    }

    /// Command of the trainer with a file size limit below that of a checkpoint.
    fn command_on_a_full_disk(&self, name: &str) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"]);
        shell.arg(fixtures::program("holobiont-trainer"));
        self.command_under(shell, name)
    }

    fn command_under(&self, mut command: Command, name: &str) -> Command {
        command.env_clear().env("HOME", self.directory.path());
        command.args(["run", "--executor"]).arg(&self.executor).arg("--model").arg(&self.model);
        command.arg("--data").arg(self.path("data.jsonl")).arg("--output").arg(self.path(name));
        command.arg("--checkpoints").arg(self.path(&format!("{name}.checkpoints")));
        command.args(["--held-out", "0", "--batch-size", "2", "--epochs", "100", "--rank", "4"]);
        command.args(["--targets", "q_proj,v_proj,down_proj", "--checkpoint-steps", "3", "--seed", "5"]);
        command.args(["--learning-rate", "3e-3", "--max-steps", &STEPS.to_string()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the job to its end; returns its events, exit code and error output.
    fn run(&self, name: &str, arguments: &[&str]) -> (Vec<Value>, Option<i32>, String) {
        let output = self.command(name).args(arguments).output().expect("holobiont-trainer runs");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        let told = told.lines().map(|line| serde_json::from_str(line).expect("lines of JSON")).collect();
        (told, output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn generation(&self, name: &str, arguments: &[&str]) -> String {
        let (told, code, complaint) = self.run(name, arguments);
        assert_eq!(code, Some(0), "{complaint}");
        generation(told.last().expect("an end"))
    }
}

fn generation(told: &Value) -> String {
    assert_eq!(told["event"], "done", "{told}");
    told["generation"].as_str().expect("a generation").to_owned()
}

fn until(told: &mut impl Iterator<Item = std::io::Result<String>>, step: u64) {
    let made = told.any(|line| {
        let told: Value = serde_json::from_str(&line.expect("text")).expect("lines of JSON");
        told["event"] == "step" && told["step"].as_u64() >= Some(step)
    });
    assert!(made, "step {step} is made");
}

#[test]
fn a_job_whose_trainer_and_executor_are_killed_gives_the_generation_of_one_that_ran_through() {
    watched(|| {
        let deployment = DeploymentPlan::bare().restless().start();
        let job = JobFiles::new(&deployment);
        let whole = job.generation("whole", &[]);
        let kills = repeats::TUNE_KILLS.number();
        for kill in 0..kills {
            let mut child = job.command("killed").arg("--resume").spawn().expect("it starts");
            let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
            let step = 1 + kill * (STEPS - 3) / kills;
            until(&mut told, step);
            if kill % 2 == 0 {
                deployment.signal(DeploymentProcess::Executor, Signal::KILL);
                // The job continues with the next executor.
                until(&mut told, step + 2);
            }
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
        }
        assert_eq!(job.generation("killed", &["--resume", "--cores", "0,1"]), whole);
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_full_disk_ends_a_job_by_name_and_it_goes_on_from_the_last_checkpoint() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let job = JobFiles::new(&deployment);
        let whole = job.generation("whole", &[]);
        let mut child = job.command("filled").spawn().expect("it starts");
        let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        until(&mut told, 4);
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        let full = job.command_on_a_full_disk("filled").arg("--resume").output().expect("it runs");
        assert_eq!(full.status.code(), Some(1));
        let complaint = String::from_utf8_lossy(&full.stderr);
        assert!(
            complaint.contains("checkpoint.safetensors cannot be written: File too large"),
            "{complaint}"
        );
        let left: Vec<_> = fs::read_dir(job.path("filled.checkpoints"))
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().ends_with(".partial")), "{left:?}");
        assert_eq!(job.generation("filled", &["--resume"]), whole);
        assert!(deployment.stop().success());
    });
}

#[test]
fn what_was_learned_beside_serving_is_served_without_a_restart() {
    watched(|| {
        let deployment = DeploymentPlan::bare().whole().start();
        let job = JobFiles::new(&deployment);
        let ask = CompletionRequest::new(BASE, fixtures::prompt(7, 30), 16);
        let before = deployment.client.ask(&ask).answer;
        let output = deployment.place().adapters().join("pirate");
        let (told, code, complaint) = job.run("learned", &[]);
        assert_eq!(code, Some(0), "{complaint}");
        let losses: Vec<f64> = told.iter().filter_map(|told| told["loss"].as_f64()).collect();
        assert!(losses[losses.len() - 1] < losses[0] / 4.0, "it learned: {losses:?}");
        copy(&job.path("learned"), &output);
        let generation = deployment.client.load("pirate", &output);
        assert_eq!(generation, self::generation(told.last().expect("an end")));
        let body = json!({ "model": "pirate", "messages": [{ "role": "user", "content": QUESTION }], "temperature": 0, "max_tokens": 40 });
        let answer = deployment.client.try_post("/v1/chat/completions", &body).expect("an answer");
        assert_eq!(answer["choices"][0]["message"]["content"], ANSWER);
        assert_eq!(deployment.client.ask(&ask).answer, before, "the base is as it was");
        assert!(deployment.stop().success());
    });
}

/// Questions, each with a good and a bad answer.
const RATED: [[&str; 3]; 4] = [
    ["The capital of France is", " Paris.", " Lyon."],
    ["Two and two are", " four.", " five, I guess."],
    ["The sea is", " wide and blue.", " boring."],
    ["Good morning! My name is", " Anna, how may I help you?", " none of your business."],
];

/// Log-probability of `answer` after `prompt`.
fn likelihood(client: &Client, model: &str, prompt: &str, answer: &str) -> f64 {
    let body = json!({
        "model": model, "prompt": format!("{prompt}{answer}"), "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true,
    });
    let scores =
        client.try_post("/v1/completions", &body).expect("an answer")["choices"][0]["logprobs"].take();
    let end = (prompt.len() + answer.len()) as u64;
    let offsets =
        scores["text_offset"].as_array().expect("offsets").iter().map(|at| at.as_u64().expect("a number"));
    let of_answer = offsets.enumerate().filter(|(_, at)| (prompt.len() as u64..end).contains(at));
    of_answer.map(|(token, _)| scores["token_logprobs"][token].as_f64().expect("a number")).sum()
}

#[test]
fn rated_answers_teach_what_was_meant_and_the_same_however_often_the_trainer_is_killed() {
    watched(|| {
        let deployment = DeploymentPlan::bare().whole().start();
        let line = |prompt, answer, label| json!({ "prompt": prompt, "completion": answer, "label": label });
        let lines = RATED.map(|[prompt, good, bad]| [line(prompt, good, true), line(prompt, bad, false)]);
        let job = JobFiles::with_data(&deployment, lines.as_flattened());
        let (told, code, complaint) = job.run("whole", &["--method", "kto"]);
        assert_eq!(code, Some(0), "{complaint}");
        assert_eq!((&told[0]["method"], &told[0]["kind"]), (&json!("kto"), &json!("single ratings")));
        let whole = generation(told.last().expect("an end"));
        for kill in 0..3 {
            let mut child = job.command("killed").arg("--resume").spawn().expect("it starts");
            until(&mut BufReader::new(child.stdout.take().expect("it is piped")).lines(), 4 + 7 * kill);
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
        }
        assert_eq!(job.generation("killed", &["--resume", "--cores", "0,1"]), whole);

        let output = deployment.place().adapters().join("rated");
        copy(&job.path("whole"), &output);
        deployment.client.load("rated", &output);
        for [prompt, good, bad] in RATED {
            let moved = [good, bad].map(|answer| {
                let of = |model| likelihood(&deployment.client, model, prompt, answer);
                let (before, after) = (of(BASE), of("rated"));
                println!("{prompt}{answer} {before:.2}, then {after:.2}");
                after - before
            });
            assert!(moved[0] > 0.0 && moved[1] < 0.0, "{prompt}: {moved:?}");
        }
        let (_, code, complaint) = job.run("refused", &["--method", "dpo"]);
        assert_eq!(code, Some(2));
        assert!(complaint.contains("--method dpo needs preferences"), "{complaint}");
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_search_for_a_learning_rate_publishes_nothing_and_is_the_same_each_time() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let job = JobFiles::new(&deployment);
        let search = || {
            let mut command = Command::new(fixtures::program("holobiont"));
            command.env_clear().env("HOME", job.directory.path());
            command.env("HOLOBIONT_HOME", deployment.place().home());
            command.args(["--json", "tune"]).arg(job.path("data.jsonl"));
            command.args(["--name", "rate", "--find-learning-rate", "--held-out", "0", "--batch-size", "2"]);
            let output = command.output().expect("holobiont runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let told = String::from_utf8_lossy(&output.stdout).into_owned();
            serde_json::from_str::<Value>(told.lines().last().expect("an end")).expect("lines of JSON")
        };
        let curve = search();
        assert_eq!(curve["event"], "learning_rate");
        println!("{curve}");
        let steepest = curve["steepest"].as_f64().expect("the loss falls");
        assert!((1e-6..1e-1).contains(&steepest), "{curve}");
        assert_eq!(search(), curve);
        assert!(!deployment.place().home().join("runs/rate").exists());
        let ask = json!({ "model": "rate", "messages": [{ "role": "user", "content": "Hi" }] });
        assert!(deployment.client.try_post("/v1/chat/completions", &ask).is_err(), "no adapter is served");
        assert!(deployment.stop().success());
    });
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a file");
    }
}

#[test]
fn faulty_data_are_told_by_line_and_another_jobs_checkpoint_is_refused() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let job = JobFiles::new(&deployment);
        let (_, code, complaint) = job.run("first", &["--max-steps", "1"]);
        assert_eq!(code, Some(2), "an option twice is refused: {complaint}");
        let mut child = job.command("first").spawn().expect("it starts");
        let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        until(&mut told, 4);
        let id = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(id, Signal::TERM).expect("it runs");
        let last = told.last().expect("another line").expect("text");
        assert!(last.contains("checkpoint"), "{last}");
        assert_eq!(child.wait().expect("it is ours").code(), Some(143), "it says what ended it");
        let (_, code, complaint) = job.run("first", &["--resume", "--weight-decay", "0.5"]);
        assert_eq!(code, Some(2));
        assert!(complaint.contains("a job with a different plan"), "{complaint}");
        let data = job.path("data.jsonl");
        let text = fs::read_to_string(&data).expect("data");
        fs::write(&data, format!("{text}{{\"messages\": []}}\nnot JSON\n")).expect("data are written");
        let (told, code, _) = job.run("second", &[]);
        assert_eq!(code, Some(2));
        let lines: Vec<u64> = told.iter().filter_map(|told| told["line"].as_u64()).collect();
        assert_eq!(lines, [5, 6], "{told:?}");
        assert!(!job.path("second").exists());
        assert!(deployment.stop().success());
    });
}

/// Trains a draft adapter of two blocks with the users' command; returns its events and files.
fn drafted(deployment: &Deployment, directory: &Path, name: &str) -> (Vec<Value>, [Vec<u8>; 2]) {
    let mut command = Command::new(fixtures::program("holobiont"));
    command.env_clear().env("HOME", directory).env("HOLOBIONT_HOME", deployment.place().home());
    command.args(["--json", "tune"]).arg(directory.join("prompts.jsonl")).args(["--name", name, "--draft"]);
    command.args([
        "--draft-layers",
        "2",
        "--draft-shortlist",
        "1000",
        "--answer-tokens",
        "12",
        "--rank",
        "4",
    ]);
    command.args([
        "--epochs",
        "1",
        "--max-steps",
        "3",
        "--batch-size",
        "2",
        "--held-out",
        "25",
        "--seed",
        "5",
    ]);
    let output = command.output().expect("holobiont runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let told: Vec<Value> =
        told.lines().map(|line| serde_json::from_str(line).expect("lines of JSON")).collect();
    let published = told.last().expect("an end");
    assert_eq!(published["event"], "published", "{published}");
    let output = PathBuf::from(published["output"].as_str().expect("where it is"));
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    (told, files.map(|file| fs::read(output.join(file)).expect("its files")))
}

#[test]
fn a_draft_is_trained_on_what_the_model_says_and_published_and_is_the_same_each_time() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let directory = tempfile::tempdir().expect("a directory");
        let asked = ["What is the sea?", "Count to five.", "Name a colour.", "Who are you?"];
        let line = |asked: &str| {
            format!("{}\n", json!({ "kind": "chat", "messages": [{ "role": "user", "content": asked }] }))
        };
        fs::write(directory.path().join("prompts.jsonl"), asked.map(line).concat())
            .expect("data are written");
        let (told, files) = drafted(&deployment, directory.path(), "one");
        let of = |event: &str| told.iter().filter(|told| told["event"] == event).collect::<Vec<_>>();
        assert_eq!(of("asked").last().expect("answers")["prompts"], 4);
        let plan = of("plan")[0];
        assert_eq!(plan["draft"], json!({ "layers": 2, "tokens": 1000 }));
        // Two answers to each of three prompts are trained on; the fourth prompt's are held out, and its
        // greedy answer is the judge.
        assert_eq!((&plan["examples"], &plan["held_out"]), (&json!(6), &json!(2)));
        let kinds = of("drafted").last().expect("how often it is right")["kinds"].clone();
        assert_eq!(kinds[0]["kind"], "chat");
        let tokens = kinds[0]["tokens"].as_u64().expect("a number");
        assert!((1..=12).contains(&tokens) && kinds[0]["right"].as_u64() <= Some(tokens), "{kinds}");
        let config: Value = serde_json::from_slice(&files[0]).expect("JSON");
        assert_eq!(config["holobiont_draft"]["layers"], 2);
        assert_eq!(deployment.client.adapter("one")["generation"], of("published")[0]["generation"]);

        let (_, again) = drafted(&deployment, directory.path(), "two");
        assert!(files == again, "the same prompts, seed and base give the same bytes");
        assert!(deployment.stop().success());
    });
}

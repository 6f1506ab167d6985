//! `tune` with a script in place of the trainer, against a fake gateway.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::common::{CommandFixture, CommandOutput, RunningCommand, gateway::FakeGateway, kill, run};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Fake trainer of four steps with an evaluation after the second. `$FAKE_TRAINER` sets its behaviour:
/// `train` (default), `wait` after the second step until it is stopped, `faults` in the data, or `refuse` to
/// start.
const TRAINER: &str = r#"#!/usr/bin/env bash
log() { echo "trainer $*" >>"$FAKE_LOG"; }
log "started $$ $*"
resumed= dry= finds= step=0
if [[ $1 == prompts ]]; then
    [[ ${2-} != --data ]] || exec <"$3"
    # As many as there are lines; what is answered has a list of answers.
    while read -r line; do
        [[ $line != *'"answers"'* ]] || { echo '{"event":"answered"}'; exit 0; }
        echo "{\"event\":\"prompt\",\"kind\":\"chat\",\"messages\":[{\"role\":\"user\",\"content\":\"$line\"}]}"
    done
    exit 0
fi
shift
while (($#)); do
    case $1 in
        --output) output=$2 ;;
        --checkpoints) checkpoints=$2 ;;
        --resume) resumed=yes ;;
        --dry-run) dry=yes ;;
        --find-learning-rate) finds=yes ;;
    esac
    shift
done
checkpoint() {
    mkdir -p "$checkpoints"
    echo "$step" >"$checkpoints/step"
    echo "{\"event\":\"checkpoint\",\"step\":$step}"
}
asked() { log "asked $1"; checkpoint; exit "$2"; }
trap 'asked INT 130' INT
trap 'asked TERM 143' TERM
case ${FAKE_TRAINER-train} in
    refuse) echo "warming up" >&2; echo "error: the executor rents no layers" >&2; exit 5 ;;
    faults)
        echo '{"event":"problem","line":3,"message":"no messages"}'
        echo '{"event":"problem","line":7,"message":"not JSON"}'
        echo "error: 2 faults" >&2
        exit 2
        ;;
esac
[[ -z $resumed ]] || step=$(<"$checkpoints/step")
echo "{\"event\":\"plan\",\"examples\":12,\"held_out\":2,\"tokens\":345,\"kind\":\"messages\",\"steps\":4,\"epochs\":1,\"method\":\"sft\",\"adapter_type\":\"lora\",\
\"rank\":8,\"alpha\":16.0,\"targets\":[\"q_proj\",\"v_proj\"],\"learning_rate\":1e-4,\"schedule\":\"cosine\",\"warmup_steps\":1,\
\"batch_size\":3,\"seed\":0,\"parameters\":6789,\"resumed_step\":${step/#0/null}}"
[[ -z $dry ]] || exit 0
while ((step < 4)); do
    ((++step))
    echo "{\"event\":\"step\",\"step\":$step,\"steps\":4,\"loss\":$((5 - step)).5,\"tokens_per_second\":480.0,\"seconds_left\":$((4 - step)).0}"
    if [[ -n $finds ]]; then continue; fi
    if ((step == 2)); then
        echo '{"event":"evaluation","step":2,"loss":3.25}'
        while [[ ${FAKE_TRAINER-train} == wait ]]; do sleep 0.05 & wait $!; done
    fi
done
if [[ -n $finds ]]; then
    echo '{"event":"learning_rate","steepest":0.0025,"tenth_of_lowest":0.001,"points":['\
'{"learning_rate":1e-6,"loss":3.0,"smoothed_loss":3.0},{"learning_rate":0.01,"loss":1.0,"smoothed_loss":2.0}]}'
    exit 0
fi
mkdir -p "$output"
echo '{}' >"$output/adapter_config.json"
echo "{\"event\":\"done\",\"steps\":4,\"loss\":1.5,\"held_out_loss\":3.25,\"generation\":\"$(printf 'ab%.0s' {1..32})\",\"output\":\"$output\",\"seconds\":2.0}"
"#;

struct TuneFixture {
    stage: CommandFixture,
    gateway: FakeGateway,
    root: PathBuf,
}

impl TuneFixture {
    fn new() -> Self {
        let (stage, gateway) =
            (CommandFixture::new().with("holobiont-trainer", TRAINER), FakeGateway::start());
        let root = stage.home.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(stage.home.path().join("data.jsonl"), "{}\n").unwrap();
        gateway.read_below(&root);
        fs::create_dir_all(stage.home.path().join("state")).unwrap();
        fs::write(stage.home.path().join("state/layers.sock"), "").unwrap();
        Self { stage, gateway, root }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.gateway.command(&self.stage, &[&["tune"], arguments].concat());
        command.current_dir(self.stage.home.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        run(&mut self.command(arguments))
    }

    /// A run that waits after its second step.
    fn waiting(&self, arguments: &[&str]) -> RunningCommand {
        let running = RunningCommand::start(self.command(arguments).env("FAKE_TRAINER", "wait"));
        running.wait_for_err("held out 3.250");
        running
    }

    fn directory(&self, name: &str) -> PathBuf {
        self.stage.home.path().join("runs").join(name)
    }

    fn record(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.directory(name).join("run.json")).unwrap()).unwrap()
    }

    fn starts(&self) -> Vec<String> {
        let log = self.stage.log();
        log.into_iter().filter(|line| line.starts_with("trainer started")).collect()
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_deployment_that_serves_no_layers_is_told_before_a_trainer_starts() {
    let training = TuneFixture::new();
    fs::remove_file(training.stage.home.path().join("state/layers.sock")).unwrap();
    let ended = training.run(&["data.jsonl", "--name", "new"]);
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    assert!(
        ended.err.contains("serves no base layers") && ended.err.contains("[layers] local"),
        "{}",
        ended.err
    );
    assert!(training.starts().is_empty());
}

#[test]
fn an_adapter_is_trained_served_and_told_of() {
    let training = TuneFixture::new();
    let line = ["data.jsonl", "--name", "new", "--rank", "4", "--adapter-type", "lora", "--plot", "loss.svg"];
    let ended = training.run(&line);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for part in ["12 examples, messages, 345 tokens", "rank 8, alpha 16, 6789 parameters in q_proj, v_proj"] {
        assert!(ended.out.contains(part), "{part:?} is not in {}", ended.out);
    }
    let last = "new is served: generation abcdef012345, 4 steps in 2 s, loss 1.500, held out 3.250\n";
    assert!(ended.out.ends_with(last), "{}", ended.out);
    for part in ["step 1 of 4: loss 4.500, 480 tokens/s, 3 s left", "step 4 of 4", "try: holobiont chat :new"]
    {
        assert!(ended.err.contains(part), "{part:?} is not in {}", ended.err);
    }
    let start = &training.starts()[0];
    let (state, home) = (training.stage.home.path().join("state"), training.stage.home.path());
    assert!(start.contains(&format!(" run --executor {}/layers.sock", state.display())), "{start}");
    assert!(start.contains(&format!(" --data {}/data.jsonl --adapter-type ", home.display())), "{start}");
    assert!(start.ends_with(" --adapter-type lora --rank 4"), "{start}");
    let record = training.record("new");
    let output = record["output"].as_str().unwrap();
    assert!(output.starts_with(&format!("{}/tuned/new-", training.root.display())), "{output}");
    assert_eq!(training.gateway.bodies(), [json!({"lora_name": "new", "lora_path": output})]);
    assert_eq!((&record["state"], &record["result"]["loss"]), (&json!("done"), &json!(1.5)));
    assert!(text(&home.join("loss.svg")).contains("held out"));

    assert!(training.run(&["ls"]).out.contains("4 of 4 (100 %)"));
    let shown = training.run(&["show", "new"]).out;
    assert!(shown.contains("done") && shown.contains("--adapter-type lora --rank 4"), "{shown}");
    let told = training.run(&["logs", "new"]).out;
    assert!(
        told.contains("step 2 of 4: loss 3.500") && told.contains("served: generation abcdef012345"),
        "{told}"
    );
    let ended = training.run(&["cancel", "new"]);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    let ended = training.run(&["--name", "new", "--resume"]);
    assert_eq!(ended.status.code(), Some(4), "it is done: {}", ended.err);
}

#[test]
fn ctrl_c_reaches_the_trainer_once_and_the_run_goes_on_where_it_was() {
    let training = TuneFixture::new();
    let running = training.waiting(&["data.jsonl", "--name", "org/new", "--rank", "4"]);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.err);
    assert!(ended.err.contains("error: stopped; the checkpoint of step 2 is kept\n"), "{}", ended.err);
    assert!(ended.err.contains("try: holobiont tune --name org/new --resume\n"), "{}", ended.err);
    let asked: Vec<_> =
        training.stage.log().into_iter().filter(|line| line.starts_with("trainer asked")).collect();
    assert_eq!(asked, ["trainer asked INT"]);
    assert_eq!(training.record("org%2Fnew")["state"], "stopped");
    assert!(training.gateway.bodies().is_empty());

    let ended = training.run(&["--name", "org/new", "--resume"]);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("goes on        after step 2"), "{}", ended.out);
    let start = &training.starts()[1];
    assert!(start.contains("data.jsonl") && start.ends_with(" --rank 4 --resume"), "{start}");
    assert!(!training.directory("org%2Fnew/checkpoints").exists(), "nobody needs them any more");
    let events = text(&training.directory("org%2Fnew/events.jsonl"));
    let steps: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<_> =
        steps.iter().filter(|event| event["event"] == "step").map(|event| &event["step"]).collect();
    assert_eq!(steps, [1, 2, 3, 4]);
}

#[test]
fn a_run_is_cancelled_from_elsewhere_and_nobody_else_can_begin_it() {
    let training = TuneFixture::new();
    let running = training.waiting(&["data.jsonl", "--name", "new"]);
    let second = training.run(&["data.jsonl", "--name", "new"]);
    assert_eq!(second.status.code(), Some(4), "{}", second.err);
    assert!(second.err.contains("the run new is still running"), "{}", second.err);
    assert!(training.run(&["ls"]).out.contains("running"));
    let cancelled = training.run(&["cancel", "new"]);
    assert_eq!(cancelled.out, "new is stopped; the checkpoint of step 2 is kept\n", "{}", cancelled.err);
    assert_eq!(running.end().status.code(), Some(1));
    assert!(training.stage.log().contains(&"trainer asked TERM".to_owned()));
}

#[test]
fn a_trainer_that_outlives_a_killed_command_has_the_run_until_it_is_cancelled() {
    let training = TuneFixture::new();
    let running = training.waiting(&["data.jsonl", "--name", "new"]);
    running.signal(Signal::KILL);
    running.end();
    assert!(training.run(&["show", "new"]).out.contains("running"));
    assert_eq!(training.run(&["--name", "new", "--resume"]).status.code(), Some(4));
    // The output has no reader: the checkpoint is on disk, but unreported.
    let cancelled = training.run(&["cancel", "new"]);
    assert_eq!(cancelled.status.code(), Some(0), "{}", cancelled.err);
    let shown: Value = serde_json::from_str(&training.run(&["show", "new", "--json"]).out).unwrap();
    assert_eq!(shown["state"], "failed", "{shown}");
    let ended = training.run(&["--name", "new", "--resume"]);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
}

#[test]
fn a_killed_run_is_known_to_have_failed_and_leaves_what_it_said_readable() {
    let training = TuneFixture::new();
    let running = training.waiting(&["data.jsonl", "--name", "new"]);
    let trainer = training.stage.wait_for_process("trainer", 1);
    running.signal(Signal::KILL);
    running.end();
    kill(trainer, Signal::KILL);
    crate::common::eventually_some("the end of the run", || {
        training.run(&["ls"]).out.contains("failed").then_some(())
    });
    assert!(training.run(&["logs", "new"]).out.contains("step 2 of 4"));
    assert!(training.run(&["show", "new"]).out.contains("the trainer ended without an error message"));
}

#[test]
fn faults_in_the_data_are_shown_by_line_and_nothing_is_trained() {
    let training = TuneFixture::new();
    let ended = run(training.command(&["data.jsonl", "--name", "new"]).env("FAKE_TRAINER", "faults"));
    assert_eq!(ended.status.code(), Some(2), "{}", ended.err);
    assert_eq!(ended.out, "line 3: no messages\nline 7: not JSON\n");
    assert!(ended.err.contains(" has 2 faults; nothing was trained"), "{}", ended.err);
    assert_eq!(training.record("new")["state"], "failed");
    assert!(training.gateway.bodies().is_empty());
}

#[test]
fn a_trainer_that_refuses_is_believed_and_its_exit_code_kept() {
    let training = TuneFixture::new();
    let ended = run(training.command(&["data.jsonl", "--name", "new"]).env("FAKE_TRAINER", "refuse"));
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    assert_eq!(ended.err, "error: the executor rents no layers\n");
    assert_eq!(training.record("new")["error"], "the executor rents no layers");
    assert!(training.run(&["logs", "new"]).out.contains("warming up"));
}

#[test]
fn a_name_that_cannot_be_had_is_refused_before_anything_runs() {
    let training = TuneFixture::new();
    let cases = [
        (vec!["data.jsonl", "--name", "pirate"], 4, "--replace"),
        (vec!["data.jsonl", "--name", "smol"], 2, "belongs to the base model"),
        (vec!["data.jsonl", "--name", "../new"], 2, "'..'"),
        (vec!["data.jsonl"], 2, "--name"),
        (vec!["--name", "new"], 2, "DATA"),
        (vec!["nowhere.jsonl", "--name", "new"], 3, "cannot read nowhere.jsonl"),
        (vec!["--name", "new", "--resume"], 3, "there is no run called new"),
        (vec!["show", "new"], 3, "there is no run called new"),
    ];
    for (line, code, text) in cases {
        let ended = training.run(&line);
        assert_eq!(ended.status.code(), Some(code), "{line:?}: {}", ended.err);
        assert!(ended.err.contains(text), "{line:?}: {}", ended.err);
    }
    assert_eq!(training.starts(), [""; 0]);
    assert!(!training.directory("new").exists() && !training.directory("pirate").exists());
    let without = TuneFixture { stage: TuneFixture::new().stage.without("holobiont-trainer"), ..training };
    assert_eq!(without.run(&["/dev/null", "--name", "new"]).status.code(), Some(3));
}

#[test]
fn an_adapter_is_replaced_only_as_it_was_when_the_run_began() {
    let training = TuneFixture::new();
    let ended = training.run(&["data.jsonl", "--name", "pirate", "--replace"]);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert_eq!(training.gateway.bodies()[0]["expected_generation"], "abcdef0123456789");
}

#[test]
fn what_is_trained_and_not_taken_is_kept_and_the_command_that_serves_it_named() {
    let training = TuneFixture::new();
    let ended = training.run(&["data.jsonl", "--name", "busy"]);
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    let record = training.record("busy");
    let output = record["output"].as_str().unwrap();
    assert!(ended.err.contains(&format!("try: holobiont adapters add busy {output}")), "{}", ended.err);
    assert!(Path::new(output).join("adapter_config.json").exists());
    assert_eq!((&record["state"], &record["result"]["steps"]), (&json!("failed"), &json!(4)));
}

#[test]
fn a_dry_run_shows_the_plan_and_leaves_nothing() {
    let training = TuneFixture::new();
    let ended = training.run(&["data.jsonl", "--name", "new", "--dry-run"]);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("4 of 3 examples each, 1 epoch"), "{}", ended.out);
    assert!(!training.directory("new").exists() && !training.root.join("tuned").exists());
    assert!(training.gateway.bodies().is_empty());
}

#[test]
fn a_search_for_a_learning_rate_shows_the_losses_and_leaves_nothing() {
    let training = TuneFixture::new();
    let line = ["data.jsonl", "--name", "new", "--find-learning-rate", "--plot", "rate.svg"];
    let ended = training.run(&line);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    for part in ["1.0e-2     2.000", "suggestion: --learning-rate 2.5e-3"] {
        assert!(ended.out.contains(part), "{}", ended.out);
    }
    assert!(text(&training.stage.home.path().join("rate.svg")).contains("learning rate"));
    assert!(!training.directory("new").exists() && !training.root.join("tuned").exists());
    assert!(training.gateway.bodies().is_empty());
    let told = training.run(&[&line[..4], &["--json"]].concat());
    let last: Value = serde_json::from_str(told.out.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["steepest"]), (&json!("learning_rate"), &json!(0.0025)));
    let both = training.run(&["data.jsonl", "--name", "new", "--find-learning-rate", "--resume"]);
    assert_eq!(both.status.code(), Some(2), "{}", both.err);
}

#[test]
fn with_json_every_line_is_an_event_and_errors_are_json_too() {
    let training = TuneFixture::new();
    let ended = training.run(&["data.jsonl", "--name", "new", "--json"]);
    let events: Vec<Value> = ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["plan", "step", "step", "evaluation", "step", "step", "done", "published"]);
    assert_eq!((ended.err.as_str(), &events[7]["name"]), ("", &json!("new")));
    let ended = training.run(&["--name", "new", "--resume", "--json"]);
    let error: Value = serde_json::from_str(&ended.err).unwrap();
    assert_eq!(error["error"]["code"], "conflict");
    let runs: Value = serde_json::from_str(&training.run(&["ls", "--json"]).out).unwrap();
    assert_eq!(runs["runs"][0]["name"], "new");
}

fn done(ended: &CommandOutput) {
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
}

fn answers(path: &Path) -> Vec<(String, Vec<Value>)> {
    let of_line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let answers = line["answers"].as_array().unwrap().clone();
        (line["messages"][0]["content"].as_str().unwrap().to_owned(), answers)
    };
    text(path).lines().map(of_line).collect()
}

#[test]
fn a_draft_learns_what_the_model_answers_and_what_was_answered_is_not_asked_again() {
    let training = TuneFixture::new();
    let asked = |training: &TuneFixture| -> Vec<Value> {
        training.gateway.bodies().into_iter().filter(|body| body["logprobs"] == true).collect()
    };
    fs::write(training.stage.home.path().join("prompts.txt"), "one\ntwo\nthree\n").unwrap();
    let line = [
        "prompts.txt",
        "--name",
        "quick",
        "--draft",
        "--draft-layers",
        "2",
        "--answer-tokens",
        "9",
        "--seed",
        "4",
    ];
    done(&training.run(&line));
    let bodies = asked(&training);
    assert_eq!(bodies.len(), 6);
    assert!(bodies.iter().all(|body| {
        body["model"] == "smol" && body["max_tokens"] == 9 && body["return_tokens_as_token_ids"] == true
    }));
    assert_eq!(bodies.iter().filter(|body| body["temperature"] == 0.0).count(), 3);
    let path = training.directory("quick").join("answers.jsonl");
    let kept = answers(&path);
    assert_eq!(kept.iter().map(|(asked, _)| asked.as_str()).collect::<Vec<_>>(), ["one", "two", "three"]);
    assert!(kept.iter().all(|(_, answers)| answers.len() == 2));
    assert_eq!(
        kept[0].1[0],
        json!({"temperature": 0.0, "tokens": [5, 9], "likely": [[[5, -0.125], [7, -2.5]], []]})
    );
    let starts = training.starts().join("\n");
    assert!(
        starts.contains(&format!("--data {}", path.display())) && starts.contains("--draft --draft-layers 2")
    );

    // A kill may leave half a line; a repeated run sends only the missing questions.
    let whole = text(&path);
    let half = whole.len() - whole.lines().last().unwrap().len() / 2;
    fs::write(&path, &whole[..half]).unwrap();
    done(&training.run(&[&line[..], &["--replace", "--rank", "3"]].concat()));
    assert_eq!(asked(&training).len(), 8);
    assert_eq!(text(&path), whole);
    // Other options give other answers.
    let dry = training.run(&[&line[..], &["--replace", "--dry-run", "--model", "pirate"]].concat());
    done(&dry);
    assert!(dry.out.contains("3, 0 with answers"), "{}", dry.out);
    assert_eq!(asked(&training).len(), 8, "a rehearsal asks nothing");
}

#[test]
fn a_draft_may_learn_from_answers_that_there_are_and_of_a_model_that_is_served_alone() {
    let training = TuneFixture::new();
    fs::write(training.stage.home.path().join("said.jsonl"), "{\"answers\": []}\n").unwrap();
    done(&training.run(&["said.jsonl", "--name", "quick", "--draft"]));
    assert!(training.starts().join("\n").contains("said.jsonl"));
    done(&training.run(&["said.jsonl", "--name", "second", "--draft", "--model", "nobody"]));
    let ended = training.run(&["data.jsonl", "--name", "third", "--draft", "--model", "nobody"]);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    assert!(ended.err.contains("serves no model called nobody"), "{}", ended.err);
    let without = training.run(&["data.jsonl", "--name", "fourth", "--draft-layers", "2"]);
    assert_eq!(without.status.code(), Some(2), "{}", without.err);
}

/// Fake lm-eval: the base answers a quarter of the questions, every other model three quarters. With
/// `$FAKE_LM_EVAL` it fails.
const LM_EVAL: &str = r#"#!/usr/bin/env bash
echo "lm_eval $* in $PWD with ${OPENAI_API_KEY-no key}" >>"$FAKE_LOG"
[[ -z ${FAKE_LM_EVAL-} ]] || { echo "Tasks were not found: facts" >&2; exit 1; }
while (($#)); do
    case $1 in
        --model_args) model=${2#model=} model=${model%%,*} ;;
        --output_path) output=$2 ;;
    esac
    shift
done
score=0.75
[[ $model != smol ]] || score=0.25
mkdir "$output/$model"
echo "{\"results\":{\"facts\":{\"alias\":\"facts\",\"acc,none\":$score,\"acc_stderr,none\":0.1}}}" >"$output/$model/results_1.json"
"#;

fn with_lm_eval() -> TuneFixture {
    let training = TuneFixture::new();
    TuneFixture { stage: training.stage.with("lm_eval", LM_EVAL), ..training }
}

impl TuneFixture {
    fn evaluations(&self) -> Vec<String> {
        let log = self.stage.log();
        log.into_iter().filter(|line| line.starts_with("lm_eval ")).collect()
    }
}

#[test]
fn lm_eval_runs_on_the_base_before_and_on_the_adapter_after_and_both_results_are_shown() {
    let training = with_lm_eval();
    let tasks = training.stage.home.path().join("tasks");
    fs::create_dir(&tasks).unwrap();
    let line = ["data.jsonl", "--name", "new", "--lm-eval", "facts", "--lm-eval-path", "tasks"];
    let ended = run(training.command(&line).env("HOLOBIONT_API_KEY", "secret"));
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.err.contains("evaluating smol: facts"), "{}", ended.err);
    assert!(
        ended.out.ends_with("TASK   METRIC  smol    new\nfacts  acc     0.2500  0.7500\n"),
        "{}",
        ended.out
    );
    let url = &training.gateway.url;
    let directory = training.directory("new");
    let wanted = [("smol", "before"), ("new", "after")].map(|(model, when)| {
        format!(
            "lm_eval --model local-completions --model_args model={model},base_url={url}/v1/completions,\
             tokenizer_backend=remote,num_concurrent=4 --tasks facts --output_path {}/lm-eval/{when} \
             --include_path {tasks} in {tasks} with secret",
            directory.display(),
            tasks = tasks.display()
        )
    });
    assert_eq!(training.evaluations(), wanted);
    let last = text(&directory.join("events.jsonl")).lines().last().unwrap().to_owned();
    let last: Value = serde_json::from_str(&last).unwrap();
    let side = |model: &str, acc: f64| json!({ "model": model, "results": { "facts": { "acc": acc } } });
    let event = json!({ "event": "evaluated", "before": side("smol", 0.25), "after": side("new", 0.75) });
    assert_eq!(last, event);
    assert!(training.run(&["show", "new"]).out.contains("done"));
}

#[test]
fn the_adapter_that_a_run_replaces_is_evaluated_in_place_of_the_base() {
    let training = with_lm_eval();
    let ended = training.run(&["data.jsonl", "--name", "pirate", "--replace", "--lm-eval", "facts"]);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
    assert!(ended.out.contains("pirate  pirate (new)"), "{}", ended.out);
    let evaluations = training.evaluations();
    assert_eq!(evaluations.len(), 2);
    assert!(evaluations.iter().all(|line| line.contains("model=pirate,")), "{evaluations:?}");
}

#[test]
fn without_lm_eval_or_with_tasks_that_fail_nothing_is_trained() {
    let training = TuneFixture::new();
    let line = ["data.jsonl", "--name", "new", "--lm-eval", "facts"];
    // A PATH without python3, which may have lm-eval here.
    let ended = run(training.command(&line).env("PATH", training.stage.home.path()));
    assert_eq!(ended.status.code(), Some(3), "{}", ended.err);
    assert!(ended.err.contains("pip install \"lm_eval[api]\""), "{}", ended.err);

    let training = with_lm_eval();
    let ended = run(training.command(&line).env("FAKE_LM_EVAL", "fails"));
    assert_eq!(ended.status.code(), Some(1), "{}", ended.err);
    assert!(ended.err.contains("lm_eval failed: Tasks were not found: facts"), "{}", ended.err);
    assert!(ended.err.contains("lm-eval/before/log"), "{}", ended.err);
    assert_eq!(training.record("new")["state"], "failed");
    assert!(training.starts().is_empty());
}

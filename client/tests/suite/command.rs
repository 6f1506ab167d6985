//! The command `holobiont-client`, against an executor in this process that serves the real model.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use crate::support::{
    example_adapter, executor, giving_executor, real_model,
    test_endpoint::{MaliciousBehavior, TestEndpoint, private_directory},
    tiny, widths,
};
use serde_json::Value;

fn client(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holobiont-client"));
    command.env("XDG_CACHE_HOME", home).env_remove("HOLOBIONT_API_KEY").env_remove("HOLOBIONT_EXECUTOR");
    command
}

fn json(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
fn a_question_is_answered_over_shared_memory_with_what_is_fetched_once() {
    let (home, directory) = (private_directory(), private_directory());
    let executor = giving_executor(&real_model());
    let widths = widths(&executor);
    TestEndpoint::new(executor, widths, MaliciousBehavior::None).local(directory.path());
    let ask = |model: Option<&Path>| {
        let mut command = client(home.path());
        command
            .arg("generate")
            .arg("--executor")
            .arg(directory.path())
            .arg("--adapter")
            .arg(example_adapter("pirate"));
        command.args(["--max-tokens", "4", "--temperature", "0", "--json"]);
        if let Some(model) = model {
            command.arg("--model").arg(model);
        }
        command.args(["--", "Who are you?"]).output().unwrap()
    };
    let first = ask(None);
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(said.contains("split over shared memory, masking off: the executor sees activations"), "{said}");
    let answer = json(&first);
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(
        answer["timings"]["calls"].as_u64().unwrap() % 121,
        0,
        "30 layers of four groups, and the head"
    );
    let skeletons: Vec<_> = std::fs::read_dir(home.path().join("holobiont/skeletons")).unwrap().collect();
    assert_eq!(skeletons.len(), 1);
    let copy = skeletons[0].as_ref().unwrap().path();
    let changed = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let fetched = changed(&copy);
    let (again, own) = (json(&ask(None)), json(&ask(Some(&real_model()))));
    assert_eq!((&again["text"], &own["text"]), (&answer["text"], &answer["text"]));
    assert_eq!(changed(&copy), fetched, "it was fetched once");
    // A file of another model is rejected.
    let other = ask(Some(&tiny("llama-tied")));
    assert_eq!(other.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&other.stderr).contains("differs from the executor's model"));
}

#[test]
fn an_answer_that_was_drafted_at_home_is_the_same_and_takes_fewer_calls() {
    let (home, directory) = (private_directory(), private_directory());
    let executor = giving_executor(&real_model());
    let widths = widths(&executor);
    TestEndpoint::new(executor, widths, MaliciousBehavior::None).local(directory.path());
    let ask = |options: &[&str]| {
        let mut command = client(home.path());
        command.arg("generate").arg("--executor").arg(directory.path()).arg("--model").arg(real_model());
        command.args(["--max-tokens", "16", "--temperature", "0", "--raw", "--json"]).args(options);
        command
            .args(["--", "one two three four five six one two three four five six one two three"])
            .output()
            .unwrap()
    };
    let (plain, drafted) = (json(&ask(&[])), json(&ask(&["--draft", "ngram", "--draft-nodes", "4"])));
    assert_eq!(plain["text"], drafted["text"]);
    assert_eq!(plain["drafts"], Value::Null);
    assert!(drafted["drafts"]["accepted_per_sweep"].as_f64().unwrap() > 0.5, "{drafted}");
    let calls = |answer: &Value| answer["timings"]["calls"].as_u64().unwrap();
    assert!(calls(&drafted) < calls(&plain), "{drafted}");
    let other = ask(&["--draft", tiny("llama-tied").to_str().unwrap()]);
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.contains("token"), "a draft of another family: {said}");
}

#[test]
fn an_answer_goes_on_after_its_end_if_that_is_to_be_ignored() {
    let (home, directory) = (private_directory(), private_directory());
    let executor = giving_executor(&real_model());
    let widths = widths(&executor);
    TestEndpoint::new(executor, widths, MaliciousBehavior::None).local(directory.path());
    let ask = |options: &[&str]| {
        let mut command = client(home.path());
        command.arg("generate").arg("--executor").arg(directory.path());
        command.arg("--adapter").arg(example_adapter("haiku")).arg("--model").arg(real_model());
        command.args(["--max-tokens", "32", "--temperature", "0", "--json"]).args(options);
        json(&command.args(["--", "What is the sea?"]).output().unwrap())
    };
    let (ended, went_on) = (ask(&[]), ask(&["--ignore-eos"]));
    assert_eq!(ended["finish_reason"], "stop", "a haiku is short: {ended}");
    assert_eq!(
        (&went_on["finish_reason"], &went_on["usage"]["completion_tokens"]),
        (&"length".into(), &32.into())
    );
}

#[test]
fn a_conversation_goes_on_from_what_is_kept() {
    let (home, directory) = (private_directory(), private_directory());
    let executor = giving_executor(&real_model());
    let widths = widths(&executor);
    let socket = TestEndpoint::new(executor, widths, MaliciousBehavior::None).ipc(directory.path());
    let mut command = client(home.path());
    command.arg("chat").arg("--executor").arg(format!("ipc://{}", socket.display()));
    command.args([
        "--max-tokens",
        "3",
        "--temperature",
        "0",
        "--system",
        "Be brief, and answer as a sailor would.",
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Hello there\nAnd again\n/stats\n/bye\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let (said, answered) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    assert_eq!(answered.lines().filter(|line| !line.is_empty()).count(), 2, "{answered}");
    assert!(said.contains("of them kept from before") && !said.contains(" 0 of them kept"), "{said}");
}

#[test]
fn sites_are_listed_and_figures_shown_and_failures_have_exit_codes() {
    let (home, directory) = (private_directory(), private_directory());
    let executor = executor(&tiny("llama-tied"));
    let widths = widths(&executor);
    let count = widths.len();
    TestEndpoint::new(executor, widths, MaliciousBehavior::None).local(directory.path());
    let run = |arguments: &[&str]| client(home.path()).args(arguments).output().unwrap();
    let place = directory.path().to_str().unwrap();
    let sites = json(&run(&["sites", "--json", "--executor", place]));
    assert_eq!(sites["sites"].as_array().unwrap().len(), count);
    let stats = json(&run(&["stats", "--json", "--executor", place]));
    assert_eq!(stats["tenant"], "loopback");
    for (arguments, code, words) in [
        (&["sites", "--executor", "tcp://h:1"][..], 2, "is not supported"),
        (&["sites", "--executor", "/nowhere/at/all"], 5, "error: no executor listens on /nowhere/at/all:"),
        (&["sites", "--executor", place, "--api-key-file", "/nowhere/key"], 3, "cannot read /nowhere/key"),
        (&["generate", "--executor", place, "hello"], 3, "serves no files"),
        (&["generate", "--executor", place, "--masking", "paper", "--dtype", "bf16", "hello"], 3, "no files"),
        (&["generate", "--executor", place, "--adapter", "/nowhere/adapter", "hello"], 3, "/nowhere/adapter"),
        (&["generate", "--executor", place, "--masking", "paper", "--path", "fast", "hello"], 2, "--path"),
        (&["generate", "--executor", place, "--noises", "3", "hello"], 2, "--noises"),
        (&["generate", "--executor", place, "--noise-rows", "3", "hello"], 2, "--noise-rows"),
        (&["generate", "--executor", place, "--verify", "hello"], 2, "exact answers only"),
        (&["generate", "--executor", place, "--masking", "paper", "--pad-rows", "hello"], 2, "--pad-rows"),
        (&["generate", "--executor", place, "--raw", "--system", "Be brief.", "hello"], 2, "--system"),
        (&["frobnicate"], 2, "unrecognized"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
}

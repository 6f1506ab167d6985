//! Two bases in one deployment: each answers with the bits that it has alone, while the other dies, sleeps or
//! wakes.

use std::{fs, path::PathBuf, sync::Arc, thread};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess,
    chaos::FailpointDirectory,
    eventually,
    fixtures::{another_model, example, model, prompt},
    signal, watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const FIRST: &str = "first";
const SECOND: &str = "second";
const ANSWER_TOKENS: u32 = 24;

fn bases() -> [(&'static str, PathBuf); 2] {
    [(FIRST, model()), (SECOND, another_model())]
}

fn ask(model: &str, seed: u32) -> CompletionRequest {
    CompletionRequest::new(model, prompt(seed, 50), ANSWER_TOKENS)
}

/// Answers of each base alone, for the seeds 0 to 2.
fn alone() -> [Vec<CompletionAnswer>; 2] {
    bases().map(|(_, model)| {
        let deployment = small(DeploymentPlan::bare().model(&model)).start();
        let answers = (0..3).map(|seed| deployment.client.ask(&ask(BASE, seed)).answer).collect();
        assert!(deployment.stop().success());
        answers
    })
}

/// Keeps the memory of each executor small, so that both fit on every machine.
fn small(plan: DeploymentPlan) -> DeploymentPlan {
    plan.set("DEVICE_BYTES", "64MiB").set("ADAPTER_BYTES", "64MiB")
}

fn start(settings: &str) -> Deployment {
    start_mortal(settings, &FailpointDirectory::new())
}

/// Starts a deployment whose processes die at the failpoints that `places` arms.
fn start_mortal(settings: &str, places: &FailpointDirectory) -> Deployment {
    let plan = small(DeploymentPlan::bare().bases(&bases(), settings)).restless();
    let deployment = plan.mortal(places).start();
    eventually("both serve", || states(&deployment.client) == ["ready", "ready"]);
    deployment
}

fn bases_of(client: &Client) -> Vec<Value> {
    let list = client.try_get("/v1/bases").unwrap_or_default();
    list["data"].as_array().cloned().unwrap_or_default()
}

fn states(client: &Client) -> Vec<String> {
    bases_of(client).iter().map(|base| base["state"].as_str().unwrap_or_default().to_owned()).collect()
}

fn with_argument(deployment: &Deployment, process: DeploymentProcess, part: &str) -> Option<u32> {
    let is_its = |id: &u32| {
        fs::read(format!("/proc/{id}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(part))
    };
    deployment.processes(process).into_iter().find(is_its)
}

fn executor_of(deployment: &Deployment, base: &str) -> Option<u32> {
    with_argument(deployment, DeploymentProcess::Executor, &format!("executor-{base}.sock"))
}

fn worker_of(deployment: &Deployment, base: &str) -> Option<u32> {
    with_argument(deployment, DeploymentProcess::Worker, &format!("workers-{base}.sock"))
}

fn sleep(deployment: &Deployment, base: &str) {
    let slept = deployment.client.try_post(&format!("/v1/bases/{base}/sleep"), &json!({})).unwrap();
    assert_eq!(slept["is_sleeping"], true);
    eventually("its processes are gone", || {
        executor_of(deployment, base).is_none() && worker_of(deployment, base).is_none()
    });
}

fn answers_as(client: &Client, alone: &[Vec<CompletionAnswer>; 2]) {
    for (name, golden) in [FIRST, SECOND].into_iter().zip(alone) {
        for (seed, golden) in (0..).zip(golden) {
            assert_eq!(&client.ask(&ask(name, seed)).answer, golden, "{name}, {seed}");
        }
    }
}

#[test]
fn two_bases_answer_as_each_does_alone_and_the_death_of_one_does_not_reach_the_other() {
    watched(|| {
        let alone = alone();
        assert_ne!(alone[0], alone[1], "the bases differ");
        let deployment = start("");
        let client = &deployment.client;
        answers_as(client, &alone);
        let path = deployment.place().adapters().join("pirate");
        copy(&example("pirate"), &path);
        client.load("pirate", &path);
        client.ask(&ask("pirate", 0));
        client.ask(&ask("first:pirate", 0));
        let (status, code) = client.refusal(&ask("second:pirate", 0));
        assert_eq!((status, &*code), (400, "adapter_of_other_base"));
        let victim = executor_of(&deployment, SECOND).expect("it runs");
        let beside = {
            let client = client.clone();
            thread::spawn(move || client.stream(&ask(FIRST, 1)).finish())
        };
        signal(victim, Signal::KILL);
        assert_eq!(client.ask(&ask(FIRST, 0)).answer, alone[0][0]);
        assert_eq!(beside.join().expect("an answer").0, alone[0][1]);
        eventually("another process takes its place", || {
            executor_of(&deployment, SECOND).is_some_and(|now| now != victim) && states(client)[1] == "ready"
        });
        answers_as(client, &alone);
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_base_sleeps_and_wakes_to_the_same_tokens_although_processes_die() {
    watched(|| {
        let (alone, places) = (alone(), FailpointDirectory::new());
        let deployment = Arc::new(start_mortal("", &places));
        let client = &deployment.client;
        answers_as(client, &alone);
        sleep(&deployment, SECOND);
        assert_eq!(states(client), ["ready", "asleep"]);
        assert_eq!(client.try_get("/v1/models/second").unwrap()["state"], "asleep");
        assert_eq!(client.ask(&ask(FIRST, 2)).answer, alone[0][2], "the other is awake");
        answers_as(client, &alone);
        assert_eq!(bases_of(client)[1]["wakes"], 1);

        // The executor dies while it wakes, and the request waits for the next one.
        sleep(&deployment, SECOND);
        let waiting = {
            let client = client.clone();
            thread::spawn(move || client.ask(&ask(SECOND, 0)).answer)
        };
        eventually("it wakes", || executor_of(&deployment, SECOND).is_some());
        signal(executor_of(&deployment, SECOND).expect("it has just started"), Signal::KILL);
        assert_eq!(waiting.join().expect("an answer"), alone[1][0]);

        // A new gateway knows that the base sleeps.
        sleep(&deployment, SECOND);
        deployment.signal(DeploymentProcess::Gateway, Signal::KILL);
        eventually("the gateway is back", || states(client) == ["ready", "asleep"]);
        assert_eq!(executor_of(&deployment, SECOND), None);
        assert_eq!(client.ask(&ask(SECOND, 1)).answer, alone[1][1]);

        // The gateway dies when the base has just fallen asleep.
        places.arm("gateway.base_fell_asleep", "kill");
        client.try_post("/v1/bases/second/sleep", &json!({})).unwrap_err();
        assert!(places.has_fired("gateway.base_fell_asleep"));
        eventually("the gateway is back", || {
            let states = states(client);
            states.first().is_some_and(|first| first == "ready") && ["asleep", "ready"].contains(&&*states[1])
        });
        assert_eq!(client.ask(&ask(SECOND, 2)).answer, alone[1][2]);
        let deployment = Arc::into_inner(deployment).expect("no thread is left");
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_base_falls_asleep_by_itself_and_the_deployment_stops_meanwhile() {
    watched(|| {
        let deployment = start("sleep_after_s = 1");
        let client = &deployment.client;
        eventually("both sleep", || states(client) == ["asleep", "asleep"]);
        assert!(client.is_healthy(), "a sleeping deployment answers");
        client.ask(&ask(FIRST, 0));
        eventually("it sleeps again", || states(client) == ["asleep", "asleep"]);
        assert!(deployment.stop_without(DeploymentProcess::Executor).success());
    });
}

fn copy(from: &std::path::Path, into: &std::path::Path) {
    fs::create_dir_all(into).unwrap();
    for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), into.join(file.file_name())).unwrap();
    }
}

//! Several executors behind one gateway: any of them may be killed during streams, and another continues its
//! sequences with the same bits.

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan, DeploymentProcess,
    chaos::{AdapterVariants, ChaosRng, Traffic},
    eventually, repeats, signal, watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const CLIENTS: u64 = 6;

/// Two executors on different cores, with unlimited restarts.
fn two() -> DeploymentPlan {
    DeploymentPlan::bare().executors(&["left", "right"]).restless()
}

fn start(plan: &DeploymentPlan) -> Deployment {
    let deployment = plan.start();
    eventually("both serve", || states(&deployment.client) == ["ready", "ready"]);
    deployment
}

fn executors(client: &Client) -> Vec<Value> {
    let status = client.try_get("/v1/status").unwrap_or_default();
    status["executors"].as_array().cloned().unwrap_or_default()
}

fn states(client: &Client) -> Vec<String> {
    executors(client).iter().map(|one| one["state"].as_str().unwrap_or_default().to_owned()).collect()
}

fn connections(client: &Client) -> Vec<Option<u64>> {
    executors(client).iter().map(|one| one["connection"].as_u64()).collect()
}

fn taken_over(client: &Client) -> u64 {
    executors(client).iter().filter_map(|one| one["sequences"]["taken_over"].as_u64()).sum()
}

fn has_work(client: &Client, name: &str) -> bool {
    let under_way = |one: &Value| one["sequences"]["under_way"].as_u64() > Some(0);
    executors(client).iter().any(|one| one["name"] == *name && under_way(one))
}

fn variants(client: &Client, into: &Path) -> (Arc<AdapterVariants>, Vec<String>) {
    let variants = Arc::new(AdapterVariants::learn(client, into, 1));
    client.load("steady", &variants.adapters[0].0);
    (variants, vec![BASE.to_owned(), "steady".to_owned()])
}

fn process_of(deployment: &Deployment, name: &str) -> Option<u32> {
    let socket = format!("executor-{name}.sock");
    let is_its = |id: &u32| {
        fs::read(format!("/proc/{id}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&socket))
    };
    deployment.processes(DeploymentProcess::Executor).into_iter().find(is_its)
}

#[test]
fn an_executor_may_die_under_streams_and_the_other_goes_on_to_the_same_bits() {
    let kills = repeats::EXECUTOR_KILLS.number();
    watched(move || {
        let deployment = start(&two());
        let client = &deployment.client;
        let (variants, models) = variants(client, &deployment.place().adapters());
        let mut traffic = Traffic::begin(client, &variants, &models, CLIENTS);
        let mut random = ChaosRng::new(repeats::SEED.number());
        for kill in 0..kills {
            let name = *random.pick(&["left", "right"]);
            let process = process_of(&deployment, name).expect("it runs");
            eventually("it has work", || has_work(client, name));
            let over: Option<u64> = connections(client).into_iter().sum();
            signal(process, Signal::KILL);
            let before = traffic.tally.answered.load(Ordering::Relaxed);
            eventually("clients are answered", || traffic.tally.answered.load(Ordering::Relaxed) > before);
            traffic.check();
            // The new process starts before the gateway notices the end of the first.
            eventually("both serve again", || connections(client).into_iter().sum::<Option<u64>>() > over);
            eprintln!("{} of {kills} deaths, {} sequences moved", kill + 1, taken_over(client));
        }
        traffic.finish().nobody_asked_again();
        assert!(taken_over(client) > 0, "the other went on with what was under way");
        assert!(deployment.stop().success());
    });
}

/// Longer than any step, and shorter than the supervisor's watchdog.
const SILENCE_MS: &str = "3000";

#[test]
fn a_stopped_executor_counts_as_dead_until_it_goes_on() {
    watched(|| {
        let deployment = start(&two().set("EXECUTOR_TIMEOUT_MS", SILENCE_MS));
        let client = &deployment.client;
        let (variants, models) = variants(client, &deployment.place().adapters());
        let mut traffic = Traffic::begin(client, &variants, &models, CLIENTS);
        let process = process_of(&deployment, "left").expect("it runs");
        eventually("it has work", || has_work(client, "left"));
        let moved = taken_over(client);
        signal(process, Signal::STOP);
        eventually("it counts as dead", || states(client) == ["lost", "ready"]);
        eventually("the other has what it had", || taken_over(client) > moved);
        let before = traffic.tally.answered.load(Ordering::Relaxed);
        let answered = || traffic.tally.answered.load(Ordering::Relaxed);
        eventually("clients are answered", || answered() > before + CLIENTS);
        signal(process, Signal::CONT);
        eventually("both serve", || states(client) == ["ready", "ready"]);
        let sent = executors(client)[0]["sequences"]["sent"].clone();
        eventually("it gets requests again", || executors(client)[0]["sequences"]["sent"] != sent);
        eventually("and answers", || answered() > before + 4 * CLIENTS);
        assert_eq!(process_of(&deployment, "left"), Some(process), "nobody has taken its place");
        traffic.check();
        traffic.finish().nobody_asked_again();
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_drained_executor_is_replaced_and_no_request_is_lost() {
    watched(|| {
        let deployment = start(&two());
        let client = &deployment.client;
        let (variants, models) = variants(client, &deployment.place().adapters());
        let mut traffic = Traffic::begin(client, &variants, &models, CLIENTS);
        let process = process_of(&deployment, "left").expect("it runs");
        client.try_post("/v1/executors/left/drain", &json!({})).expect("the other serves");
        eventually("it has nothing left to do", || executors(client)[0]["sequences"]["under_way"] == 0);
        let moved = taken_over(client);
        signal(process, Signal::TERM);
        eventually("another process has taken its place", || {
            process_of(&deployment, "left").is_some_and(|now| now != process)
                && states(client)[0] == "drained"
        });
        let sent = executors(client)[0]["sequences"]["sent"].clone();
        let before = traffic.tally.answered.load(Ordering::Relaxed);
        eventually("the other answers", || traffic.tally.answered.load(Ordering::Relaxed) > before + CLIENTS);
        assert_eq!(executors(client)[0]["sequences"]["sent"], sent, "it gets nothing new");
        assert_eq!(taken_over(client), moved, "and had nothing to lose");
        client.try_post("/v1/executors/left/undrain", &json!({})).expect("it is there");
        eventually("it gets requests again", || executors(client)[0]["sequences"]["sent"] != sent);
        traffic.check();
        thread::sleep(Duration::from_millis(200));
        traffic.finish().nobody_asked_again();
        assert!(deployment.stop().success());
    });
}

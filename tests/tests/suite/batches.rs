//! Batches of the real programs: the bits of online answers, also if everything is killed in between.

use std::{collections::BTreeMap, sync::Arc};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan, DeploymentProcess, MODELS, StateDirectory,
    chaos::FailpointDirectory, eventually, eventually_some, watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const ROUTE: &str = "/v1/completions";
const LINES: usize = 24;

/// Seeded and greedy requests on all models, whose prompts share no prefix.
fn bodies() -> Vec<Value> {
    let body = |index: usize| {
        let prompt: Vec<usize> = (0..20).map(|token| 1000 + 97 * index + 13 * token).collect();
        let (model, temperature) =
            (MODELS[index % MODELS.len()], f64::from(u8::from(!index.is_multiple_of(3))));
        json!({
            "model": model, "prompt": prompt, "max_tokens": 16, "seed": index, "temperature": temperature,
            "logprobs": 2, "ignore_eos": true,
        })
    };
    (0..LINES).map(body).collect()
}

fn text(bodies: &[Value]) -> String {
    let line = |(index, body): (usize, &Value)| json!({ "custom_id": format!("line {index}"), "method": "POST", "url": ROUTE, "body": body });
    bodies.iter().enumerate().map(|one| format!("{}\n", line(one))).collect()
}

fn create(client: &Client, file: &str) -> String {
    let order = json!({ "input_file_id": file, "endpoint": ROUTE, "completion_window": "24h" });
    let created = client.try_post("/v1/batches", &order).expect("a batch is created");
    created["id"].as_str().expect("its id").to_owned()
}

fn batch(client: &Client, id: &str) -> Option<Value> {
    client.try_get(&format!("/v1/batches/{id}")).ok()
}

/// Waits until the batch has `count` results; false if the batch has ended before.
fn has_results(client: &Client, id: &str, count: u64) -> bool {
    let look = || {
        let batch = batch(client, id)?;
        let is_there = batch["request_counts"]["completed"].as_u64() >= Some(count);
        let is_over = batch["status"] == "completed";
        (is_there || is_over).then_some(!is_over)
    };
    eventually_some("the batch goes on", look)
}

/// Waits for the end of a batch; returns its results by custom id, each of which is there once.
fn results(client: &Client, id: &str) -> BTreeMap<String, Value> {
    let ended = eventually_some("the batch ends", || {
        batch(client, id).filter(|batch| batch["status"] == "completed")
    });
    assert_eq!(ended["request_counts"], json!({ "total": LINES, "completed": LINES, "failed": 0 }));
    let file = ended["output_file_id"].as_str().expect("an output file");
    let content = client.try_get_text(&format!("/v1/files/{file}/content")).expect("the results");
    let read = |line: &str| {
        let result: Value = serde_json::from_str(line).expect("a result is JSON");
        let custom_id = result["custom_id"].as_str().expect("a custom id").to_owned();
        (custom_id, comparable(&result["response"]["body"]))
    };
    let results: BTreeMap<String, Value> = content.lines().map(read).collect();
    assert_eq!((content.lines().count(), results.len()), (LINES, LINES), "each line has one result");
    results
}

/// Returns the parts of an answer that are equal for equal requests.
fn comparable(answer: &Value) -> Value {
    let usage = &answer["usage"];
    json!([
        answer["choices"],
        answer["adapter_generation"],
        usage["prompt_tokens"],
        usage["completion_tokens"]
    ])
}

/// Kills processes one after the other during the batch, and everything at once in between.
fn disturb(plan: &DeploymentPlan, mut deployment: Deployment, id: &str) -> Deployment {
    let place = Arc::clone(deployment.place());
    let deaths: [&[DeploymentProcess]; 3] =
        [&[DeploymentProcess::Gateway], &[DeploymentProcess::Executor], &DeploymentProcess::ALL];
    for (count, processes) in (1..).step_by(4).zip(deaths) {
        if has_results(&deployment.client, id, count) {
            processes.iter().for_each(|process| deployment.signal(*process, Signal::KILL));
        }
    }
    if has_results(&deployment.client, id, 13) {
        for process in [DeploymentProcess::Gateway, DeploymentProcess::Executor] {
            eventually("the processes run", || deployment.process(process).is_some());
        }
        deployment.kill_supervisor();
        deployment = plan.start_in(place);
    }
    deployment
}

#[test]
fn a_batch_through_every_death_has_the_bits_of_online_answers_and_each_line_once() {
    watched(|| {
        let places = FailpointDirectory::new();
        let plan = DeploymentPlan::with_examples().mortal(&places);
        let deployment = plan.start_in(Arc::new(StateDirectory::new()));
        let bodies = bodies();
        let online: BTreeMap<String, Value> = bodies
            .iter()
            .enumerate()
            .map(|(index, body)| {
                let answer = deployment.client.try_post(ROUTE, body).expect("an answer");
                (format!("line {index}"), comparable(&answer))
            })
            .collect();
        let file = deployment.client.try_upload_as("batch", "lines.jsonl", &text(&bodies)).expect("a file");
        let calm = create(&deployment.client, &file);
        assert_eq!(results(&deployment.client, &calm), online);
        // The results are written, but not all of them are recorded as done.
        places.arm("gateway.batch_line_written", "kill 3");
        places.arm("gateway.batch_files_kept", "kill");
        let id = create(&deployment.client, &file);
        let deployment = disturb(&plan, deployment, &id);
        assert_eq!(results(&deployment.client, &id), online);
        assert!(
            places.has_fired("gateway.batch_line_written") && places.has_fired("gateway.batch_files_kept")
        );
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_batch_is_kept_from_the_moment_it_is_acknowledged() {
    watched(|| {
        let places = FailpointDirectory::new();
        let deployment = DeploymentPlan::with_examples().mortal(&places).start();
        let client = &deployment.client;
        let file = client.try_upload_as("batch", "lines.jsonl", &text(&bodies())).expect("a file");
        places.arm("gateway.batch_committed", "kill");
        // The batch is stored, but its creation was not acknowledged.
        let order = json!({ "input_file_id": file, "endpoint": ROUTE, "completion_window": "24h" });
        assert!(client.try_post("/v1/batches", &order).is_err());
        eventually("the gateway is back", || client.is_healthy());
        let listed = eventually_some("the list", || client.try_get("/v1/batches").ok());
        let id = listed["data"][0]["id"].as_str().expect("the batch is listed");
        // The batch keeps its lines when the file is deleted.
        client.delete(&format!("/v1/files/{file}")).expect("the file is deleted");
        assert_eq!(results(client, id).len(), LINES);
        assert!(client.try_ask(&e2e_tests::CompletionRequest::new(BASE, vec![5], 1)).is_ok());
        assert!(deployment.stop().success());
    });
}

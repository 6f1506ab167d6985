//! Fine-tuning jobs through the API of OpenAI's clients: their whole life, with every process killed.
//!
//! `HOLOBIONT_TUNE_KILLS` sets the number of kills during one job.

use std::{sync::Arc, time::Duration};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan, DeploymentProcess, RequestFault, StateDirectory,
    chaos::FailpointDirectory,
    eventually, eventually_some,
    jobs::{self, ANSWER, data},
    repeats, signal,
    split::SplitEndpoints,
    watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

fn create(deployment: &Deployment, file: &str, suffix: &str) -> String {
    jobs::create(&deployment.client, &jobs::order(file, suffix, 10))
}

fn generation(deployment: &Deployment, id: &str) -> String {
    jobs::generation(&deployment.client, id)
}

fn made(deployment: &Deployment, id: &str, step: u64) -> bool {
    jobs::made(&deployment.client, id, step)
}

fn kill_trainers(deployment: &Deployment) {
    deployment.trainers().into_iter().for_each(|trainer| signal(trainer, Signal::KILL));
}

#[test]
fn a_job_through_every_death_gives_the_generation_of_one_that_ran_through() {
    watched(|| {
        let deployment = DeploymentPlan::bare().restless().start();
        let file = deployment.client.upload("pirate.jsonl", &data());
        let whole = create(&deployment, &file, "whole");
        let whole = generation(&deployment, &whole);
        let id = create(&deployment, &file, "killed");
        let kills = repeats::TUNE_KILLS.number();
        for kill in 0..kills {
            if !made(&deployment, &id, 1 + kill * 18 / kills) {
                break;
            }
            match kill % 4 {
                0 => kill_trainers(&deployment),
                1 => deployment.signal(DeploymentProcess::Gateway, Signal::KILL),
                2 => deployment.signal(DeploymentProcess::Executor, Signal::KILL),
                _ => deployment.signal(DeploymentProcess::Trainer, Signal::KILL),
            }
        }
        assert_eq!(generation(&deployment, &id), whole);
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_job_is_kept_from_the_moment_it_is_acknowledged_and_published_once() {
    watched(|| {
        let places = FailpointDirectory::new();
        let deployment = DeploymentPlan::bare().mortal(&places).start();
        let file = deployment.client.upload("pirate.jsonl", &data());
        places.arm("gateway.job_committed", "kill");
        // The job is stored, but its creation was not acknowledged.
        let order = json!({ "model": BASE, "training_file": file, "suffix": "unheard" });
        assert!(deployment.client.try_post("/v1/fine_tuning/jobs", &order).is_err());
        let id = create(&deployment, &file, "pirate");
        places.arm("gateway.job_published", "kill");
        let generation = generation(&deployment, &id);
        assert_eq!(deployment.client.adapter("public/pirate")["generation"], generation.as_str());
        let jobs = deployment.client.try_get("/v1/fine_tuning/jobs").expect("jobs");
        assert_eq!(jobs["data"].as_array().map(Vec::len), Some(2), "{jobs}");
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_job_waits_over_a_restart_and_goes_on() {
    watched(|| {
        let place = Arc::new(StateDirectory::new());
        let deployment = DeploymentPlan::bare().whole().start_in(Arc::clone(&place));
        let file = deployment.client.upload("pirate.jsonl", &data());
        let id = create(&deployment, &file, "restarted");
        assert!(made(&deployment, &id, 2));
        let paused = deployment.client.try_post(&format!("/v1/fine_tuning/jobs/{id}/pause"), &json!({}));
        assert_eq!(paused.expect("it can be paused")["status"], "paused");
        assert!(deployment.stop().success());
        let deployment = DeploymentPlan::bare().whole().start_in(place);
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(jobs::job(&deployment.client, &id).expect("it is kept")["status"], "paused");
        let resumed = deployment.client.try_post(&format!("/v1/fine_tuning/jobs/{id}/resume"), &json!({}));
        assert_eq!(resumed.expect("it can go on")["status"], "queued");
        generation(&deployment, &id);
        assert_eq!(jobs::answer(&deployment.client, "public/restarted"), ANSWER);
        // Training continues from the adapter, with a result of its own.
        let body = json!({ "model": "public/restarted", "training_file": file, "suffix": "restarted" });
        let further = deployment.client.try_post("/v1/fine_tuning/jobs", &body).expect("a job");
        generation(&deployment, further["id"].as_str().expect("its id"));
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_request_that_is_sent_again_with_its_key_is_answered_with_the_job_it_created() {
    watched(|| {
        let places = FailpointDirectory::new();
        let deployment = DeploymentPlan::bare().mortal(&places).start();
        let client = &deployment.client;
        let file = client.upload("pirate.jsonl", &data());
        let order = json!({ "model": BASE, "training_file": file, "suffix": "once" });
        let ask = |key: &str, order: &Value| client.try_post_keyed("/v1/fine_tuning/jobs", key, order);
        places.arm("gateway.job_committed", "kill");
        ask("retry-1", &order).expect_err("it is kept, and never acknowledged");
        let job = eventually_some("the gateway is back", || ask("retry-1", &order).ok());
        client.delete(&format!("/v1/files/{file}")).expect("the job has a link of its own");
        let again = ask("retry-1", &order).expect("the same job, though its file is gone");
        assert_eq!(again["id"], job["id"]);
        let other = json!({ "model": BASE, "training_file": file, "suffix": "twice" });
        let reused = RequestFault::Refused { status: 422, code: "idempotency_key_reused".to_owned() };
        assert_eq!(ask("retry-1", &other), Err(reused));
        let jobs = client.try_get("/v1/fine_tuning/jobs").expect("jobs");
        assert_eq!(jobs["data"].as_array().map(Vec::len), Some(1), "{jobs}");
        let file = client.upload("pirate.jsonl", &data());
        let order = json!({ "model": BASE, "training_file": file, "suffix": "twice" });
        let second = ask("retry-2", &order).expect("another key, another job");
        assert_ne!(second["id"], job["id"]);
        assert!(deployment.stop().success());
    });
}

#[test]
fn what_belongs_to_a_tenant_is_nobody_elses() {
    watched(|| {
        let keys = SplitEndpoints::new();
        let (acme, other) = (keys.add_key("acme"), keys.add_key("other"));
        let file = keys.key_file().display().to_string();
        let deployment = DeploymentPlan::bare().set("API_KEY_FILE", &file).set("TENANT_JOBS", "2").start();
        let (acme, other) = (deployment.client.with_key(&acme), deployment.client.with_key(&other));
        let file = acme.upload("pirate.jsonl", &data());
        let gone = |client: &Client, route: &str| client.try_get(route).is_err();
        assert!(
            gone(&other, &format!("/v1/files/{file}")) && gone(&other, &format!("/v1/files/{file}/content"))
        );
        let order = json!({ "model": BASE, "training_file": file, "suffix": "mine" });
        assert!(other.try_post("/v1/fine_tuning/jobs", &order).is_err(), "a file of somebody else");
        let job = acme.try_post("/v1/fine_tuning/jobs", &order).expect("a job");
        let route = format!("/v1/fine_tuning/jobs/{}", job["id"].as_str().expect("its id"));
        for route in [route.clone(), format!("{route}/events"), format!("{route}/checkpoints")] {
            assert!(gone(&other, &route), "{route}");
        }
        assert!(other.try_post(&format!("{route}/cancel"), &json!({})).is_err());
        assert_eq!(other.try_get("/v1/fine_tuning/jobs").expect("none")["data"], json!([]));
        let second = json!({ "model": BASE, "training_file": file });
        acme.try_post("/v1/fine_tuning/jobs", &second).expect("a second job");
        let third = acme.try_post("/v1/fine_tuning/jobs", &order).expect_err("a third one");
        assert!(format!("{third:?}").contains("job_quota_exceeded"), "{third:?}");
        eventually("the first is done", || {
            acme.try_get(&route).is_ok_and(|job| job["status"] == "succeeded")
        });
        let ask = json!({ "model": "acme/mine", "prompt": "a", "max_tokens": 1 });
        assert!(acme.try_post("/v1/completions", &ask).is_ok());
        assert!(other.try_post("/v1/completions", &ask).is_err(), "it is acme's alone");
        assert!(deployment.stop().success());
    });
}

#[test]
fn faulty_data_fail_a_job_with_the_lines_to_mend_and_a_job_keeps_its_data() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let faulty =
            deployment.client.upload("faulty.jsonl", &format!("{}{{\"messages\": []}}\nnot JSON\n", data()));
        let id = create(&deployment, &faulty, "faulty");
        let last = jobs::ended(&deployment.client, &id);
        assert_eq!(
            (&last["status"], &last["error"]["code"]),
            (&json!("failed"), &json!("invalid_training_file"))
        );
        let message = last["error"]["message"].as_str().expect("a message");
        assert!(message.contains("line 5:") && message.contains("line 6:"), "{message}");
        // A job holds its own link to its data.
        let file = deployment.client.upload("pirate.jsonl", &data());
        let id = create(&deployment, &file, "linked");
        deployment.client.delete(&format!("/v1/files/{file}")).expect("it is there");
        generation(&deployment, &id);
        assert!(deployment.stop().success());
    });
}

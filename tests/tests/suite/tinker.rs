//! Stepwise training with a killed trainer, and the state that survives.

use e2e_tests::{
    Client, Deployment, DeploymentPlan, RequestFault, signal,
    tinker::{Example, TinkerModel},
    watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

fn batch(first: u32) -> [Example; 1] {
    [Example { tokens: (first..first + 20).collect(), weights: vec![0.05; 19] }]
}

fn adam() -> Value {
    json!({ "learning_rate": 1e-3 })
}

fn begin(client: &Client) -> TinkerModel<'_> {
    TinkerModel::begin(client, &json!({ "rank": 4, "seed": 5, "train_unembed": false }))
}

fn generation(deployment: &Deployment, model: &mut TinkerModel<'_>, name: &str) -> Value {
    let published = model.publish(name);
    deployment.client.adapter(&published)["generation"].clone()
}

#[test]
fn a_model_whose_trainer_is_killed_says_so_and_goes_on_from_its_last_state_to_the_same_bits() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let mut model = begin(&deployment.client);
        model.step(&batch(100), &adam());
        let state = model.try_save("first").expect("a state");
        model.step(&batch(200), &adam());
        let whole = generation(&deployment, &mut model, "whole");
        let now = &deployment.client.status()["training"];
        assert_eq!((&now["trains"], &now["runs"][0]["step"]), (&json!(true), &json!(2)), "{now}");
        deployment.trainers().into_iter().for_each(|trainer| signal(trainer, Signal::KILL));
        for _ in 0..2 {
            let failure = model.try_step(&batch(300), &adam()).expect_err("there is no trainer any more");
            let message = failure["error"].as_str().expect("why");
            assert_eq!(failure["category"], "server");
            assert!(message.contains("create_training_client_from_state_with_optimizer"), "{message}");
        }
        model.end();
        let mut resumed = TinkerModel::resume(&deployment.client, &state);
        resumed.step(&batch(200), &adam());
        assert_eq!(generation(&deployment, &mut resumed, "resumed"), whole);
        assert!(deployment.stop().success());
    });
}

#[test]
fn what_is_kept_of_a_run_is_listed_bounded_and_taken_away() {
    watched(|| {
        let deployment = DeploymentPlan::bare().set("TENANT_STATE_BYTES", "1").start();
        let client = &deployment.client;
        let mut model = begin(client);
        let state = model.try_save("first").expect("a state");
        let refused = model.try_save("second").expect_err("that is too much");
        assert_eq!(refused["category"], "user");
        assert!(
            refused["error"].as_str().is_some_and(|why| why.contains("--tenant-state-bytes")),
            "{refused}"
        );
        let sampler = model.publish("pirate");
        let run = state.split('/').nth(2).expect("a run");
        let listed = client.try_get("/api/v1/training_runs").expect("runs");
        let found = &listed["training_runs"][0];
        assert_eq!((&found["training_run_id"], &listed["cursor"]["total_count"]), (&json!(run), &json!(1)));
        assert_eq!(
            (&found["lora_rank"], &found["last_checkpoint"]["tinker_path"]),
            (&json!(4), &json!(state))
        );
        let paths = |route: &str| -> Vec<String> {
            let listed = client.try_get(route).expect("what is kept");
            let path = |kept: &Value| kept["tinker_path"].as_str().expect("a path").to_owned();
            listed["checkpoints"].as_array().expect("a list").iter().map(path).collect()
        };
        let route = format!("/api/v1/training_runs/{run}/checkpoints");
        let served = format!("tinker://{run}/sampler_weights/pirate");
        for route in [&route, "/api/v1/checkpoints"] {
            let mut kept = paths(route);
            kept.sort();
            assert_eq!(kept, [served.clone(), state.clone()], "{route}");
        }
        client.delete(&format!("{route}/weights/first")).expect("the state is there");
        assert_eq!(paths(&route), [served]);
        model.try_save("second").expect("there is room again");
        client.delete(&format!("{route}/sampler_weights/pirate")).expect("the adapter is there");
        assert!(client.try_get(&format!("/v1/models/{sampler}")).is_err());
        for gone in ["weights/first", "sampler_weights/pirate", "other/first", "weights"] {
            let refused = client.delete(&format!("{route}/{gone}")).expect_err("nothing is there");
            assert!(matches!(refused, RequestFault::Refused { status: 404, .. }), "{gone}: {refused}");
        }
        model.end();
        assert!(deployment.stop().success());
    });
}

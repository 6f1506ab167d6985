//! Fine-tuning jobs of hosts that share one PostgreSQL and one bucket: created on any host, run on one, and
//! continued elsewhere if it is lost.

use std::sync::Arc;

use e2e_tests::{
    Deployment, DeploymentPlan, DeploymentProcess, RequestFault,
    chaos::FailpointDirectory,
    eventually, fixtures,
    jobs::{self, ROUTE},
    servers::{self, postgres::Postgres, s3::Bucket, wire::ResponseFault},
    signal, watched,
};
use rustix::process::Signal;
use serde_json::json;

/// Epochs of jobs that must still run when another event happens, with two steps each.
const EPOCHS: u64 = 24;
/// Epochs of jobs that repeat most of their steps.
const FEW_EPOCHS: u64 = 12;

fn host(postgres: &Postgres, bucket: &Bucket) -> DeploymentPlan {
    let plan = DeploymentPlan::bare().workers(0).set("REGISTRY", &postgres.url()).set("STORE", &bucket.url());
    let plan = plan.set("CHECKPOINT_STEPS", "8");
    bucket.variables().iter().fold(plan, |plan, (name, value)| plan.environment(name, value))
}

/// Host whose gateway runs no jobs.
fn gateway(postgres: &Postgres, bucket: &Bucket) -> Deployment {
    host(postgres, bucket).set("MAX_TRAINERS", "0").start()
}

fn two(postgres: &Postgres, bucket: &Bucket) -> (Deployment, Deployment, String) {
    let (first, second) = (host(postgres, bucket).start(), host(postgres, bucket).start());
    let file = first.client.upload("pirate.jsonl", &jobs::data());
    (first, second, file)
}

/// The host that runs the job, and the other one.
fn by_work(first: Deployment, second: Deployment, job: &str) -> (Deployment, Deployment) {
    if first.trains(job) { (first, second) } else { (second, first) }
}

fn kept(bucket: &Bucket) -> Vec<String> {
    bucket.names().into_iter().filter(|name| name.starts_with("adapters/training/")).collect()
}

fn only_files_stay(bucket: &Bucket, files: usize) {
    eventually("what jobs needed is removed", || {
        let kept = kept(bucket);
        kept.len() == files && kept.iter().all(|name| name.starts_with("adapters/training/files/"))
    });
}

#[test]
fn a_job_whose_host_is_lost_goes_on_on_another_to_the_same_bits() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (first, second, file) = two(&postgres, &bucket);
        let order = |suffix: &str| jobs::order(&file, suffix, FEW_EPOCHS);
        let whole = jobs::create(&second.client, &order("whole"));
        let whole = jobs::generation(&first.client, &whole);
        let id = jobs::create(&first.client, &order("moved"));
        jobs::wait_for_checkpoint(&second.client, &id);
        assert!(kept(&bucket).iter().any(|name| name.contains("/checkpoint")), "{:?}", kept(&bucket));
        let (lost, left) = by_work(first, second, &id);
        assert_eq!((lost.trainers().len(), left.trainers().len()), (1, 0), "one works on it");
        lost.kill_supervisor();
        assert_eq!(jobs::generation(&left.client, &id), whole);
        let said = jobs::said(&left.client, &id);
        assert!(said.iter().any(|said| said.starts_with("continuing after step ")), "{said:?}");
        let answers = ["public/moved", "public/whole"].map(|model| jobs::answer(&left.client, model));
        assert_eq!(answers[0], answers[1]);
        let results = jobs::job(&left.client, &id).expect("it is known")["result_files"].clone();
        assert_eq!(results.as_array().map(Vec::len), Some(1));
        // The data, and the metrics of two jobs.
        only_files_stay(&bucket, 3);
        assert!(left.stop().success());
    });
}

#[test]
fn files_and_jobs_are_the_same_through_every_host_and_a_job_obeys_through_any() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (gateway, trains) = (gateway(&postgres, &bucket), host(&postgres, &bucket).start());
        let file = gateway.client.upload("pirate.jsonl", &jobs::data());
        let line = trains.client.upload("line.json", "{\"a\": 1}");
        for host in [&gateway, &trains] {
            let files = host.client.try_get("/v1/files").expect("files");
            assert_eq!([&files["data"][0]["id"], &files["data"][1]["id"]], [line.as_str(), file.as_str()]);
            let content = host.client.try_get(&format!("/v1/files/{line}/content")).expect("its content");
            assert_eq!(content, json!({ "a": 1 }));
        }
        gateway.client.delete(&format!("/v1/files/{line}")).expect("it is there");
        assert!(trains.client.try_get(&format!("/v1/files/{line}/content")).is_err());

        let order = jobs::order(&file, "obeys", EPOCHS);
        let ask = |host: &Deployment| host.client.try_post_keyed(ROUTE, "once", &order).expect("a job");
        let id = ask(&gateway)["id"].as_str().expect("its id").to_owned();
        assert_eq!(ask(&trains)["id"], id.as_str(), "the same request through another host");
        // A job keeps its data.
        trains.client.delete(&format!("/v1/files/{file}")).expect("it is there");
        assert!(jobs::made(&gateway.client, &id, 2));
        assert_eq!(jobs::request_action(&gateway.client, &id, "pause"), "paused");
        eventually("its trainer stops", || trains.trainers().is_empty());
        let back = gateway.place().home().join("back").display().to_string();
        let moving = ["registry", "move", "--from", &postgres.url(), "--to", &back, "--store", &bucket.url()];
        let (moved, said) = fixtures::holobiont(&moving, &bucket.variables());
        assert!(!moved && said.contains("1 unfinished fine-tuning jobs"), "{said}");
        jobs::wait_for_checkpoint(&gateway.client, &id);
        let step = jobs::job(&gateway.client, &id).expect("it is known")["step"].clone();
        assert_eq!(jobs::request_action(&gateway.client, &id, "resume"), "queued");
        assert!(jobs::made(&gateway.client, &id, step.as_u64().expect("a step") + 1));
        let said = jobs::said(&trains.client, &id);
        assert_eq!(said, jobs::said(&gateway.client, &id));
        assert!(said.iter().any(|said| *said == format!("continuing after step {step}")), "{said:?}");
        assert_eq!(jobs::request_action(&gateway.client, &id, "cancel"), "cancelled");
        eventually("its trainer stops", || trains.trainers().is_empty());
        only_files_stay(&bucket, 0);
        assert!(gateway.stop().success() && trains.stop().success());
    });
}

#[test]
fn what_a_tenant_may_have_holds_across_hosts() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let few = |plan: DeploymentPlan| plan.set("TENANT_JOBS", "1").set("TENANT_TRAINING_BYTES", "2000");
        let hosts = [0, 1].map(|_| few(host(&postgres, &bucket)).set("MAX_TRAINERS", "0").start());
        let file = hosts[0].client.upload("pirate.jsonl", &jobs::data());
        let codes = hosts.each_ref().map(|host| {
            let order = jobs::order(&file, "first", EPOCHS);
            match host.client.try_post(ROUTE, &order) {
                Ok(job) => job["status"].as_str().unwrap_or_default().to_owned(),
                Err(fault) => format!("{fault:?}"),
            }
        });
        assert_eq!(codes[0], "queued");
        assert!(codes[1].contains("job_quota_exceeded"), "{codes:?}");
        let more = hosts[1].client.try_upload("more.jsonl", &jobs::data().repeat(4));
        let more = more.expect_err("files of both hosts count");
        assert!(format!("{more:?}").contains("file_quota_exceeded"), "{more:?}");
        only_files_stay(&bucket, 1);
    });
}

#[test]
fn a_host_without_postgresql_trains_on_for_a_while_then_stops_and_nothing_is_lost() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (gateway, trains) = (gateway(&postgres, &bucket), host(&postgres, &bucket).start());
        let file = gateway.client.upload("pirate.jsonl", &jobs::data());
        let order = |suffix: &str| jobs::order(&file, suffix, EPOCHS);
        let whole = jobs::create(&gateway.client, &order("whole"));
        let whole = jobs::generation(&gateway.client, &whole);
        let id = jobs::create(&gateway.client, &order("cut"));
        assert!(jobs::made(&gateway.client, &id, 5));
        let trainer = trains.trainers();
        // The trainer is stopped, so that the job cannot end before the checks.
        trainer.iter().for_each(|trainer| signal(*trainer, Signal::STOP));
        postgres.stop();
        for host in [&gateway, &trains] {
            let refused = RequestFault::Refused { status: 503, code: "registry_unavailable".to_owned() };
            assert_eq!(host.client.try_post(ROUTE, &order("refused")), Err(refused.clone()));
            assert_eq!(host.client.try_get(ROUTE), Err(refused));
        }
        assert_eq!(trains.trainers(), trainer, "for a while it is left alone");
        trainer.iter().for_each(|trainer| signal(*trainer, Signal::CONT));
        eventually("it stops when its time is over", || trains.trainers().is_empty());
        postgres.restart();
        assert_eq!(jobs::generation(&gateway.client, &id), whole);
        only_files_stay(&bucket, 3);
        assert!(gateway.stop().success() && trains.stop().success());
    });
}

#[test]
fn a_gateway_that_is_killed_under_a_job_takes_it_up_again() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let place = Arc::new(e2e_tests::StateDirectory::new());
        let only = host(&postgres, &bucket).restless().start_in(place);
        let file = only.client.upload("pirate.jsonl", &jobs::data());
        let whole = jobs::create(&only.client, &jobs::order(&file, "whole", 10));
        let whole = jobs::generation(&only.client, &whole);
        let id = jobs::create(&only.client, &jobs::order(&file, "killed", 10));
        assert!(jobs::made(&only.client, &id, 2));
        only.signal(DeploymentProcess::Gateway, Signal::KILL);
        assert_eq!(jobs::generation(&only.client, &id), whole);
        assert!(only.stop().success());
    });
}

#[test]
fn a_bucket_that_is_gone_and_then_has_another_checkpoint_costs_steps_and_no_bit() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (first, second, file) = two(&postgres, &bucket);
        let order = |suffix: &str| jobs::order(&file, suffix, FEW_EPOCHS);
        let whole = jobs::create(&first.client, &order("whole"));
        let whole = jobs::generation(&first.client, &whole);
        let id = jobs::create(&first.client, &order("astray"));
        assert!(jobs::made(&second.client, &id, 1));
        let (held, free) = by_work(first, second, &id);
        bucket.wire.set(ResponseFault::Gone);
        let refused = RequestFault::Refused { status: 503, code: "adapter_store_unavailable".to_owned() };
        assert_eq!(held.client.try_upload("more.jsonl", &jobs::data()), Err(refused));
        assert!(jobs::made(&free.client, &id, 10), "it goes on, and its checkpoints are nowhere yet");
        assert!(!kept(&bucket).iter().any(|name| name.contains("/checkpoint")), "{:?}", kept(&bucket));
        bucket.wire.set(ResponseFault::None);
        assert_eq!(jobs::request_action(&free.client, &id, "pause"), "paused");
        eventually("its last checkpoint is in the bucket", || {
            let step = jobs::job(&free.client, &id).map(|job| job["step"].clone());
            jobs::last_checkpoint(&free.client, &id) == step
        });
        held.kill_supervisor();
        let checkpoint = kept(&bucket).into_iter().find(|name| name.contains("/checkpoint"));
        bucket.replace(&checkpoint.expect("it is there"), b"something else");
        assert_eq!(jobs::request_action(&free.client, &id, "resume"), "queued");
        assert_eq!(jobs::generation(&free.client, &id), whole);
        let said = jobs::said(&free.client, &id);
        assert!(said.iter().any(|said| said.contains("starts over")), "{said:?}");
        only_files_stay(&bucket, 3);
        assert!(free.stop().success());
    });
}

#[test]
fn a_host_that_stops_for_a_while_has_lost_its_job_and_says_no_more_of_it() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (first, second, file) = two(&postgres, &bucket);
        let order = |suffix: &str| jobs::order(&file, suffix, FEW_EPOCHS);
        let whole = jobs::create(&first.client, &order("whole"));
        let whole = jobs::generation(&first.client, &whole);
        let id = jobs::create(&first.client, &order("stopped"));
        jobs::wait_for_checkpoint(&second.client, &id);
        let (held, free) = by_work(first, second, &id);
        let trainers = held.trainers();
        let all = |how| {
            held.signal(DeploymentProcess::Gateway, how);
            trainers.iter().for_each(|trainer| signal(*trainer, how));
        };
        all(Signal::STOP);
        eventually("the other host takes the job over", || free.trains(&id));
        all(Signal::CONT);
        eventually("the first gives it up", || held.trainers().is_empty());
        assert_eq!(jobs::generation(&free.client, &id), whole);
        let said = jobs::said(&held.client, &id);
        let taken = said.iter().filter(|said| said.starts_with("continuing after step ")).count();
        assert_eq!(taken, 1, "{said:?}");
        only_files_stay(&bucket, 3);
        assert!(held.stop().success() && free.stop().success());
    });
}

fn served(bucket: &Bucket) -> Vec<String> {
    bucket.names().into_iter().filter(|name| !name.starts_with("adapters/training/")).collect()
}

#[test]
fn a_gateway_that_stops_while_it_publishes_an_adapter_leaves_it_to_another_host_once_and_whole() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let places = FailpointDirectory::new();
        let plan = host(&postgres, &bucket).mortal(&places);
        let (mut first, mut second) = (plan.start(), plan.start());
        let file = first.client.upload("pirate.jsonl", &jobs::data());
        let mut made = jobs::create(&first.client, &jobs::order(&file, "whole", FEW_EPOCHS));
        let whole = jobs::generation(&first.client, &made);
        let mut name = "public/whole".to_owned();
        // Before any copy of the adapter, and when only its row is missing.
        for place in ["gateway.job_publishing", "gateway.before_commit"] {
            let answer = jobs::answer(&first.client, &name);
            // The next adapter has the same bytes, and must not be taken for the first one's.
            first.client.unload(&name);
            let suffix = place.trim_start_matches("gateway.");
            made = jobs::create(&first.client, &jobs::order(&file, suffix, FEW_EPOCHS));
            name = format!("public/{suffix}");
            eventually("a host works on it", || first.trains(&made) || second.trains(&made));
            let (held, free) = by_work(first, second, &made);
            // Long enough to stop the process there, and shorter than the lease.
            places.arm(place, "wait 5000");
            eventually("its gateway gets so far", || places.has_fired(place));
            held.signal(DeploymentProcess::Gateway, Signal::STOP);
            assert_eq!(jobs::generation(&free.client, &made), whole, "the other host has taken it over");
            let (said, stored) = (jobs::said(&free.client, &made), served(&bucket));
            let directory = held.place().state().join("training/jobs").join(&made);
            assert!(directory.exists(), "the first has its adapter there");
            held.signal(DeploymentProcess::Gateway, Signal::CONT);
            eventually("it lets go of the job", || !directory.exists());
            for host in [&held, &free] {
                let alone = [(name.clone(), whole.clone())];
                eventually("one adapter is served", || host.client.registered().as_deref() == Some(&alone));
                assert_eq!(jobs::answer(&host.client, &name), answer);
                assert_eq!(jobs::said(&host.client, &made), said, "nothing more is said of it");
            }
            for event in ["new fine-tuned model created: ", "the job has successfully completed"] {
                assert_eq!(said.iter().filter(|said| said.starts_with(event)).count(), 1, "{said:?}");
            }
            assert_eq!(served(&bucket), stored);
            (first, second) = (free, held);
        }
        // The data, and the metrics of three jobs.
        only_files_stay(&bucket, 4);
        let answer = jobs::answer(&first.client, &name);
        let fresh = gateway(&postgres, &bucket);
        assert_eq!(jobs::answer(&fresh.client, &name), answer, "it is whole in the bucket");
        assert!(first.stop().success() && second.stop().success() && fresh.stop().success());
    });
}

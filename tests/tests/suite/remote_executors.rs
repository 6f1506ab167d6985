//! Executors on other hosts: the gateway reaches them over TLS and gets the same bits; other clients are
//! rejected.

use std::{
    io::{Read as _, Write as _},
    sync::{Arc, atomic::Ordering},
};

use e2e_tests::{
    BASE, Client, Deployment, DeploymentPlan,
    chaos::{AdapterVariants, ChaosRng, Traffic},
    eventually, eventually_some,
    remote_executor::{RemoteExecutor, answer},
    repeats,
    split::{CERTIFIED, GATEWAY},
    watched,
};
use serde_json::{Value, json};
use shmproto::remote_executor::{FileName, RemoteReply, RemoteRequest, StagedFile};

const CLIENTS: u64 = 4;
/// Short, so that loss is soon noticed, but long enough for a busy machine.
const SILENCE_MS: &str = "4000";
const NEAR: usize = 0;
const FAR: usize = 1;

fn mixed(far: &RemoteExecutor) -> Deployment {
    let plan = DeploymentPlan::bare().executors(&["near"]).workers(0).set("EXECUTOR_TIMEOUT_MS", SILENCE_MS);
    let deployment = far.of(plan, "far").start();
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

fn sent(client: &Client, index: usize) -> u64 {
    executors(client)[index]["sequences"]["sent"].as_u64().expect("a count")
}

/// Drains one executor, so that the other gets all requests.
fn only(client: &Client, open: &str, drained: &str) {
    client.try_post(&format!("/v1/executors/{open}/undrain"), &json!({})).expect("it is there");
    client.try_post(&format!("/v1/executors/{drained}/drain"), &json!({})).expect("the other serves");
}

#[test]
fn a_far_executor_answers_with_the_bits_of_a_near_one() {
    watched(|| {
        let far = RemoteExecutor::start(&[]);
        let deployment = mixed(&far);
        let client = &deployment.client;
        only(client, "near", "far");
        let variants = AdapterVariants::learn(client, &deployment.place().adapters(), 2);
        assert_eq!((sent(client, FAR), far.lent()), (0, 0), "it has learned nothing yet");
        only(client, "far", "near");
        let before = sent(client, NEAR);
        for (path, generation) in &variants.adapters {
            // The second adapter replaces the first while it is served.
            let loaded = match client.adapters().is_empty() {
                true => client.load("steady", path),
                false => client.reload("steady", path),
            };
            assert_eq!(&loaded, generation, "what arrives there is what was sent");
            for index in 0..variants.questions() {
                let ask = variants.ask("steady", index);
                let reply = client.ask(&ask);
                variants.check(index, reply.generation.as_deref(), &reply.answer);
                let (streamed, _) = client.stream(&ask).finish();
                variants.check(index, Some(generation), &streamed);
                let base = client.ask(&variants.ask(BASE, index));
                variants.check(index, None, &base.answer);
            }
        }
        assert!(sent(client, NEAR) == before && sent(client, FAR) > 0, "the far one has answered");
        eventually("no files are left there", || far.lent() == 0);
        let address = far.wire.address.to_string();
        assert_eq!(executors(client)[FAR]["address"], address, "one sees where it is");
        assert!(deployment.stop().success());
    });
}

#[test]
fn a_far_executor_alone_is_enough_and_no_weights_are_loaded_here() {
    watched(|| {
        let far = RemoteExecutor::start(&[]);
        let plan = far.of(DeploymentPlan::bare().workers(0), "far");
        let (plan, place) =
            (plan.set("EXECUTOR_TIMEOUT_MS", SILENCE_MS), Arc::new(e2e_tests::StateDirectory::new()));
        let deployment = plan.start_in(place);
        assert!(deployment.processes(e2e_tests::DeploymentProcess::Executor).is_empty());
        let reply = deployment.client.ask(&e2e_tests::CompletionRequest::new(BASE, vec![1, 2, 3], 4));
        assert_eq!(reply.answer.scored.len(), 4);
        assert!(deployment.stop().success());
    });
}

#[test]
fn what_a_lost_far_executor_had_goes_on_here_to_the_same_bits() {
    let faults = repeats::EXECUTOR_KILLS.number();
    watched(move || {
        let mut far = RemoteExecutor::start(&[]);
        let deployment = mixed(&far);
        let client = &deployment.client;
        let variants = Arc::new(AdapterVariants::learn(client, &deployment.place().adapters(), 1));
        client.load("steady", &variants.adapters[0].0);
        let models = [BASE.to_owned(), "steady".to_owned()];
        let mut traffic = Traffic::begin(client, &variants, &models, CLIENTS);
        let mut random = ChaosRng::new(repeats::SEED.number());
        for fault in 0..faults {
            eventually("it has work", || {
                executors(client).get(FAR).and_then(|one| one["sequences"]["under_way"].as_u64()) > Some(0)
            });
            let what = if fault < 3 { fault } else { random.below(3) as u64 };
            match what {
                0 => far.wire.stick(),
                1 => far.wire.hang_up(),
                _ => far.die_and_return(),
            }
            if what == 0 {
                // No reset arrives, so only silence shows the loss.
                eventually("it counts as lost", || states(client)[FAR] != "ready");
            }
            let before = traffic.tally.answered.load(Ordering::Relaxed);
            eventually("clients are answered", || traffic.tally.answered.load(Ordering::Relaxed) > before);
            traffic.check();
            far.wire.mend();
            eventually("both serve again", || states(client) == ["ready", "ready"]);
        }
        traffic.finish().nobody_asked_again();
        let taken_over = executors(client)[NEAR]["sequences"]["taken_over"].as_u64();
        assert!(taken_over > Some(0), "the near one went on with what was under way");
        assert!(deployment.stop().success());
    });
}

#[test]
fn only_a_listed_certificate_drives_an_executor_from_afar() {
    watched(|| {
        let keys = e2e_tests::split::SplitEndpoints::new();
        let admin = keys.add_key("tenant");
        let file = keys.key_file().display().to_string();
        // With keys, certificates are optional.
        let far = RemoteExecutor::start(&["--layer-key-file", &file]);
        for client in [None, Some(CERTIFIED)] {
            for ask in [RemoteRequest::Tunnel, staged_files_request(&[(FileName::Gguf, 1)])] {
                let (mut stream, said) = far.raw(client, &ask).expect("it says why");
                let RemoteReply::Refused(why) = said else { panic!("{client:?} was let in: {said:?}") };
                let part = client.map_or("needs a certificate", |_| "'alice' may not use this executor");
                assert!(why.contains(part), "{why}");
                assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0, "nothing more is said");
            }
        }
        assert!(!admin.is_empty() && far.lent() == 0);
        let plan = DeploymentPlan::bare().executors(&["near"]).workers(0);
        let deployment = far.shown(plan, "far", CERTIFIED).start();
        let detail = || executors(&deployment.client)[FAR]["detail"].as_str().map(str::to_owned);
        let told = eventually_some("one is told why", || detail().filter(|why| why.contains("refuses")));
        assert!(told.contains("--layer-gateways"), "{told}");
        assert!(deployment.stop().success());

        let closed = RemoteExecutor::closed();
        let deployment = closed.of(DeploymentPlan::bare().executors(&["near"]).workers(0), "far").start();
        let detail = || executors(&deployment.client)[FAR]["detail"].as_str().map(str::to_owned);
        eventually("one is told why", || detail().is_some_and(|why| why.contains("accepts no gateways")));
        assert!(deployment.stop().success());
    });
}

fn staged_files_request(files: &[(FileName, u64)]) -> RemoteRequest {
    RemoteRequest::Lend(files.iter().map(|(name, bytes)| StagedFile { name: *name, bytes: *bytes }).collect())
}

#[test]
fn files_that_are_none_of_an_adapter_harm_nobody() {
    watched(|| {
        let far = RemoteExecutor::start(&["--max-adapter-file-bytes", "64MiB"]);
        let deployment = mixed(&far);
        let client = &deployment.client;
        let variants = Arc::new(AdapterVariants::learn(client, &deployment.place().adapters(), 1));
        client.load("steady", &variants.adapters[0].0);
        let mut traffic = Traffic::begin(client, &variants, &["steady".to_owned()], CLIENTS);
        let refused = |ask: &RemoteRequest, part: &str| {
            let (_, said) = far.raw(Some(GATEWAY), ask).expect("it says why");
            assert!(matches!(&said, RemoteReply::Refused(why) if why.contains(part)), "{said:?}");
        };
        refused(&staged_files_request(&[(FileName::Gguf, 65 << 20)]), "the limit of this executor is");
        refused(
            &staged_files_request(&[(FileName::Config, 2 << 20), (FileName::Weights, 1)]),
            "the limit of this executor is",
        );
        refused(&staged_files_request(&[(FileName::Weights, 1)]), "one or two files");
        refused(&staged_files_request(&[]), "one or two files");

        let ask = staged_files_request(&[(FileName::Config, 2), (FileName::Weights, 3)]);
        let (mut wrong, said) = far.raw(Some(GATEWAY), &ask).expect("it is let in");
        assert_eq!(said, RemoteReply::Admitted);
        wrong.write_all(&[b"{}abc".as_slice(), &[0; 32]].concat()).expect("it is taken");
        let said = answer(&mut wrong).expect("it says why");
        assert!(matches!(&said, RemoteReply::Refused(why) if why.contains("do not match")), "{said:?}");

        let (mut cut, _) = far.raw(Some(GATEWAY), &ask).expect("it is let in");
        cut.write_all(b"{").expect("it is taken");
        drop(cut);
        let (mut slow, _) = far.raw(Some(GATEWAY), &ask).expect("it is let in");
        slow.write_all(b"{}a").expect("it is taken");
        eventually("a file that does not come is not waited for", || far.lent() == 0);
        let said = answer(&mut slow).expect("it says why");
        assert!(matches!(&said, RemoteReply::Refused(why) if why.contains("no data arrived")), "{said:?}");

        traffic.check();
        let before = traffic.tally.answered.load(Ordering::Relaxed);
        eventually("others are served", || traffic.tally.answered.load(Ordering::Relaxed) > before + CLIENTS);
        traffic.finish().nobody_asked_again();
        assert_eq!(states(client), ["ready", "ready"]);
        assert!(deployment.stop().success());
    });
}

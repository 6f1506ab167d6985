//! Names are aliases of content: replaced, removed and persisted without ever answering with the wrong
//! weights.

use std::{
    sync::{Arc, Mutex, Weak},
    thread,
};

use e2e_tests::{
    BASE, CompletionRequest, Deployment, DeploymentPlan, StreamEnd, eventually, fixtures, watched,
};

static SHARED: Mutex<Weak<Deployment>> = Mutex::new(Weak::new());

fn shared() -> Arc<Deployment> {
    Deployment::shared(&SHARED, || DeploymentPlan::bare().start())
}

/// Request for sixteen tokens of `model` after a prompt of several blocks.
fn ask(model: &str, seed: u32) -> CompletionRequest {
    CompletionRequest::new(model, fixtures::prompt(seed, 60), 16)
}

/// Writes an adapter unique to the caller into the deployment's adapter folder.
fn variant(deployment: &Deployment, example: &str, alpha: u32) -> std::path::PathBuf {
    let path = deployment.place().adapters().join(format!("{example}-{alpha}"));
    fixtures::variant(example, alpha, &path);
    path
}

#[test]
fn a_name_that_stands_for_other_weights_never_answers_from_old_keys_and_values() {
    watched(|| {
        let (deployment, fresh) = (shared(), DeploymentPlan::bare().start());
        let client = &deployment.client;
        let old = client.load("changing", &variant(&deployment, "pirate", 17));
        let before = [0, 1].map(|_| client.ask(&ask("changing", 1)));
        assert!(before[1].cached_tokens > 0, "the prompt is not in the prefix cache");

        let new = client.reload("changing", &variant(&deployment, "json", 17));
        assert_ne!(new, old);
        let after = client.ask(&ask("changing", 1));
        assert_eq!(after.cached_tokens, 0);
        assert_eq!((&before[0].generation, &after.generation), (&Some(old), &Some(new.clone())));
        assert_ne!(after.answer.scored, before[0].answer.scored);

        // Equal weights under their first name, here and in a deployment that had no others.
        assert_eq!(client.load("another", &variant(&deployment, "json", 17)), new);
        assert_eq!(client.ask(&ask("another", 1)).answer, after.answer);
        assert_eq!(fresh.client.load("fresh", &variant(&fresh, "json", 17)), new);
        assert_eq!(fresh.client.ask(&ask("fresh", 1)).answer, after.answer);
    });
}

#[test]
fn a_stream_that_began_before_a_reload_ends_with_the_weights_it_began_with() {
    watched(|| {
        let deployment = shared();
        let client = &deployment.client;
        let long = |name: &str| CompletionRequest::new(name, fixtures::prompt(2, 60), 96);
        client.load("replaced", &variant(&deployment, "pirate", 18));
        let golden = client.ask(&long("replaced")).answer;
        let mut stream = client.stream(&long("replaced"));
        assert_eq!(stream.step(), None);
        client.reload("replaced", &variant(&deployment, "haiku", 18));
        assert_ne!(client.ask(&long("replaced")).answer, golden);
        assert_eq!(stream.finish(), (golden, StreamEnd::Done));
    });
}

#[test]
fn two_adapters_at_once_answer_to_the_last_bit_as_what_is_merged_of_them() {
    watched(|| {
        let deployment = shared();
        let client = &deployment.client;
        let parts = ["pirate", "json"].map(|name| variant(&deployment, name, 22));
        client.load("one", &parts[0]);
        client.load("other", &parts[1]);
        let merged = deployment.place().adapters().join("merged");
        let [one, other] = [(&parts[0], "0.7"), (&parts[1], "0.3")]
            .map(|(path, weight)| format!("{}:{weight}", path.display()));
        let into = merged.display().to_string();
        let (is_merged, said) =
            fixtures::holobiont(&["adapters", "merge", &one, &other, "--output", &into], &[]);
        assert!(is_merged, "{said}");
        client.load("merged", &merged);
        let expected = client.ask(&ask("merged", 6)).answer;
        let sums = ["one:0.7+other:0.3", "other:0.3+one:0.7"].map(|model| client.ask(&ask(model, 6)));
        assert_eq!(sums[0].generation, sums[1].generation);
        assert!(sums.iter().all(|sum| sum.answer == expected));
        assert!(sums[1].cached_tokens > 0, "both are one adapter");
        for name in ["one", "other"] {
            assert_ne!(client.ask(&ask(name, 6)).answer, expected, "{name} changes something");
        }
        assert_eq!(client.refusal(&ask("one+nobody", 6)), (404, "model_not_found".to_owned()));
        assert_eq!(client.refusal(&ask("one:x+other", 6)), (400, "invalid_value".to_owned()));
    });
}

#[test]
fn an_activated_adapter_goes_on_from_what_the_base_has_cached_to_the_same_bits() {
    watched(|| {
        let invocation = [57, 91, 64];
        let (deployment, fresh) = (shared(), DeploymentPlan::bare().start());
        for host in [&*deployment, &fresh] {
            let path = host.place().adapters().join("activated");
            fixtures::activated("pirate", &invocation, &path);
            host.client.load("activated", &path);
        }
        let mut asked = fixtures::prompt(7, 100);
        deployment.client.ask(&CompletionRequest::new(BASE, asked.clone(), 1));
        asked.extend(invocation);
        asked.extend(fixtures::prompt(8, 5));
        let ask = |model: &str| CompletionRequest::new(model, asked.clone(), 16);
        let before = deployment.client.metric("holobiont_cached_tokens_total");
        let warm = deployment.client.ask(&ask("activated"));
        assert_eq!(warm.cached_tokens, 96, "all full blocks of the base's");
        assert!(deployment.client.metric("holobiont_cached_tokens_total") - before >= 96.0);
        let cold = fresh.client.ask(&ask("activated"));
        assert_eq!((cold.cached_tokens, cold.answer), (0, warm.answer.clone()));
        assert_ne!(fresh.client.ask(&ask(BASE)).answer, warm.answer, "it changes something");
        // A prompt without the invocation gets the base's answer.
        let plain = CompletionRequest::new("activated", fixtures::prompt(7, 100), 16);
        assert_eq!(fresh.client.ask(&plain).answer, fresh.client.ask(&plain.of(BASE)).answer);
    });
}

#[test]
fn unloading_gives_the_bytes_back_and_the_name_is_not_found_any_more() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let client = &deployment.client;
        let bytes = || client.metric("holobiont_adapter_bytes");
        for round in 0..3 {
            client.load("passing", &variant(&deployment, "pirate", 19));
            eventually("the adapter's bytes are counted", || bytes() > 0.0);
            assert!(client.ask(&ask("passing", 3)).generation.is_some());
            let freed = client.unload("passing");
            assert!(freed > 0, "round {round}");
            assert_eq!(client.refusal(&ask("passing", 3)), (404, "model_not_found".to_owned()));
            eventually("the adapter's bytes are free", || bytes() == 0.0);
        }
        assert_eq!(client.adapters(), []);
        client.ask(&ask(BASE, 3));
    });
}

#[test]
fn an_adapter_nobody_loaded_is_not_found() {
    watched(|| {
        assert_eq!(shared().client.refusal(&ask("nobody", 4)), (404, "model_not_found".to_owned()));
    });
}

#[test]
fn adapters_are_still_there_after_a_stop_and_after_a_kill() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let place = Arc::clone(deployment.place());
        for name in ["pirate", "json", "haiku"] {
            deployment.client.load(name, &variant(&deployment, name, 20));
        }
        deployment.client.reload("json", &variant(&deployment, "json", 21));
        deployment.client.unload("haiku");
        let listed = deployment.client.adapters();
        assert_eq!(listed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["json", "pirate"]);
        let answer = deployment.client.ask(&ask("json", 5));
        assert!(deployment.stop().success());

        let deployment = DeploymentPlan::bare().start_in(Arc::clone(&place));
        assert_eq!(deployment.client.adapters(), listed);
        assert_eq!(deployment.client.ask(&ask("json", 5)), answer);
        deployment.client.unload("pirate");
        deployment.kill_supervisor();

        let deployment = DeploymentPlan::bare().start_in(place);
        assert_eq!(deployment.client.adapters(), listed[..1]);
        assert_eq!(deployment.client.ask(&ask("json", 5)), answer);
    });
}

#[test]
fn loads_and_unloads_beside_requests_leave_every_answer_golden() {
    watched(|| {
        let deployment = shared();
        let client = &deployment.client;
        client.load("steady", &variant(&deployment, "pirate", 22));
        let golden = client.ask(&ask("steady", 6)).answer;
        let path = variant(&deployment, "haiku", 22);
        let churn = client.clone();
        let churning = thread::spawn(move || {
            for _ in 0..8 {
                churn.load("churn", &path);
                churn.unload("churn");
            }
        });
        while !churning.is_finished() {
            assert_eq!(client.ask(&ask("steady", 6)).answer, golden);
        }
        churning.join().expect("every load and unload is answered");
    });
}

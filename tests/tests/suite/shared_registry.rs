//! Hosts that share one PostgreSQL and one bucket: adapters registered on one are served by the others with
//! the same bits, also after a server's failure.

use std::{path::PathBuf, sync::Arc};

use e2e_tests::{
    CompletionRequest, Deployment, DeploymentPlan, StreamEnd, eventually, fixtures,
    servers::{self, postgres::Postgres, s3::Bucket, wire::ResponseFault},
    watched,
};
use serde_json::{Value, json};

fn host(postgres: &Postgres, bucket: &Bucket) -> DeploymentPlan {
    let plan = DeploymentPlan::bare().set("REGISTRY", &postgres.url()).set("STORE", &bucket.url());
    bucket.variables().iter().fold(plan, |plan, (name, value)| plan.environment(name, value))
}

fn ask(model: &str) -> CompletionRequest {
    CompletionRequest::new(model, fixtures::prompt(1, 40), 12)
}

/// Writes an adapter unique to the caller into the host's adapter folder.
fn variant(host: &Deployment, example: &str, alpha: u32) -> PathBuf {
    let path = host.place().adapters().join(format!("{example}-{alpha}"));
    fixtures::variant(example, alpha, &path);
    path
}

fn load_refused(host: &Deployment, name: &str, path: &std::path::Path) -> String {
    let body = json!({ "lora_name": name, "lora_path": path });
    let fault = host.client.try_post("/v1/load_lora_adapter", &body).expect_err("it is refused");
    format!("{fault:?}")
}

fn registry(host: &Deployment) -> Value {
    host.client.status()["registry"].clone()
}

#[test]
fn hosts_of_a_fleet_serve_what_any_of_them_registered_to_the_same_bits_through_outages() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (one, other) = (host(&postgres, &bucket).start(), host(&postgres, &bucket).start());
        let generation = one.client.load("shared", &variant(&one, "pirate", 31));
        let golden = one.client.ask(&ask("shared"));
        eventually("the other host has it", || other.client.adapters() == one.client.adapters());
        let there = other.client.ask(&ask("shared"));
        assert_eq!((&there.answer, &there.generation), (&golden.answer, &Some(generation)));
        assert_eq!(other.client.status()["store"]["fetched"], 1);
        let figure = |name: &str| other.client.metric(&format!("holobiont_store_{name}"));
        assert_eq!(
            (figure("fetches_total{outcome=\"fetched\"}"), figure("fetches_total{outcome=\"failed\"}")),
            (1.0, 0.0)
        );
        assert_eq!((figure("damaged_total"), figure("evictions_total")), (0.0, 0.0));
        assert!(figure("cache_bytes") > 1024.0);
        assert_eq!(registry(&other)["reachable"], true);

        one.client.load("later", &variant(&one, "json", 31));
        eventually("the other host has it", || other.client.adapters() == one.client.adapters());
        postgres.stop();
        for host in [&one, &other] {
            eventually("it says that it is cut off", || registry(host)["reachable"] == false);
            assert_eq!(host.client.ask(&ask("shared")).answer, golden.answer);
        }
        let refused = load_refused(&other, "new", &variant(&other, "haiku", 31));
        assert!(refused.contains("registry_unavailable") && refused.contains("503"), "{refused}");
        assert!(other.client.metric("holobiont_registry_age_seconds") > 0.0);
        let later = other.client.ask(&ask("later")).answer;
        assert_eq!(
            later,
            one.client.ask(&ask("later")).answer,
            "known, and fetched while nobody can register"
        );
        postgres.restart();
        other_loads(&other, &one);
        assert!(one.stop().success() && other.stop().success());
    });
}

/// Checks that the registry recovers, and that all hosts learn of new entries.
fn other_loads(other: &Deployment, one: &Deployment) {
    eventually("it is back", || registry(other)["reachable"] == true && registry(one)["reachable"] == true);
    other.client.load("new", &variant(other, "haiku", 31));
    eventually("the first has it", || one.client.adapters() == other.client.adapters());
    assert_eq!(one.client.ask(&ask("new")).answer, other.client.ask(&ask("new")).answer);
}

#[test]
fn a_bucket_that_changes_bytes_or_is_gone_costs_no_wrong_token_and_no_other_adapter() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let (one, other) = (host(&postgres, &bucket).start(), host(&postgres, &bucket).start());
        for (name, example) in [("a", "pirate"), ("b", "json"), ("c", "haiku")] {
            one.client.load(name, &variant(&one, example, 32));
        }
        let golden = ["a", "b", "c"].map(|name| one.client.ask(&ask(name)).answer);
        eventually("the other host has them", || other.client.adapters() == one.client.adapters());
        bucket.wire.set(ResponseFault::Flip(1));
        assert_eq!(other.client.ask(&ask("a")).answer, golden[0], "fetched again");
        bucket.wire.set(ResponseFault::Flip(usize::MAX));
        assert_eq!(other.client.refusal(&ask("b")), (503, "adapter_store_unavailable".to_owned()));
        bucket.wire.set(ResponseFault::Gone);
        assert_eq!(other.client.refusal(&ask("c")), (503, "adapter_store_unavailable".to_owned()));
        assert_eq!(other.client.ask(&ask("a")).answer, golden[0], "what is here is served");
        bucket.wire.set(ResponseFault::None);
        for (name, golden) in ["a", "b", "c"].into_iter().zip(&golden) {
            assert_eq!(&other.client.ask(&ask(name)).answer, golden);
        }
        assert!(other.client.status()["store"]["damaged"].as_u64() >= Some(3));
    });
}

#[test]
fn a_lost_sequence_goes_on_although_its_adapters_files_have_left_the_host() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let one = host(&postgres, &bucket).start();
        for (name, example) in [("a", "pirate"), ("b", "json")] {
            one.client.load(name, &variant(&one, example, 34));
        }
        // The cache holds either adapter, but not both.
        let other = host(&postgres, &bucket).bytes("STORE_CACHE_BYTES", 1950).start();
        let long = CompletionRequest::new("a", fixtures::prompt(1, 40), 64);
        let golden = one.client.ask(&long).answer;
        for name in ["a", "b"] {
            other.client.ask(&ask(name));
        }
        assert!(other.client.metric("holobiont_store_evictions_total") > 0.0);
        let mut stream = other.client.stream(&long);
        assert_eq!((0..4).find_map(|_| stream.step()), None);
        other.kill_executor();
        assert_eq!(stream.finish(), (golden, StreamEnd::Done));
        assert_eq!(other.client.status()["store"]["fetched"], 3);
    });
}

fn moved(bucket: &Bucket, from: &str, to: &str) -> (bool, String) {
    let arguments = ["registry", "move", "--from", from, "--to", to, "--store", &bucket.url()];
    fixtures::holobiont(&arguments, &bucket.variables())
}

#[test]
fn a_registry_moves_to_many_hosts_and_back_with_all_its_adapters() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let alone = DeploymentPlan::bare().start();
        alone.client.load("a", &variant(&alone, "pirate", 33));
        alone.client.load("b", &variant(&alone, "json", 33));
        let golden = alone.client.ask(&ask("a")).answer;
        let (before, place) = (alone.client.adapters(), Arc::clone(alone.place()));
        let state = place.state().display().to_string();
        let (done, said) = moved(&bucket, &state, &postgres.url());
        assert!(!done && said.contains("in use"), "{said}");
        assert!(alone.stop().success());
        let (done, said) = moved(&bucket, &state, &postgres.url());
        assert!(done && said.contains("2 adapters"), "{said}");
        let (done, said) = moved(&bucket, &state, &postgres.url());
        assert!(!done && said.contains("has 2 adapters already"), "{said}");

        let member = host(&postgres, &bucket).start();
        assert_eq!(member.client.adapters(), before);
        assert_eq!(member.client.ask(&ask("a")).answer, golden);
        let back = place.home().join("back").display().to_string();
        let (done, said) = moved(&bucket, &postgres.url(), &back);
        assert!(done && said.contains("2 adapters"), "{said}");
        assert!(member.stop().success());
        std::fs::rename(&state, place.home().join("old")).expect("the state can be put away");
        std::fs::rename(&back, &state).expect("and the other in its place");
        let alone = DeploymentPlan::bare().start_in(place);
        assert_eq!(alone.client.adapters(), before);
        assert_eq!(alone.client.ask(&ask("a")).answer, golden);
    });
}

fn checked(file: &str, bucket: &Bucket) -> (bool, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("fleet.toml");
    std::fs::write(&path, file).expect("a file");
    let path = path.display().to_string();
    fixtures::holobiont(&["check", "--config", &path], &bucket.variables())
}

#[test]
fn a_check_looks_at_registry_and_bucket_and_shows_no_password() {
    watched(|| {
        let Some((postgres, bucket)) = servers::both() else { return };
        let file = |registry: &str| {
            let model = fixtures::model();
            format!(
                "[model]\nname = \"{}\"\n[gateway]\nregistry = \"{registry}\"\nstore = \"{}\"\n",
                model.display(),
                bucket.url()
            )
        };
        let (well, said) = checked(&file(&postgres.url()), &bucket);
        assert!(
            well && said.contains("no registry yet") && said.contains("wrote, read and removed"),
            "{said}"
        );
        let secret = postgres.url().replace("fleet@", "fleet:secret@");
        let (well, said) = checked(&file(&secret), &bucket);
        assert!(!well && said.contains("PGPASSFILE") && !said.contains("secret"), "{said}");
        bucket.wire.set(ResponseFault::Gone);
        postgres.stop();
        let (well, said) = checked(&file(&postgres.url()), &bucket);
        assert!(
            !well && said.contains("cannot reach the registry") && said.contains("cannot be used now"),
            "{said}"
        );
    });
}

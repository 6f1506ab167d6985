//! A gateway killed at every failpoint of an adapter's life: acknowledged changes persist, others are absent
//! or complete, and no unreferenced file stays.

use std::{collections::BTreeMap, path::Path, time::Duration};

use gateway::adapters::FAILPOINTS;

use crate::{
    child::RegistryChild,
    fake_executor::FakeExecutor,
    support::{admin, gone, hex, open, stored, uri_of},
};

type AdapterWeightsByName = BTreeMap<String, String>;

/// Commands before the kill, with memory for three adapters.
const PREPARED: [&str; 3] = ["load a one", "load b two", "load c three"];
const ORDERS: [&str; 7] =
    ["load d four", "load a five", "pin a", "unload b", "bring c", "unload d", "fetch e six"];

fn apply(state: &mut AdapterWeightsByName, path: &Path, order: &str) {
    match order.split(' ').collect::<Vec<_>>()[..] {
        ["load", name, weights] => drop(state.insert(name.to_owned(), weights.to_owned())),
        ["fetch", name, weights] => drop(state.insert(uri_of(path, name), weights.to_owned())),
        ["unload", name] => drop(state.remove(name)),
        _ => {}
    }
}

async fn dies_at(place: &str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    std::fs::create_dir(path.join("root")).unwrap();
    std::fs::create_dir(path.join("failpoints")).unwrap();
    let fake = FakeExecutor::start(&path.join("socket"), 3, Duration::ZERO).await;
    let (acknowledged, doubtful) = {
        let (path, place) = (path.to_owned(), place.to_owned());
        tokio::task::spawn_blocking(move || kill(&path, &place)).await.unwrap()
    };
    assert!(path.join("failpoints").join(format!("{place}.fired")).exists(), "{place} was reached");
    check(path, place, [acknowledged, doubtful]).await;
    drop(fake);
}

/// Runs commands until the child is killed; returns the acknowledged state, and that state with the last
/// command.
fn kill(path: &Path, place: &str) -> (AdapterWeightsByName, AdapterWeightsByName) {
    let mut state = AdapterWeightsByName::new();
    let mut child = RegistryChild::start(path, &[]);
    assert_eq!(child.heard().as_deref(), Some("ok open"));
    for order in PREPARED {
        assert!(child.order(order).unwrap().starts_with("ok"), "{order}");
        apply(&mut state, path, order);
    }
    child.end();
    std::fs::write(path.join("failpoints").join(place), "kill").unwrap();
    let mut child = RegistryChild::start(path, &[]);
    let mut doubtful = state.clone();
    if child.heard().is_some() {
        for order in ORDERS {
            apply(&mut doubtful, path, order);
            match child.order(order) {
                Some(answer) => assert!(answer.starts_with("ok"), "{place}: {order}: {answer}"),
                None => break,
            }
            apply(&mut state, path, order);
        }
    }
    child.end();
    (state, doubtful)
}

async fn check(path: &Path, place: &str, allowed: [AdapterWeightsByName; 2]) {
    let (executor, registry) = open(path).await.unwrap();
    let entries = registry.entries();
    let found: BTreeMap<_, _> =
        entries.iter().map(|(name, entry)| (name.clone(), entry.record.generation.to_string())).collect();
    let hashed = |state: &AdapterWeightsByName| -> BTreeMap<String, String> {
        state.iter().map(|(name, weights)| (name.clone(), hex(weights))).collect()
    };
    assert!(allowed.iter().any(|state| hashed(state) == found), "{place}: {found:?}, not one of {allowed:?}");
    let referred: std::collections::BTreeSet<_> =
        entries.values().map(|entry| entry.record.content.to_string()).collect();
    assert_eq!(stored(path), referred, "{place}: every file has a name, every name its files");
    for name in found.keys() {
        let lease = registry.lease(name, &admin()).unwrap().unwrap();
        registry.load_on(&lease, 0).await.unwrap_or_else(|error| panic!("{place}: {name}: {error}"));
    }
    drop(entries);
    executor.close();
    gone(registry).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_place_leaves_the_acknowledged_adapters_and_no_orphan() {
    for place in FAILPOINTS.iter().filter(|place| !place.ends_with("_fails")) {
        dies_at(place).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_in_the_middle_is_a_typed_error_and_the_registry_is_as_before() {
    for (place, code) in
        [("gateway.copy_fails", "insufficient_storage"), ("gateway.commit_fails", "registry_unavailable")]
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        std::fs::create_dir(path.join("root")).unwrap();
        std::fs::create_dir(path.join("failpoints")).unwrap();
        let _fake = FakeExecutor::start(&path.join("socket"), 3, Duration::ZERO).await;
        let orders = move || {
            let mut child = RegistryChild::start(&path, &[]);
            assert_eq!(child.heard().as_deref(), Some("ok open"));
            assert!(child.order("load a one").unwrap().starts_with("ok"));
            for order in ["load a two", "load b three"] {
                std::fs::write(path.join("failpoints").join(place), "fail").unwrap();
                assert_eq!(child.order(order), Some(format!("error {code}")), "{place}: {order}");
            }
            assert_eq!(child.order("names").as_deref(), Some("ok a"));
            assert_eq!(child.order("bring a"), Some(format!("ok {}", hex("one"))), "serving goes on");
            // The next successful change sweeps the remains of a failed one.
            assert_eq!(child.order("load b three"), Some(format!("ok {}", hex("three"))));
            assert_eq!(stored(&path).len(), 2, "{place}");
            assert_eq!(child.order("reopen").as_deref(), Some("ok"));
            assert_eq!(child.order("names").as_deref(), Some("ok a,b"));
            child.end();
        };
        tokio::task::spawn_blocking(orders).await.unwrap();
    }
}

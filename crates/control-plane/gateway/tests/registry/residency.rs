//! More adapters than fit: residency, eviction and waiting.

use std::{sync::Arc, time::Duration};

use gateway::adapters::{AdapterError, Pin, ResidencyError, Tier};

use crate::{
    fake_executor::LoadCommand,
    support::{RegistryHarness, admin, eventually},
};

#[tokio::test]
async fn the_adapter_used_least_recently_makes_room() {
    let bench = RegistryHarness::with_room_for(2).await;
    for name in ["a", "b"] {
        bench.load(name, name).await.unwrap();
    }
    drop(bench.registry.lease("a", &admin()).unwrap());
    bench.load("c", "c").await.unwrap();
    let entries = bench.registry.entries();
    let tiers: Vec<Tier> = ["a", "b", "c"].iter().map(|name| bench.registry.tier(&entries[*name])).collect();
    assert_eq!(tiers, [Tier::Host, Tier::Disk, Tier::Host]);
    assert_eq!((bench.fake.held(), bench.registry.resident()), (2, (2, 2000)));
    assert_eq!(bench.registry.stats().evictions, 1);
}

#[tokio::test]
async fn a_request_for_an_adapter_on_disk_waits_for_it_and_the_others_do_not() {
    let bench = RegistryHarness::slow(1, Duration::from_millis(50)).await;
    bench.load("a", "a").await.unwrap();
    bench.load("b", "b").await.unwrap();
    let hot = bench.registry.lease("b", &admin()).unwrap().unwrap();
    bench.registry.load_on(&hot, 0).await.unwrap();
    drop(hot);
    let cold = bench.registry.lease("a", &admin()).unwrap().unwrap();
    bench.registry.load_on(&cold, 0).await.unwrap();
    assert_eq!(bench.fake.loads(), ["a", "b", "b", "a"], "b was tried, then a had to go");
    let stats = bench.registry.stats();
    assert_eq!((stats.hits, stats.misses), (1, 1));
}

#[tokio::test]
async fn all_who_wait_for_an_adapter_share_one_load() {
    let bench = RegistryHarness::slow(1, Duration::from_millis(50)).await;
    bench.load("a", "a").await.unwrap();
    bench.load("b", "b").await.unwrap();
    let before = bench.fake.loads().len();
    let leases: Vec<_> = (0..20).map(|_| bench.registry.lease("a", &admin()).unwrap().unwrap()).collect();
    let waits = leases.iter().map(|lease| bench.registry.load_on(lease, 0));
    assert!(futures::future::join_all(waits).await.iter().all(Result::is_ok));
    assert_eq!(bench.fake.loads().len(), before + 1);
}

#[tokio::test]
async fn what_is_in_use_is_never_evicted_and_the_request_is_told_to_come_back() {
    let bench = RegistryHarness::with_room_for(1).await;
    bench.load("a", "a").await.unwrap();
    bench.load("b", "b").await.unwrap();
    let held = bench.registry.lease("b", &admin()).unwrap().unwrap();
    let place = bench.registry.load_on(&held, 0).await.unwrap();
    let cold = bench.registry.lease("a", &admin()).unwrap().unwrap();
    assert!(matches!(bench.registry.load_on(&cold, 0).await, Err(ResidencyError::Busy(_))));
    assert!(matches!(bench.load("c", "c").await, Err(AdapterError::Residency(ResidencyError::Busy(_)))));
    drop((held, place));
    bench.registry.load_on(&cold, 0).await.unwrap();
    let unloads = bench.fake.commands().iter().filter(|told| matches!(told, LoadCommand::Unload(_))).count();
    assert_eq!(unloads, 2, "a for b, and b for a");
}

#[tokio::test]
async fn a_pinned_adapter_stays_and_pins_alone_cannot_use_up_the_budget() {
    let bench = RegistryHarness::with_room_for(2).await;
    for name in ["a", "b", "c"] {
        bench.load(name, name).await.unwrap();
    }
    for name in ["a", "b"] {
        bench.registry.pin(name, Pin::Keep).await.unwrap();
    }
    let refused = bench.registry.pin("c", Pin::Keep).await;
    assert!(matches!(
        refused,
        Err(AdapterError::PinsExceedBudget { pinned_bytes: 3000, budget_bytes: 2000, .. })
    ));
    let cold = bench.registry.lease("c", &admin()).unwrap().unwrap();
    assert!(matches!(bench.registry.load_on(&cold, 0).await, Err(ResidencyError::NeverFits(_))));
    bench.registry.pin("a", Pin::Release).await.unwrap();
    bench.registry.load_on(&cold, 0).await.unwrap();
    let entries = bench.registry.entries();
    assert_eq!(bench.registry.tier(&entries["b"]), Tier::Host);
    assert_eq!(bench.registry.tier(&entries["a"]), Tier::Disk);
}

#[tokio::test]
async fn an_adapter_that_fits_no_budget_is_refused_and_leaves_nothing() {
    let bench = RegistryHarness::with_room_for(0).await;
    assert!(matches!(bench.load("a", "a").await, Err(AdapterError::Residency(ResidencyError::NeverFits(_)))));
    assert!(bench.registry.is_empty() && bench.stored().is_empty());
}

#[tokio::test]
async fn a_restart_brings_in_what_is_pinned_first_and_then_what_was_used_last() {
    let bench = RegistryHarness::with_room_for(2).await;
    for name in ["a", "b", "c", "d"] {
        bench.load(name, name).await.unwrap();
    }
    bench.registry.pin("a", Pin::Keep).await.unwrap();
    // Another executor, which holds nothing.
    let RegistryHarness { directory, fake, executor, registry } = bench;
    executor.close();
    crate::support::gone(registry).await;
    drop(fake);
    let socket = directory.path().join("socket");
    let fake = crate::fake_executor::FakeExecutor::start(&socket, 2, Duration::ZERO).await;
    let (_executor, registry) = crate::support::open(directory.path()).await.unwrap();
    assert_eq!(fake.loads()[0], "a", "it is there before the gateway is ready");
    eventually("the rest of the budget is used", || fake.held() == 2).await;
    assert_eq!(fake.loads(), ["a", "d"]);
    assert_eq!(registry.len(), 4);
}

#[tokio::test]
async fn a_thousand_registered_adapters_do_not_make_a_restart_wait() {
    let bench = RegistryHarness::with_room_for(4).await;
    for index in 0..1000 {
        bench.load(&format!("adapter-{index}"), &format!("weights {index}")).await.unwrap();
    }
    let bench = bench.reopen().await;
    assert_eq!(bench.registry.len(), 1000);
    let before = bench.fake.loads().len();
    assert!(
        before <= 1000 + 1000,
        "each was loaded once, or twice where room had to be made first: {before}"
    );
    let cold = bench.registry.lease("adapter-0", &admin()).unwrap().unwrap();
    bench.registry.load_on(&cold, 0).await.unwrap();
    assert_eq!(
        (bench.fake.held(), bench.fake.loads().len()),
        (4, before + 1),
        "nothing but what was asked for"
    );
}

#[tokio::test]
async fn a_storm_of_loads_and_requests_never_holds_more_than_the_budget_and_ends_at_rest() {
    let bench = RegistryHarness::with_room_for(3).await;
    for index in 0..8 {
        bench.load(&format!("a{index}"), &format!("w{index}")).await.unwrap();
    }
    let requests = (0..200).map(|turn| {
        let registry = Arc::clone(&bench.registry);
        tokio::spawn(async move {
            let lease = registry.lease(&format!("a{}", turn * 5 % 8), &admin()).unwrap().unwrap();
            let brought = registry.load_on(&lease, 0).await;
            if brought.is_ok() {
                assert_eq!(
                    registry.tier(&registry.entries()[lease.name()]),
                    Tier::Host,
                    "as long as it is leased"
                );
            }
            tokio::task::yield_now().await;
            brought
        })
    });
    for outcome in futures::future::join_all(requests).await {
        assert!(matches!(outcome.unwrap(), Ok(_) | Err(ResidencyError::Busy(_))));
    }
    assert!(bench.fake.held() <= 3);
    assert_eq!(bench.registry.resident().0, bench.fake.held(), "both sides agree");
    assert!(bench.registry.entries().values().all(|entry| entry.requests() == 0));
}

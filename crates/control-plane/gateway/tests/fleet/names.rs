//! Changes by one gateway reach the others in commit order, and no change is lost.

use std::sync::Arc;

use gateway::adapters::{AdapterError, Pin, database::DatabaseError};
use sqlx::Connection as _;

use crate::{
    servers,
    support::{FleetHost, eventually},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_registered_through_one_gateway_is_served_by_every_other() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    one.load("a", "first").await.unwrap();
    other.hears(&one, "a").await;
    assert_eq!(other.loaded(), None, "it comes when it is asked for");
    other.ask("a").await.unwrap();
    assert_eq!(other.loaded().as_deref(), Some("first"));
    other.load("a", "second").await.unwrap();
    one.hears(&other, "a").await;
    one.ask("a").await.unwrap();
    assert_eq!(one.loaded().as_deref(), Some("second"));
    one.registry.pin("a", Pin::Keep).await.unwrap();
    eventually("it is pinned there", || other.all() == one.all() && other.all()[0].2).await;
    other.registry.unload("a", None).await.unwrap();
    eventually("it is gone here", || one.registry.is_empty()).await;
    // A gateway that starts later knows everything at once.
    one.load("b", "third").await.unwrap();
    let late = FleetHost::new(&postgres, &bucket).await;
    assert_eq!(late.all(), one.all());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_gateways_that_change_a_name_at_once_one_is_refused_and_all_agree() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let hosts =
        [FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await].map(Arc::new);
    hosts[0].load("a", "zero").await.unwrap();
    hosts[1].hears(&hosts[0], "a").await;
    let mut refused = 0;
    for round in 0..10 {
        let loads = hosts.each_ref().map(|host| {
            let (host, weights) = (Arc::clone(host), format!("{round} of {:p}", Arc::as_ptr(host)));
            tokio::spawn(async move { host.load("a", &weights).await })
        });
        for load in loads {
            match load.await.unwrap() {
                Ok(_) => {}
                Err(AdapterError::Database(DatabaseError::Conflict(name))) if name == "a" => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
        hosts[0].hears(&hosts[1], "a").await;
        hosts[0].ask("a").await.unwrap();
        hosts[1].ask("a").await.unwrap();
        assert_eq!(hosts[0].stands_for("a"), hosts[1].stands_for("a"));
    }
    assert!(refused < 20, "somebody is always first");
    let late = FleetHost::new(&postgres, &bucket).await;
    assert_eq!(late.all(), hosts[0].all(), "what is written is what all have");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_many_names_from_all_sides_are_all_heard_of() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let hosts =
        [FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await].map(Arc::new);
    let mut changes = Vec::new();
    for number in 0..12 {
        let host = Arc::clone(&hosts[number % 2]);
        changes.push(tokio::spawn(async move {
            let name = format!("n{number}");
            loop {
                // An executor that holds few adapters rejects most loads at first, so they are retried.
                match host.load(&name, &name).await {
                    Ok(_) => break,
                    Err(AdapterError::Busy(_) | AdapterError::Residency(_)) => tokio::task::yield_now().await,
                    Err(other) => panic!("{other}"),
                }
            }
            if number % 3 == 0 {
                host.registry.unload(&name, None).await.unwrap();
            }
        }));
    }
    for change in changes {
        change.await.unwrap();
    }
    eventually("both have what was changed", || {
        hosts.iter().all(|host| host.registry.len() == 8) && hosts[0].all() == hosts[1].all()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_while_nobody_can_listen_is_read_afterwards() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    for (name, weights) in [("a", "one"), ("b", "two"), ("c", "three")] {
        one.load(name, weights).await.unwrap();
    }
    other.hears(&one, "c").await;
    let mut connection = sqlx::PgConnection::connect(&postgres.url()).await.unwrap();
    // All gateways are disconnected, and miss the notifications meanwhile.
    let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE application_name = 'holobiont' AND pid <> pg_backend_pid()";
    sqlx::query(cut).execute(&mut connection).await.unwrap();
    for change in [
        "UPDATE holobiont_clock SET change = change + 2",
        "DELETE FROM holobiont_adapters WHERE name = 'a'",
        "UPDATE holobiont_adapters SET pinned = TRUE, version = (SELECT change FROM holobiont_clock) WHERE name = 'b'",
    ] {
        sqlx::query(change).execute(&mut connection).await.unwrap();
    }
    for host in [&one, &other] {
        eventually("the host has read it", || {
            let all = host.all();
            all.len() == 2 && all[0].2 && !all[1].2
        })
        .await;
    }
    one.load("d", "four").await.unwrap();
    other.hears(&one, "d").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_too_far_behind_the_log_reads_everything() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    one.load("a", "one").await.unwrap();
    other.hears(&one, "a").await;
    let mut connection = sqlx::PgConnection::connect(&postgres.url()).await.unwrap();
    let lost = "WITH gone AS (DELETE FROM holobiont_adapters), cut AS (DELETE FROM holobiont_changes), \
                ahead AS (UPDATE holobiont_clock SET change = change + 20000) \
                INSERT INTO holobiont_changes SELECT change + 20000, 'z' FROM holobiont_clock";
    sqlx::query(lost).execute(&mut connection).await.unwrap();
    eventually("all are gone", || one.registry.is_empty() && other.registry.is_empty()).await;
}

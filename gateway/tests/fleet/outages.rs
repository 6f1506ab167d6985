//! A gateway that is cut off from PostgreSQL serves what it knows, refuses changes by name, and heals by itself.

use gateway::adapters::{AdapterError, Freshness, Pin, database::DatabaseError};

use crate::{
    servers,
    support::{Host, eventually},
};

fn freshness(host: &Host) -> Freshness {
    host.registry.freshness().expect("the registry is shared")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_known_is_served_without_postgresql_and_changes_are_refused_until_it_is_back() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (Host::new(&postgres, &bucket).await, Host::new(&postgres, &bucket).await);
    one.load("a", "first").await.unwrap();
    other.hears(&one, "a").await;
    postgres.stop();
    eventually("both have seen that it is gone", || {
        [&one, &other].iter().all(|host| freshness(host).fault.is_some())
    })
    .await;
    other.ask("a").await.expect("what is known is served, also to who never had it");
    assert_eq!(other.loaded().as_deref(), Some("first"));
    let before = freshness(&one).age;
    for refused in [
        one.load("b", "second").await.map(drop),
        one.registry.unload("a", None).await.map(drop),
        one.registry.pin("a", Pin::Keep).await.map(drop),
    ] {
        match refused {
            Err(AdapterError::Database(DatabaseError::Unreachable { address, reason })) => {
                assert!(address.starts_with("127.0.0.1") && reason.contains("old"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(freshness(&one).age > before, "it grows old");
    assert!(one.registry.entries().contains_key("a"));
    postgres.restart();
    eventually("both have it back", || [&one, &other].iter().all(|host| freshness(host).fault.is_none()))
        .await;
    other.load("b", "second").await.unwrap();
    one.hears(&other, "b").await;
    one.ask("b").await.unwrap();
    assert_eq!(one.loaded().as_deref(), Some("second"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_under_which_postgresql_dies_has_happened_for_all_or_for_none() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (Host::new(&postgres, &bucket).await, Host::new(&postgres, &bucket).await);
    for round in 0..3 {
        let name = format!("n{round}");
        let load = one.load(&name, &name);
        let death = async {
            tokio::time::sleep(std::time::Duration::from_millis(15 * round)).await;
            tokio::task::block_in_place(|| postgres.stop());
        };
        let (loaded, ()) = tokio::join!(load, death);
        tokio::task::block_in_place(|| postgres.restart());
        eventually("both have it back", || {
            [&one, &other]
                .iter()
                .all(|host| freshness(host).fault.is_none() && freshness(host).age.as_secs() < 1)
        })
        .await;
        if loaded.is_ok() {
            eventually("what was answered is there", || other.stands_for(&name).is_some()).await;
        }
        eventually("all agree", || one.all() == other.all()).await;
        let late = Host::new(&postgres, &bucket).await;
        assert_eq!(late.all(), one.all());
        if matches!(loaded, Err(AdapterError::Database(DatabaseError::Unreachable { .. }))) {
            assert_eq!(late.stands_for(&name), None, "nothing was changed");
        }
    }
}

//! A gateway without PostgreSQL serves its known adapters, rejects changes with a named error, and recovers
//! by itself.

use std::{net::TcpListener, time::Duration};

use gateway::{
    adapters::{AdapterError, Freshness, Pin, database::DatabaseError},
    keys::line_of,
};

use crate::{
    servers::{self, postgres::Postgres},
    support::{FleetHost, eventually},
};

fn freshness(host: &FleetHost) -> Freshness {
    host.registry.freshness().expect("the registry is shared")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_known_is_served_without_postgresql_and_changes_are_refused_until_it_is_back() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
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
        // This change would write nothing, but the current content of the name is unknown.
        one.load("a", "first").await.map(drop),
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
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    for round in 0..3 {
        let name = format!("n{round}");
        let load = one.load(&name, &name);
        let death = async {
            tokio::time::sleep(Duration::from_millis(15 * round)).await;
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
        let late = FleetHost::new(&postgres, &bucket).await;
        assert_eq!(late.all(), one.all());
        if matches!(loaded, Err(AdapterError::Database(DatabaseError::Unreachable { .. }))) {
            assert_eq!(late.stands_for(&name), None, "nothing was changed");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_starts_without_postgresql_serves_what_its_host_knew_and_hears_the_rest_later() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    for (name, weights) in [("a", "first"), ("b", "second"), ("gone", "third")] {
        one.load(name, weights).await.unwrap();
    }
    let own = one.request("own", "with a template");
    std::fs::write(own.path.join("chat_template.jinja"), "{{ messages }}").unwrap();
    one.registry.load(own, "base".into()).await.unwrap();
    one.registry.pin("b", Pin::Keep).await.unwrap();
    one.registry.unload("gone", None).await.unwrap();
    eventually("the other has heard all of it", || other.all() == one.all()).await;
    // Notifications are written to the disk a moment later.
    let known = one.all();
    one.load("last", "fourth").await.unwrap();
    other.hears(&one, "last").await;
    one.registry.unload("last", None).await.unwrap();
    other.hears(&one, "last").await;
    let directory = other.end().await;
    postgres.stop();
    let other = FleetHost::at(directory, &postgres, &bucket, 1 << 30).await.unwrap();
    let told = freshness(&other);
    assert!(told.fault.is_some(), "{told:?}");
    let mut there = other.all();
    there.retain(|(name, ..)| name != "last");
    assert_eq!(there, known);
    other.ask("a").await.expect("its files come from the bucket");
    assert_eq!(other.loaded().as_deref(), Some("first"));
    let template = other.registry.entries()["own"].record.template.clone();
    assert_eq!(&*template.expect("the template is kept here too").source, "{{ messages }}");
    assert!(matches!(
        other.load("c", "fifth").await,
        Err(AdapterError::Database(DatabaseError::Unreachable { .. }))
    ));
    let empty = FleetHost::at(tempfile::tempdir().unwrap(), &postgres, &bucket, 1 << 30).await;
    assert!(empty.is_err(), "who never saw the registry would say that there is nothing");
    postgres.restart();
    eventually("both have it back", || [&one, &other].iter().all(|host| freshness(host).fault.is_none()))
        .await;
    one.load("c", "fifth").await.unwrap();
    other.hears(&one, "c").await;
    eventually("they agree", || other.all() == one.all()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_was_empty_is_known_to_be_empty_and_one_that_is_silent_keeps_nobody_from_starting() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let directory = FleetHost::new(&postgres, &bucket).await.end().await;
    postgres.stop();
    // The listener accepts connections and stays silent.
    let _silent = TcpListener::bind(("127.0.0.1", postgres.port())).unwrap();
    let host =
        FleetHost::at(directory, &postgres, &bucket, 1 << 30).await.expect("it knows that there is nothing");
    let told = freshness(&host);
    assert!(host.all().is_empty() && told.fault.is_some(), "{told:?}");
}

fn keys(postgres: &Postgres, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_gateway"));
    let output = command.args(["registry", "keys", "--registry", &postgres.url()]).args(arguments).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_keys_of_the_registry_come_to_every_host_and_go_again() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (alice, bob) = (line_of("user", "alice", "hb-a"), line_of("admin", "bob", "hb-b"));
    let (alice, bob) = (alice.trim(), bob.trim());
    let first = tokio::task::block_in_place(|| keys(&postgres, &["--add", alice]));
    assert_eq!(first.trim(), alice);
    let (one, other) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    let held = |host: &FleetHost| {
        let text = std::fs::read_to_string(host.directory.path().join("api-keys")).unwrap_or_default();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        (held(&one), held(&other)),
        (vec![alice.to_owned()], vec![alice.to_owned()]),
        "from the start"
    );
    tokio::task::block_in_place(|| keys(&postgres, &["--add", bob]));
    eventually("both hosts have the second", || [&one, &other].iter().all(|host| held(host) == [alice, bob]))
        .await;
    one.load("a", "an adapter").await.unwrap();
    other.hears(&one, "a").await;
    let hash = alice.rsplit(':').next().unwrap();
    let left = tokio::task::block_in_place(|| keys(&postgres, &["--revoke", hash]));
    assert_eq!(left.trim(), bob);
    eventually("the first is revoked everywhere", || [&one, &other].iter().all(|host| held(host) == [bob]))
        .await;
    postgres.stop();
    eventually("it is noticed", || freshness(&one).fault.is_some()).await;
    assert_eq!(held(&one), [bob], "keys stay while nobody can be asked");
}

//! Acknowledged changes survive a restart, a damaged disk is an error, and a truncated log never adds a
//! change.

use std::{collections::BTreeMap, path::Path};

use gateway::adapters::{OpenError, Pin, database::DatabaseError};

use crate::support::{BASE, RegistryHarness, admin, files, hex, open, stored};

fn names(bench: &RegistryHarness) -> BTreeMap<String, String> {
    let entries = bench.registry.entries();
    entries.iter().map(|(name, entry)| (name.clone(), entry.record.generation.to_string())).collect()
}

#[tokio::test]
async fn a_restart_brings_back_what_was_acknowledged_with_all_that_is_known_of_it() {
    let bench = RegistryHarness::with_room_for(4).await;
    for (name, weights) in [("a", "one"), ("b", "two"), ("c", "three")] {
        bench.load(name, weights).await.unwrap();
    }
    bench.registry.pin("a", Pin::Keep).await.unwrap();
    bench.registry.unload("b", None).await.unwrap();
    bench.load("c", "four").await.unwrap();
    let before: Vec<_> = bench.registry.entries().values().map(|entry| entry.record.clone()).collect();
    let bench = bench.reopen().await;
    let after: Vec<_> = bench.registry.entries().values().map(|entry| entry.record.clone()).collect();
    assert!(after[0].pinned, "a");
    assert_eq!((&after[1], after[0].generation), (&before[1], before[0].generation));
    assert_eq!(bench.stored().len(), 2);
}

#[tokio::test]
async fn what_becomes_of_the_source_changes_nothing() {
    let bench = RegistryHarness::with_room_for(1).await;
    bench.load("a", "one").await.unwrap();
    bench.files("a", "tampered");
    bench.load("b", "two").await.unwrap();
    std::fs::remove_dir_all(bench.path().join("root/b")).unwrap();
    let bench = bench.reopen().await;
    for (name, weights) in [("a", "one"), ("b", "two"), ("a", "one")] {
        let lease = bench.registry.lease(name, &admin()).unwrap().unwrap();
        bench.registry.load_on(&lease, 0).await.unwrap();
        assert_eq!(bench.fake.loads().last().unwrap(), weights);
        assert_eq!(lease.generation.to_string(), hex(weights));
    }
}

#[tokio::test]
async fn files_that_rot_in_the_store_are_not_served_under_the_old_generation() {
    let bench = RegistryHarness::with_room_for(1).await;
    bench.load("a", "one").await.unwrap();
    let store = bench.path().join("state/adapters").join(bench.stored().first().unwrap());
    bench.load("b", "two").await.unwrap();
    std::fs::write(store.join("adapter_model.safetensors"), "rotten").unwrap();
    let lease = bench.registry.lease("a", &admin()).unwrap().unwrap();
    assert!(bench.registry.load_on(&lease, 0).await.unwrap_err().to_string().contains("load it again"));
    bench.registry.lease("a", &admin()).unwrap_err();
    drop(lease);
    bench.files("a", "one");
    assert_eq!(bench.fake.held(), 0, "the stranger was freed");
}

#[tokio::test]
async fn a_registry_that_cannot_be_read_is_an_error_and_never_an_empty_one() {
    let bench = RegistryHarness::with_room_for(4).await;
    bench.load("a", "one").await.unwrap();
    bench.executor.close();
    crate::support::gone(bench.registry).await;
    let (path, database) = (bench.directory.path(), bench.directory.path().join("state/registry.sqlite3"));
    // The log is part of the registry.
    let whole = DatabaseSnapshot::of(&path.join("state"));
    let refused = async || open(path).await.map(drop).unwrap_err();
    std::fs::write(&database, "").unwrap();
    assert!(matches!(refused().await, OpenError::Database(DatabaseError::Damaged { .. })));
    std::fs::write(&database, vec![7; 8192]).unwrap();
    assert!(matches!(refused().await, OpenError::Database(DatabaseError::Damaged { .. })));
    std::fs::remove_file(&database).unwrap();
    assert!(matches!(refused().await, OpenError::Database(DatabaseError::Missing(_))));
    whole.put_back(&path.join("state"));
    set_layout(&database, 99).await;
    assert!(matches!(refused().await, OpenError::Database(DatabaseError::Newer { found: 99, .. })));
    assert_eq!(stored(path).len(), 1, "nothing was swept");
    // Schemas of former versions are migrated.
    let no_templates = "DROP TABLE batches; ALTER TABLE adapters DROP COLUMN labels; ALTER TABLE adapters \
         DROP COLUMN chat_template; ALTER TABLE adapters DROP COLUMN weights";
    let no_terms = "ALTER TABLE adapters DROP COLUMN made_by; ALTER TABLE adapters DROP COLUMN expires_at";
    let no_drafts = format!("{no_templates}; {no_terms}; ALTER TABLE adapters DROP COLUMN draft_layers");
    change(&database, no_drafts.clone()).await;
    set_layout(&database, 3).await;
    assert_eq!(open(path).await.unwrap().1.len(), 1);
    change(&database, format!("{no_drafts}; DROP INDEX jobs_of_key; ALTER TABLE jobs DROP COLUMN key")).await;
    set_layout(&database, 2).await;
    assert_eq!(open(path).await.unwrap().1.len(), 1);
    change(&database, format!("{no_drafts}; DROP TABLE job_events; DROP TABLE jobs; DROP TABLE files")).await;
    set_layout(&database, 1).await;
    assert_eq!(open(path).await.unwrap().1.len(), 1);
}

async fn set_layout(database: &Path, number: i64) {
    change(database, format!("PRAGMA user_version = {number}")).await;
}

async fn change(database: &Path, statements: String) {
    use sqlx::{ConnectOptions as _, Connection as _};
    let mut connection =
        sqlx::sqlite::SqliteConnectOptions::new().filename(database).connect().await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

struct DatabaseSnapshot(Vec<(String, Vec<u8>)>);

impl DatabaseSnapshot {
    fn of(state: &Path) -> Self {
        let names = ["registry.sqlite3", "registry.sqlite3-wal"];
        let files =
            names.iter().filter_map(|name| Some(((*name).to_owned(), std::fs::read(state.join(name)).ok()?)));
        Self(files.collect())
    }

    fn put_back(&self, state: &Path) {
        for (name, bytes) in &self.0 {
            std::fs::write(state.join(name), bytes).unwrap();
        }
    }

    fn log_bytes(&self) -> usize {
        self.0.iter().find(|(name, _)| name.ends_with("-wal")).map_or(0, |(_, bytes)| bytes.len())
    }
}

#[tokio::test]
async fn a_power_cut_at_any_byte_of_the_log_leaves_some_acknowledged_state_and_nothing_older_than_synced() {
    let bench = RegistryHarness::with_room_for(8).await;
    let state = bench.path().join("state");
    // Registered names after each acknowledgement, and the synced length of the log.
    let mut history = vec![(names(&bench), DatabaseSnapshot::of(&state).log_bytes())];
    for (name, weights) in [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")] {
        bench.load(name, weights).await.unwrap();
        history.push((names(&bench), DatabaseSnapshot::of(&state).log_bytes()));
    }
    bench.registry.unload("b", None).await.unwrap();
    history.push((names(&bench), DatabaseSnapshot::of(&state).log_bytes()));
    let last = DatabaseSnapshot::of(&state);
    let log = last.log_bytes();
    assert!(log > 10_000, "what is cut is there: {log}");
    for cut in (0..=log).step_by(509).chain([log]) {
        let copy = tempfile::tempdir().unwrap();
        last.put_back(copy.path());
        let wal = copy.path().join("registry.sqlite3-wal");
        std::fs::OpenOptions::new().write(true).open(&wal).unwrap().set_len(cut as u64).unwrap();
        let (_database, records) = gateway::adapters::database::Database::open(copy.path()).await.unwrap();
        let found: BTreeMap<_, _> =
            records.iter().map(|record| (record.name.clone(), record.generation.to_string())).collect();
        let at = history.iter().rposition(|(state, _)| *state == found);
        let synced = history.iter().rposition(|(_, synced)| *synced <= cut).unwrap_or(0);
        assert!(at.is_some_and(|at| at >= synced), "cut at {cut}: {found:?}, {synced} changes were synced");
    }
}

#[tokio::test]
async fn the_registry_of_earlier_versions_is_taken_over_once() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("state")).unwrap();
    std::fs::create_dir_all(directory.path().join("root")).unwrap();
    let there = files(&directory.path().join("anywhere"), "a", "one");
    let old = |name: &str, path: &Path, weights: &str| {
        serde_json::json!({ "name": name, "path": path, "generation": hex(weights), "rank": 16, "bytes": 1000,
                            "modules": 4, "loaded_at": 1 })
    };
    let gone = directory.path().join("gone");
    let adapters = [old("a", &there, "one"), old("b", &gone, "two")];
    let journal = directory.path().join("state/adapters.json");
    std::fs::write(&journal, serde_json::json!({ "version": 1, "adapters": adapters }).to_string()).unwrap();
    let socket = directory.path().join("socket");
    let fake = crate::fake_executor::FakeExecutor::start(&socket, 4, std::time::Duration::ZERO).await;
    let (_executor, registry) = open(directory.path()).await.unwrap();
    assert!(!journal.exists() && journal.with_extension("json.imported").exists());
    std::fs::remove_dir_all(&there).unwrap();
    let lease = registry.lease("a", &admin()).unwrap().unwrap();
    registry.load_on(&lease, 0).await.unwrap();
    assert_eq!(fake.loads(), ["one"]);
    assert_eq!(registry.len(), 2, "the one without files is kept by name");
    let broken = registry.lease("b", &admin());
    assert!(match broken {
        Ok(lease) => registry.load_on(&lease.unwrap(), 0).await.is_err(),
        Err(_) => true,
    });
}

#[tokio::test]
async fn a_second_gateway_is_kept_out_of_the_state_directory() {
    let bench = RegistryHarness::with_room_for(4).await;
    let second = open(bench.path()).await.map(drop);
    assert!(matches!(second, Err(OpenError::Database(DatabaseError::Locked(_)))));
}

#[tokio::test]
async fn compare_and_swap_refuses_a_name_that_stands_for_something_else() {
    let bench = RegistryHarness::with_room_for(4).await;
    bench.load("a", "one").await.unwrap();
    let mut request = bench.request("a", "two");
    request.replace = gateway::adapters::Replace::Only(hex("three"));
    bench.registry.load(request.clone(), BASE.into()).await.unwrap_err();
    bench.registry.unload("a", Some(&hex("three"))).await.unwrap_err();
    assert_eq!(names(&bench)["a"], hex("one"));
    assert_eq!(bench.stored().len(), 1);
    request.replace = gateway::adapters::Replace::Only(hex("one"));
    bench.registry.load(request, BASE.into()).await.unwrap();
    bench.registry.unload("a", Some(&hex("two"))).await.unwrap();
    assert!(bench.registry.is_empty());
}

//! Files and jobs behave equally in a single host's database and in a fleet's PostgreSQL; in a fleet also
//! leases of jobs, and the sweep of the bucket.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gateway::training::{
    TrainingError,
    records::{
        EventLevel, EventRecord, FileRecord, JobHyperparameters, JobRecord, JobSpec, JobStatus, Purpose,
        TrainingMethod,
    },
    table::{FileAdded, JobAdded, NewJob, Page, TrainingTable, UpdatedBy, shared::SharedTable},
};
use sqlx::{Connection as _, PgConnection};

use crate::{
    servers::{self, postgres::Postgres},
    support::FleetHost,
};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

fn file(id: &str, bytes: u64) -> FileRecord {
    FileRecord {
        id: id.to_owned(),
        tenant: "acme".to_owned(),
        name: "data.jsonl".to_owned(),
        purpose: Purpose::FineTune,
        expires_at: None,
        bytes,
        hash: "00".to_owned(),
        created_at: 1,
    }
}

pub(crate) fn job(id: &str) -> JobRecord {
    let order = JobSpec {
        model: "base".to_owned(),
        training_file: "file-1".to_owned(),
        validation_file: None,
        suffix: None,
        method: TrainingMethod::Supervised,
        choices: JobHyperparameters::default(),
        metadata: BTreeMap::new(),
    };
    // Deterministic, so that repeated calls give the same job.
    JobRecord { created_at: 1, ..JobRecord::new(id.to_owned(), "acme", order, format!("acme/{id}"), None) }
}

fn event(message: &str) -> EventRecord {
    EventRecord::now(EventLevel::Info, message)
}

async fn add_file(table: &TrainingTable, file: &FileRecord, limit: Option<u64>) -> FileAdded {
    if let TrainingTable::Shared(shared) = table {
        shared.intend(&file.path()).await.unwrap();
    }
    table.add_file(file, limit).await.unwrap()
}

pub(crate) async fn add(
    table: &TrainingTable,
    job: &JobRecord,
    key: Option<&[u8]>,
    limit: usize,
) -> JobAdded {
    table.add_job(NewJob { job, key, event: &event("created"), limit }).await.unwrap()
}

fn page(after: Option<&str>, limit: u32) -> Page {
    Page { after: after.map(str::to_owned), limit }
}

pub(crate) fn to(
    status: JobStatus,
) -> impl FnOnce(&mut JobRecord) -> Result<Vec<EventRecord>, TrainingError> {
    move |job| {
        job.status = status;
        Ok(vec![event("changed")])
    }
}

/// Tables of a single host and of a fleet, and their hosts.
async fn both(postgres: &Postgres, bucket: &servers::s3::Bucket) -> [(FleetHost, TrainingTable); 2] {
    let hosts = [FleetHost::alone().await, FleetHost::new(postgres, bucket).await];
    hosts.map(|host| {
        let table = TrainingTable::of(&host.registry);
        (host, table)
    })
}

pub(crate) fn shared(host: &FleetHost) -> (TrainingTable, Arc<SharedTable>) {
    let table = TrainingTable::of(&host.registry);
    let TrainingTable::Shared(shared) = &table else { panic!("it is a fleet's") };
    let shared = Arc::clone(shared);
    (table, shared)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_kept_listed_limited_and_removed_in_either_table() {
    let Some((postgres, bucket)) = servers::both() else { return };
    for (_host, table) in both(&postgres, &bucket).await {
        for (id, bytes) in [("file-1", 10), ("file-2", 20), ("file-3", 30)] {
            assert_eq!(add_file(&table, &file(id, bytes), Some(60)).await, FileAdded::Kept);
        }
        assert_eq!(add_file(&table, &file("file-4", 1), Some(60)).await, FileAdded::TooManyBytes(61));
        assert_eq!(add_file(&table, &file("file-5", 1), None).await, FileAdded::Kept);
        assert_eq!(table.file("file-2", "acme").await.unwrap(), Some(file("file-2", 20)));
        assert_eq!(table.file("file-2", "other").await.unwrap(), None);
        let listed = table.files("acme", &page(Some("file-5"), 2)).await.unwrap();
        let ids: Vec<_> = listed.items.iter().map(|file| file.id.as_str()).collect();
        assert_eq!((ids, listed.has_more), (vec!["file-3", "file-2"], true));
        assert_eq!(table.remove_file("file-2", "other").await.unwrap(), None);
        assert_eq!(table.remove_file("file-2", "acme").await.unwrap(), Some(file("file-2", 20)));
        assert_eq!(table.remove_file("file-2", "acme").await.unwrap(), None);
        assert_eq!(add_file(&table, &file("file-6", 1), Some(60)).await, FileAdded::Kept, "there is room");
        for _ in 0..2 {
            assert_eq!(add_file(&table, &file("file-7", 1), None).await, FileAdded::Kept);
        }
        let all = table.files("acme", &page(None, 9)).await.unwrap();
        assert_eq!(
            all.items.iter().filter(|file| file.id == "file-7").count(),
            1,
            "the same file is kept once"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_are_kept_limited_changed_and_ended_in_either_table() {
    let Some((postgres, bucket)) = servers::both() else { return };
    for (_host, table) in both(&postgres, &bucket).await {
        assert_eq!(add(&table, &job("a"), Some(b"k"), 2).await, JobAdded::Kept);
        assert_eq!(add(&table, &job("b"), Some(b"k"), 2).await, JobAdded::Before(Box::new(job("a"))));
        assert_eq!(table.job_of_key(b"k", "acme").await.unwrap(), Some(job("a")));
        assert_eq!(table.job_of_key(b"k", "other").await.unwrap(), None);
        assert_eq!(add(&table, &job("b"), None, 2).await, JobAdded::Kept);
        assert_eq!(add(&table, &job("c"), None, 2).await, JobAdded::TooMany);
        let changed =
            table.change("a", UpdatedBy::Anyone, to(JobStatus::Paused)).await.unwrap().expect("it is there");
        assert_eq!(changed.status, JobStatus::Paused);
        assert_eq!(table.job("a", "acme").await.unwrap(), Some(changed));
        let refused =
            table.change("a", UpdatedBy::Anyone, |_| Err(TrainingError::NoJob("x".to_owned()))).await;
        assert!(matches!(refused, Err(TrainingError::NoJob(_))));
        assert!(table.change("a", UpdatedBy::Anyone, to(JobStatus::Cancelled)).await.unwrap().is_some());
        assert!(
            table.change("a", UpdatedBy::Anyone, to(JobStatus::Queued)).await.unwrap().is_none(),
            "it has ended"
        );
        assert_eq!(add(&table, &job("c"), None, 2).await, JobAdded::Kept);
        let unfinished = table.unfinished_jobs().await.unwrap();
        assert_eq!(unfinished.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["b", "c"]);
        let listed = table.jobs("acme", &page(None, 2)).await.unwrap();
        assert_eq!(listed.items.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["c", "b"]);
        assert!(listed.has_more);
        let events = table.events("a", &page(None, 2)).await.unwrap();
        assert!(events.has_more && events.items.iter().all(|(_, event)| event.message == "changed"));
        let after = events.items[1].0.to_string();
        let events = table.events("a", &page(Some(&after), 2)).await.unwrap();
        assert_eq!(
            events.items.iter().map(|(_, event)| event.message.as_str()).collect::<Vec<_>>(),
            ["created"]
        );
    }
}

/// Tables of a single host and, if the servers are installed, of a fleet, with its servers.
async fn tables() -> (Option<(Postgres, servers::s3::Bucket)>, Vec<(FleetHost, TrainingTable)>) {
    let alone = FleetHost::alone().await;
    let table = TrainingTable::of(&alone.registry);
    let mut tables = vec![(alone, table)];
    let servers = servers::both();
    if let Some((postgres, bucket)) = &servers {
        let host = FleetHost::new(postgres, bucket).await;
        let table = TrainingTable::of(&host.registry);
        tables.push((host, table));
    }
    (servers, tables)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_no_database_holds_names_nothing_in_either_table() {
    let (_servers, tables) = tables().await;
    for (_host, table) in tables {
        assert_eq!(add_file(&table, &file("file-1", 1), None).await, FileAdded::Kept);
        assert_eq!(add(&table, &job("a"), None, 9).await, JobAdded::Kept);
        for id in ["\0", "file-1\0", "a\0"] {
            assert_eq!(table.file(id, "acme").await.unwrap(), None);
            assert_eq!(table.remove_file(id, "acme").await.unwrap(), None);
            assert_eq!(table.job(id, "acme").await.unwrap(), None);
            assert_eq!(table.files("acme", &page(Some(id), 9)).await.unwrap().items.len(), 1);
            assert_eq!(table.jobs("acme", &page(Some(id), 9)).await.unwrap().items.len(), 1);
            assert_eq!(table.events("a", &page(Some(id), 9)).await.unwrap().items.len(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_jobs_that_have_ended_the_newest_of_a_tenant_are_kept_in_either_table() {
    let (_servers, tables) = tables().await;
    for (_host, table) in tables {
        let other = JobRecord { tenant: "other".to_owned(), ..job("other") };
        for job in [&job("a"), &job("b"), &job("c"), &job("d"), &other] {
            assert_eq!(add(&table, job, Some(job.id.as_bytes()), 9).await, JobAdded::Kept);
        }
        assert_eq!(table.unfinished_of("acme").await.unwrap(), 4);
        for id in ["a", "c", "d", "other"] {
            table
                .change(id, UpdatedBy::Anyone, to(JobStatus::Cancelled))
                .await
                .unwrap()
                .expect("it has not ended");
        }
        assert_eq!(table.unfinished_of("acme").await.unwrap(), 1);
        assert!(table.remove_ended("acme", 3).await.unwrap().is_empty(), "there are no more");
        let removed = table.remove_ended("acme", 1).await.unwrap();
        let mut removed: Vec<_> = removed.iter().map(|job| job.id.as_str()).collect();
        removed.sort_unstable();
        assert_eq!(removed, ["a", "c"], "those that were created first");
        let left = table.jobs("acme", &page(None, 9)).await.unwrap();
        assert_eq!(left.items.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["d", "b"]);
        assert!(
            table.events("a", &page(None, 9)).await.unwrap().items.is_empty(),
            "events go with their job"
        );
        assert_eq!(table.job_of_key(b"a", "acme").await.unwrap(), None);
        assert!(table.job("other", "other").await.unwrap().is_some(), "nobody else loses anything");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_host_at_a_time_holds_a_job_and_who_has_lost_it_writes_nothing() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let hosts = [FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await];
    let [(one, holder), (_, other)] = hosts.each_ref().map(shared);
    add(&one, &job("a"), None, 9).await;
    let (lost, _) =
        holder.acquire_lease("a", Duration::from_millis(300)).await.unwrap().expect("nobody has it");
    assert!(other.acquire_lease("a", LONG).await.unwrap().is_none(), "it is taken");
    assert_eq!(other.unfinished().await.unwrap()[0].holder.as_deref(), Some(holder.holder()));
    assert_eq!(holder.renew_leases(&["a".to_owned()], Duration::from_millis(300)).await.unwrap(), ["a"]);
    tokio::time::sleep(Duration::from_millis(350)).await;
    assert_eq!(other.unfinished().await.unwrap()[0].holder, None, "its time is over");
    let written = one.change("a", UpdatedBy::Holder(lost), to(JobStatus::Running)).await.unwrap();
    assert!(written.is_some(), "as long as nobody else has it");
    let (fence, taken) = other.acquire_lease("a", LONG).await.unwrap().expect("its time was over");
    assert_eq!(taken.status, JobStatus::Running);
    assert!(one.change("a", UpdatedBy::Holder(lost), to(JobStatus::Succeeded)).await.unwrap().is_none());
    assert!(holder.renew_leases(&["a".to_owned()], LONG).await.unwrap().is_empty());
    holder.give_back("a", lost).await.unwrap();
    holder.give_all_back().await.unwrap();
    assert!(holder.acquire_lease("a", LONG).await.unwrap().is_none(), "what is another's is not given back");
    other.give_back("a", fence).await.unwrap();
    one.change("a", UpdatedBy::Anyone, to(JobStatus::Paused)).await.unwrap();
    assert!(holder.acquire_lease("a", LONG).await.unwrap().is_none(), "it does not wait");
    one.change("a", UpdatedBy::Anyone, to(JobStatus::Queued)).await.unwrap();
    assert!(other.acquire_lease("a", LONG).await.unwrap().is_some(), "it was given back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_hosts_that_ask_at_once_one_gets_the_job_and_one_the_last_place() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let hosts = [FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await];
    let tables = hosts.each_ref().map(|host| shared(host).0);
    for round in 0..10 {
        let jobs = [0, 1].map(|host| job(&format!("{round}-{host}")));
        let key = round.to_string().into_bytes();
        let (one, other) = tokio::join!(
            add(&tables[0], &jobs[0], Some(&key), 99),
            add(&tables[1], &jobs[1], Some(&key), 99)
        );
        let kept = [&one, &other].iter().filter(|added| ***added == JobAdded::Kept).count();
        assert_eq!(kept, 1, "{one:?} {other:?}");
        let limit = usize::try_from(round).unwrap() * 2 + 2;
        let more = [2, 3].map(|host| job(&format!("{round}-{host}")));
        let (one, other) =
            tokio::join!(add(&tables[0], &more[0], None, limit), add(&tables[1], &more[1], None, limit));
        assert_eq!([one, other].iter().filter(|added| **added == JobAdded::TooMany).count(), 1);
        let id = if tables[0].job(&jobs[0].id, "acme").await.unwrap().is_some() {
            &jobs[0].id
        } else {
            &jobs[1].id
        };
        let [one, other] = hosts.each_ref().map(|host| shared(host).1);
        let (one, other) = tokio::join!(one.acquire_lease(id, LONG), other.acquire_lease(id, LONG));
        assert!(one.unwrap().is_some() != other.unwrap().is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nothing_names_may_go_from_the_bucket_and_nothing_else() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let host = FleetHost::new(&postgres, &bucket).await;
    let (table, shared) = shared(&host);
    let data = file("file-1", 10);
    add_file(&table, &data, None).await;
    assert!(table.add_file(&file("file-0", 1), None).await.is_err(), "what was never intended is not kept");
    let (mut one, mut other) = (job("a"), job("b"));
    for job in [&mut one, &mut other] {
        job.objects = vec![data.object("data.jsonl")];
        assert_eq!(add(&table, job, None, 9).await, JobAdded::Kept);
    }
    let litter = async || shared.litter().await.unwrap();
    table.remove_file("file-1", "acme").await.unwrap();
    assert!(litter().await.is_empty(), "jobs learn from it");
    let mut late = job("c");
    late.objects = vec![data.object("data.jsonl")];
    assert_eq!(add(&table, &late, None, 9).await, JobAdded::NoFile("file-1".to_owned()));

    for path in ["training/jobs/a/checkpoint-1", "training/jobs/a/checkpoint-2"] {
        shared.intend(path).await.unwrap();
        let name = |job: &mut JobRecord| {
            job.objects.retain(|object| object.name == "data.jsonl");
            let checkpoint = gateway::training::records::ObjectRecord {
                name: "checkpoint".to_owned(),
                path: path.to_owned(),
                bytes: 1,
                hash: "00".to_owned(),
            };
            job.objects.push(checkpoint);
            Ok(Vec::new())
        };
        table.change("a", UpdatedBy::Anyone, name).await.unwrap();
    }
    assert_eq!(litter().await, ["training/jobs/a/checkpoint-1"], "there is a newer one");
    shared.swept("training/jobs/a/checkpoint-1").await.unwrap();
    table.change("a", UpdatedBy::Anyone, to(JobStatus::Succeeded)).await.unwrap();
    assert_eq!(litter().await, ["training/jobs/a/checkpoint-2"], "another job learns from the data");
    shared.swept("training/jobs/a/checkpoint-2").await.unwrap();
    table.change("b", UpdatedBy::Anyone, to(JobStatus::Cancelled)).await.unwrap();
    assert_eq!(litter().await, ["training/files/file-1"]);
    shared.intend("training/files/file-9").await.unwrap();
    shared.discard("training/files/file-9").await.unwrap();
    assert_eq!(litter().await.len(), 2, "what will not be named may go at once");
    // A gateway that was stopped uploads a file again that is registered by now.
    add_file(&table, &file("file-8", 1), None).await;
    shared.intend("training/files/file-8").await.unwrap();
    shared.discard("training/files/file-8").await.unwrap();
    assert_eq!(litter().await.len(), 2, "what a row names does not go");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_of_before_gets_the_tables_of_jobs() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let host = FleetHost::new(&postgres, &bucket).await;
    host.load("a", "first").await.unwrap();
    drop(host);
    let mut connection = PgConnection::connect(&postgres.url()).await.unwrap();
    let back = "DROP TABLE holobiont_job_events, holobiont_jobs, holobiont_files, holobiont_litter, holobiont_keys, \
                holobiont_gateways, holobiont_secrets; \
                ALTER TABLE holobiont_adapters DROP COLUMN made_by, DROP COLUMN expires_at, \
                DROP COLUMN chat_template, DROP COLUMN weights, DROP COLUMN labels; \
                UPDATE holobiont_layout SET number = 1;";
    sqlx::raw_sql(back).execute(&mut connection).await.unwrap();
    let host = FleetHost::new(&postgres, &bucket).await;
    assert_eq!(host.all().len(), 1);
    assert_eq!(add(&shared(&host).0, &job("a"), None, 1).await, JobAdded::Kept);
}

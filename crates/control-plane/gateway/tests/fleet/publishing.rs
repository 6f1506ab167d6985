//! Only the gateway that holds a job's lease registers the job's adapter.

use std::time::Duration;

use gateway::{
    adapters::{AdapterError, LoadRequest, Publication, Terms, database::DatabaseError},
    training::{
        records::{JobRecord, JobStatus},
        table::{TrainingTable, UpdatedBy, shared::leases::FencingToken},
    },
};

use crate::{
    jobs::{add, job, shared, to},
    servers,
    support::{BASE, FleetHost},
};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);
const NAME: &str = "acme/made";

async fn publish(host: &FleetHost, holder: Option<(String, FencingToken)>) -> Result<(), AdapterError> {
    let request = LoadRequest { tenant: Some("acme".to_owned()), ..host.request(NAME, "made") };
    let publication = Some(Publication {
        job: "a".to_owned(),
        holder: holder.map(|(holder, fence)| (holder, fence.number())),
        note: JobRecord::with_generation,
    });
    host.registry.load_made(request, BASE.into(), Terms { publication, ..Terms::default() }).await.map(drop)
}

async fn close(table: &TrainingTable, by: UpdatedBy) {
    let close = |job: &mut JobRecord| {
        job.is_closing = true;
        Ok(Vec::new())
    };
    assert!(table.change("a", by, close).await.unwrap().is_some());
}

fn is_not_held(done: &Result<(), AdapterError>) -> bool {
    matches!(done, Err(AdapterError::Database(DatabaseError::NotHeld(job))) if job == "a")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_has_lost_a_job_while_it_was_stopped_does_not_publish_its_adapter() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let (slept, woke) = (FleetHost::new(&postgres, &bucket).await, FleetHost::new(&postgres, &bucket).await);
    let ((one, holder), (_, other)) = (shared(&slept), shared(&woke));
    add(&one, &job("a"), None, 9).await;
    let (lost, _) = holder.acquire_lease("a", Duration::ZERO).await.unwrap().expect("nobody has it");
    let lost = Some((holder.holder().to_owned(), lost));
    assert!(is_not_held(&publish(&slept, lost.clone()).await), "it is not all but done");
    close(&one, UpdatedBy::Holder(lost.as_ref().unwrap().1)).await;
    // Here the gateway is stopped for longer than its lease.
    let (fence, taken) = other.acquire_lease("a", LONG).await.unwrap().expect("its time was over");
    assert!(taken.is_closing);
    assert!(is_not_held(&publish(&slept, lost.clone()).await), "another works on the job");
    one.change("a", UpdatedBy::Anyone, to(JobStatus::Cancelled)).await.unwrap().expect("it has not ended");
    let held = Some((other.holder().to_owned(), fence));
    for (host, holder) in [(&slept, lost), (&woke, held)] {
        assert!(is_not_held(&publish(host, holder).await), "a job that was cancelled has no adapter");
        assert_eq!(host.stands_for(NAME), None);
    }
    assert_eq!((slept.fake.held(), woke.fake.held()), (0, 0), "what was loaded is freed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_adapter_is_registered_knows_it_from_the_same_moment_on() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let hosts = [FleetHost::alone().await, FleetHost::new(&postgres, &bucket).await];
    for host in hosts {
        let table = TrainingTable::of(&host.registry);
        add(&table, &job("a"), None, 9).await;
        let holder = match &table {
            TrainingTable::Host(_) => None,
            TrainingTable::Shared(shared) => {
                let (fence, _) = shared.acquire_lease("a", LONG).await.unwrap().expect("nobody has it");
                Some((shared.holder().to_owned(), fence))
            }
        };
        assert!(is_not_held(&publish(&host, holder.clone()).await), "it is not all but done");
        close(&table, UpdatedBy::Anyone).await;
        publish(&host, holder).await.unwrap();
        let known = table.job("a", "acme").await.unwrap().expect("it is there");
        assert_eq!(known.generation, host.stands_for(NAME));
        assert!(known.generation.is_some() && known.is_all_but_done() && !known.status.is_final());
    }
}

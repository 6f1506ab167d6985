//! Results of the work on a job: a retry with another trainer, a registered adapter, or a failure.

use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use super::{
    Training, TrainingError, event_log,
    job::{JobActor, fail},
    records::{EventLevel, EventRecord, JobRecord, JobStatus},
    table::Page,
    trainer_args::ADAPTER,
};
use crate::adapters::{
    AdapterError, Base, LoadRequest, Publication, Replace, StoreError, Terms, database::DatabaseError,
};

/// Maximum number of consecutive trainers that end without a step.
const MAX_FAILURES: u32 = 5;

/// Time that a job without a trainer lets other jobs request one.
const UNAVAILABLE: Duration = Duration::from_secs(3);
/// Delay before another attempt to publish an adapter.
const PUBLISH_AGAIN: Duration = Duration::from_secs(15);

/// Outcome of the work on a job.
pub(super) enum JobOutcome {
    /// The adapter is complete.
    Done,
    Busy(String),
    /// No trainer answers, or an input cannot be downloaded.
    Unavailable(String),
    /// The trainer reported why it cannot train the adapter.
    Failed {
        message: String,
        exit: String,
    },
    /// The worker was told to stop.
    Stopped,
    /// The trainer ended without a report, or never began.
    Lost(String),
}

impl Training {
    /// Records the outcome, and registers the adapter if there is one.
    pub(super) async fn complete(&self, id: &str, ending: JobOutcome) -> Result<(), TrainingError> {
        match ending {
            JobOutcome::Stopped => {}
            JobOutcome::Busy(why) => {
                tracing::debug!(job = id, why, "no trainer is free for a fine-tuning job");
                self.requeue(id, None).await?;
            }
            JobOutcome::Unavailable(why) => {
                tracing::debug!(job = id, why, "cannot work on a fine-tuning job now");
                if let Some(found) = self.active_jobs().get_mut(id) {
                    found.not_before = Some(Instant::now() + UNAVAILABLE);
                }
                self.requeue(id, None).await?;
            }
            JobOutcome::Done => self.publish(id).await?,
            JobOutcome::Failed { message, exit } => {
                let (code, param) = match exit.as_str() {
                    "usage" | "not_found" => ("invalid_training_file", Some("training_file")),
                    _ => ("training_failed", None),
                };
                self.change(id, JobActor::Worker, fail(code, message, param)).await?;
            }
            JobOutcome::Lost(why) => {
                self.counters.trainers_lost.fetch_add(1, Relaxed);
                if self.back_off(id) < MAX_FAILURES {
                    self.requeue(id, Some(why)).await?;
                } else {
                    let message = format!(
                        "{MAX_FAILURES} trainers in a row ended without a step; the last reason: {why}"
                    );
                    self.change(id, JobActor::Worker, fail("trainer_lost", message, None)).await?;
                }
            }
        }
        Ok(())
    }

    /// Counts a failed trainer, and delays the next one exponentially. Returns the number of failures in a
    /// row.
    pub(super) fn back_off(&self, id: &str) -> u32 {
        let mut live = self.active_jobs();
        let Some(found) = live.get_mut(id) else { return 0 };
        found.failures += 1;
        found.not_before =
            Some(Instant::now() + Duration::from_secs(1) * 2u32.pow(found.failures.min(5) - 1));
        found.failures
    }

    /// Schedules another attempt to publish a finished adapter. No trainer failed, and only the first attempt
    /// adds an event, because events are kept.
    async fn publish_later(&self, id: &str, error: &AdapterError) -> Result<(), TrainingError> {
        let is_told = self.active_jobs().get_mut(id).is_none_or(|found| {
            found.not_before = Some(Instant::now() + PUBLISH_AGAIN);
            std::mem::replace(&mut found.is_unpublished, true)
        });
        let why = format!("the adapter is complete but cannot be published yet: {error}");
        self.requeue(id, (!is_told).then_some(why)).await
    }

    /// Queues a job for another trainer, unless it was paused or has ended.
    pub(super) async fn requeue(&self, id: &str, why: Option<String>) -> Result<(), TrainingError> {
        let requeued = |job: &mut JobRecord| {
            if job.status.is_due() {
                job.status = JobStatus::Queued;
            }
            job.is_closing = false;
            let event = why
                .map(|why| EventRecord::now(EventLevel::Warn, format!("{why}; another trainer continues")));
            Ok(event.into_iter().collect())
        };
        self.change(id, JobActor::Worker, requeued).await.map(drop)
    }

    /// Registers the adapter of a job and ends the job. After the first write the job cannot be cancelled.
    ///
    /// Copying and loading hold no lock. Callers are kept out by `is_closing`. Another gateway is kept out
    /// because only the lease holder can commit the transaction that registers the adapter.
    async fn publish(&self, id: &str) -> Result<(), TrainingError> {
        let Ok(serving) = self.status.borrow().serving() else {
            self.back_off(id);
            return self.requeue(id, None).await;
        };
        let close = |job: &mut JobRecord| {
            job.is_closing = job.status.is_due();
            Ok(Vec::new())
        };
        let job = self.change(id, JobActor::Worker, close).await?;
        let Some(job) = job.filter(|job| job.is_closing) else { return Ok(()) };
        let generation = match &job.generation {
            Some(generation) => Ok(generation.clone()),
            None => self.register(&job, (&*serving).into()).await,
        };
        match generation {
            Ok(generation) => self.succeed(&job, generation).await,
            Err(AdapterError::Database(DatabaseError::NotHeld(_))) => {
                tracing::warn!(
                    job = id,
                    "a fine-tuning job moved to another gateway; its adapter is not registered here"
                );
                Ok(())
            }
            Err(error) if may_succeed_later(&error) => self.publish_later(id, &error).await,
            Err(error) => {
                let failed = fail("publishing_failed", error.to_string(), None);
                self.change(id, JobActor::Worker, failed).await.map(drop)
            }
        }
    }

    /// Registers the adapter of a job under its name, if this gateway still holds the job; returns its
    /// adapter version.
    async fn register(&self, job: &JobRecord, base: Base<'_>) -> Result<String, AdapterError> {
        let holder = match &self.fleet {
            None => None,
            Some(fleet) => {
                let hold = self.active_jobs().get(&job.id).and_then(|found| found.hold);
                let hold = hold.ok_or_else(|| DatabaseError::NotHeld(job.id.clone()))?;
                Some((fleet.table.holder().to_owned(), hold.fence.number()))
            }
        };
        let request = LoadRequest {
            name: job.name.clone(),
            path: self.job_directory(&job.id).join(ADAPTER),
            replace: job.replaces.clone().map_or(Replace::Never, Replace::Only),
            tenant: Some(job.tenant.clone()),
            pinned: None,
        };
        failpoint::pass("gateway.job_publishing");
        let publication = Some(Publication { job: job.id.clone(), holder, note: JobRecord::with_generation });
        let loaded = self.registry.load_made(request, base, Terms { publication, ..Terms::default() }).await;
        failpoint::pass("gateway.job_published");
        loaded.map(|entry| entry.record.generation.to_string())
    }

    async fn succeed(&self, job: &JobRecord, generation: String) -> Result<(), TrainingError> {
        let page = Page { after: None, limit: u32::MAX - 1 };
        let events = self.table.events(&job.id, &page).await?;
        let results = event_log::table(events.items.iter().rev().filter_map(|(_, event)| event.metrics));
        let results = self.keep_results(job, &results).await?;
        let succeeded = |job: &mut JobRecord| {
            (job.status, job.generation, job.result_file) =
                (JobStatus::Succeeded, Some(generation), Some(results));
            Ok(vec![
                EventRecord::now(EventLevel::Info, format!("new fine-tuned model created: {}", job.name)),
                EventRecord::now(EventLevel::Info, "the job has successfully completed"),
            ])
        };
        self.change(&job.id, JobActor::Worker, succeeded).await.map(drop)
    }
}

/// Whether another attempt to publish may succeed, because space or a service may become available.
fn may_succeed_later(error: &AdapterError) -> bool {
    matches!(
        error,
        AdapterError::Busy(_)
            | AdapterError::Residency(_)
            | AdapterError::Database(_)
            | AdapterError::Full(_)
            | AdapterError::TenantFull { .. }
            | AdapterError::Store(StoreError::Full(_) | StoreError::Bucket(_))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_that_finds_no_room_is_published_later_and_one_that_is_refused_is_not() {
        let no_room =
            AdapterError::TenantFull { adapters: 1, held_bytes: 1, bytes: 1, max_adapters: 1, max_bytes: 1 };
        for error in [AdapterError::Full(1), no_room, AdapterError::Busy(1)] {
            assert!(may_succeed_later(&error), "{error}");
        }
        for error in [AdapterError::NameTaken("a".to_owned()), AdapterError::NoModules("a".to_owned())] {
            assert!(!may_succeed_later(&error), "{error}");
        }
    }
}

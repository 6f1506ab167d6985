//! What is counted of jobs, for whoever renders figures.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use control_protocol::training::TrainingEvent;

use super::{
    Training,
    job::ActiveJob,
    records::{JobRecord, JobStatus},
};

/// Counts since the process began.
#[derive(Debug, Default)]
pub(super) struct TrainingCounters {
    succeeded: AtomicU64,
    failed: AtomicU64,
    cancelled: AtomicU64,
    pub(super) trainers_lost: AtomicU64,
    steps: AtomicU64,
    tokens: AtomicU64,
}

/// The counters at one moment, and what there is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingStats {
    /// Jobs that have not ended, by what they do.
    pub unfinished: [(&'static str, u64); 3],
    /// Jobs that ended, by how.
    pub ended: [(&'static str, u64); 3],
    /// Trainers that died.
    pub trainers_lost: u64,
    /// Steps that were made.
    pub steps: u64,
    /// Tokens that were learned from.
    pub tokens: u64,
}

/// A job that has not ended, for whoever watches all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct JobInProgress {
    /// As it is now.
    pub job: JobRecord,
    /// What its trainer learns from in a second, if it has one that has made a step.
    pub tokens_per_s: Option<f64>,
}

impl TrainingCounters {
    /// Counts a job that has just ended, if it has.
    pub(super) fn changed(&self, job: &JobRecord) {
        let counter = match job.status {
            JobStatus::Succeeded => &self.succeeded,
            JobStatus::Failed => &self.failed,
            JobStatus::Cancelled => &self.cancelled,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts what a trainer says.
    pub(super) fn said(&self, event: &TrainingEvent) {
        if let TrainingEvent::Step(step) = event {
            self.steps.fetch_add(1, Relaxed);
            self.tokens.fetch_add(step.tokens, Relaxed);
        }
    }
}

impl Training {
    /// Every job that has not ended, the oldest first.
    #[must_use]
    pub fn under_way(&self) -> Vec<JobInProgress> {
        let live = self.active_jobs();
        let under_way =
            |live: &ActiveJob| JobInProgress { job: live.job.clone(), tokens_per_s: live.tokens_per_s };
        let mut all: Vec<JobInProgress> = live.values().map(under_way).collect();
        all.sort_by(|a, b| (a.job.created_at, &a.job.id).cmp(&(b.job.created_at, &b.job.id)));
        all
    }

    /// What has been counted since the process began, and what there is now.
    #[must_use]
    pub fn figures(&self) -> TrainingStats {
        let live = self.active_jobs();
        let count =
            |is: fn(JobStatus) -> bool| live.values().filter(|live| is(live.job.status)).count() as u64;
        let counters = &self.counters;
        TrainingStats {
            unfinished: [
                ("queued", count(|status| status == JobStatus::Queued)),
                (
                    "training",
                    count(|status| matches!(status, JobStatus::ValidatingFiles | JobStatus::Running)),
                ),
                ("paused", count(|status| status == JobStatus::Paused)),
            ],
            ended: [
                ("succeeded", counters.succeeded.load(Relaxed)),
                ("failed", counters.failed.load(Relaxed)),
                ("cancelled", counters.cancelled.load(Relaxed)),
            ],
            trainers_lost: counters.trainers_lost.load(Relaxed),
            steps: counters.steps.load(Relaxed),
            tokens: counters.tokens.load(Relaxed),
        }
    }
}

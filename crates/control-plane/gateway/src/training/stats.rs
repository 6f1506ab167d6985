//! Counters of fine-tuning jobs for metrics and status.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use control_protocol::training::TrainingEvent;

use super::{
    Training,
    job::ActiveJob,
    records::{JobRecord, JobStatus},
};

/// Counts since the process started.
#[derive(Debug, Default)]
pub(super) struct TrainingCounters {
    succeeded: AtomicU64,
    failed: AtomicU64,
    cancelled: AtomicU64,
    pub(super) trainers_lost: AtomicU64,
    steps: AtomicU64,
    tokens: AtomicU64,
}

/// Counters at one moment, and the number of unfinished jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingStats {
    /// Unfinished jobs by status.
    pub unfinished: [(&'static str, u64); 3],
    /// Ended jobs by final status.
    pub ended: [(&'static str, u64); 3],
    /// Trainers that ended without a result.
    pub trainers_lost: u64,
    pub steps: u64,
    pub tokens: u64,
}

/// An unfinished job as the status report shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct JobInProgress {
    pub job: JobRecord,
    /// Training speed in tokens per second, if the job's trainer has reported a step.
    pub tokens_per_s: Option<f64>,
}

impl TrainingCounters {
    /// Counts a job whose status has just become final.
    pub(super) fn changed(&self, job: &JobRecord) {
        let counter = match job.status {
            JobStatus::Succeeded => &self.succeeded,
            JobStatus::Failed => &self.failed,
            JobStatus::Cancelled => &self.cancelled,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts the steps and tokens that a trainer reports.
    pub(super) fn said(&self, event: &TrainingEvent) {
        if let TrainingEvent::Step(step) = event {
            self.steps.fetch_add(1, Relaxed);
            self.tokens.fetch_add(step.tokens, Relaxed);
        }
    }
}

impl Training {
    /// Returns every unfinished job, the oldest first.
    #[must_use]
    pub fn under_way(&self) -> Vec<JobInProgress> {
        let live = self.active_jobs();
        let under_way =
            |live: &ActiveJob| JobInProgress { job: live.job.clone(), tokens_per_s: live.tokens_per_s };
        let mut all: Vec<JobInProgress> = live.values().map(under_way).collect();
        all.sort_by(|a, b| (a.job.created_at, &a.job.id).cmp(&(b.job.created_at, &b.job.id)));
        all
    }

    /// Returns the counters and the current number of unfinished jobs.
    #[must_use]
    pub fn stats(&self) -> TrainingStats {
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

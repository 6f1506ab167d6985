//! Changes of a fleet's jobs by other hosts. A notification is only a hint; the jobs are read from the table,
//! at least once per second.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout};

use super::{
    Training, TrainingError, files, fleet::TrainingFleet, job::ActiveJob, sweep,
    table::shared::leases::ObservedJob,
};

/// Interval of reads without notifications.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before a lost connection is opened again.
const PAUSE: Duration = Duration::from_millis(500);

impl Training {
    /// Applies changes of jobs by other hosts, forever.
    pub(super) async fn follow(&self, fleet: &TrainingFleet) {
        let mut is_swept = false;
        loop {
            if let Err(error) = self.listen_to(fleet, &mut is_swept).await {
                tracing::debug!(%error, "cannot read the fleet's fine-tuning jobs");
            }
            sleep(PAUSE).await;
        }
    }

    /// Applies changes over one database connection until it is lost.
    async fn listen_to(&self, fleet: &TrainingFleet, is_swept: &mut bool) -> Result<(), TrainingError> {
        let mut listener = fleet.table.listener().await?;
        loop {
            let asked = Instant::now();
            let seen = fleet.table.unfinished().await?;
            if !std::mem::replace(is_swept, true) {
                let keep = seen.iter().map(|seen| seen.job.id.clone()).collect();
                sweep(&self.directory, "jobs", keep).await?;
            }
            self.take_over(fleet, seen, asked);
            self.due.notify_one();
            match timeout(LOOK, listener.try_recv()).await {
                // One read covers all pending notifications.
                Ok(Ok(Some(_))) => while listener.next_buffered().is_some() {},
                Ok(_) => return Ok(()),
                Err(_) => {}
            }
        }
    }

    /// Updates the live jobs to the rows that were read at `asked`.
    fn take_over(&self, fleet: &TrainingFleet, seen: Vec<ObservedJob>, asked: Instant) {
        let ids: HashSet<String> = seen.iter().map(|seen| seen.job.id.clone()).collect();
        let mut live = self.active_jobs();
        for seen in seen {
            let is_elsewhere = seen.holder.as_deref().is_some_and(|holder| holder != fleet.table.holder());
            let found = live
                .entry(seen.job.id.clone())
                .or_insert_with(|| ActiveJob::known_at(asked, seen.job.clone()));
            if found.known > asked {
                continue;
            }
            found.is_elsewhere = is_elsewhere;
            if !found.is_attended {
                found.job = seen.job;
            } else if found.hold.is_some() && !seen.job.status.is_due() {
                found.job.status = seen.job.status;
                found.stop.send_replace(true);
            }
        }
        let gone = remove_ended(&mut live, &ids, asked);
        drop(live);
        for id in gone {
            tokio::spawn(files::remove(self.job_directory(&id)));
        }
    }
}

/// Handles live jobs that are not among `ids`, because they have ended. A worker on such a job is told to
/// stop; other jobs are removed, and their ids returned.
fn remove_ended(live: &mut HashMap<String, ActiveJob>, ids: &HashSet<String>, asked: Instant) -> Vec<String> {
    let ended = live.iter().filter(|(id, found)| !ids.contains(*id) && found.known <= asked);
    let (attended, gone): (Vec<_>, Vec<_>) = ended.partition(|(_, found)| found.is_attended);
    for (_, found) in attended {
        found.stop.send_replace(true);
    }
    let gone: Vec<String> = gone.into_iter().map(|(id, _)| id.clone()).collect();
    gone.iter().for_each(|id| drop(live.remove(id)));
    gone
}

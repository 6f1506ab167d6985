//! Who works on what: jobs are taken for a time, kept for longer, and given back.

use std::time::Duration;

use sqlx::postgres::PgListener;

use super::{CHANNEL, SharedTable, read};
use crate::{adapters::database::DatabaseError, training::records::JobRecord};

/// How often a job has been taken over; a later holder's is larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence(pub(super) i64);

impl Fence {
    /// The number, as the job's row has it.
    #[must_use]
    pub fn number(self) -> i64 {
        self.0
    }
}

/// A job that has not ended, as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedJob {
    /// As it is.
    pub job: JobRecord,
    /// Which gateway works on it.
    pub holder: Option<String>,
}

impl SharedTable {
    /// Every job that has not ended, in the order in which they were created.
    ///
    /// # Errors
    /// If it cannot be read now.
    pub async fn unfinished(&self) -> Result<Vec<ObservedJob>, DatabaseError> {
        let rows = sqlx::query_as(
            "SELECT record, CASE WHEN until > now() THEN holder END FROM holobiont_jobs WHERE due ORDER BY number",
        );
        let pool = self.link.session()?;
        let asked = async {
            let rows: Vec<(String, Option<String>)> = rows.fetch_all(&pool).await?;
            let seen = |(row, holder): (String, _)| Ok(ObservedJob { job: read(&row)?, holder });
            rows.into_iter().map(seen).collect()
        };
        self.link.within(asked).await
    }

    /// Becomes the holder of a job for so long, if it waits and nobody is.
    ///
    /// # Errors
    /// The database's; it is given back by itself then.
    pub async fn acquire_lease(
        &self,
        id: &str,
        time: Duration,
    ) -> Result<Option<(Fence, JobRecord)>, DatabaseError> {
        let taken = sqlx::query_as(
            "UPDATE holobiont_jobs SET holder = $2, fence = fence + 1, until = now() + make_interval(secs => $3) \
             WHERE id = $1 AND due AND (holder IS NULL OR holder = $2 OR until < now()) RETURNING fence, record",
        );
        let taken = taken.bind(id).bind(&self.holder).bind(time.as_secs_f64());
        let pool = self.link.session()?;
        let asked = async {
            let row: Option<(i64, String)> = taken.fetch_optional(&pool).await?;
            row.map(|(fence, row)| Ok((Fence(fence), read::<JobRecord>(&row)?))).transpose()
        };
        let taken = self.link.within(asked).await?;
        match taken {
            Some((fence, job)) if !job.status.is_due() => self.give_back(id, fence).await.map(|()| None),
            taken => Ok(taken),
        }
    }

    /// Stays the holder of these jobs for so long from now on; returns those of which it is.
    ///
    /// # Errors
    /// If it cannot be said now.
    pub async fn renew_leases(&self, ids: &[String], time: Duration) -> Result<Vec<String>, DatabaseError> {
        let stays = sqlx::query_scalar(
            "UPDATE holobiont_jobs SET until = now() + make_interval(secs => $3) \
             WHERE id = ANY($1) AND holder = $2 AND due RETURNING id",
        );
        let stays = stays.bind(ids).bind(&self.holder).bind(time.as_secs_f64());
        let pool = self.link.session()?;
        self.link.within(stays.fetch_all(&pool)).await
    }

    /// Is no longer the holder of a job.
    ///
    /// # Errors
    /// If it cannot be said now; it is given back by itself then.
    pub async fn give_back(&self, id: &str, fence: Fence) -> Result<(), DatabaseError> {
        let given = sqlx::query(
            "WITH given AS (UPDATE holobiont_jobs SET holder = NULL \
                            WHERE id = $1 AND holder = $2 AND fence = $3 RETURNING id) \
             SELECT pg_notify($4, id) FROM given",
        );
        let given = given.bind(id).bind(&self.holder).bind(fence.0).bind(CHANNEL);
        let pool = self.link.session()?;
        self.link.within(given.execute(&pool)).await.map(drop)
    }

    /// Is no longer the holder of any job.
    ///
    /// # Errors
    /// If it cannot be said now; they are given back by themselves then.
    pub async fn give_all_back(&self) -> Result<(), DatabaseError> {
        let given = sqlx::query(
            "WITH given AS (UPDATE holobiont_jobs SET holder = NULL WHERE holder = $1 RETURNING id) \
             SELECT pg_notify($2, id) FROM given",
        );
        let pool = self.link.session()?;
        self.link.within(given.bind(&self.holder).bind(CHANNEL).execute(&pool)).await.map(drop)
    }

    /// Hears that jobs have changed, as long as the connection lasts.
    ///
    /// # Errors
    /// If there is none now.
    pub async fn listener(&self) -> Result<PgListener, DatabaseError> {
        let pool = self.link.session()?;
        let mut listener = self.link.within(PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        self.link.within(listener.listen(CHANNEL)).await?;
        Ok(listener)
    }
}

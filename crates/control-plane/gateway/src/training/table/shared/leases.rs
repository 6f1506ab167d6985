//! Leases on jobs in the shared table: taking, renewing and releasing them.

use std::time::Duration;

use sqlx::postgres::PgListener;

use super::{CHANNEL, SharedTable, read};
use crate::{adapters::database::DatabaseError, training::records::JobRecord};

/// Number of times that a job was taken over; a later holder has a larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FencingToken(pub(super) i64);

impl FencingToken {
    /// Number in the job's row.
    #[must_use]
    pub fn number(self) -> i64 {
        self.0
    }
}

/// An unfinished job as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedJob {
    pub job: JobRecord,
    /// Gateway that works on the job.
    pub holder: Option<String>,
}

impl SharedTable {
    /// Returns every unfinished job, in the order of creation.
    ///
    /// # Errors
    /// If the database fails.
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

    /// Takes the lease of a job for `time`, if the job waits and has no other holder.
    ///
    /// # Errors
    /// If the database fails; a lease that was taken nevertheless expires.
    pub async fn acquire_lease(
        &self,
        id: &str,
        time: Duration,
    ) -> Result<Option<(FencingToken, JobRecord)>, DatabaseError> {
        let taken = sqlx::query_as(
            "UPDATE holobiont_jobs SET holder = $2, fence = fence + 1, until = now() + make_interval(secs => $3) \
             WHERE id = $1 AND due AND (holder IS NULL OR holder = $2 OR until < now()) RETURNING fence, record",
        );
        let taken = taken.bind(id).bind(&self.holder).bind(time.as_secs_f64());
        let pool = self.link.session()?;
        let asked = async {
            let row: Option<(i64, String)> = taken.fetch_optional(&pool).await?;
            row.map(|(fence, row)| Ok((FencingToken(fence), read::<JobRecord>(&row)?))).transpose()
        };
        let taken = self.link.within(asked).await?;
        match taken {
            Some((fence, job)) if !job.status.is_due() => self.give_back(id, fence).await.map(|()| None),
            taken => Ok(taken),
        }
    }

    /// Renews the leases of these jobs for `time` from now; returns the ids of those that this process still
    /// holds.
    ///
    /// # Errors
    /// If the database fails.
    pub async fn renew_leases(&self, ids: &[String], time: Duration) -> Result<Vec<String>, DatabaseError> {
        let stays = sqlx::query_scalar(
            "UPDATE holobiont_jobs SET until = now() + make_interval(secs => $3) \
             WHERE id = ANY($1) AND holder = $2 AND due RETURNING id",
        );
        let stays = stays.bind(ids).bind(&self.holder).bind(time.as_secs_f64());
        let pool = self.link.session()?;
        self.link.within(stays.fetch_all(&pool)).await
    }

    /// Releases the lease of a job.
    ///
    /// # Errors
    /// If the database fails; the lease expires then.
    pub async fn give_back(&self, id: &str, fence: FencingToken) -> Result<(), DatabaseError> {
        let given = sqlx::query(
            "WITH given AS (UPDATE holobiont_jobs SET holder = NULL \
                            WHERE id = $1 AND holder = $2 AND fence = $3 RETURNING id) \
             SELECT pg_notify($4, id) FROM given",
        );
        let given = given.bind(id).bind(&self.holder).bind(fence.0).bind(CHANNEL);
        let pool = self.link.session()?;
        self.link.within(given.execute(&pool)).await.map(drop)
    }

    /// Releases the leases of this process.
    ///
    /// # Errors
    /// If the database fails; the leases expire then.
    pub async fn give_all_back(&self) -> Result<(), DatabaseError> {
        let given = sqlx::query(
            "WITH given AS (UPDATE holobiont_jobs SET holder = NULL WHERE holder = $1 RETURNING id) \
             SELECT pg_notify($2, id) FROM given",
        );
        let pool = self.link.session()?;
        self.link.within(given.bind(&self.holder).bind(CHANNEL).execute(&pool)).await.map(drop)
    }

    /// Listens for changes of jobs until the connection is lost.
    ///
    /// # Errors
    /// If there is no connection.
    pub async fn listener(&self) -> Result<PgListener, DatabaseError> {
        let pool = self.link.session()?;
        let mut listener = self.link.within(PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        self.link.within(listener.listen(CHANNEL)).await?;
        Ok(listener)
    }
}

//! Registration of a fine-tuning job's result. The transaction that registers the adapter also notes it in
//! the job's row. The transaction fails unless the job is about to end and the caller holds the job.

use sqlx::{PgConnection, SqliteConnection};

/// A fine-tuning job whose result is registered by the gateway that works on the job.
#[derive(Debug, Clone)]
pub struct Publication {
    pub job: String,
    /// In a fleet, the gateway that works on the job, and the fence number of its lease.
    pub holder: Option<(String, i64)>,
    /// Returns the job's row with the adapter version noted; `None` if the job is not about to end.
    pub note: fn(row: &str, generation: &str) -> Option<String>,
}

impl Publication {
    /// Notes the adapter version in a host's job row. Returns false if the adapter must not be registered.
    pub(super) async fn write_here(
        &self,
        connection: &mut SqliteConnection,
        generation: &str,
    ) -> Result<bool, sqlx::Error> {
        let row = sqlx::query_scalar("SELECT record FROM jobs WHERE id = ?1 AND due").bind(&self.job);
        let row: Option<String> = row.fetch_optional(&mut *connection).await?;
        let Some(noted) = row.and_then(|row| (self.note)(&row, generation)) else { return Ok(false) };
        let put = sqlx::query("UPDATE jobs SET record = ?2 WHERE id = ?1").bind(&self.job).bind(noted);
        put.execute(connection).await.map(|_| true)
    }

    /// Notes the adapter version in a fleet's job row, locked until the transaction ends. Returns false if
    /// the adapter must not be registered.
    pub(super) async fn write(
        &self,
        connection: &mut PgConnection,
        generation: &str,
    ) -> Result<bool, sqlx::Error> {
        const HELD: &str = "SELECT record FROM holobiont_jobs \
                            WHERE id = $1 AND due AND holder = $2 AND fence = $3 FOR UPDATE";
        let Some((holder, fence)) = &self.holder else { return Ok(false) };
        let row = sqlx::query_scalar(HELD).bind(&self.job).bind(holder).bind(fence);
        let row: Option<String> = row.fetch_optional(&mut *connection).await?;
        let Some(noted) = row.and_then(|row| (self.note)(&row, generation)) else { return Ok(false) };
        let put =
            sqlx::query("UPDATE holobiont_jobs SET record = $2 WHERE id = $1").bind(&self.job).bind(noted);
        put.execute(connection).await.map(|_| true)
    }
}

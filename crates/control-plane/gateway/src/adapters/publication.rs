//! The result of a fine-tuning job on its way into the registry: the transaction that registers the adapter notes it in the job's
//! row, and fails unless the job is all but done and its holder asks.

use sqlx::{PgConnection, SqliteConnection};

/// A fine-tuning job whose result is registered, by whoever works on it and nobody else.
#[derive(Debug, Clone)]
pub struct Publication {
    /// The job's id.
    pub job: String,
    /// In a fleet, the gateway that works on the job, and the number of its take-over.
    pub holder: Option<(String, i64)>,
    /// Turns the job's row into one that names the adapter's generation; `None` if the job is not all but done.
    pub note: fn(row: &str, generation: &str) -> Option<String>,
}

impl Publication {
    /// Notes the generation in the row of a host alone. False if it must not be registered.
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

    /// Notes the generation in the row that a fleet shares, which is locked until the end of the transaction. False if it must not
    /// be registered.
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

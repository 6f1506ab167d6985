//! Batches in the SQLite database of this host, durable when a change returns.

use sqlx::Connection as _;

use super::records::BatchRecord;
use crate::{
    adapters::database::{Database, DatabaseError},
    training::table::{ListedPage, Page, page_query, text},
};

/// Result of adding a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchAdded {
    Kept,
    /// The tenant has reached its limit of unfinished batches.
    TooMany,
}

impl Database {
    /// Adds a batch, unless its tenant has `limit` unfinished ones.
    pub(super) async fn add_batch(
        &self,
        batch: &BatchRecord,
        limit: usize,
    ) -> Result<BatchAdded, DatabaseError> {
        let mut connection = self.writer().await?;
        let mut transaction = connection.begin().await.map_err(DatabaseError::of)?;
        let count = sqlx::query_scalar("SELECT COUNT(*) FROM batches WHERE due AND tenant = ?1");
        let count = count.bind(&batch.tenant).fetch_one(&mut *transaction).await;
        let count: i64 = count.map_err(DatabaseError::of)?;
        if usize::try_from(count).unwrap_or(usize::MAX) >= limit {
            return Ok(BatchAdded::TooMany);
        }
        let add = sqlx::query("INSERT INTO batches (id, tenant, due, record) VALUES (?1, ?2, 1, ?3)");
        let add = add.bind(&batch.id).bind(&batch.tenant).bind(text(batch));
        add.execute(&mut *transaction).await.map_err(DatabaseError::of)?;
        transaction.commit().await.map_err(DatabaseError::of)?;
        Ok(BatchAdded::Kept)
    }

    /// Replaces the record of an unfinished batch.
    pub(super) async fn update_batch(&self, batch: &BatchRecord) -> Result<(), DatabaseError> {
        let update = sqlx::query(
            "UPDATE batches SET due = ?2, outputs_expire_at = ?3, record = ?4 WHERE id = ?1 AND due",
        );
        let outputs_expire_at = batch.outputs_expire_at().and_then(|at| i64::try_from(at).ok());
        let update = update.bind(&batch.id).bind(!batch.status.is_final()).bind(outputs_expire_at);
        let mut connection = self.writer().await?;
        update.bind(text(batch)).execute(&mut *connection).await.map(drop).map_err(DatabaseError::of)
    }

    /// Returns the batch `id` of `tenant`, if there is one.
    pub(super) async fn batch(&self, id: &str, tenant: &str) -> Result<Option<BatchRecord>, DatabaseError> {
        self.one("SELECT record FROM batches WHERE id = ?1 AND tenant = ?2", id, tenant).await
    }

    /// Lists the batches of `tenant`.
    pub(super) async fn batches(
        &self,
        tenant: &str,
        page: &Page,
    ) -> Result<ListedPage<BatchRecord>, DatabaseError> {
        self.page(page_query!("batches"), tenant, page).await
    }

    /// Returns every unfinished batch, in the order of creation.
    pub(super) async fn unfinished_batches(&self) -> Result<Vec<BatchRecord>, DatabaseError> {
        self.records(sqlx::query_scalar("SELECT record FROM batches WHERE due ORDER BY number")).await
    }

    /// Returns ended batches whose result files expired before `now`.
    pub(super) async fn batches_with_expired_outputs(
        &self,
        now: u64,
    ) -> Result<Vec<BatchRecord>, DatabaseError> {
        let query = sqlx::query_scalar("SELECT record FROM batches WHERE outputs_expire_at <= ?1");
        self.records(query.bind(i64::try_from(now).unwrap_or(i64::MAX))).await
    }

    /// Records that the result files of a batch are deleted.
    pub(super) async fn forget_outputs(&self, id: &str) -> Result<(), DatabaseError> {
        let update = sqlx::query("UPDATE batches SET outputs_expire_at = NULL WHERE id = ?1").bind(id);
        let mut connection = self.writer().await?;
        update.execute(&mut *connection).await.map(drop).map_err(DatabaseError::of)
    }

    /// Removes ended batches of `tenant` except the `keep` newest; returns the removed ones.
    pub(super) async fn remove_ended_batches(
        &self,
        tenant: &str,
        keep: u32,
    ) -> Result<Vec<BatchRecord>, DatabaseError> {
        let removed = sqlx::query_scalar(
            "DELETE FROM batches WHERE tenant = ?1 AND NOT due AND number <= \
             (SELECT number FROM batches WHERE tenant = ?1 AND NOT due ORDER BY number DESC \
             LIMIT 1 OFFSET ?2) RETURNING record",
        );
        self.records(removed.bind(tenant).bind(keep)).await
    }
}

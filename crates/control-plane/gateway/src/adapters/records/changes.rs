//! Changes of adapters in a shared registry.

use tokio::time::timeout;

use super::{
    change_feed::{PATIENCE, SharedRegistry},
    postgres,
};
use crate::adapters::{
    database::{DatabaseError, Record},
    publication::Publication,
};

impl SharedRegistry {
    pub(super) async fn put(
        &self,
        record: &Record,
        over: Option<u64>,
        of: Option<&Publication>,
    ) -> Result<u64, DatabaseError> {
        let pool = self.session()?;
        self.settled(&record.name, timeout(PATIENCE, postgres::put(&pool, record, over, of)).await)
    }

    pub(super) async fn remove(&self, name: &str, version: u64) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        self.settled(name, timeout(PATIENCE, postgres::remove(&pool, name, version)).await).map(drop)
    }

    pub(super) async fn set_pinned(
        &self,
        name: &str,
        version: u64,
        pinned: bool,
    ) -> Result<u64, DatabaseError> {
        let pool = self.session()?;
        self.settled(name, timeout(PATIENCE, postgres::set_pinned(&pool, name, version, pinned)).await)
    }

    pub(super) async fn set_expiry(
        &self,
        name: &str,
        version: u64,
        at: Option<u64>,
    ) -> Result<u64, DatabaseError> {
        let pool = self.session()?;
        self.settled(name, timeout(PATIENCE, postgres::set_expiry(&pool, name, version, at)).await)
    }

    pub(super) async fn confirm(&self, name: &str, version: u64) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        match self.within(postgres::is_registered(&pool, name, version)).await? {
            true => Ok(()),
            false => Err(DatabaseError::Conflict(name.to_owned())),
        }
    }

    pub(super) async fn set_used(&self, used: &[(String, u64)]) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        self.within(postgres::set_used(&pool, used)).await
    }
}

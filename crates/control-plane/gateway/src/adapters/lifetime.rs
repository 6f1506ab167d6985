//! How long adapters that were made here stay registered: until a time, or as long as the run of a gateway needs them.

use std::{collections::HashSet, sync::Arc};

use super::{
    database::{Database, DatabaseError, signed},
    errors::AdapterError,
    registry::Registry,
    to_end::to_end,
};
use crate::random;

impl Registry {
    /// What this process is called among the gateways of a fleet. No other process has the name.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Says that this gateway is alive, and returns the gateways that are. Without a fleet there is no other.
    ///
    /// # Errors
    /// If the registry of the fleet cannot be reached.
    pub async fn renew_presence(&self) -> Result<HashSet<String>, DatabaseError> {
        match self.records.shared() {
            None => Ok(HashSet::from([self.instance.clone()])),
            Some(shared) => shared.renew_presence(&self.instance).await,
        }
    }

    /// What addresses of downloads are signed with: one secret for all gateways of a fleet; of a host alone, until it ends.
    ///
    /// # Errors
    /// If the registry of the fleet cannot be reached, or the system gives no secret.
    pub(crate) async fn download_secret(&self) -> Result<&[u8; 32], DatabaseError> {
        let first = async {
            let fresh = random::secret().map_err(|error| DatabaseError::Failed(sqlx::Error::Io(error)))?;
            match self.records.shared() {
                None => Ok(fresh),
                Some(shared) => shared.secret("downloads", fresh).await,
            }
        };
        self.download_secret.get_or_try_init(|| first).await
    }

    /// Says that this gateway ends. If that fails, others find out a while later.
    pub async fn remove_presence(&self) {
        let Some(shared) = self.records.shared() else { return };
        if let Err(error) = shared.remove_presence(&self.instance).await {
            tracing::warn!(%error, "other gateways hear later that this one has ended");
        }
    }

    /// Unloads an adapter at a time from now on, in seconds since 1970, or never.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn set_expiry(self: &Arc<Self>, name: &str, at: Option<u64>) -> Result<(), AdapterError> {
        let (registry, name) = (Arc::clone(self), name.to_owned());
        to_end(async move { registry.write_expiry(&name, at).await }).await
    }

    async fn write_expiry(&self, name: &str, at: Option<u64>) -> Result<(), AdapterError> {
        let _changing = self.changing.lock().await;
        let entry = self.entry(name)?;
        let version = self.records.set_expiry(&entry, at).await?;
        entry.set_expiry(at);
        entry.set_version(version);
        self.after_commit().await;
        Ok(())
    }
}

impl Database {
    /// Remembers when an adapter is to be unloaded. On disk when this returns.
    ///
    /// # Errors
    /// As [`Database::put`].
    pub(super) async fn set_expiry(&self, name: &str, at: Option<u64>) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let changed = sqlx::query("UPDATE adapters SET expires_at = ?2 WHERE name = ?1");
        let changed = changed.bind(name).bind(at.map(signed)).execute(&mut *connection).await;
        changed.map(drop).map_err(DatabaseError::of)
    }
}

//! Lifetime of adapters that were made here: until a given time, or until the gateway that needs them ends.

use std::{collections::HashSet, sync::Arc};

use super::{
    database::{Database, DatabaseError, signed},
    detached_task::run_detached,
    errors::AdapterError,
    registry::Registry,
};
use crate::random;

impl Registry {
    /// Name of this process among the gateways of a fleet. No other process has this name.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Announces that this gateway is alive, and returns all that are; without a fleet only this one.
    ///
    /// # Errors
    /// If the registry of the fleet cannot be reached.
    pub async fn renew_presence(&self) -> Result<HashSet<String>, DatabaseError> {
        match self.records.shared() {
            None => Ok(HashSet::from([self.instance.clone()])),
            Some(shared) => shared.renew_presence(&self.instance).await,
        }
    }

    /// Returns the secret that signs download addresses. All gateways of a fleet share it; a single host
    /// makes a new one at each start.
    ///
    /// # Errors
    /// If the registry of the fleet cannot be reached, or the system provides no random bytes.
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

    /// Announces that this gateway ends. If the announcement fails, the other gateways notice the end later.
    pub async fn remove_presence(&self) {
        let Some(shared) = self.records.shared() else { return };
        if let Err(error) = shared.remove_presence(&self.instance).await {
            tracing::warn!(%error, "cannot tell other gateways that this one stops; they notice later");
        }
    }

    /// Sets when an adapter is unloaded, in seconds since 1970; `None` is never.
    ///
    /// # Errors
    /// See [`AdapterError`]; nothing has changed then.
    pub async fn set_expiry(self: &Arc<Self>, name: &str, at: Option<u64>) -> Result<(), AdapterError> {
        let (registry, name) = (Arc::clone(self), name.to_owned());
        run_detached(async move { registry.write_expiry(&name, at).await }).await
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
    /// Stores when an adapter is to be unloaded. The change is on disk when this returns.
    ///
    /// # Errors
    /// Fails as [`Database::put`] does.
    pub(super) async fn set_expiry(&self, name: &str, at: Option<u64>) -> Result<(), DatabaseError> {
        let mut connection = self.writer().await?;
        let changed = sqlx::query("UPDATE adapters SET expires_at = ?2 WHERE name = ?1");
        let changed = changed.bind(name).bind(at.map(signed)).execute(&mut *connection).await;
        changed.map(drop).map_err(DatabaseError::of)
    }
}

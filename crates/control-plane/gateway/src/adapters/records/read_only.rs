//! Access to a shared registry by programs that are not gateways.

use security::keys::{Key, KeyHash};
use tokio::time::timeout;

use super::{
    address::PostgresAddress,
    change_feed::{PATIENCE, SharedRegistry},
    postgres,
};
use crate::adapters::database::DatabaseError;

/// Counts the registered adapters; `None` if there is no registry yet. Creates nothing.
///
/// # Errors
/// If the registry cannot be reached or read.
pub(crate) async fn count_adapters(address: &PostgresAddress) -> Result<Option<u64>, DatabaseError> {
    let shared = SharedRegistry::at(address.clone(), None);
    let pool = shared.pool();
    let mut connection = shared.within(pool.acquire()).await?;
    shared.within(postgres::count(&mut connection)).await
}

/// Returns the API keys of a registry, after adding `added` and removing the keys with the hashes `removed`.
///
/// # Errors
/// If the registry cannot be reached or changed.
pub(crate) async fn keys(
    address: PostgresAddress,
    added: &[Key],
    removed: &[KeyHash],
) -> Result<Vec<String>, DatabaseError> {
    let (shared, _) = SharedRegistry::open(address).await?;
    let pool = shared.session()?;
    if !(added.is_empty() && removed.is_empty()) {
        let added: Vec<_> = added.iter().map(|key| (key.hash.to_hex(), key.to_string())).collect();
        let removed: Vec<_> = removed.iter().map(|hash| hash.to_hex()).collect();
        let changed = timeout(PATIENCE, postgres::change_keys(&pool, &added, &removed)).await;
        shared.settled("API keys", changed.map(|changed| changed.map(Some)))?;
    }
    let mut connection = shared.within(pool.acquire()).await?;
    shared.within(postgres::keys(&mut connection)).await
}

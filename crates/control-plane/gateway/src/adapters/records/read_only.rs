//! What is asked of a registry of many hosts by who is none of its gateways.

use security::keys::{Key, KeyHash};
use tokio::time::timeout;

use super::{
    address::PostgresAddress,
    change_feed::{PATIENCE, SharedRegistry},
    postgres,
};
use crate::adapters::database::DatabaseError;

/// How many adapters are registered there; `None` if there is no registry yet. Nothing is changed.
///
/// # Errors
/// If it cannot be reached or read.
pub(crate) async fn count_adapters(address: &PostgresAddress) -> Result<Option<u64>, DatabaseError> {
    let shared = SharedRegistry::at(address.clone(), None);
    let pool = shared.pool();
    let mut connection = shared.within(pool.acquire()).await?;
    shared.within(postgres::count(&mut connection)).await
}

/// The API keys of a registry, once keys are added and those of other hashes removed.
///
/// # Errors
/// If it cannot be reached or changed.
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

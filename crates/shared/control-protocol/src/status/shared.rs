//! The registry and the adapter store, which gateways on several hosts may share.

use serde::{Deserialize, Serialize};

/// Place of the registry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistryStatus {
    /// `sqlite`, or `postgres` for a shared registry.
    pub kind: String,
    #[serde(flatten)]
    pub shared: Option<SharedRegistryStatus>,
}

/// A shared registry, and the age of the gateway's copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRegistryStatus {
    /// Address of the database, without secrets.
    pub address: String,
    pub reachable: bool,
    pub age_ms: u64,
    /// Reason why the database cannot be reached.
    pub error: Option<String>,
}

/// Place of adapter files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreStatus {
    /// `directory`, or `s3` for a shared store.
    pub kind: String,
    #[serde(flatten)]
    pub shared: Option<SharedStoreStatus>,
}

/// A shared store, and this host's copies of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedStoreStatus {
    pub address: String,
    pub cached_bytes: u64,
    pub fetched: u64,
    pub failed: u64,
    /// Number of downloads that did not match their hash.
    #[serde(default)]
    pub damaged: u64,
    #[serde(default)]
    pub evicted: u64,
}

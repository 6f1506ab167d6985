//! Models and adapters as a gateway lists them.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::errors::ClientError;
use crate::terminal::table::percent;

/// Model of `/v1/models`: the base, or an adapter with its parent.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct ServedModel {
    /// Name of the model in requests.
    pub(crate) id: String,
    /// Base of an adapter; `None` for the base itself.
    #[serde(default)]
    pub(crate) parent: Option<String>,
}

impl ServedModel {
    /// True for an adapter, false for the base.
    pub(crate) fn is_adapter(&self) -> bool {
        self.parent.is_some()
    }
}

/// Adapter of `/v1/lora_adapters`. Fields that an older gateway does not send are `None`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub(crate) struct LoadedAdapter {
    /// Name of the adapter in requests.
    pub(crate) name: String,
    /// Adapter version: content hash in hexadecimal.
    pub(crate) generation: String,
    /// Largest rank of all its modules.
    pub(crate) rank: u64,
    /// Size of the adapter in memory.
    pub(crate) bytes: u64,
    /// Number of linear layers that the adapter changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) modules: Option<u64>,
    /// Tenant that owns the adapter; `None` if all tenants may use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// Memory tier: `host`, `disk`, or `memory` for an ephemeral adapter outside of the executor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tier: Option<String>,
    /// Executors that hold the adapter, if the gateway has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) executors: Option<Vec<String>>,
    /// `ready`, `loading`, `draining` or `failed`.
    pub(crate) state: String,
    /// Reason why loading failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// True if the adapter is never evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinned: Option<bool>,
    /// Number of running requests that use the adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) requests: Option<u64>,
    /// Current output tokens per second of the adapter's requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_s: Option<f64>,
    /// Bytes of the adapter on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_bytes: Option<u64>,
    /// Number of requests that did not find the complete adapter on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cold_starts: Option<u64>,
    /// Time that requests waited for the adapter to reach the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) load_wait_ms: Option<f64>,
    /// Work of the adapter's ranks by processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rank_rows: Option<RankRows>,
}

impl LoadedAdapter {
    /// Returns the part of the adapter on the device in percent. An adapter of rank 0 has no matrices to
    /// copy: `None`.
    pub(crate) fn on_device(&self) -> Option<String> {
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        let part = |bytes: u64| percent(bytes as f64 / self.bytes.max(1) as f64);
        self.device_bytes.filter(|_| self.rank > 0).map(part)
    }
}

/// Products of rows and ranks of an adapter, by the processor that computed them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct RankRows {
    pub(crate) device: u64,
    pub(crate) workers: u64,
    /// Work of the executor itself, because no worker did it.
    pub(crate) executor: u64,
}

impl RankRows {
    /// Returns the sum over all processors.
    pub(crate) fn all(self) -> u64 {
        self.device.saturating_add(self.workers).saturating_add(self.executor)
    }
}

/// Parses the field `data` of a list.
pub(crate) fn list_in<T: DeserializeOwned>(mut body: Value) -> Result<Vec<T>, ClientError> {
    let data = body.get_mut("data").map(Value::take).unwrap_or_default();
    serde_json::from_value(data).map_err(ClientError::Garbled)
}

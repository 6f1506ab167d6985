//! What a gateway lists: the models that `model` may name, and its adapters with where they are.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::errors::ClientError;
use crate::terminal::table::percent;

/// A model as `/v1/models` lists it: the base, or an adapter with its parent.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct ServedModel {
    /// What requests call it.
    pub(crate) id: String,
    /// The base of an adapter; `None` for the base.
    #[serde(default)]
    pub(crate) parent: Option<String>,
}

impl ServedModel {
    /// True for an adapter, false for the base.
    pub(crate) fn is_adapter(&self) -> bool {
        self.parent.is_some()
    }
}

/// An adapter as `/v1/lora_adapters` lists it. What an older gateway does not say is `None`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub(crate) struct LoadedAdapter {
    /// What requests call it.
    pub(crate) name: String,
    /// Content hash, in hexadecimal.
    pub(crate) generation: String,
    /// Its largest rank.
    pub(crate) rank: u64,
    /// Memory it takes.
    pub(crate) bytes: u64,
    /// Linear layers it changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) modules: Option<u64>,
    /// Whose it is; nothing for everybody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// `host` or `disk`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tier: Option<String>,
    /// The executors that have it, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) executors: Option<Vec<String>>,
    /// `ready`, `loading`, `draining` or `failed`.
    pub(crate) state: String,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// True if it is never evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinned: Option<bool>,
    /// Requests that use it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) requests: Option<u64>,
    /// Tokens it answers now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_s: Option<f64>,
    /// Bytes of it that are on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_bytes: Option<u64>,
    /// Requests that found it not, or not wholly, on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cold_starts: Option<u64>,
    /// How long requests waited for it to reach the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) load_wait_ms: Option<f64>,
    /// Where it was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rank_rows: Option<RankRows>,
}

impl LoadedAdapter {
    /// How much of it is on the device, for people; nothing of one without matrices ever travels there.
    pub(crate) fn on_device(&self) -> Option<String> {
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        let part = |bytes: u64| percent(bytes as f64 / self.bytes.max(1) as f64);
        self.device_bytes.filter(|_| self.rank > 0).map(part)
    }
}

/// Rows times ranks of an adapter, by who computed them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct RankRows {
    /// The device.
    pub(crate) device: u64,
    /// The workers.
    pub(crate) workers: u64,
    /// The executor, because no worker did.
    pub(crate) executor: u64,
}

impl RankRows {
    /// All of them.
    pub(crate) fn all(self) -> u64 {
        self.device.saturating_add(self.workers).saturating_add(self.executor)
    }
}

/// The `data` of a list.
pub(crate) fn list_in<T: DeserializeOwned>(mut body: Value) -> Result<Vec<T>, ClientError> {
    let data = body.get_mut("data").map(Value::take).unwrap_or_default();
    serde_json::from_value(data).map_err(ClientError::Garbled)
}

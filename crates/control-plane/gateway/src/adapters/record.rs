//! The stored data of one adapter.

use std::{path::PathBuf, sync::Arc};

use types::AdapterVersion;

use super::{store::ContentId, uri::is_uri};

/// Names of the labels of a classification head, in the order of its logits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels(pub Arc<[String]>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub name: String,
    /// Tenant that owns the adapter; `None` means all tenants.
    pub tenant: Option<String>,
    /// Content id of the adapter's files in the store.
    pub content: ContentId,
    /// Adapter version: the hash of the weights, and of the adapter's own chat template if there is one.
    pub generation: AdapterVersion,
    /// Chat template of the adapter; `None` means that of the base.
    pub template: Option<OwnTemplate>,
    /// Largest rank of the adapter's modules.
    pub rank: u32,
    /// Bytes that the adapter takes in the executor.
    pub bytes: u64,
    /// Number of linear layers that the adapter changes.
    pub modules: u32,
    /// Number of base layers that a draft adapter computes; 0 for all other adapters.
    pub draft_layers: u32,
    /// Labels of the adapter's classification head; empty for all other adapters.
    pub labels: Labels,
    /// Path from which the files were copied.
    pub source: PathBuf,
    /// Time of the load, in seconds since 1970.
    pub loaded_at: u64,
    /// Time of the last use, in microseconds since 1970.
    pub last_used_us: u64,
    /// True if the adapter is always resident.
    pub pinned: bool,
    /// Number of the record's last change in a fleet's registry; 0 on a single host.
    pub version: u64,
    /// Gateway process that needs the adapter and unloads it at its end; `None` if users unload it.
    pub made_by: Option<String>,
    /// When the adapter is unloaded, in seconds since 1970. `None` is never.
    pub expires_at: Option<u64>,
}

/// The chat template of an adapter that replaces the base's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnTemplate {
    /// Jinja source of the template.
    pub source: Arc<str>,
    /// Adapter version by the weights alone, which executors use.
    pub weights: AdapterVersion,
}

impl Record {
    #[must_use]
    pub fn weights(&self) -> AdapterVersion {
        self.template.as_ref().map_or(self.generation, |template| template.weights)
    }

    /// Pinned URI from which the adapter was fetched; `None` for other adapters.
    #[must_use]
    pub(crate) fn uri(&self) -> Option<&str> {
        self.source.to_str().filter(|source| is_uri(source))
    }

    /// Bytes that count against the tenant's limit: those in the executor, and those of the chat template.
    pub(super) fn tenant_bytes(&self) -> u64 {
        let template_bytes = self.template.as_ref().map_or(0, |template| template.source.len() as u64);
        self.bytes.saturating_add(template_bytes)
    }
}

impl OwnTemplate {
    /// Returns the adapter version of `weights` with the chat template `source`, and the template to store.
    pub(super) fn over(weights: AdapterVersion, source: Option<Arc<str>>) -> (AdapterVersion, Option<Self>) {
        match source {
            None => (weights, None),
            Some(source) => (weights.with_chat_template(&source), Some(Self { source, weights })),
        }
    }

    /// Builds the template from the two columns of a row; `None` if one of them is NULL.
    pub(super) fn of_row(
        source: Option<String>,
        weights: Option<Vec<u8>>,
    ) -> Result<Option<Self>, sqlx::Error> {
        let (Some(source), Some(weights)) = (source, weights) else { return Ok(None) };
        let weights =
            weights.try_into().map_err(|_| sqlx::Error::Decode("'weights' has not 32 bytes".into()))?;
        Ok(Some(Self { source: source.into(), weights: AdapterVersion(weights) }))
    }
}

impl Labels {
    /// Returns the text of the labels in a database row.
    pub(super) fn to_row(&self) -> String {
        serde_json::json!(&*self.0).to_string()
    }

    /// Reads the text of a database row.
    pub(super) fn of_row(text: &str) -> Result<Self, sqlx::Error> {
        let labels: Vec<String> =
            serde_json::from_str(text).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok(Self(labels.into()))
    }
}

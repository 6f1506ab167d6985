//! What is remembered of an adapter.

use std::{path::PathBuf, sync::Arc};

use types::Generation;

use super::store::ContentId;

/// An adapter as it is remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What people call it.
    pub name: String,
    /// Whose it is; `None` is everybody's.
    pub tenant: Option<String>,
    /// Its files in the store.
    pub content: ContentId,
    /// What it is: its weights, and its chat template if it has one of its own.
    pub generation: Generation,
    /// Its own chat template; `None` is the base model's.
    pub template: Option<OwnTemplate>,
    /// Largest rank of its modules.
    pub rank: u32,
    /// Bytes it takes in the executor.
    pub bytes: u64,
    /// Linear layers it changes.
    pub modules: u32,
    /// Of a draft, which answers nobody, the layers of the base that it computes; 0 of all others.
    pub draft_layers: u32,
    /// Where its files were copied from.
    pub source: PathBuf,
    /// Seconds since 1970.
    pub loaded_at: u64,
    /// Microseconds since 1970.
    pub last_used_us: u64,
    /// True if it is to be resident always.
    pub pinned: bool,
    /// Number of its last change in a registry of many hosts; 0 in that of one, where nobody else changes it.
    pub version: u64,
    /// The gateway process whose run needs the adapter, and unloads it with the run. `None` if people unload it.
    pub made_by: Option<String>,
    /// When the adapter is unloaded, in seconds since 1970. `None` is never.
    pub expires_at: Option<u64>,
}

/// The chat template that an adapter has in place of the base model's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnTemplate {
    /// Its text.
    pub source: Arc<str>,
    /// The generation of the adapter's weights alone: that which executors know.
    pub weights: Generation,
}

impl Record {
    /// The generation that executors know: of the weights alone.
    #[must_use]
    pub fn weights(&self) -> Generation {
        self.template.as_ref().map_or(self.generation, |template| template.weights)
    }

    /// Bytes that count to its tenant: those in the executor, and its chat template.
    pub(super) fn tenant_bytes(&self) -> u64 {
        let template_bytes = self.template.as_ref().map_or(0, |template| template.source.len() as u64);
        self.bytes.saturating_add(template_bytes)
    }
}

impl OwnTemplate {
    /// The generation of an adapter of these weights with this chat template, if it has one, and both as they are remembered.
    pub(super) fn over(weights: Generation, source: Option<Arc<str>>) -> (Generation, Option<Self>) {
        match source {
            None => (weights, None),
            Some(source) => (weights.with_chat_template(&source), Some(Self { source, weights })),
        }
    }

    /// As a row has it: both of its columns, or neither.
    pub(super) fn of_row(
        source: Option<String>,
        weights: Option<Vec<u8>>,
    ) -> Result<Option<Self>, sqlx::Error> {
        let (Some(source), Some(weights)) = (source, weights) else { return Ok(None) };
        let weights =
            weights.try_into().map_err(|_| sqlx::Error::Decode("'weights' has not 32 bytes".into()))?;
        Ok(Some(Self { source: source.into(), weights: Generation(weights) }))
    }
}

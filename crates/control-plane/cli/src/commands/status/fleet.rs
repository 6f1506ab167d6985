//! Status of the registry and adapter store that gateways on several hosts share.

use serde::Deserialize;

use crate::terminal::{printable, table::size};

/// Shared registry of adapters.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Registry {
    address: Option<String>,
    reachable: bool,
    age_ms: u64,
    error: Option<String>,
}

/// Shared store of adapter files.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SharedStoreStatus {
    address: Option<String>,
    cached_bytes: u64,
    fetched: u64,
    failed: u64,
    damaged: u64,
}

impl Registry {
    /// Formats the status; `None` if the registry is not shared.
    pub(super) fn text(&self) -> Option<String> {
        let address = printable(self.address.as_deref()?);
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        let age_s = self.age_ms as f64 / 1000.0;
        Some(match (self.reachable, &self.error) {
            (true, _) => format!("{address}, read {age_s:.1} s ago"),
            (false, error) => {
                let why = error.as_deref().map(printable).unwrap_or_default();
                format!("{address} CANNOT BE REACHED ({why}); the local copy is {age_s:.0} s old")
            }
        })
    }
}

impl SharedStoreStatus {
    /// Formats the status; `None` if the store is not shared.
    pub(super) fn text(&self) -> Option<String> {
        let address = printable(self.address.as_deref()?);
        let damaged = if self.damaged > 0 { format!(", {} DAMAGED", self.damaged) } else { String::new() };
        let Self { fetched, failed, .. } = self;
        Some(format!(
            "{address}, {} of it here; {fetched} fetched, {failed} failed{damaged}",
            size(self.cached_bytes)
        ))
    }
}

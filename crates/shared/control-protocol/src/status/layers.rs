//! Use of the base layers by split clients.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerServiceStatus {
    /// Number of open sessions.
    pub open: u32,
    pub refused: u64,
    /// Number of sessions that ended because a client broke the protocol.
    pub broken: u64,
    pub batches: u64,
    /// Rows of calls that joined a pass of the resident engine.
    pub joined_rows: u64,
    pub used: LayerUsage,
    pub tenants: Vec<TenantLayerUsage>,
    pub sessions: Vec<SplitSessionStatus>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantLayerUsage {
    pub tenant: String,
    pub waiting_rows: u32,
    pub used: LayerUsage,
}

/// A connected split client.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SplitSessionStatus {
    pub session: u64,
    pub tenant: String,
    pub name: String,
    pub masking: String,
    pub route: String,
    pub waiting_rows: u32,
    pub slab_bytes: u64,
    pub used: LayerUsage,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerUsage {
    pub calls: u64,
    pub refused: u64,
    pub rows: RowCounts,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub wait_ms: f64,
    pub compute_ms: f64,
    pub mean_batch_rows: f64,
}

/// Rows by the class of their call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RowCounts {
    pub decode: u64,
    pub verify: u64,
    pub prefill: u64,
    pub training: u64,
    pub noise: u64,
}

impl RowCounts {
    /// Returns the rows of all classes.
    #[must_use]
    pub const fn total(self) -> u64 {
        let Self { decode, verify, prefill, training, noise } = self;
        decode + verify + prefill + training + noise
    }
}

//! Settings and limits of the layer service.

use std::time::Duration;

pub use ::settings::BatchingPolicy;
use ::settings::LayersSection;
use shmproto::layer::CallClass;

use crate::call_queue::CUT_ROWS;

/// Parameters of batching calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    /// Policy that forms the batches.
    pub policy: BatchingPolicy,
    /// Factor of all waits.
    pub wait_factor: f64,
    /// Factor of the waits of each [`CallClass`](shmproto::layer::CallClass).
    pub class_factors: [f64; CallClass::ALL.len()],
    /// Wait per row, summed over all sites of a pass.
    pub row_wait: Duration,
    /// Maximum wait, summed over all sites of a pass.
    pub max_wait: Duration,
    /// Maximum rows per batch; larger calls are split, so that others run in between.
    pub chunk_rows: usize,
    /// Maximum bytes of a batch's input and output rows: batches as wide as a vocabulary have fewer rows.
    pub chunk_bytes: usize,
    /// Waiting time after which a call rises by one class.
    pub aging: Duration,
    /// Number of rows that may join a smaller resident pass.
    pub join_rows: usize,
    /// Maximum rows of urgent calls that are computed before a site of a resident pass.
    pub urgent_rows: usize,
}

impl Batching {
    /// Returns the maximum rows per batch; `row_elements` counts input and output of a row.
    pub(crate) fn rows(&self, row_elements: usize) -> usize {
        let rows = self.chunk_bytes / (row_elements * size_of::<f32>()).max(1);
        self.chunk_rows.min(rows.max(CUT_ROWS))
    }
}

impl Default for Batching {
    /// Returns the paper's wait: 50 ms for 256 rows.
    fn default() -> Self {
        Self {
            policy: BatchingPolicy::Opportunistic,
            wait_factor: 1.0,
            class_factors: [1.0, 1.0, 1.0, 2.0, 4.0],
            row_wait: Duration::from_micros(195),
            max_wait: Duration::from_millis(50),
            chunk_rows: 256,
            chunk_bytes: 16 << 20,
            aging: Duration::from_millis(250),
            join_rows: 32,
            urgent_rows: 64,
        }
    }
}

/// Limits per tenant, and of all tenants together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Maximum sessions of all tenants.
    pub sessions: usize,
    /// Maximum sessions of a tenant.
    pub tenant_sessions: usize,
    /// Maximum waiting rows of a tenant.
    pub tenant_rows: u32,
    /// Maximum bytes of a tenant in slabs and in messages.
    pub tenant_bytes: u64,
    /// Maximum rows per second of a tenant; `None` means no limit.
    pub tenant_rows_per_s: Option<u32>,
}

impl Default for Quotas {
    /// Returns the presets of a deployment.
    fn default() -> Self {
        let presets = LayersSection::presets();
        let count = |preset: Option<u32>| preset.expect("every quota but that of rows a second has a preset");
        Self {
            sessions: count(presets.max_sessions) as usize,
            tenant_sessions: count(presets.tenant_sessions) as usize,
            tenant_rows: count(presets.tenant_rows),
            tenant_bytes: presets.tenant_bytes.expect("so has that of bytes").0,
            tenant_rows_per_s: presets.rows_per_s,
        }
    }
}

/// Settings of the whole service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSettings {
    /// Parameters of batching calls.
    pub batching: Batching,
    /// Limits of the tenants.
    pub quotas: Quotas,
    /// Share of the requests' time that training gets beside them; with 0, one batch after a long wait.
    pub training_share: f64,
    /// How long the compute thread spins for the next call before it sleeps.
    pub spin: Duration,
}

impl Default for LayerSettings {
    fn default() -> Self {
        let share = LayersSection::presets().training_share.expect("it has a preset");
        Self {
            batching: Batching::default(),
            quotas: Quotas::default(),
            training_share: share.0,
            spin: Duration::from_micros(50),
        }
    }
}

//! What the layer service holds itself to.

use std::time::Duration;

use ::settings::LayersSection;
use shmproto::layer::CallClass;

use crate::call_queue::CUT_ROWS;

/// When calls that wait are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchingPolicy {
    /// After a wait in proportion to its rows, with whatever waits for the same by then (Symbiosis §3.6).
    Opportunistic,
    /// At once, each call alone.
    None,
    /// When every active session waits, all of them together; for comparison.
    Lockstep,
}

/// How calls are put together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    /// When they are computed.
    pub policy: BatchingPolicy,
    /// All waits are multiplied by it.
    pub wait_factor: f64,
    /// Waits of a class are multiplied by it; by [`CallClass`](shmproto::layer::CallClass).
    pub class_factors: [f64; CallClass::ALL.len()],
    /// What a row may wait at all sites of a pass together.
    pub row_wait: Duration,
    /// Longest wait at all sites of a pass together.
    pub max_wait: Duration,
    /// Rows of a batch at most; calls of more are cut, so that others have their turn in between.
    pub chunk_rows: usize,
    /// Bytes of a batch's rows at most, of what goes in and what comes out together: a batch of a vocabulary's width has
    /// fewer rows, whoever asks beside others.
    pub chunk_bytes: usize,
    /// So long a call waits for others to be one class more urgent.
    pub aging: Duration,
    /// Rows that may join a pass that has fewer itself.
    pub join_rows: usize,
    /// Rows of urgent calls computed before a site of a resident pass.
    pub urgent_rows: usize,
}

impl Batching {
    /// Rows of a batch at most where a row has so many elements, those that come out among them.
    pub(crate) fn rows(&self, row_elements: usize) -> usize {
        let rows = self.chunk_bytes / (row_elements * size_of::<f32>()).max(1);
        self.chunk_rows.min(rows.max(CUT_ROWS))
    }
}

impl Default for Batching {
    /// The paper's wait: 50 ms for 256 rows.
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

/// What a tenant, and all together, may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Sessions of all tenants.
    pub sessions: usize,
    /// Sessions of a tenant.
    pub tenant_sessions: usize,
    /// Rows a tenant has waiting.
    pub tenant_rows: u32,
    /// Bytes of a tenant in slabs and in messages on their way.
    pub tenant_bytes: u64,
    /// Rows a second of a tenant; `None`: as many as are computed.
    pub tenant_rows_per_s: Option<u32>,
}

impl Default for Quotas {
    /// As a deployment has them that sets none.
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

/// What the service as a whole holds itself to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSettings {
    /// How calls are put together.
    pub batching: Batching,
    /// What tenants may hold.
    pub quotas: Quotas,
    /// Beside requests that are answered, training gets this share of the time that they take; with none, a turn now and then.
    pub training_share: f64,
    /// How long the compute thread looks for the next call before it sleeps, after it has computed one.
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

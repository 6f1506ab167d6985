//! Service classes: load, served tokens, and SLO outcomes.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassStatus {
    pub name: String,
    pub weight: u32,
    pub priority: u8,
    /// Limit of each tenant.
    pub requests_per_min: Option<u32>,
    /// Limit of each tenant.
    pub tokens_per_min: Option<u32>,
    pub requests: u64,
    pub throttled: u64,
    pub tokens: u64,
    pub waiting: usize,
    pub ttft: ObjectiveStatus,
    pub tpot: ObjectiveStatus,
    pub tenants: Vec<ClassTenant>,
}

/// An SLO target, and the requests that met and missed it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectiveStatus {
    pub promised_ms: Option<u32>,
    pub mean_ms: Option<f64>,
    pub met: u64,
    pub missed: u64,
    /// Number of requests that were refused because they would have missed the target.
    pub refused: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassTenant {
    pub tenant: String,
    pub waiting: usize,
    pub tokens: u64,
}

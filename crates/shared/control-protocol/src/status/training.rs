//! Running training: fine-tuning jobs, and models that clients train step by step.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainingStatus {
    /// Whether the deployment has a trainer service.
    pub trains: bool,
    pub jobs: Vec<JobSummary>,
    pub runs: Vec<RunSummary>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobSummary {
    pub id: String,
    /// Name of the resulting adapter.
    pub name: String,
    pub tenant: String,
    pub status: String,
    pub step: u64,
    pub steps: Option<u64>,
    pub loss: Option<f64>,
    pub tokens_per_s: Option<f64>,
    /// End as the trainer estimates it, in seconds since 1970.
    pub estimated_finish: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunSummary {
    pub name: String,
    pub tenant: String,
    pub status: String,
    pub step: u64,
    /// Loss of the last evaluated batch, summed.
    pub loss_sum: Option<f64>,
}

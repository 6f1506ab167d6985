//! Settings of metrics and traces.

use super::{GatewayConfigError, args::TelemetryArgs};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TelemetryConfig {
    pub names: MetricNames,
    pub max_adapter_labels: usize,
    /// Expected number of workers of each executor, in the executors' order; a single number applies to all.
    pub expected_workers: Vec<u32>,
    /// Endpoint of traces; `None` sends no traces.
    pub otlp_endpoint: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricNames {
    Own,
    WithVllm,
}

impl TelemetryConfig {
    /// Takes the settings from `args`, and checks them for the number of executors.
    pub(super) fn of(args: &TelemetryArgs, executors: usize) -> Result<Self, GatewayConfigError> {
        let given = args.expected_workers.len();
        if given != 1 && given != executors {
            return Err(GatewayConfigError::ExpectedWorkers { given, executors });
        }
        Ok(Self {
            names: if args.vllm_metrics { MetricNames::WithVllm } else { MetricNames::Own },
            max_adapter_labels: args.max_adapter_labels,
            expected_workers: args.expected_workers.clone(),
            otlp_endpoint: args.otlp_endpoint.clone(),
        })
    }

    #[must_use]
    pub fn expected_workers(&self, index: usize) -> u32 {
        match self.expected_workers[..] {
            [all] => all,
            ref each => each.get(index).copied().unwrap_or(0),
        }
    }
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            names: MetricNames::Own,
            max_adapter_labels: 64,
            expected_workers: vec![0],
            otlp_endpoint: None,
        }
    }
}

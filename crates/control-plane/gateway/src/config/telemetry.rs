//! Which figures and traces there are.

use super::{GatewayConfigError, args::TelemetryArgs};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// Whether vLLM's names stand beside our own.
    pub names: MetricNames,
    /// Most adapters with metrics of their own.
    pub max_adapter_labels: usize,
    /// Workers that there should be beside each executor, in their order; a single number is for all.
    pub expected_workers: Vec<u32>,
    /// Where traces go; `None` without the feature `otel`.
    pub otlp_endpoint: Option<String>,
}

/// Whose metric names are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricNames {
    /// Ours alone.
    Own,
    /// Ours, and vLLM's beside them.
    WithVllm,
}

impl TelemetryConfig {
    /// As `args` say, for so many executors.
    pub(super) fn of(args: &TelemetryArgs, executors: usize) -> Result<Self, GatewayConfigError> {
        let given = args.expected_workers.len();
        if given != 1 && given != executors {
            return Err(GatewayConfigError::ExpectedWorkers { given, executors });
        }
        Ok(Self {
            names: if args.vllm_metrics { MetricNames::WithVllm } else { MetricNames::Own },
            max_adapter_labels: args.max_adapter_labels,
            expected_workers: args.expected_workers.clone(),
            #[cfg(feature = "otel")]
            otlp_endpoint: args.otlp_endpoint.clone(),
            #[cfg(not(feature = "otel"))]
            otlp_endpoint: None,
        })
    }

    /// Workers that there should be beside the executor at `index`.
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

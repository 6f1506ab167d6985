//! Receivers of request records beside the log: the metrics, and a trace collector if configured.

use std::sync::Arc;

use super::otlp::Exporter;
use crate::metrics::GatewayMetrics;

#[derive(Debug, thiserror::Error)]
#[error(
    "--otlp-endpoint '{0}' is not valid; use http://host:port of a collector for OTLP over HTTP without TLS"
)]
pub struct EndpointError(pub String);

/// Receivers of request records; clones share them.
#[derive(Debug, Clone)]
pub struct Sinks {
    pub(super) metrics: Arc<GatewayMetrics>,
    pub(super) exporter: Option<Exporter>,
}

impl Sinks {
    /// Creates sinks for `metrics`, and for the collector at `otlp_endpoint` if given.
    ///
    /// # Errors
    /// `otlp_endpoint` is not a valid address.
    pub fn open(metrics: Arc<GatewayMetrics>, otlp_endpoint: Option<&str>) -> Result<Self, EndpointError> {
        let start =
            |endpoint: &str| Exporter::start(endpoint).ok_or_else(|| EndpointError(endpoint.to_owned()));
        Ok(Self { metrics, exporter: otlp_endpoint.map(start).transpose()? })
    }

    /// Sends queued spans within a bounded time.
    pub async fn close(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.close().await;
        }
    }
}

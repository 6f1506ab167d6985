//! Who is told about requests beside the log: the figures, and a collector of traces if there is one.

use std::sync::Arc;

#[cfg(feature = "otel")]
use super::otlp::Exporter;
use crate::metrics::GatewayMetrics;

/// Spans cannot be sent there.
#[derive(Debug, thiserror::Error)]
#[error(
    "--otlp-endpoint '{0}' cannot be used; give http://host:port of a collector that takes OTLP over HTTP (no TLS)"
)]
pub struct EndpointError(pub String);

/// See the module's description; clones tell the same.
#[derive(Debug, Clone)]
pub struct Sinks {
    pub(super) metrics: Arc<GatewayMetrics>,
    #[cfg(feature = "otel")]
    pub(super) exporter: Option<Exporter>,
}

impl Sinks {
    /// Counts in `metrics`, and sends spans to the collector at `otlp_endpoint` if somebody is to have them.
    ///
    /// # Errors
    /// If spans cannot be sent there.
    #[cfg(feature = "otel")]
    pub fn open(metrics: Arc<GatewayMetrics>, otlp_endpoint: Option<&str>) -> Result<Self, EndpointError> {
        let start =
            |endpoint: &str| Exporter::start(endpoint).ok_or_else(|| EndpointError(endpoint.to_owned()));
        Ok(Self { metrics, exporter: otlp_endpoint.map(start).transpose()? })
    }

    /// Counts in `metrics`. Without the feature `otel` there is nothing that could send.
    ///
    /// # Errors
    /// If spans are to be sent.
    #[cfg(not(feature = "otel"))]
    pub fn open(metrics: Arc<GatewayMetrics>, otlp_endpoint: Option<&str>) -> Result<Self, EndpointError> {
        match otlp_endpoint {
            None => Ok(Self { metrics }),
            Some(endpoint) => Err(EndpointError(endpoint.to_owned())),
        }
    }

    /// Nobody will be told anything more: spans that wait are sent, in bounded time.
    pub async fn close(&self) {
        #[cfg(feature = "otel")]
        if let Some(exporter) = &self.exporter {
            exporter.close().await;
        }
    }
}

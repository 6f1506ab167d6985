//! Receivers of request records beside the log: the metrics, and a trace collector if configured.

use std::sync::Arc;

#[cfg(feature = "otel")]
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
    #[cfg(feature = "otel")]
    pub(super) exporter: Option<Exporter>,
}

impl Sinks {
    /// Creates sinks for `metrics`, and for the collector at `otlp_endpoint` if given.
    ///
    /// # Errors
    /// `otlp_endpoint` is not a valid address.
    #[cfg(feature = "otel")]
    pub fn open(metrics: Arc<GatewayMetrics>, otlp_endpoint: Option<&str>) -> Result<Self, EndpointError> {
        let start =
            |endpoint: &str| Exporter::start(endpoint).ok_or_else(|| EndpointError(endpoint.to_owned()));
        Ok(Self { metrics, exporter: otlp_endpoint.map(start).transpose()? })
    }

    /// Creates sinks for `metrics`; without the feature `otel` there is no trace exporter.
    ///
    /// # Errors
    /// `otlp_endpoint` is given.
    #[cfg(not(feature = "otel"))]
    pub fn open(metrics: Arc<GatewayMetrics>, otlp_endpoint: Option<&str>) -> Result<Self, EndpointError> {
        match otlp_endpoint {
            None => Ok(Self { metrics }),
            Some(endpoint) => Err(EndpointError(endpoint.to_owned())),
        }
    }

    /// Sends queued spans within a bounded time.
    pub async fn close(&self) {
        #[cfg(feature = "otel")]
        if let Some(exporter) = &self.exporter {
            exporter.close().await;
        }
    }
}

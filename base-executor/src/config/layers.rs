//! Settings of the layer service.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

use clap::Args;
use layer_service::{
    remote::GatewayAccess,
    settings::{Batching, LayerSettings, Quotas},
    start::ListenAddresses,
    tls::TlsFiles,
};
use settings::{BatchingPolicy, ByteCount, Fraction, WaitFactor};

use super::ExecutorConfigError;

/// Sockets and limits of the layer service.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct LayerFlags {
    /// Socket for split clients of this host, or `off` [default: layers.sock beside the gateways' socket].
    ///
    /// ZeroMQ clients of this host find layers.zmq beside it.
    #[arg(long = "layers", value_name = "PATH|off", env = "HOLOBIONT_LAYERS")]
    pub place: Option<LayerSocket>,
    /// Address for split clients of other hosts, over TLS 1.3 [default: none].
    #[arg(long = "layer-listen", value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Certificate of this executor and its chain.
    #[arg(long = "layer-cert", value_name = "PEM")]
    pub cert: Option<PathBuf>,
    /// Private key of the certificate.
    #[arg(long = "layer-cert-key", value_name = "PEM")]
    pub cert_key: Option<PathBuf>,
    /// Authorities of client certificates; a client is the tenant that its certificate names.
    #[arg(long = "layer-client-ca", value_name = "PEM")]
    pub client_ca: Option<PathBuf>,
    /// API keys of split clients, in the gateway's format [default: no keys needed].
    #[arg(long = "layer-key-file", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Gateways of other hosts that may use the engine, by the names in their certificates.
    #[arg(long = "layer-gateways", value_name = "A,B", value_delimiter = ',')]
    pub gateways: Vec<String>,
    /// Maximum size of an adapter file that such a gateway sends.
    #[arg(long, value_name = "BYTES")]
    pub max_adapter_file_bytes: ByteCount,
    /// Batching policy of waiting calls.
    #[arg(long = "layer-batching", value_name = "POLICY")]
    pub batching: BatchingPolicy,
    /// Factor on the default time that calls wait for others to join their batch.
    #[arg(long = "layer-batch-wait-factor", value_name = "FACTOR")]
    pub wait_factor: WaitFactor,
    /// Time share of training, relative to answered requests; with 0 training gets one call every 5 s.
    #[arg(long = "layer-training-share", value_name = "SHARE")]
    pub training_share: Fraction,
    /// Maximum number of sessions of split clients.
    #[arg(long = "layer-max-sessions", value_name = "COUNT")]
    pub max_sessions: usize,
    /// Maximum number of sessions per tenant.
    #[arg(long = "layer-tenant-sessions", value_name = "COUNT")]
    pub tenant_sessions: usize,
    /// Maximum number of waiting rows per tenant.
    #[arg(long = "layer-tenant-rows", value_name = "ROWS")]
    pub tenant_rows: u32,
    /// Maximum bytes per tenant in slabs and in messages in transit.
    #[arg(long = "layer-tenant-bytes", value_name = "BYTES")]
    pub tenant_bytes: ByteCount,
    /// Maximum rows per second and tenant [default: no limit].
    #[arg(long = "layer-rows-per-s", value_name = "ROWS_PER_S")]
    pub rows_per_s: Option<u32>,
    /// Offer the modular path, which sound masking needs; the start reads and hashes all weights.
    #[arg(long = "layer-exact")]
    pub exact: bool,
}

/// Socket for split clients of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerSocket {
    /// No socket, and no address for other hosts.
    Off,
    /// A socket in a directory that only this user may enter.
    At(PathBuf),
}

impl FromStr for LayerSocket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "" => Err("write the path of a socket, or off".to_owned()),
            path => Ok(Self::At(path.into())),
        }
    }
}

impl LayerFlags {
    /// Checks settings against each other and against limits.
    ///
    /// # Errors
    /// If a value cannot work; the error names the setting.
    pub(super) fn check(&self) -> Result<(), ExecutorConfigError> {
        let counts = [
            ("--layer-max-sessions", self.max_sessions),
            ("--layer-tenant-sessions", self.tenant_sessions),
            ("--layer-tenant-rows", self.tenant_rows as usize),
            ("--layer-rows-per-s", self.rows_per_s.unwrap_or(1) as usize),
        ];
        if let Some((flag, value)) = counts.into_iter().find(|(_, value)| *value == 0) {
            return Err(ExecutorConfigError::TooSmall { flag, value, least: 1 });
        }
        if !self.gateways.is_empty() && (self.listen.is_none() || self.client_ca.is_none()) {
            return Err(ExecutorConfigError::LayerGateways);
        }
        match (self.listen, &self.cert, &self.cert_key, &self.client_ca) {
            (Some(_), Some(_), Some(_), _) | (None, None, None, None) => Ok(()),
            (Some(_), ..) => Err(ExecutorConfigError::LayerCertificate),
            (None, ..) => Err(ExecutorConfigError::LayerListen),
        }
    }

    /// Returns the service's addresses. `socket` is for split clients of this host. Remote gateways are
    /// connected to `own`, and their files lie in `lent`.
    #[must_use]
    pub fn places(&self, socket: PathBuf, own: Option<PathBuf>, lent: PathBuf) -> ListenAddresses {
        let tls = match (self.listen, &self.cert, &self.cert_key) {
            (Some(address), Some(certificate), Some(key)) => {
                let (certificate, key) = (certificate.clone(), key.clone());
                Some((address, TlsFiles { certificate, key, client_ca: self.client_ca.clone() }))
            }
            _ => None,
        };
        let is_open = tls.is_some() && !self.gateways.is_empty();
        let gateways = own.filter(|_| is_open).map(|socket| GatewayAccess {
            names: self.gateways.clone(),
            socket,
            lent,
            max_file_bytes: self.max_adapter_file_bytes.0,
        });
        ListenAddresses { socket, tls, gateways, key_file: self.key_file.clone() }
    }

    /// Returns the limits and policies of the service.
    #[must_use]
    pub fn settings(&self) -> LayerSettings {
        let batching =
            Batching { policy: self.batching, wait_factor: self.wait_factor.0, ..Batching::default() };
        let quotas = Quotas {
            sessions: self.max_sessions,
            tenant_sessions: self.tenant_sessions,
            tenant_rows: self.tenant_rows,
            tenant_bytes: self.tenant_bytes.0,
            tenant_rows_per_s: self.rows_per_s,
        };
        LayerSettings { batching, quotas, training_share: self.training_share.0, ..LayerSettings::default() }
    }
}

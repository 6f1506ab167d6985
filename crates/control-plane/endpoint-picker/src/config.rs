//! Command line and environment, turned into one checked [`PickerConfig`].

use std::{fs, io, net::SocketAddr, num::NonZeroU64, path::PathBuf, time::Duration};

use clap::Parser;
use hyper::header::HeaderValue;
use scheduling::routing::{RoutingPolicy, Slo};
use settings::{ByteCount, LogFormat};

use crate::{fleet::PickRules, scrape::Scrape, tls};

/// Maximum size of a key file's text, in bytes.
const MAX_KEY_BYTES: usize = 512;

/// The endpoint picker: chooses the host of each request, for Envoy and the Gateway API inference extension.
#[derive(Debug, Clone, Parser)]
#[command(name = "endpoint-picker", version, about, mut_args(settings::described))]
pub struct Args {
    /// Address and port on which the picker listens
    #[arg(long, value_name = "ADDR:PORT")]
    pub picker_listen: SocketAddr,
    /// Hosts among which the picker chooses
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',', required = true)]
    pub picker_endpoints: Vec<String>,
    /// File with the key that the picker sends to the hosts
    #[arg(long, value_name = "FILE")]
    pub picker_key_file: Option<PathBuf>,
    /// Certificate file of the picker's port
    #[arg(long, value_name = "FILE", requires = "picker_cert_key")]
    pub picker_cert: Option<PathBuf>,
    /// Private key file of the certificate
    #[arg(long, value_name = "FILE", requires = "picker_cert")]
    pub picker_cert_key: Option<PathBuf>,
    /// Interval between two reports of a host
    #[arg(long, value_name = "MS")]
    pub picker_interval_ms: NonZeroU64,
    /// Time after which a silent host counts as gone
    #[arg(long, value_name = "MS")]
    pub picker_stale_ms: NonZeroU64,
    /// Target for the time to the first token
    #[arg(long, value_name = "MS")]
    pub picker_ttft_ms: Option<NonZeroU64>,
    /// Target for the time per output token
    #[arg(long, value_name = "MS")]
    pub picker_tpot_ms: Option<NonZeroU64>,
    /// Number of fallback endpoints after the first
    #[arg(long, value_name = "N")]
    pub picker_fallbacks: usize,
    /// Maximum size of a request body
    #[arg(long, value_name = "BYTES")]
    pub picker_max_body_bytes: ByteCount,
    /// Policy that chooses a host
    #[arg(long, value_name = "POLICY")]
    pub routing: RoutingPolicy,
    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
}

#[derive(Debug, thiserror::Error)]
pub enum PickerConfigError {
    /// An endpoint is not a host with a port.
    #[error("--picker-endpoints '{0}' is not HOST:PORT; write a name or an address with a port")]
    Endpoint(String),
    /// Hosts would count as stale before their next report.
    #[error("--picker-stale-ms {stale_ms} must be longer than --picker-interval-ms {interval_ms}; raise it")]
    Stale { stale_ms: u64, interval_ms: u64 },
    #[error("cannot read --picker-key-file '{}': {reason}", path.display())]
    KeyFile { path: PathBuf, reason: io::Error },
    /// The file holds no usable key.
    #[error("--picker-key-file '{}' has no key; write one line of at most {MAX_KEY_BYTES} bytes, as \
             'holobiont key add' printed it", .0.display())]
    Key(PathBuf),
    /// The limit exceeds the address space.
    #[error("--picker-max-body-bytes is more than this machine can address; lower it")]
    Body,
}

#[derive(Debug, Clone)]
pub struct PickerConfig {
    pub listen: SocketAddr,
    /// Certificate of the port; without one, the port speaks no TLS.
    pub certificate: Option<tls::CertificateFiles>,
    pub rules: PickRules,
    pub scrape: Scrape,
    /// Maximum size of a request body, in bytes.
    pub max_body_bytes: usize,
    pub log_format: LogFormat,
}

impl TryFrom<Args> for PickerConfig {
    type Error = PickerConfigError;

    fn try_from(args: Args) -> Result<Self, PickerConfigError> {
        let (interval_ms, stale_ms) = (args.picker_interval_ms.get(), args.picker_stale_ms.get());
        if stale_ms <= interval_ms {
            return Err(PickerConfigError::Stale { stale_ms, interval_ms });
        }
        let endpoints: Vec<_> = args.picker_endpoints.iter().map(|one| one.trim().to_owned()).collect();
        if let Some(wrong) = endpoints.iter().find(|one| !is_endpoint(one)) {
            return Err(PickerConfigError::Endpoint(wrong.clone()));
        }
        let us = |ms: Option<NonZeroU64>| ms.map(|ms| ms.get().saturating_mul(1_000));
        let stale = Duration::from_millis(stale_ms);
        Ok(Self {
            listen: args.picker_listen,
            certificate: args
                .picker_cert
                .zip(args.picker_cert_key)
                .map(|(certificate, key)| tls::CertificateFiles { certificate, key }),
            rules: PickRules {
                policy: args.routing,
                slo: Slo { ttft_us: us(args.picker_ttft_ms), tpot_us: us(args.picker_tpot_ms) },
                stale,
                fallbacks: args.picker_fallbacks,
            },
            scrape: Scrape {
                endpoints,
                every: Duration::from_millis(interval_ms),
                limit: stale,
                key: args.picker_key_file.map(key).transpose()?,
            },
            max_body_bytes: usize::try_from(args.picker_max_body_bytes.0)
                .map_err(|_| PickerConfigError::Body)?,
            log_format: args.log_format,
        })
    }
}

fn is_endpoint(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// Returns the authorization header with the key in the file.
fn key(path: PathBuf) -> Result<HeaderValue, PickerConfigError> {
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(reason) => return Err(PickerConfigError::KeyFile { path, reason }),
    };
    let key = text.trim();
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        return Err(PickerConfigError::Key(path));
    }
    let mut header =
        HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| PickerConfigError::Key(path))?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn read(more: &[&str]) -> Result<PickerConfig, PickerConfigError> {
        let args = ["endpoint-picker"].iter().chain(more);
        PickerConfig::try_from(Args::try_parse_from(args).unwrap())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn hosts_have_ports_and_are_asked_before_they_count_as_gone() {
        let config = read(&["--picker-endpoints", "10.0.0.1:8080,gateways:80", "--picker-ttft-ms", "500"]);
        let config = config.unwrap();
        assert_eq!(config.scrape.endpoints, ["10.0.0.1:8080", "gateways:80"]);
        assert_eq!(config.rules.slo.ttft_us, Some(500_000));
        for wrong in ["10.0.0.1", ":80", "a:b"] {
            let error = read(&["--picker-endpoints", wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        let error = read(&["--picker-endpoints", "a:1", "--picker-interval-ms", "2000"]).unwrap_err();
        assert!(matches!(error, PickerConfigError::Stale { .. }), "{error}");
    }

    #[test]
    fn a_key_is_the_only_line_of_its_file() {
        let path = std::env::temp_dir().join(format!("picker-key-{}", std::process::id()));
        for (text, is_key) in [("hb-abc\n", true), ("\n", false), ("a\nb", false)] {
            fs::write(&path, text).unwrap();
            let path = path.to_str().unwrap();
            let read = read(&["--picker-endpoints", "a:1", "--picker-key-file", path]);
            assert_eq!(read.is_ok(), is_key, "{text:?}");
        }
        fs::remove_file(path).unwrap();
    }
}

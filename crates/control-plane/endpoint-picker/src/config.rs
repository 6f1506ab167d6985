//! Command line and environment, turned into one checked [`PickerConfig`].

use std::{fs, io, net::SocketAddr, num::NonZeroU64, path::PathBuf, time::Duration};

use clap::Parser;
use hyper::header::HeaderValue;
use scheduling::routing::{RoutingPolicy, Slo};
use settings::{ByteCount, LogFormat};

use crate::{fleet::PickRules, scrape::Scrape, tls};

/// Longest file of a key, in bytes.
const MAX_KEY_BYTES: usize = 512;

/// The endpoint picker: says which host a request goes to, for Envoy and the Gateway API inference extension.
#[derive(Debug, Clone, Parser)]
#[command(name = "endpoint-picker", version, about, mut_args(settings::described))]
pub struct Args {
    /// Where to listen
    #[arg(long, value_name = "ADDR:PORT")]
    pub picker_listen: SocketAddr,
    /// The hosts
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',', required = true)]
    pub picker_endpoints: Vec<String>,
    /// The key to show them
    #[arg(long, value_name = "FILE")]
    pub picker_key_file: Option<PathBuf>,
    /// The port's certificate
    #[arg(long, value_name = "FILE", requires = "picker_cert_key")]
    pub picker_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "picker_cert")]
    pub picker_cert_key: Option<PathBuf>,
    /// How often each is asked
    #[arg(long, value_name = "MS")]
    pub picker_interval_ms: NonZeroU64,
    /// After which time one counts as gone
    #[arg(long, value_name = "MS")]
    pub picker_stale_ms: NonZeroU64,
    /// Time to the first token
    #[arg(long, value_name = "MS")]
    pub picker_ttft_ms: Option<NonZeroU64>,
    /// Time for each token after it
    #[arg(long, value_name = "MS")]
    pub picker_tpot_ms: Option<NonZeroU64>,
    /// Endpoints beside the first
    #[arg(long, value_name = "N")]
    pub picker_fallbacks: usize,
    /// Longest body of a request
    #[arg(long, value_name = "BYTES")]
    pub picker_max_body_bytes: ByteCount,
    /// How a host is chosen
    #[arg(long, value_name = "POLICY")]
    pub routing: RoutingPolicy,
    /// How to write the log to stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
}

/// Why the arguments cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PickerConfigError {
    /// What is no host with a port.
    #[error("--picker-endpoints '{0}' is no HOST:PORT; give a name or an address with a port")]
    Endpoint(String),
    /// Hosts that are asked more seldom than they are believed.
    #[error(
        "--picker-stale-ms {stale_ms} is not longer than --picker-interval-ms {interval_ms}; give it more"
    )]
    Stale {
        /// As given.
        stale_ms: u64,
        /// As given.
        interval_ms: u64,
    },
    /// The key cannot be read.
    #[error("--picker-key-file '{}' cannot be read: {reason}", path.display())]
    KeyFile {
        /// As given.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// The file holds no key.
    #[error("--picker-key-file '{}' holds no key: one line of at most {MAX_KEY_BYTES} bytes, as 'holobiont key add' printed it", .0.display())]
    Key(PathBuf),
    /// More than the address space.
    #[error("--picker-max-body-bytes is more than this machine can have; give it less")]
    Body,
}

/// What the process runs with.
#[derive(Debug, Clone)]
pub struct PickerConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// What it shows there; without, it speaks no TLS.
    pub certificate: Option<tls::CertificateFiles>,
    /// How hosts are chosen.
    pub rules: PickRules,
    /// How they are asked.
    pub scrape: Scrape,
    /// Longest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Form of the log.
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

/// The header that shows the key in a file.
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

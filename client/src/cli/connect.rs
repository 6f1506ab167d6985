//! From arguments to a session.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use shmproto::layer::Dtype;
use types::AdapterVersion;

use super::exit::CliError;
use crate::{
    address::{Address, AddressError},
    error::CallError,
    masking::{Masking, secret_sharing::SecondExecutor, session_commitment},
    session::{ClientSettings, Session},
    transport::{Connect, local::LocalConnector, remote::RemoteConnector, tls::TlsFiles},
};

const MAX_KEY_BYTES: u64 = 4096;

#[derive(Debug, clap::Args)]
pub(super) struct ConnectArguments {
    /// Executor: its directory or layers.sock, ipc://PATH, or tls://HOST:PORT
    #[arg(long, value_name = "ADDR", env = "HOLOBIONT_EXECUTOR")]
    executor: String,
    /// PEM file of authorities for the executor's certificate; else the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// This client's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "cert_key")]
    cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "cert")]
    cert_key: Option<PathBuf>,
    /// File with the API key; else the environment variable HOLOBIONT_API_KEY
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Hash of the weights that the executor must serve, as `sites` prints it
    #[arg(long, value_name = "HEX")]
    commitment: Option<String>,
    /// Number format of activations on the wire: f32, or bf16 with half the bytes and rounding
    #[arg(long, value_name = "FORMAT", default_value = "f32")]
    dtype: WireDtype,
    /// Name of this client in the operator's lists
    #[arg(long, value_name = "NAME", default_value = "holobiont-client")]
    name: String,
    /// Seconds to wait for a lost or busy executor
    #[arg(long, value_name = "S", default_value_t = 30)]
    patience_s: u64,
    /// Seconds after which a call without an answer fails
    #[arg(long, value_name = "S", default_value_t = 60)]
    deadline_s: u64,
    /// Microseconds to spin for an answer in shared memory before sleeping; helps if a core is idle
    #[arg(long, value_name = "US", default_value_t = 0)]
    spin_us: u64,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum WireDtype {
    F32,
    Bf16,
}

impl ConnectArguments {
    pub(super) fn transport(&self) -> Result<&'static str, CliError> {
        Ok(self.address()?.transport())
    }

    pub(super) fn address(&self) -> Result<Address, CliError> {
        self.executor.parse().map_err(|error: AddressError| CliError::Usage(error.to_string()))
    }

    /// Opens a session, and checks the pinned hash of the weights.
    pub(super) fn session(&self, masking: &Masking) -> Result<Session, CliError> {
        let (connector, settings) = self.way(&self.address()?, self.key()?, masking.as_str())?;
        let session = Session::open(connector, settings)?;
        if let Some(pinned) = &self.commitment {
            let found = AdapterVersion(session_commitment(&session)?).to_string();
            if !found.eq_ignore_ascii_case(pinned) {
                return Err(CallError::OtherCommitment { pinned: pinned.clone(), found }.into());
            }
        }
        Ok(session)
    }

    /// Returns address and settings for a second executor.
    pub(super) fn second(&self, address: &str, key_file: Option<&Path>) -> Result<SecondExecutor, CliError> {
        let address = address.parse().map_err(|error: AddressError| CliError::Usage(error.to_string()))?;
        let key = key_file.map_or_else(|| self.key(), |path| read_key(path).map(Some))?;
        let (connector, settings) = self.way(&address, key, "shares")?;
        Ok(SecondExecutor { connector: connector.into(), settings })
    }

    fn way(
        &self,
        address: &Address,
        key: Option<String>,
        masking: &str,
    ) -> Result<(Box<dyn Connect>, ClientSettings), CliError> {
        let deadline = Duration::from_secs(self.deadline_s);
        // ZeroMQ transports send the key in their handshake; over shared memory the session sends it.
        let (connector, key): (Box<dyn Connect>, _) = match address {
            Address::Local(path) => {
                let spin = Duration::from_micros(self.spin_us);
                (Box::new(LocalConnector::new(path.clone(), spin, deadline)), key)
            }
            Address::Ipc(_) | Address::Tls(_) => {
                let identity = self.cert.clone().zip(self.cert_key.clone());
                let files = TlsFiles { ca: self.ca.clone(), identity };
                let remote = RemoteConnector::new(address.clone(), key, &files, deadline);
                (Box::new(remote.map_err(CallError::from)?), None)
            }
        };
        let dtype = match self.dtype {
            WireDtype::F32 => Dtype::F32,
            WireDtype::Bf16 => Dtype::Bf16,
        };
        let settings = ClientSettings {
            key,
            name: self.name.clone(),
            masking: masking.to_owned(),
            dtype,
            patience: Duration::from_secs(self.patience_s),
            ..ClientSettings::default()
        };
        Ok((connector, settings))
    }

    fn key(&self) -> Result<Option<String>, CliError> {
        let Some(path) = &self.api_key_file else {
            return Ok(std::env::var("HOLOBIONT_API_KEY").ok().filter(|key| !key.is_empty()));
        };
        read_key(path).map(Some)
    }
}

fn read_key(path: &Path) -> Result<String, CliError> {
    let failed = |source| CliError::Read { path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > MAX_KEY_BYTES {
        return Err(CliError::Usage(format!(
            "{} is not a file with an API key: it is too long",
            path.display()
        )));
    }
    let key = std::fs::read_to_string(path).map_err(failed)?.trim().to_owned();
    if key.is_empty() {
        return Err(CliError::Usage(format!("{} has no API key", path.display())));
    }
    Ok(key)
}

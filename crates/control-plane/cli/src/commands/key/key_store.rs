//! Storage of API keys: a key file of one host, or a registry shared by many hosts, which the `gateway`
//! program reaches.

use std::{
    fmt, io,
    path::PathBuf,
    process::{Command, Output},
};

use security::keys::{Key, KeyFileEdit, KeyFileError};

use crate::{
    commands::registry::GATEWAY,
    deployment::{
        config::{DeploymentConfig, DeploymentConfigError},
        program_paths,
    },
    exit::{Exit, Explain},
    home::HomeDirectory,
};

/// Arguments that select the key store.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyStoreArguments {
    /// Key file [default: [gateway].api_key_file, else api-keys in the state directory]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Shared registry with the keys, as postgres://USER@HOST/DATABASE [default: [gateway].registry, with
    /// shared_keys]
    #[arg(long, value_name = "URL", conflicts_with = "file")]
    registry: Option<String>,
    /// Deployment file that names the key file or registry
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Clone)]
pub(crate) enum KeyStore {
    File(PathBuf),
    Registry(String),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyStoreError {
    #[error(transparent)]
    File(#[from] KeyFileError),
    #[error("the program {GATEWAY}, which reaches the registry, is neither beside `holobiont` nor on PATH")]
    NoGateway,
    #[error("cannot start {GATEWAY}")]
    Run(#[source] io::Error),
    /// The gateway program failed; its stderr is the message.
    #[error("{}", .0.trim().trim_start_matches("error: "))]
    Refused(String),
    #[error("the output of {GATEWAY} {0}, because its version differs; install both programs again")]
    Foreign(&'static str),
}

impl Explain for KeyStoreError {
    fn exit(&self) -> Exit {
        match self {
            Self::File(error) => error.exit(),
            Self::NoGateway => Exit::NotFound,
            Self::Run(_) | Self::Refused(_) | Self::Foreign(_) => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        matches!(self, Self::NoGateway).then(|| "cargo build --release --bin gateway".into())
    }
}

impl KeyStoreArguments {
    /// Returns the selected key store.
    pub(super) fn place(&self) -> Result<KeyStore, DeploymentConfigError> {
        match (&self.file, &self.registry) {
            (Some(file), _) => return Ok(KeyStore::File(file.clone())),
            (None, Some(registry)) => return Ok(KeyStore::Registry(registry.clone())),
            (None, None) => {}
        }
        let DeploymentConfig { gateway, deployment, .. } =
            DeploymentConfig::layered(DeploymentConfig::default(), self.config.as_deref())?;
        if let (Some(true), Some(registry)) = (gateway.shared_keys, gateway.registry) {
            return Ok(KeyStore::Registry(registry));
        }
        let state = || deployment.state.unwrap_or_else(|| HomeDirectory::from_environment().state());
        Ok(KeyStore::File(gateway.api_key_file.unwrap_or_else(|| state().join("api-keys"))))
    }
}

impl KeyStore {
    pub(super) fn keys(&self) -> Result<Vec<Key>, KeyStoreError> {
        match self {
            Self::File(path) => Ok(KeyFileEdit::read(path)?.keys().cloned().collect()),
            Self::Registry(url) => asked(url, &[]),
        }
    }

    pub(super) fn add(&self, key: Key) -> Result<(), KeyStoreError> {
        match self {
            Self::File(path) => Ok(KeyFileEdit::edit(path, |draft| draft.push(key))?),
            Self::Registry(url) => asked(url, &["--add".to_owned(), key.to_string()]).map(drop),
        }
    }

    /// Revokes keys and returns how many the store held.
    pub(super) fn revoke(&self, keys: &[Key]) -> Result<usize, KeyStoreError> {
        match self {
            Self::File(path) => {
                let is_meant = |key: &Key| keys.iter().any(|meant| meant.hash == key.hash);
                Ok(KeyFileEdit::edit(path, |draft| draft.remove(is_meant))?)
            }
            Self::Registry(url) => {
                let each = keys.iter().flat_map(|key| ["--revoke".to_owned(), key.hash.to_hex()]);
                asked(url, &each.collect::<Vec<_>>()).map(|_| keys.len())
            }
        }
    }

    /// Returns the start of a sentence that names the gateways which learn of a change within a second.
    pub(super) fn known_to(&self) -> String {
        match self {
            Self::File(path) => format!("A gateway with --api-key-file {} accepts", path.display()),
            Self::Registry(_) => "All gateways of this registry with --shared-keys accept".to_owned(),
        }
    }
}

/// Runs the gateway program with `change` and returns the registry's keys afterwards.
fn asked(url: &str, change: &[String]) -> Result<Vec<Key>, KeyStoreError> {
    let program = program_paths::find(GATEWAY).ok_or(KeyStoreError::NoGateway)?;
    let mut command = Command::new(program);
    command.args(["registry", "keys", "--registry", url]).args(change);
    let Output { status, stdout, stderr } = command.output().map_err(KeyStoreError::Run)?;
    if !status.success() {
        return Err(KeyStoreError::Refused(String::from_utf8_lossy(&stderr).into_owned()));
    }
    let lines = String::from_utf8_lossy(&stdout);
    let keys: Result<_, _> = lines.lines().map(Key::parse).collect();
    keys.map_err(KeyStoreError::Foreign)
}

impl fmt::Display for KeyStore {
    /// Writes the path or URL without credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Registry(url) => f.write_str(url),
        }
    }
}

//! An executor with its three listeners, and sessions.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use client::{
    address::Address,
    session::{ClientSettings, Session},
    transport::{
        Connect,
        local::{LocalConnector, SPIN},
        remote::RemoteConnector,
        tls::TlsFiles,
    },
};
use tempfile::TempDir;

use super::watch::{CallWatcher, WatchedConnector};
use crate::{config::SuiteConfig, http::free_port, machine::list, process::LoggedProcess};

const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallTransport {
    Channel,
    /// ZeroMQ over a private Unix socket.
    Ipc,
    Tls,
}

impl CallTransport {
    pub(super) const EACH: [Self; 3] = [Self::Channel, Self::Ipc, Self::Tls];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Channel => "shared memory",
            Self::Ipc => "a Unix socket",
            Self::Tls => "loopback TLS",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchingFlag {
    /// Computes waiting calls after a short wait.
    Opportunistic,
    /// Computes each call at once and alone.
    None,
    /// Computes when all clients wait.
    Lockstep,
}

impl BatchingFlag {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Opportunistic => "opportunistic",
            Self::None => "none",
            Self::Lockstep => "lockstep",
        }
    }
}

/// A running executor that serves only split clients.
#[derive(Debug)]
pub(crate) struct SplitExecutor {
    // Dropped before its folder.
    process: LoggedProcess,
    folder: TempDir,
    port: u16,
}

impl SplitExecutor {
    /// Starts the executor on `cores`, and waits until it accepts sessions.
    ///
    /// # Errors
    /// Fails if the executor does not start.
    pub(crate) fn start(config: &SuiteConfig, cores: &[usize], policy: BatchingFlag) -> Result<Self> {
        Self::start_with(config, cores, policy, &[])
    }

    /// Starts an executor that commits to its weights, so that it serves exact arithmetic.
    ///
    /// # Errors
    /// Fails if the executor does not start.
    pub(super) fn start_exact(config: &SuiteConfig, cores: &[usize]) -> Result<Self> {
        Self::start_with(config, cores, BatchingFlag::Opportunistic, &["--layer-exact"])
    }

    fn start_with(
        config: &SuiteConfig,
        cores: &[usize],
        policy: BatchingFlag,
        flags: &[&str],
    ) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for an executor's sockets")?;
        let port = free_port()?;
        let (certificate, key) = write_certificate(folder.path())?;
        let mut command = Command::new(config.ours.join("base-executor"));
        command.arg("--model").arg(&config.model);
        command.arg("--socket").arg(folder.path().join("run/executor.sock"));
        command.arg("--layer-cert").arg(certificate).arg("--layer-cert-key").arg(key);
        command.arg("--layer-listen").arg(format!("127.0.0.1:{port}"));
        command.arg("--layer-batching").arg(policy.name());
        for (option, value) in [
            ("--cores", list(cores)),
            ("--precision", config.precision.name().to_owned()),
            ("--kv-bytes", "128MiB".to_owned()),
            ("--max-workers", "0".to_owned()),
            ("--log-format", "json".to_owned()),
        ] {
            command.arg(option).arg(value);
        }
        command.args(flags);
        let process = LoggedProcess::start(&mut command, &folder.path().join("executor.log"))?;
        let mut started = Self { process, folder, port };
        started.wait_until_ready()?;
        Ok(started)
    }

    pub(crate) fn layer_socket(&self) -> PathBuf {
        self.folder.path().join("run/layers.sock")
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            self.process.ensure_running()?;
            match self.session(CallTransport::Channel, "off", None) {
                Ok(_) => return Ok(()),
                Err(error) if begun.elapsed() > LIMIT => {
                    bail!("the executor takes no session: {error:#}; {}", self.process.last_words())
                }
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Opens a session with masking mode `masking`; `watcher` records its calls.
    ///
    /// # Errors
    /// Fails if the session is rejected.
    pub(super) fn session(
        &self,
        way: CallTransport,
        masking: &str,
        watcher: Option<&CallWatcher>,
    ) -> Result<Session> {
        open(self.connector(way)?, masking, watcher)
    }

    /// Returns a connector for this transport.
    ///
    /// # Errors
    /// If TLS is not available.
    pub(super) fn connector(&self, way: CallTransport) -> Result<Box<dyn Connect>> {
        let run = self.folder.path().join("run");
        let address = match way {
            CallTransport::Channel => return Ok(channel(&run)),
            CallTransport::Ipc => Address::Ipc(run),
            CallTransport::Tls => format!("tls://localhost:{}", self.port).parse()?,
        };
        let files = TlsFiles { ca: Some(self.folder.path().join(CERTIFICATE)), identity: None };
        Ok(Box::new(RemoteConnector::new(address, None, &files, LIMIT).context("TLS cannot be spoken")?))
    }
}

/// Connector through shared memory to the executor in `folder`, the default of `holobiont-client`.
pub(super) fn channel(folder: &Path) -> Box<dyn Connect> {
    Box::new(LocalConnector::new(folder.to_owned(), SPIN, LIMIT))
}

pub(super) fn open(
    connector: Box<dyn Connect>,
    masking: &str,
    watcher: Option<&CallWatcher>,
) -> Result<Session> {
    let connector = match watcher {
        Some(watcher) => Box::new(WatchedConnector { connector, watcher: watcher.clone() }),
        None => connector,
    };
    let settings =
        ClientSettings { masking: masking.to_owned(), name: "bench".to_owned(), ..ClientSettings::default() };
    Session::open(connector, settings).context("no session")
}

const CERTIFICATE: &str = "cert.pem";

fn write_certificate(folder: &Path) -> Result<(PathBuf, PathBuf)> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).context("no certificate")?;
    let paths = (folder.join(CERTIFICATE), folder.join("key.pem"));
    fs::write(&paths.0, made.cert.pem()).context("the certificate cannot be kept")?;
    fs::write(&paths.1, made.signing_key.serialize_pem()).context("the certificate's key cannot be kept")?;
    Ok(paths)
}

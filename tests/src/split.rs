//! Split clients of a deployment, which use its base layers and compute the rest of the pass themselves.
//!
//! - [`SplitEndpoints`]: a deployment's endpoints for split clients, with certificates and keys
//! - [`tenant`]: a client in the test's process with access to all logits
//! - [`program`]: `holobiont-client`, which can be killed
//! - [`exact`]: executors of exact arithmetic that can be killed; [`tap`]: a relay that shows their calls
//! - [`audit`]: check for pads that were used twice
//! - [`raw`]: clients that send arbitrary bytes
//! - [`network`]: a network with loss and delay, between namespaces

pub mod audit;
pub mod exact;
pub mod network;
pub mod program;
pub mod raw;
pub mod tap;
pub mod tenant;

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use client::{
    address::Address,
    error::CallError,
    masking::Masking,
    transport::{Connect, local::LocalConnector, remote::RemoteConnector, tls::TlsFiles},
};
use tempfile::TempDir;

pub use program::{Program, ProgramEnd};
pub use tenant::{SplitTenant, TokenScore};

use crate::{
    deployment::{Deployment, DeploymentProcess},
    fixtures::program,
    plan::DeploymentPlan,
    proc::{self, SharedMemory},
    watchdog::WATCHDOG,
};

/// Name of the executor's threads that read from disk.
const READERS: &str = "layer-reader";

/// Tenant of clients with a client certificate.
pub const CERTIFIED: &str = "alice";

/// Name in the certificate of remote gateways.
pub const GATEWAY: &str = "front";

/// How calls reach the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitRoute {
    /// Calls use a channel in shared memory.
    SharedMemory,
    /// Calls use ZeroMQ over the private Unix socket.
    Ipc,
    /// Calls use ZeroMQ over TLS.
    Tls,
}

impl SplitRoute {
    /// All transports of calls.
    pub const ALL: [Self; 3] = [Self::SharedMemory, Self::Ipc, Self::Tls];

    /// Returns the transport's name in `/v1/status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory",
            Self::Ipc => "ipc",
            Self::Tls => "tls",
        }
    }
}

/// Endpoints of a deployment that has not been started.
#[derive(Debug)]
pub struct SplitEndpoints {
    directory: TempDir,
    address: SocketAddr,
}

impl SplitEndpoints {
    /// Creates certificates for 127.0.0.1 with the users' command, and chooses a free port.
    #[must_use]
    pub fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST)
    }

    /// Creates endpoints at another address of this host.
    #[must_use]
    pub fn at(host: Ipv4Addr) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let free = TcpListener::bind((host, 0)).expect("a free port");
        let endpoints = Self { directory, address: free.local_addr().expect("an address") };
        let mut cert = holobiont();
        cert.args(["cert", "--host", &host.to_string(), "--client", CERTIFIED, "--client", GATEWAY, "--dir"]);
        let made = cert.arg(endpoints.directory.path()).output().expect("holobiont cert runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        endpoints
    }

    /// Adds the endpoints to a deployment's plan: remote clients with a certificate may connect.
    #[must_use]
    pub fn of(&self, plan: DeploymentPlan) -> DeploymentPlan {
        let text = |name: &str| self.file(name).display().to_string();
        plan.set("LAYER_LISTEN", &self.address.to_string())
            .set("LAYER_CERT", &text("server.pem"))
            .set("LAYER_CERT_KEY", &text("server-key.pem"))
            .set("LAYER_CLIENT_CA", &text("ca.pem"))
    }

    /// Creates a key for `tenant` with the users' command; returns the key.
    #[must_use]
    pub fn add_key(&self, tenant: &str) -> String {
        let made = holobiont().args(["-q", "key", "add", tenant, "--file"]).arg(self.key_file()).output();
        let made = made.expect("holobiont key runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        String::from_utf8(made.stdout).expect("a key is text").trim().to_owned()
    }

    /// Removes the keys of `tenant`.
    pub fn remove_keys(&self, tenant: &str) {
        let removed = holobiont().args(["key", "rm", tenant, "--file"]).arg(self.key_file()).output();
        let removed = removed.expect("holobiont key runs");
        assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    }

    /// Returns the file with the keys, which exists once a key was created.
    #[must_use]
    pub fn key_file(&self) -> PathBuf {
        self.file("keys")
    }

    /// Returns the address of the TLS listener.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the certificate authority's file.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.file("ca.pem")
    }

    /// Returns certificate and key of [`CERTIFIED`].
    #[must_use]
    pub fn identity(&self) -> (PathBuf, PathBuf) {
        self.identity_of(CERTIFIED)
    }

    /// Returns certificate and key of a client.
    #[must_use]
    pub fn identity_of(&self, client: &str) -> (PathBuf, PathBuf) {
        (self.file(&format!("client-{client}.pem")), self.file(&format!("client-{client}-key.pem")))
    }

    /// Returns the certificate of the listener.
    #[must_use]
    pub fn server_certificate(&self) -> PathBuf {
        self.file("server.pem")
    }

    /// Returns the key of the listener.
    #[must_use]
    pub fn server_key(&self) -> PathBuf {
        self.file("server-key.pem")
    }

    /// Returns the value of `--executor` for a client on `route`.
    #[must_use]
    pub fn executor(&self, deployment: &Deployment, route: SplitRoute) -> String {
        let state = deployment.place().state();
        match route {
            SplitRoute::SharedMemory => state.join("layers.sock").display().to_string(),
            SplitRoute::Ipc => format!("ipc://{}", state.join("layers.zmq").display()),
            SplitRoute::Tls => format!("tls://{}", self.address),
        }
    }

    /// Returns a connector over `route`, with the certificate for TLS, and with `key` if there is one.
    #[must_use]
    pub fn connector(
        &self,
        deployment: &Deployment,
        route: SplitRoute,
        key: Option<&str>,
    ) -> Box<dyn Connect> {
        let address: Address = self.executor(deployment, route).parse().expect("an address");
        if let Address::Local(socket) = address {
            return Box::new(LocalConnector::new(socket, Duration::ZERO, WATCHDOG));
        }
        let connector = RemoteConnector::new(address, key.map(str::to_owned), &self.tls_files(key), WATCHDOG);
        Box::new(connector.expect("the certificates can be read"))
    }

    /// Connects a client over `route` with `masking`, and with `key` if there is one. Retries until the
    /// executor accepts it or the test times out.
    #[must_use]
    pub fn tenant(
        &self,
        deployment: &Deployment,
        route: SplitRoute,
        masking: Masking,
        key: Option<&str>,
    ) -> SplitTenant {
        self.try_tenant(deployment, route, masking, key).expect("the executor takes a client in")
    }

    /// Connects a client once.
    ///
    /// # Errors
    /// If the executor is unreachable or refuses.
    pub fn try_tenant(
        &self,
        deployment: &Deployment,
        route: SplitRoute,
        masking: Masking,
        key: Option<&str>,
    ) -> Result<SplitTenant, CallError> {
        let connector = self.connector(deployment, route, key);
        // Over ZeroMQ the handshake carries the key.
        let own_words = key.filter(|_| route == SplitRoute::SharedMemory);
        SplitTenant::rent(deployment.model(), connector, masking, own_words, WATCHDOG)
    }

    /// Returns the client's trusted authority, and its certificate unless it has a key.
    #[must_use]
    pub fn tls_files(&self, key: Option<&str>) -> TlsFiles {
        TlsFiles { ca: Some(self.ca()), identity: key.is_none().then(|| self.identity()) }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Default for SplitEndpoints {
    fn default() -> Self {
        Self::new()
    }
}

/// Builds the command `holobiont` without settings of the developer's environment.
fn holobiont() -> Command {
    clean(&program("holobiont"))
}

fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"HOLOBIONT_"))
    {
        command.env_remove(name);
    }
    command
}

/// Resources that an executor holds, to detect leaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldResources {
    /// Number of files and sockets.
    pub files: usize,
    /// Number of threads, except the two that read files for clients and stay for a few seconds.
    pub threads: usize,
    /// Memory shared with other processes.
    pub shared: SharedMemory,
}

impl HeldResources {
    /// Returns the current resources of a deployment's executor.
    #[must_use]
    pub fn of(deployment: &Deployment) -> Self {
        let id = deployment.process(DeploymentProcess::Executor).unwrap_or(0);
        Self {
            files: proc::open_files(id).len(),
            threads: proc::threads(id, READERS),
            shared: SharedMemory::of(id),
        }
    }

    /// True if no resource exceeds `before`.
    #[must_use]
    pub fn are_within(&self, before: &Self) -> bool {
        self.files <= before.files
            && self.threads <= before.threads
            && self.shared.files <= before.shared.files
            && self.shared.maps <= before.shared.maps
    }
}

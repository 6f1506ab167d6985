//! Split clients of a deployment: they rent its base layers and do the rest of the pass themselves.
//!
//! - [`SplitEndpoints`]: a deployment's ways in for split clients, with certificates and keys
//! - [`tenant`]: a client in the test's own process, whose every logit can be looked at
//! - [`program`]: `holobiont-client`, which can be killed
//! - [`exact`]: executors of exact arithmetic that can be killed; [`tap`]: what they were sent
//! - [`audit`]: whether a pad was used twice
//! - [`raw`]: clients that say whatever they like
//! - [`network`]: a network that loses and delays, between namespaces

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

/// What an executor calls its threads that wait for disks.
const READERS: &str = "layer-reader";

/// Whose sessions those with a client certificate are.
pub const CERTIFIED: &str = "alice";

/// Whom a certificate names that gateways of other hosts show.
pub const GATEWAY: &str = "front";

/// How calls travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitRoute {
    /// Through shared memory.
    SharedMemory,
    /// ZeroMQ over the private Unix socket.
    Ipc,
    /// ZeroMQ over TLS.
    Tls,
}

impl SplitRoute {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::SharedMemory, Self::Ipc, Self::Tls];

    /// What `/v1/status` calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory",
            Self::Ipc => "ipc",
            Self::Tls => "tls",
        }
    }
}

/// The ways in of a deployment that has not been started.
#[derive(Debug)]
pub struct SplitEndpoints {
    directory: TempDir,
    address: SocketAddr,
}

impl SplitEndpoints {
    /// Certificates for 127.0.0.1, made as people make them, and a free port.
    #[must_use]
    pub fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST)
    }

    /// The same for another address of this host.
    #[must_use]
    pub fn at(host: Ipv4Addr) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let free = TcpListener::bind((host, 0)).expect("a free port");
        let doors = Self { directory, address: free.local_addr().expect("an address") };
        let mut cert = holobiont();
        cert.args(["cert", "--host", &host.to_string(), "--client", CERTIFIED, "--client", GATEWAY, "--dir"]);
        let made = cert.arg(doors.directory.path()).output().expect("holobiont cert runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        doors
    }

    /// Lets a deployment have them: whoever has a certificate may come in from outside.
    #[must_use]
    pub fn of(&self, plan: DeploymentPlan) -> DeploymentPlan {
        let text = |name: &str| self.file(name).display().to_string();
        plan.set("LAYER_LISTEN", &self.address.to_string())
            .set("LAYER_CERT", &text("server.pem"))
            .set("LAYER_CERT_KEY", &text("server-key.pem"))
            .set("LAYER_CLIENT_CA", &text("ca.pem"))
    }

    /// Makes a key for `tenant` as people make them; returns it.
    #[must_use]
    pub fn add_key(&self, tenant: &str) -> String {
        let made = holobiont().args(["-q", "key", "add", tenant, "--file"]).arg(self.key_file()).output();
        let made = made.expect("holobiont key runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        String::from_utf8(made.stdout).expect("a key is text").trim().to_owned()
    }

    /// Takes the keys of `tenant` away.
    pub fn remove_keys(&self, tenant: &str) {
        let removed = holobiont().args(["key", "rm", tenant, "--file"]).arg(self.key_file()).output();
        let removed = removed.expect("holobiont key runs");
        assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    }

    /// The file with the keys, once there is one.
    #[must_use]
    pub fn key_file(&self) -> PathBuf {
        self.file("keys")
    }

    /// Where TLS is listened for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The authority.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.file("ca.pem")
    }

    /// Certificate and key of [`CERTIFIED`].
    #[must_use]
    pub fn identity(&self) -> (PathBuf, PathBuf) {
        self.identity_of(CERTIFIED)
    }

    /// Certificate and key of a client.
    #[must_use]
    pub fn identity_of(&self, client: &str) -> (PathBuf, PathBuf) {
        (self.file(&format!("client-{client}.pem")), self.file(&format!("client-{client}-key.pem")))
    }

    /// What the door shows.
    #[must_use]
    pub fn server_certificate(&self) -> PathBuf {
        self.file("server.pem")
    }

    /// Its key.
    #[must_use]
    pub fn server_key(&self) -> PathBuf {
        self.file("server-key.pem")
    }

    /// What `--executor` is set to for a client that comes over `route`.
    #[must_use]
    pub fn executor(&self, deployment: &Deployment, route: SplitRoute) -> String {
        let state = deployment.place().state();
        match route {
            SplitRoute::SharedMemory => state.join("layers.sock").display().to_string(),
            SplitRoute::Ipc => format!("ipc://{}", state.join("layers.zmq").display()),
            SplitRoute::Tls => format!("tls://{}", self.address),
        }
    }

    /// Connections over `route`, with the certificate where there is TLS, and with `key` if there is one.
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

    /// A client that rents over `route`, masked as `masking` says, and shows `key` if there is one. Sooner or later it is
    /// let in, or the test fails.
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

    /// The same, or why it is not let in.
    ///
    /// # Errors
    /// The executor is not there, or refuses.
    pub fn try_tenant(
        &self,
        deployment: &Deployment,
        route: SplitRoute,
        masking: Masking,
        key: Option<&str>,
    ) -> Result<SplitTenant, CallError> {
        let connector = self.connector(deployment, route, key);
        // Over ZeroMQ the handshake shows the key.
        let own_words = key.filter(|_| route == SplitRoute::SharedMemory);
        SplitTenant::rent(deployment.model(), connector, masking, own_words, WATCHDOG)
    }

    /// Whom a client trusts; and how it proves who it is, unless it has a key for that.
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

/// The command `holobiont`, without the settings of whoever runs the tests.
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

/// What an executor holds for others: what it would leak if it forgot one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldResources {
    /// Files and sockets.
    pub files: usize,
    /// Threads, but for the two that read files for clients: they stay a few seconds, whoever comes.
    pub threads: usize,
    /// Memory shared with others.
    pub shared: SharedMemory,
}

impl HeldResources {
    /// What the executor of a deployment holds now.
    #[must_use]
    pub fn of(deployment: &Deployment) -> Self {
        let id = deployment.process(DeploymentProcess::Executor).unwrap_or(0);
        Self {
            files: proc::open_files(id).len(),
            threads: proc::threads(id, READERS),
            shared: SharedMemory::of(id),
        }
    }

    /// True if this is no more than `before`.
    #[must_use]
    pub fn are_within(&self, before: &Self) -> bool {
        self.files <= before.files
            && self.threads <= before.threads
            && self.shared.files <= before.shared.files
            && self.shared.maps <= before.shared.maps
    }
}

//! Executors of other hosts: processes without a `holobiont up`, reached through TLS over a link that can be
//! cut.
//!
//! - [`RemoteExecutor`]: such a process, with its certificates
//! - [`HostLink`]: the relay of its connections

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};
use shmproto::{
    codec::Wire as _,
    remote_executor::{ALPN, RemoteReply, RemoteRequest, body_bytes, frame},
};
use tempfile::TempDir;

use crate::{
    fixtures::{self, program},
    plan::DeploymentPlan,
    split::{GATEWAY, SplitEndpoints},
    watchdog::WATCHDOG,
};

/// Interval at which a link checks whether it is stuck.
const TICK: Duration = Duration::from_millis(10);

/// A connection to the executor after the TLS handshake.
pub type TlsConnection = StreamOwned<ClientConnection, TcpStream>;

/// An executor without a deployment.
#[derive(Debug)]
pub struct RemoteExecutor {
    /// Certificates of the executor and its clients.
    pub endpoints: SplitEndpoints,
    /// Relay through which the executor is reached.
    pub wire: HostLink,
    place: TempDir,
    flags: Vec<String>,
    child: Child,
}

impl RemoteExecutor {
    /// Starts an executor that [`GATEWAY`] may drive, with additional flags.
    #[must_use]
    pub fn start(flags: &[&str]) -> Self {
        let named = ["--layer-gateways", GATEWAY];
        Self::plain(&[&named, flags].concat())
    }

    /// Starts an executor that no remote gateway may drive.
    #[must_use]
    pub fn closed() -> Self {
        Self::plain(&[])
    }

    fn plain(flags: &[&str]) -> Self {
        let endpoints = SplitEndpoints::new();
        let place = tempfile::tempdir().expect("a temporary directory");
        let wire = HostLink::to(endpoints.address());
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let child = spawn(&endpoints, &place, &flags);
        Self { endpoints, wire, place, flags, child }
    }

    /// Kills the executor and starts another in its place.
    pub fn die_and_return(&mut self) {
        self.kill();
        self.child = spawn(&self.endpoints, &self.place, &self.flags);
    }

    fn kill(&mut self) {
        // The process may have ended by itself; its log then states the reason.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Adds the executor to a deployment's plan as `name`.
    #[must_use]
    pub fn of(&self, plan: DeploymentPlan, name: &str) -> DeploymentPlan {
        self.shown(plan, name, GATEWAY)
    }

    /// Adds the executor to a plan, with the certificate of `client`.
    #[must_use]
    pub fn shown(&self, plan: DeploymentPlan, name: &str, client: &str) -> DeploymentPlan {
        let (cert, key) = self.endpoints.identity_of(client);
        plan.elsewhere(name, self.wire.address)
            .set("EXECUTOR_CA", &self.endpoints.ca().display().to_string())
            .set("EXECUTOR_CERT", &cert.display().to_string())
            .set("EXECUTOR_CERT_KEY", &key.display().to_string())
    }

    /// Returns the directory of the executor's adapters.
    #[must_use]
    pub fn lent(&self) -> usize {
        fs::read_dir(self.place.path().join("run/executor.lent")).map_or(0, Iterator::count)
    }

    /// Connects with the certificate of `client`, if any, and requests the gateway protocol.
    ///
    /// # Errors
    /// If the executor closes the connection after the check of the certificate.
    pub fn raw(&self, client: Option<&str>, ask: &RemoteRequest) -> io::Result<(TlsConnection, RemoteReply)> {
        let mut files = self.endpoints.tls_files(Some("a key"));
        files.identity = client.map(|client| self.endpoints.identity_of(client));
        let mut config = client::transport::tls::config(&files).expect("the certificates");
        config.alpn_protocols = vec![ALPN.to_vec()];
        let name = ServerName::from(self.endpoints.address().ip());
        let tls = ClientConnection::new(Arc::new(config), name).expect("a TLS client");
        let tcp = TcpStream::connect(self.endpoints.address())?;
        tcp.set_read_timeout(Some(WATCHDOG))?;
        let mut stream = StreamOwned::new(tls, tcp);
        stream.write_all(&frame(ask))?;
        stream.flush()?;
        let answer = answer(&mut stream)?;
        Ok((stream, answer))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.place.path().join("log")).unwrap_or_default()
    }
}

/// Returns the next reply.
///
/// # Errors
/// If the connection ends.
pub fn answer(stream: &mut TlsConnection) -> io::Result<RemoteReply> {
    let mut first = [0; 4];
    stream.read_exact(&mut first)?;
    let mut body = vec![0; body_bytes(first).expect("a frame of this protocol")];
    stream.read_exact(&mut body)?;
    Ok(RemoteReply::from_bytes(&body).expect("an answer"))
}

impl Drop for RemoteExecutor {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("the log of the executor on the other host:\n{}", self.log());
        }
    }
}

fn spawn(endpoints: &SplitEndpoints, place: &TempDir, flags: &[String]) -> Child {
    let path = |name: &str| place.path().join(name);
    let log = File::options().append(true).create(true).open(path("log")).expect("a log file");
    let mut command = Command::new(program("base-executor"));
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"HOLOBIONT_"))
    {
        command.env_remove(name);
    }
    command.arg("--model").arg(fixtures::model());
    command.arg("--socket").arg(path("run/executor.sock"));
    command.args(["--max-workers", "0", "--exit-with-stdin", "--cores", &crate::cores::one()]);
    command.args(["--layer-listen", &endpoints.address().to_string()]);
    let files: [(&str, PathBuf); 3] = [
        ("--layer-cert", endpoints.server_certificate()),
        ("--layer-cert-key", endpoints.server_key()),
        ("--layer-client-ca", endpoints.ca()),
    ];
    for (flag, path) in files {
        command.arg(flag).arg(path);
    }
    command.args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().expect("base-executor starts");
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("its stdout is a pipe");
    let read = BufReader::new(stdout).read_line(&mut line).expect("its stdout can be read");
    testkit::step();
    assert!(read > 0, "it did not start; its log:\n{}", fs::read_to_string(path("log")).unwrap_or_default());
    child
}

/// Relay of TCP connections between two hosts.
#[derive(Debug)]
pub struct HostLink {
    /// Listen address of the relay.
    pub address: SocketAddr,
    shared: Arc<LinkShared>,
}

#[derive(Debug, Default)]
struct LinkShared {
    /// Whether no bytes arrive, without notice to either side.
    is_stuck: AtomicBool,
    /// Connections with smaller numbers are closed.
    hang_ups: AtomicU64,
}

impl HostLink {
    /// Creates a relay to `address`.
    #[must_use]
    pub fn to(address: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let wire = Self { address: listener.local_addr().expect("an address"), shared: Arc::default() };
        let shared = Arc::clone(&wire.shared);
        // The thread ends with the process of the test.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(address) else { continue };
                relay(&near, &far, &shared);
                relay(&far, &near, &shared);
            }
        });
        wire
    }

    /// Stops all bytes in both directions until [`mend`](Self::mend).
    pub fn stick(&self) {
        self.shared.is_stuck.store(true, Ordering::SeqCst);
    }

    /// Resumes all stuck connections.
    pub fn mend(&self) {
        self.shared.is_stuck.store(false, Ordering::SeqCst);
    }

    /// Closes all relayed connections.
    pub fn hang_up(&self) {
        self.shared.hang_ups.fetch_add(1, Ordering::SeqCst);
    }
}

fn relay(from: &TcpStream, to: &TcpStream, shared: &Arc<LinkShared>) {
    let (from, to) = (from.try_clone().expect("a descriptor"), to.try_clone().expect("a descriptor"));
    from.set_read_timeout(Some(TICK)).expect("a socket takes time limits");
    let shared = Arc::clone(shared);
    thread::spawn(move || {
        // Any error ends the connection, as on a real network.
        let _ = carry_until_the_end(&from, &to, &shared);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}

fn carry_until_the_end(mut from: &TcpStream, mut to: &TcpStream, shared: &LinkShared) -> io::Result<()> {
    let (number, mut buffer) = (shared.hang_ups.load(Ordering::SeqCst), [0; 16 << 10]);
    while shared.hang_ups.load(Ordering::SeqCst) == number {
        if shared.is_stuck.load(Ordering::SeqCst) {
            thread::sleep(TICK);
            continue;
        }
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

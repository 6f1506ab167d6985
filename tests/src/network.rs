//! Hosts with separate networks on one machine: namespaces, and links between them that can be cut.
//!
//! - [`Network`]: a test's network, and a name for all hosts on it.
//! - [`Namespace`]: the network namespace of a host's processes. [`Links`]: the links to the host.
//!
//! The kernel removes the namespaces with the processes that hold them, which end with the test.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr},
    os::fd::AsFd as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::NamedTempFile;

use crate::watchdog::eventually;

/// DNS name of all hosts.
pub const HOSTS: &str = "hosts.fleet";

/// Purpose of a link of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkLink {
    /// Requests reach the host over this link.
    Front,
    /// The host reaches the registry over this link.
    Registry,
    /// The host reaches the bucket over this link.
    Bucket,
}

impl NetworkLink {
    /// All links of a host.
    pub const ALL: [Self; 3] = [Self::Front, Self::Registry, Self::Bucket];

    fn number(self) -> u8 {
        match self {
            Self::Front => 1,
            Self::Registry => 2,
            Self::Bucket => 3,
        }
    }
}

/// An idle process that keeps a namespace open while the test's process runs.
#[derive(Debug)]
struct NamespaceHolder(Child);

impl NamespaceHolder {
    fn start(kinds: &[&str]) -> Result<Self, String> {
        let mut command = Command::new("unshare");
        command.args(kinds).arg("cat").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut holder = Self(command.spawn().map_err(|error| format!("there is no unshare: {error}"))?);
        let network = |id: &str| fs::read_link(format!("/proc/{id}/ns/net")).ok();
        let (own, id) = (network("thread-self"), holder.0.id().to_string());
        let mut refused = false;
        eventually("it has a network of its own", || {
            refused = matches!(holder.0.try_wait(), Ok(Some(_)));
            refused || network(&id).is_some_and(|network| Some(network) != own)
        });
        if refused { Err("namespaces may not be made here; run as root".to_owned()) } else { Ok(holder) }
    }

    fn path(&self, kind: &str) -> String {
        format!("/proc/{}/ns/{kind}", self.0.id())
    }

    /// Builds a command that runs a program in one of the namespaces and keeps the command's process id.
    fn command(&self, kind: &str, name: &str, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--{name}={}", self.path(kind))).arg("--").arg(program);
        command
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A test's network with namespaces for hosts.
#[derive(Debug)]
pub struct Network {
    holder: NamespaceHolder,
    names: NamedTempFile,
}

impl Network {
    /// Creates a network. The calling thread and its children are on it from then on.
    ///
    /// # Errors
    /// If this machine forbids namespaces.
    pub fn create() -> Result<Self, String> {
        let holder = NamespaceHolder::start(&["--net", "--mount"])?;
        let file = File::open(holder.path("net")).map_err(|error| error.to_string())?;
        let entered = move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network));
        entered.map_err(|error| format!("a network may not be entered: {error}"))?;
        run(Command::new("ip").args(["link", "set", "lo", "up"]));
        let names = NamedTempFile::new().expect("a file of names");
        let network = Self { holder, names };
        network.set_hosts(&[]);
        run(network.command(Path::new("mount")).arg("--bind").arg(network.names.path()).arg("/etc/hosts"));
        Ok(network)
    }

    /// Sets the addresses of [`HOSTS`].
    pub fn set_hosts(&self, addresses: &[IpAddr]) {
        let hosts = addresses.iter().map(|address| format!("{address} {HOSTS}\n"));
        let text = hosts.fold("127.0.0.1 localhost\n".to_owned(), |text, line| text + &line);
        // The file is overwritten in place, because the mount refers to this file.
        fs::write(self.names.path(), text).expect("names");
    }

    /// Builds a command for a program that knows the name.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        self.holder.command("mnt", "mount", program)
    }

    /// Creates a namespace and links for one more host with a unique `number`.
    #[must_use]
    pub fn host(&self, number: u8) -> Links {
        let namespace = Namespace(Arc::new(NamespaceHolder::start(&["--net"]).expect("one more namespace")));
        let id = namespace.0.0.id().to_string();
        run(namespace.ip().args(["link", "set", "lo", "up"]));
        let links = Links { number, namespace };
        for link in NetworkLink::ALL {
            let (here, there) = (links.name(link), format!("up{}", link.number()));
            run(Command::new("ip")
                .args(["link", "add", &here, "type", "veth", "peer", "name", &there, "netns", &id]));
            let end = |address: Ipv4Addr, device: &str| {
                ["addr", "add", &format!("{address}/24"), "dev", device].map(str::to_owned)
            };
            run(Command::new("ip").args(end(links.here(link), &here)));
            run(links.namespace.ip().args(end(links.there(link), &there)));
            run(Command::new("ip").args(["link", "set", &here, "up"]));
            run(links.namespace.ip().args(["link", "set", &there, "up"]));
        }
        links
    }
}

/// Network namespace of a host's processes.
#[derive(Debug, Clone)]
pub struct Namespace(Arc<NamespaceHolder>);

impl Namespace {
    /// Builds a command for a program in this namespace.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        self.0.command("net", "net", program)
    }

    fn ip(&self) -> Command {
        self.command(Path::new("ip"))
    }
}

/// Links to a host, one for each purpose.
#[derive(Debug)]
pub struct Links {
    number: u8,
    /// Namespace of the host's processes.
    pub namespace: Namespace,
}

impl Links {
    /// Returns the address of the test's end of a link.
    #[must_use]
    pub fn here(&self, link: NetworkLink) -> Ipv4Addr {
        Ipv4Addr::new(10, link.number(), self.number, 1)
    }

    /// Returns the address of the host's end of a link.
    #[must_use]
    pub fn there(&self, link: NetworkLink) -> Ipv4Addr {
        Ipv4Addr::new(10, link.number(), self.number, 2)
    }

    /// Cuts a link. Neither end is notified; packets are lost.
    pub fn cut(&self, link: NetworkLink) {
        self.set(link, "down");
    }

    /// Restores a cut link.
    pub fn mend(&self, link: NetworkLink) {
        self.set(link, "up");
    }

    fn set(&self, link: NetworkLink, state: &str) {
        // The end that does not initiate connections is cut, because the other end would get an error at
        // once.
        let (mut ip, name) = match link {
            NetworkLink::Front => (self.namespace.ip(), format!("up{}", link.number())),
            NetworkLink::Registry | NetworkLink::Bucket => (Command::new("ip"), self.name(link)),
        };
        run(ip.args(["link", "set", &name, state]));
    }

    fn name(&self, link: NetworkLink) -> String {
        format!("down{}-{}", link.number(), self.number)
    }
}

fn run(command: &mut Command) {
    let status = command.stdin(Stdio::null()).status().expect("it starts");
    assert!(status.success(), "{command:?}: {status}");
}

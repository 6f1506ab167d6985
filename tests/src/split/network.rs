//! A network between two namespaces of this host that can be slow, lossy, or cut, as needed for half-open
//! connections.
//!
//! Creation needs root and the program `ip`; without them tests print a message and pass. Delay and loss also
//! need `tc` and a kernel with `netem`.

use std::{
    ffi::OsStr,
    fs,
    net::Ipv4Addr,
    path::Path,
    process::{Command, Stdio},
};

use super::clean;

/// A veth pair between this namespace and one for a client.
#[derive(Debug)]
pub struct Network {
    name: String,
    /// Third byte of the addresses, which differs between concurrent networks.
    subnet: u8,
}

fn succeeds(program: &str, words: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn ip(line: &str) -> bool {
    succeeds("ip", &line.split(' ').collect::<Vec<_>>())
}

impl Network {
    /// Creates a network, if permitted; otherwise prints why `test` is skipped.
    #[must_use]
    pub fn lay(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !succeeds("ip", &["netns"]) {
            eprintln!("{test} was not run: it takes root and `ip` with network namespaces");
            return None;
        }
        let id = std::process::id();
        let network = Self { name: format!("hb{id}"), subnet: u8::try_from(id % 250).unwrap_or(0) };
        if network.set_up() {
            return Some(network);
        }
        eprintln!("{test} was not run: network namespaces or virtual cables are not allowed here");
        None
    }

    fn set_up(&self) -> bool {
        let Self { name, .. } = self;
        let (here, there) = (self.address(), self.far_address());
        ip(&format!("netns add {name}"))
            && ip(&format!("link add {name}a type veth peer name {name}b netns {name}"))
            && ip(&format!("addr add {here}/30 dev {name}a"))
            && ip(&format!("link set {name}a up"))
            && self.inside(&format!("addr add {there}/30 dev {name}b"))
            && self.inside(&format!("link set {name}b up"))
    }

    /// Returns the address of this side.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 211, self.subnet, 1)
    }

    fn far_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 211, self.subnet, 2)
    }

    /// Returns the start of a command that runs `program` in the other namespace.
    #[must_use]
    pub fn far_side(&self, program: &Path) -> Command {
        let mut command = clean(Path::new("ip"));
        command.args([OsStr::new("netns"), OsStr::new("exec"), OsStr::new(&self.name), program.as_os_str()]);
        command
    }

    /// Delays and drops packets in both directions; false, with a message, if the kernel cannot.
    #[must_use]
    pub fn degrade(&self, delay_ms: u32, loss_percent: u32) -> bool {
        let Self { name, .. } = self;
        let netem = format!("root netem delay {delay_ms}ms {}ms loss {loss_percent}%", (delay_ms / 4).max(1));
        let near = format!("qdisc replace dev {name}a {netem}");
        let far = format!("netns exec {name} tc qdisc replace dev {name}b {netem}");
        let done = succeeds("tc", &near.split(' ').collect::<Vec<_>>()) && ip(&far);
        if !done {
            eprintln!("no delay and loss by netem: it takes `tc` and the kernel's sch_netem");
        }
        done
    }

    /// Sets the other side's interface down: packets are lost without notice.
    pub fn cut(&self) {
        assert!(self.inside(&format!("link set {}b down", self.name)), "the cable can be pulled out");
    }

    /// Sets the other side's interface up again.
    pub fn mend(&self) {
        assert!(self.inside(&format!("link set {}b up", self.name)), "the cable can be put back");
    }

    fn inside(&self, line: &str) -> bool {
        ip(&format!("-n {} {line}", self.name))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Processes in the namespace lose the network, and the other interface goes with this one.
        let _ = ip(&format!("link del {}a", self.name));
        let _ = ip(&format!("netns del {}", self.name));
        let _ = fs::remove_dir(format!("/etc/netns/{}", self.name));
    }
}

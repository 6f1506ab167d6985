//! Checks of several executors: conflicts on this host, and reachability of other hosts.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    net::{TcpStream, ToSocketAddrs as _},
    path::{Path, PathBuf},
    time::Duration,
};

use security::address::HostPort;
use settings::{ByteCount, DeviceChoice, MemoryFraction, Preset};
use text::sandbox::{MEMORY_BYTES, PROCESSES};

use crate::{
    deployment::{
        config::{DeployedExecutor, DeploymentConfig},
        cores::{CoreSplit, named_cores},
        machine,
    },
    terminal::{findings::Finding, table::size},
};

/// Timeout for a connection to another host.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Prefixes the finding with the executor's name, if there are several executors.
pub(crate) fn named(mut finding: Finding, member: &DeployedExecutor) -> Finding {
    if let Some(name) = &member.name {
        finding.name = format!("{name}: {}", finding.name);
    }
    finding
}

/// Checks conflicts between executors.
pub(super) fn together(members: &[DeployedExecutor], splits: &[CoreSplit]) -> Vec<Finding> {
    if members.len() < 2 {
        return Vec::new();
    }
    vec![cores(members, splits), stores(members)]
}

/// Checks the sum of the memory limits of all processes on this host.
pub(super) fn memory(config: &DeploymentConfig, members: &[DeployedExecutor]) -> Finding {
    memory_of(members, gateway_bytes(config), machine_bytes())
}

/// Checks that no core computes for two executors, which would delay each other in every step.
fn cores(members: &[DeployedExecutor], splits: &[CoreSplit]) -> Finding {
    const NAME: &str = "[[executor]] cores";
    const FIX: &str = "give each executor its own cores, or remove them to divide cores automatically";
    let mut of: BTreeMap<u32, &str> = BTreeMap::new();
    for (member, split) in members.iter().zip(splits) {
        // A GPU executor needs its core only occasionally.
        let is_cpu = matches!(member.config.executor.device, None | Some(DeviceChoice::Cpu));
        for core in split.executor.iter().filter(|_| is_cpu).flat_map(|cores| cores.0.iter().copied()) {
            let name = member.name.as_deref().unwrap_or_default();
            if let Some(other) = of.insert(core, name) {
                let found = format!("the executors {other} and {name} share core {core}");
                let is_asked_for = named_cores(&member.config).is_some();
                return match is_asked_for {
                    true => Finding::fail(NAME, found, FIX),
                    false => Finding::warn(NAME, found, "use fewer executors than cores"),
                };
            }
        }
    }
    Finding::ok(NAME, format!("{} executors, which share no core", members.len()))
}

/// Compares the sum of the memory limits with this machine's memory. Executors alone must not exceed the
/// machine's memory.
fn memory_of(members: &[DeployedExecutor], gateway_bytes: u64, machine_bytes: u64) -> Finding {
    const NAME: &str = "memory";
    const FIX: &str = "lower [memory] process, or remove it from each [[executor]] to give all an even part";
    let of = |member: &DeployedExecutor| match member.config.memory.process {
        Some(MemoryFraction::Bytes(bytes)) => bytes.0,
        Some(part) => part.bytes_of(machine_bytes),
        // The default of `--process-memory` is fifteen sixteenths of the machine's memory.
        None => machine_bytes / 16 * 15,
    };
    let executors = members.iter().map(of).fold(0, u64::saturating_add);
    // Grammars of the gateway and of each executor, and chat templates of the gateway, whose loads have one more.
    let helpers = MEMORY_BYTES * (PROCESSES * (2 + members.len()) + 1) as u64;
    let found = format!(
        "at most {} together: executors {}, requests in the gateway {}, helper processes {}; this machine has {}",
        size(executors.saturating_add(gateway_bytes).saturating_add(helpers)),
        size(executors),
        size(gateway_bytes),
        size(helpers),
        size(machine_bytes)
    );
    if executors > machine_bytes {
        return Finding::warn(NAME, found, FIX);
    }
    if gateway_bytes > machine_bytes {
        return Finding::warn(NAME, found, "lower [gateway] memory_bytes");
    }
    Finding::ok(NAME, found)
}

/// Returns the memory limit of requests in the gateway: `memory_bytes` of `[gateway]`, or its default.
fn gateway_bytes(config: &DeploymentConfig) -> u64 {
    let preset = || {
        let setting = settings::all().find(|setting| setting.flag == "memory-bytes")?;
        let Preset::Is(value) = setting.preset else { return None };
        value.parse::<ByteCount>().ok()
    };
    config.gateway.memory_bytes.or_else(preset).map_or(0, |bytes| bytes.0)
}

/// Returns the memory of this machine in bytes.
fn machine_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    machine::memory_bytes(&meminfo, "MemTotal").unwrap_or(u64::MAX)
}

/// Checks that no two executors offload KV blocks to the same file.
fn stores(members: &[DeployedExecutor]) -> Finding {
    const NAME: &str = "[[executor]] memory.directory";
    let mut of: BTreeMap<PathBuf, &str> = BTreeMap::new();
    for member in members {
        let name = member.name.as_deref().unwrap_or_default();
        let directory = member.config.memory.directory.clone();
        if let Some((directory, other)) =
            directory.and_then(|directory| Some((directory.clone(), of.insert(directory, name)?)))
        {
            let found = format!("{other} and {name} would use the same directory {}", directory.display());
            return Finding::fail(NAME, found, "give each executor its own directory, or remove the setting");
        }
    }
    Finding::ok(NAME, "each executor has its own directory")
}

/// Checks executors of other hosts: the gateway's certificate files exist and the addresses accept
/// connections.
pub(super) fn elsewhere(config: &DeploymentConfig) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        config.elsewhere().map(|(name, address)| reachable(name, address)).collect();
    if !findings.is_empty() {
        let gateway = &config.gateway;
        let certificates = [
            ("[gateway] executor_ca", &gateway.executor_ca),
            ("[gateway] executor_cert", &gateway.executor_cert),
            ("[gateway] executor_cert_key", &gateway.executor_cert_key),
        ];
        findings.extend(certificates.map(|(name, path)| certificate(name, path.as_deref())));
    }
    findings
}

fn certificate(name: &str, path: Option<&Path>) -> Finding {
    const FIX: &str = "run holobiont cert --client NAME on the host of the certificate authority, and \
                       copy the files to this host";
    match path.map(|path| (path, File::open(path))) {
        Some((path, Ok(_))) => Finding::ok(name, path.display().to_string()),
        Some((path, Err(error))) => Finding::fail(name, format!("{}: {error}", path.display()), FIX),
        None if name.ends_with("ca") => Finding::ok(name, "the certificate authorities of the system"),
        None => Finding::fail(name, "executors on other hosts require a certificate, and none is set", FIX),
    }
}

fn reachable(name: &str, address: &HostPort) -> Finding {
    let label = format!("[[executor]] {name}");
    let HostPort { host, port } = address;
    let connected = (host.as_str(), *port).to_socket_addrs().and_then(|mut addresses| {
        let first = addresses.next().ok_or(io::ErrorKind::NotFound)?;
        TcpStream::connect_timeout(&first, CONNECT_LIMIT)
    });
    match connected {
        Ok(_) => Finding::ok(label, format!("reachable at {address}")),
        Err(error) => {
            let fix = "start the executor there, with [layers] listen and gateways; the gateway waits for it";
            Finding::warn(label, format!("{address}: {error}"), fix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    fn found(file: &str) -> Vec<Finding> {
        let config: DeploymentConfig = toml::from_str(file).unwrap();
        let members = config.members();
        together(&members, &CoreSplit::each(&members, &"0-7".parse().unwrap()))
    }

    fn two(of_each: [&str; 2]) -> String {
        format!("[[executor]]\nname = 'a'\n{}\n[[executor]]\nname = 'b'\n{}\n", of_each[0], of_each[1])
    }

    #[test]
    fn executors_on_the_same_cores_are_refused_by_name() {
        let findings = found(&two(["cores = '0-3'", "cores = '3-5'"]));
        assert!(findings[0].health == Health::Fail && findings[0].found.contains("core 3"), "{findings:?}");
        assert!(found(&two(["", ""])).iter().all(|finding| finding.health == Health::Ok));
        let gpu = "device = 'cuda:0'\ncores = '0-3'";
        assert!(found(&two([gpu, "cores = '0-3'"])).iter().all(|finding| finding.health == Health::Ok));
    }

    #[test]
    fn executors_with_one_store_are_refused_by_name() {
        let findings = found(&two(["memory.directory = '/h'", "memory.directory = '/h'"]));
        assert!(findings[1].health == Health::Fail && findings[1].found.contains("a and b"), "{findings:?}");
        let common = format!("memory.directory = '/h'\n{}", two(["", ""]));
        assert_eq!(found(&common)[1].health, Health::Ok, "each has a directory below it");
    }

    #[test]
    fn executors_that_hold_more_together_than_there_is_are_told() {
        let of = |each: [&str; 2], machine_bytes| {
            let config: DeploymentConfig = toml::from_str(&two(each)).unwrap();
            memory_of(&config.members(), 100, machine_bytes)
        };
        assert_eq!(of(["", ""], 1000).health, Health::Ok, "each has an even part");
        assert_eq!(of(["memory.process = '500'", ""], 1000).health, Health::Ok);
        let many = of(["memory.process = '1GiB'", ""], 1 << 30);
        assert!(many.health == Health::Warn && many.found.contains("1.5"), "{many:?}");
    }

    #[test]
    fn memory_of_executors_and_gateway_is_summed_up() {
        let of = |file: &str| {
            let config: DeploymentConfig = toml::from_str(file).unwrap();
            (gateway_bytes(&config), memory_of(&config.members(), gateway_bytes(&config), 16 << 30))
        };
        let (bytes, found) = of("");
        assert_eq!((bytes, found.health), (2 << 30, Health::Ok));
        for part in ["executors 15", "gateway 2", "18", "processes 1.75", "has 16"] {
            assert!(found.found.contains(part), "{part}: {found:?}");
        }
        let (bytes, found) = of("gateway.memory_bytes = '1GiB'\nmemory.process = '4GiB'");
        assert!(bytes == 1 << 30 && found.found.contains("6.75"), "{found:?}");
        assert_eq!(of("gateway.memory_bytes = '17GiB'").1.health, Health::Warn);
    }

    #[test]
    fn a_single_executor_is_in_nobodys_way() {
        assert!(found("").is_empty());
    }

    #[test]
    fn an_executor_on_another_host_takes_a_certificate_and_somebody_who_listens() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let file = format!("[[executor]]\nname = 'far'\naddress = '{address}'\n");
        let health = |text: &str| {
            let found = elsewhere(&toml::from_str(text).unwrap());
            found.iter().map(|finding| finding.health).collect::<Vec<_>>()
        };
        assert_eq!(health(&file), [Health::Ok, Health::Ok, Health::Fail, Health::Fail]);
        let shown = "[gateway]\nexecutor_cert = '/dev/null'\nexecutor_cert_key = '/dev/null'\n";
        assert_eq!(health(&(file.clone() + shown)), [Health::Ok; 4]);
        drop(listener);
        assert_eq!(health(&(file + shown))[0], Health::Warn);
        assert!(health("").is_empty());
    }
}

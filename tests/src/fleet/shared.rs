//! Hosts behind Envoy that share a registry and a bucket, each with a separate network, so that each part of
//! a fleet can fail individually.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use tempfile::TempDir;

use super::front::{FleetFront, FrontSetup};
use crate::{
    client::Client,
    deployment::Deployment,
    network::{HOSTS, Links, Network, NetworkLink},
    plan::DeploymentPlan,
    servers::{self, postgres::Postgres, s3::Bucket, wire::FaultyRelay},
    state_directory::StateDirectory,
};

/// Port of the gateways, each of which has a separate address.
const PORT: u16 = 8000;
/// Size of a host's bucket cache: two or three adapters, so that the host fetches permanently.
const CACHE_KIB: u64 = 5 << 10;

/// A host of the fleet.
#[derive(Debug)]
pub struct SharedHost {
    /// The host's running deployment.
    pub deployment: Deployment,
    /// Network links to the host.
    pub links: Links,
}

/// Hosts behind a front, with registry and bucket.
#[derive(Debug)]
pub struct SharedFleet {
    /// The hosts, the oldest first.
    pub hosts: Vec<SharedHost>,
    /// Pickers and Envoy before the hosts.
    pub front: FleetFront,
    /// PostgreSQL server of the registry.
    pub registry: Postgres,
    /// Relay between all hosts and the registry.
    pub registry_wire: FaultyRelay,
    bucket: Bucket,
    /// Relay between all hosts and the bucket.
    pub bucket_wire: FaultyRelay,
    adapters: TempDir,
    numbers: u8,
    // The network is dropped last, since all other parts use it.
    network: Network,
}

impl SharedFleet {
    /// Starts `count` hosts. The calling thread and its children are on their network from then on.
    ///
    /// # Errors
    /// If this machine lacks a program or forbids an operation.
    pub fn start(count: u8) -> Result<Self, String> {
        let network = Network::create()?;
        let (registry, bucket) = servers::both().ok_or("what is missing is said above")?;
        let anywhere = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let registry_wire = FaultyRelay::from(anywhere, registry.port());
        let bucket_wire = FaultyRelay::from(anywhere, bucket.port());
        let adapters = TempDir::new().expect("a directory");
        let ways = HostSetup {
            network: &network,
            registry: registry_wire.port(),
            bucket: (&bucket, bucket_wire.port()),
            adapters: &adapters,
        };
        let hosts: Vec<SharedHost> = (1..=count).map(|number| ways.host(number)).collect();
        publish_hosts(&network, &hosts);
        let front =
            FleetFront::start(&gateways(), FrontSetup { network: Some(&network), ..FrontSetup::default() });
        let numbers = count;
        Ok(Self { hosts, front, registry, registry_wire, bucket, bucket_wire, adapters, numbers, network })
    }

    /// Returns the location of all hosts' adapters.
    #[must_use]
    pub fn adapters(&self) -> PathBuf {
        self.adapters.path().to_owned()
    }

    /// Returns clients of each host.
    #[must_use]
    pub fn clients(&self) -> Vec<Client> {
        self.hosts.iter().map(|host| host.deployment.client.clone()).collect()
    }

    /// Removes a host from the list of names.
    #[must_use]
    pub fn remove_host(&mut self, index: usize) -> SharedHost {
        let host = self.hosts.remove(index);
        publish_hosts(&self.network, &self.hosts);
        host
    }

    /// Adds a host at a new address with an empty disk.
    pub fn add(&mut self) {
        self.numbers += 1;
        let host = self.ways().host(self.numbers);
        self.hosts.push(host);
        publish_hosts(&self.network, &self.hosts);
    }

    /// Replaces a removed host at its address with an empty disk.
    pub fn replace(&mut self, index: usize, links: Links) {
        let deployment = self.ways().plan(&links).start_in(Arc::new(StateDirectory::new()));
        self.hosts.insert(index, SharedHost { deployment, links });
        publish_hosts(&self.network, &self.hosts);
    }

    /// Starts another picker in place of a killed one.
    pub fn replace_picker(&mut self, index: usize) {
        let setup = FrontSetup { network: Some(&self.network), ..FrontSetup::default() };
        self.front.replace_picker(index, &gateways(), setup);
    }

    fn ways(&self) -> HostSetup<'_> {
        HostSetup {
            network: &self.network,
            registry: self.registry_wire.port(),
            bucket: (&self.bucket, self.bucket_wire.port()),
            adapters: &self.adapters,
        }
    }
}

fn gateways() -> [String; 1] {
    [format!("{HOSTS}:{PORT}")]
}

fn publish_hosts(network: &Network, hosts: &[SharedHost]) {
    let addresses: Vec<IpAddr> =
        hosts.iter().map(|host| host.links.there(NetworkLink::Front).into()).collect();
    network.set_hosts(&addresses);
}

struct HostSetup<'a> {
    network: &'a Network,
    registry: u16,
    bucket: (&'a Bucket, u16),
    adapters: &'a TempDir,
}

impl HostSetup<'_> {
    fn host(&self, number: u8) -> SharedHost {
        let links = self.network.host(number);
        let deployment = self.plan(&links).start();
        SharedHost { deployment, links }
    }

    fn plan(&self, links: &Links) -> DeploymentPlan {
        let registry =
            format!("postgres://fleet@{}:{}/postgres", links.here(NetworkLink::Registry), self.registry);
        let (bucket, port) = self.bucket;
        let plan = DeploymentPlan::bare().workers(0).restless().inside(&links.namespace);
        let plan = plan.listen(SocketAddr::from((links.there(NetworkLink::Front), PORT)));
        let plan = plan.set("INSECURE", "true").set("REGISTRY", &registry).set("STORE", &bucket.url());
        let plan = plan.bytes("STORE_CACHE_BYTES", CACHE_KIB);
        let plan = plan.set("ADAPTER_ROOT", &self.adapters.path().display().to_string());
        let variables = bucket.variables_at(SocketAddr::from((links.here(NetworkLink::Bucket), port)));
        variables.iter().fold(plan, |plan, (name, value)| plan.environment(name, value))
    }
}

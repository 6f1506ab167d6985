//! Hosts of a fleet, each a registry with an executor, and their shared servers.

use std::{path::PathBuf, sync::Arc, time::Duration};

use gateway::{
    adapters::{
        AdapterEntry, AdapterError, BucketAddress, EphemeralStorage, FleetStorage, LoadRequest, OpenError,
        PostgresAddress, Registry, RegistryOptions, RemoteOptions, Replace, ResidencyError,
    },
    caller::{Caller, KeyRole, RequestPriority},
    executor::{Endpoint, Executor, LinkSettings, SharedConnections, link_messages::LinkState},
    executors::{Executors, ONLY},
    limits::KeyLimit,
};
use tempfile::TempDir;
use testkit::WATCHDOG;

use crate::{
    fake_executor::FakeExecutor,
    servers::{postgres::Postgres, s3::Bucket},
};

pub(crate) const BASE: &str = "base";
const ROOM: u64 = 2;
/// Minimum bytes of the weights: the relay damages only longer responses.
pub(crate) const FILE_BYTES: usize = 8192;

pub(crate) struct FleetHost {
    pub(crate) directory: TempDir,
    pub(crate) fake: FakeExecutor,
    pub(crate) registry: Arc<Registry>,
}

impl FleetHost {
    pub(crate) async fn new(postgres: &Postgres, bucket: &Bucket) -> Self {
        Self::with_cache(postgres, bucket, 1 << 30).await
    }

    pub(crate) async fn with_cache(postgres: &Postgres, bucket: &Bucket, cache_bytes: u64) -> Self {
        Self::at(tempfile::tempdir().unwrap(), postgres, bucket, cache_bytes).await.unwrap()
    }

    pub(crate) async fn at(
        directory: TempDir,
        postgres: &Postgres,
        bucket: &Bucket,
        cache_bytes: u64,
    ) -> Result<Self, OpenError> {
        let key_file = Some(directory.path().join("api-keys"));
        let fleet = FleetStorage { key_file, ..fleet(postgres, bucket, cache_bytes) };
        Self::of(directory, Some(fleet)).await
    }

    /// Host whose files are in a directory shared by all hosts.
    pub(crate) async fn beside(postgres: &Postgres, shared: &std::path::Path) -> Self {
        let store = BucketAddress::parse(&format!("file://{}", shared.display()), []).unwrap();
        let registry = PostgresAddress::parse(&postgres.url()).unwrap();
        let fleet = FleetStorage { registry, store, cache_bytes: 1 << 30, key_file: None };
        Self::of(tempfile::tempdir().unwrap(), Some(fleet)).await.unwrap()
    }

    pub(crate) async fn alone() -> Self {
        Self::of(tempfile::tempdir().unwrap(), None).await.unwrap()
    }

    /// Host with the state in `directory`, in `fleet` if there is one.
    pub(crate) async fn of(directory: TempDir, fleet: Option<FleetStorage>) -> Result<Self, OpenError> {
        let path = directory.path();
        std::fs::create_dir_all(path.join("root")).unwrap();
        let fake = FakeExecutor::start(&path.join("socket"), ROOM, Duration::ZERO).await;
        let limits = LinkSettings { max_sequences: 16, silence: Duration::from_secs(30) };
        let common = SharedConnections::default();
        let executor = Executor::connect(Endpoint::Socket(path.join("socket")), limits, common.clone());
        let executors = Executors::of([(ONLY.to_owned(), executor.clone())], &common);
        let options = RegistryOptions {
            state: path.join("state"),
            adapter_root: path.join("root").canonicalize().unwrap(),
            max_adapters: 2000,
            max_adapter_file_bytes: 64 << 20,
            tenant_bytes: 1 << 30,
            ephemeral: EphemeralStorage { memory: path.to_owned(), bytes: 1 << 20 },
            remote: RemoteOptions::default(),
            fleet,
        };
        let registry = Registry::open(executors, options).await?;
        let mut link = executor.link();
        let up = link.wait_for(|link| matches!(link, LinkState::Up { .. }));
        drop(tokio::time::timeout(WATCHDOG, up).await.expect("a connection").unwrap());
        assert!(registry.restore(0, &[], BASE).await);
        Ok(Self { directory, fake, registry })
    }

    pub(crate) async fn end(self) -> TempDir {
        let Self { directory, fake, registry } = self;
        drop(fake);
        let held = Arc::downgrade(&registry);
        drop(registry);
        eventually("nobody holds the registry", || held.strong_count() == 0).await;
        directory
    }

    /// Registers an adapter and replaces any other of its name.
    pub(crate) async fn load(&self, name: &str, weights: &str) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.registry.load(self.request(name, weights), BASE.into()).await
    }

    pub(crate) fn request(&self, name: &str, weights: &str) -> LoadRequest {
        let path = self.files(name, long(weights).as_bytes());
        LoadRequest { name: name.to_owned(), path, replace: Replace::Always, tenant: None, pinned: None }
    }

    pub(crate) fn files(&self, name: &str, weights: &[u8]) -> PathBuf {
        let path = self.directory.path().join("root").join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(path.join("adapter_model.safetensors"), weights).unwrap();
        path
    }

    /// Loads an adapter into this host's executor, as a request does.
    pub(crate) async fn ask(&self, name: &str) -> Result<(), ResidencyError> {
        let (limit, priority) = (KeyLimit::new(None), RequestPriority::Online);
        let admin = Caller { tenant: "operator".into(), role: KeyRole::Admin, limit, priority };
        let lease = self.registry.lease(name, &admin).unwrap().expect("it is registered");
        self.registry.load_on(&lease, 0).await.map(drop)
    }

    pub(crate) fn loaded(&self) -> Option<String> {
        self.fake.loads().last().map(|weights| weights.trim().to_owned())
    }

    /// Adapter version of a name on this host.
    pub(crate) fn stands_for(&self, name: &str) -> Option<String> {
        self.registry.entries().get(name).map(|entry| entry.record.generation.to_string())
    }

    /// Every name with its adapter version and whether it is pinned.
    pub(crate) fn all(&self) -> Vec<(String, String, bool)> {
        let entries = self.registry.entries();
        let told = |entry: &Arc<AdapterEntry>| entry.record.generation.to_string();
        entries.iter().map(|(name, entry)| (name.clone(), told(entry), entry.is_pinned())).collect()
    }

    /// Waits until a name has the same version on both hosts.
    pub(crate) async fn hears(&self, of: &Self, name: &str) {
        let heard = || self.stands_for(name) == of.stands_for(name);
        eventually("another host hears of it", heard).await;
    }

    pub(crate) fn stored(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path().join("state/adapters")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !name.starts_with('.')).collect()
    }
}

pub(crate) fn fleet(postgres: &Postgres, bucket: &Bucket, cache_bytes: u64) -> FleetStorage {
    let variables = bucket.variables().into_iter().map(|(name, value)| (name.to_owned(), value));
    FleetStorage {
        registry: PostgresAddress::parse(&postgres.url()).unwrap(),
        store: BucketAddress::parse(&bucket.url(), variables).unwrap(),
        cache_bytes,
        key_file: None,
    }
}

pub(crate) fn long(word: &str) -> String {
    format!("{word:<FILE_BYTES$}")
}

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, wait).await.unwrap_or_else(|_| panic!("did not happen: {what}"));
}

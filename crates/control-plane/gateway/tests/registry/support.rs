//! A registry, its directories, and shortcuts.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gateway::{
    adapters::{
        AdapterEntry, AdapterError, AllowList, EphemeralStorage, LoadRequest, OpenError, Registry,
        RegistryOptions, RemoteOptions, Replace,
    },
    caller::{Caller, KeyRole, RequestPriority},
    executor::{Endpoint, Executor, LinkSettings, SharedConnections, link_messages::LinkState},
    executors::{Executors, ONLY},
    limits::KeyLimit,
};
use tempfile::TempDir;
use types::AdapterVersion;

use crate::fake_executor::{FakeExecutor, generation};

pub(crate) use testkit::WATCHDOG;

pub(crate) const BASE: &str = "base";

pub(crate) struct RegistryHarness {
    pub(crate) directory: TempDir,
    pub(crate) fake: FakeExecutor,
    pub(crate) executor: Executor,
    pub(crate) registry: Arc<Registry>,
}

impl RegistryHarness {
    pub(crate) async fn with_room_for(adapters: u64) -> Self {
        Self::slow(adapters, Duration::ZERO).await
    }

    pub(crate) async fn slow(adapters: u64, load_time: Duration) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("root")).unwrap();
        let fake = FakeExecutor::start(&directory.path().join("socket"), adapters, load_time).await;
        let (executor, registry) = open(directory.path()).await.unwrap();
        Self { directory, fake, executor, registry }
    }

    pub(crate) async fn reopen(self) -> Self {
        self.with_options(|_| {}).await
    }

    pub(crate) async fn with_options(self, change: impl FnOnce(&mut RegistryOptions)) -> Self {
        let Self { directory, fake, executor, registry } = self;
        executor.close();
        gone(registry).await;
        let mut options = options(directory.path());
        change(&mut options);
        let (executor, registry) = open_with(directory.path(), options).await.unwrap();
        Self { directory, fake, executor, registry }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn files(&self, name: &str, weights: &str) -> PathBuf {
        files(self.path(), name, weights)
    }

    pub(crate) async fn load(&self, name: &str, weights: &str) -> Result<Arc<AdapterEntry>, AdapterError> {
        self.registry.load(self.request(name, weights), BASE.into()).await
    }

    pub(crate) fn request(&self, name: &str, weights: &str) -> LoadRequest {
        let path = self.files(name, weights);
        LoadRequest { name: name.to_owned(), path, replace: Replace::Always, tenant: None, pinned: None }
    }

    pub(crate) async fn load_path(
        &self,
        path: impl Into<PathBuf>,
    ) -> Result<Arc<AdapterEntry>, AdapterError> {
        let (name, path) = ("x".to_owned(), path.into());
        let request = LoadRequest { name, path, replace: Replace::Always, tenant: None, pinned: None };
        self.registry.load(request, BASE.into()).await
    }

    pub(crate) fn stored(&self) -> BTreeSet<String> {
        stored(self.path())
    }
}

pub(crate) fn caller(tenant: &str, role: KeyRole) -> Caller {
    Caller { tenant: tenant.into(), role, limit: KeyLimit::new(None), priority: RequestPriority::Online }
}

pub(crate) fn admin() -> Caller {
    caller("operator", KeyRole::Admin)
}

pub(crate) fn files(directory: &Path, name: &str, weights: &str) -> PathBuf {
    let path = directory.join("root").join(name);
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(path.join("adapter_model.safetensors"), weights).unwrap();
    path
}

pub(crate) fn stored(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory.join("state/adapters")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// URI of a directory inside the adapter root.
pub(crate) fn uri_of(directory: &Path, name: &str) -> String {
    let root = directory.join("root").canonicalize().unwrap();
    format!("file://{}/{name}", root.display())
}

pub(crate) fn options(directory: &Path) -> RegistryOptions {
    RegistryOptions {
        state: directory.join("state"),
        adapter_root: directory.join("root").canonicalize().unwrap(),
        max_adapters: 2000,
        max_adapter_file_bytes: 4 << 20,
        tenant_bytes: 1 << 30,
        ephemeral: EphemeralStorage { memory: directory.to_owned(), bytes: 1 << 20 },
        remote: RemoteOptions {
            allowed: AllowList::parse(&[uri_of(directory, "")]).unwrap(),
            ..RemoteOptions::default()
        },
        fleet: None,
    }
}

/// Opens the registry of `directory` and restores it, as the gateway does at its start.
pub(crate) async fn open(directory: &Path) -> Result<(Executor, Arc<Registry>), OpenError> {
    open_with(directory, options(directory)).await
}

pub(crate) async fn open_with(
    directory: &Path,
    options: RegistryOptions,
) -> Result<(Executor, Arc<Registry>), OpenError> {
    let silence = Duration::from_secs(30);
    let limits = LinkSettings { max_sequences: 16, silence };
    let common = SharedConnections::default();
    let executor = Executor::connect(Endpoint::Socket(directory.join("socket")), limits, common.clone());
    let executors = Executors::of([(ONLY.to_owned(), executor.clone())], &common);
    let registry = Registry::open(executors, options).await?;
    let mut link = executor.link();
    let up = link.wait_for(|link| matches!(link, LinkState::Up { .. }));
    let resident = match &*tokio::time::timeout(WATCHDOG, up).await.expect("a connection").unwrap() {
        LinkState::Up { welcome, .. } => welcome.adapters.clone(),
        _ => unreachable!("waited for"),
    };
    assert!(registry.restore(0, &resident, BASE).await);
    Ok((executor, registry))
}

/// Waits until the registry's last reference is dropped, so that its directory is free.
pub(crate) async fn gone(registry: Arc<Registry>) {
    let weak = Arc::downgrade(&registry);
    drop(registry);
    eventually("the registry is closed", || weak.strong_count() == 0).await;
}

pub(crate) fn hex(weights: &str) -> String {
    AdapterVersion(generation(weights.as_bytes())).to_string()
}

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, wait).await.unwrap_or_else(|_| panic!("did not happen: {what}"));
}

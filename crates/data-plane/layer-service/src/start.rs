//! Start of the layer service from its settings and an open base.

use std::{
    hash::{BuildHasher as _, RandomState},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use kernels::{attention::KvPrecision, lora::LoraPrecision};
use kv_cache::ledger::MemoryAccount;
use model::{
    client_weights::ClientWeightsPlan,
    linear_sites::{EvaluateSites, Site, catalog_sites},
};
use shmproto::layer::{
    MAX_ROWS,
    control::{AdapterDtype, Catalog, KvDtype},
};

use super::{
    auth::Authenticator,
    base_files::{BaseBlobs, Blobs, catalog_files, maskable},
    dispatcher::Dispatcher,
    event_queue::inbox,
    local::{LocalParts, LocalServer},
    registry::{Registry, ServedBase},
    remote,
    settings::LayerSettings,
    tls::TlsFiles,
};
use ::scheduling::clock::SystemClock;

const NUMBER_BYTES: usize = 4;

/// Facts about a base for the catalog.
#[derive(Debug)]
pub struct CatalogInfo {
    /// Name that the operator gave the model.
    pub model: String,
    /// Architecture from the model's files.
    pub architecture: String,
    /// Content hash of the base.
    pub base_hash: [u8; 32],
    /// Context length of the resident engine, in tokens; 0 without one.
    pub context_length: usize,
    /// KV precision of the executor's engine, which clients should use too.
    pub kv: KvPrecision,
    /// Adapter precision of the executor's engine.
    pub adapters: LoraPrecision,
    /// Files that clients may fetch.
    pub plan: ClientWeightsPlan,
}

/// Addresses of the servers, and credentials of their clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddresses {
    /// Control socket for clients on this host; `layers.zmq` is beside it.
    pub socket: PathBuf,
    /// Address and certificates for clients of other hosts.
    pub tls: Option<(std::net::SocketAddr, TlsFiles)>,
    /// File with the API keys.
    pub key_file: Option<PathBuf>,
    /// Remote gateways that may use the executor, if there is TLS.
    pub gateways: Option<remote::GatewayAccess>,
}

/// Returns the model's name for tenants: a hub name unchanged, of a path only the last part.
#[must_use]
pub fn name_of(model: &str) -> String {
    let path = Path::new(model);
    match path.exists() {
        true => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        false => model.to_owned(),
    }
}

/// The running servers, which are closed when this is dropped.
#[derive(Debug)]
pub struct RunningServers {
    _remote: remote::RemoteServer,
    _local: LocalServer,
}

/// Starts the layer service over a base; memory that clients use is charged to `memory`.
///
/// # Errors
/// Fails if a server cannot be started.
pub fn start(
    settings: LayerSettings,
    places: ListenAddresses,
    base: &dyn EvaluateSites,
    info: CatalogInfo,
    memory: MemoryAccount,
) -> anyhow::Result<(Dispatcher, RunningServers)> {
    let sites = base.sites();
    let catalog = catalog(sites, &info);
    let (sender, inbox) = inbox();
    let maskable = maskable(&catalog.sites);
    let blobs: Arc<dyn Blobs> = Arc::new(BaseBlobs::new(&catalog, Some(info.plan))?);
    // The standard library keys its hashers at random, so each start of the process gets another number.
    let instance = RandomState::new().hash_one(std::process::id());
    let lent = ServedBase { instance, catalog_bytes: blobs.catalog_bytes(), maskable };
    let registry = Registry::new(settings.quotas, lent, sender, memory);
    let authenticator = Arc::new(match &places.key_file {
        Some(path) => Authenticator::open(path)
            .context("cannot use --layer-key-file, so split clients cannot be authenticated")?,
        None => Authenticator::without_keys(),
    });
    let max_frame_bytes = max_frame_bytes(sites, &settings);
    let parts = remote::RemoteParts {
        registry: registry.clone(),
        blobs: Arc::clone(&blobs),
        authenticator: Arc::clone(&authenticator),
        max_frame_bytes,
    };
    let private_socket = Some(places.socket.with_extension("zmq"));
    let ListenAddresses { tls, gateways, .. } = places;
    let remote =
        remote::RemoteSettings { tls, gateways, private_socket, ..remote::RemoteSettings::default() };
    // The first server that binds creates the directory, if it is missing.
    let remote = remote::RemoteServer::open(remote, parts)?;
    let local =
        LocalServer::open(&places.socket, LocalParts { registry: registry.clone(), authenticator, blobs })?;
    tracing::info!(
        socket = %places.socket.display(),
        tls = remote.address().map(tracing::field::display),
        sites = sites.len(),
        "serving split clients"
    );
    let dispatcher = Dispatcher::new(base, settings, registry, inbox, Box::new(SystemClock));
    Ok((dispatcher, RunningServers { _remote: remote, _local: local }))
}

fn catalog(sites: &[Site], info: &CatalogInfo) -> Catalog {
    Catalog {
        model: info.model.clone(),
        architecture: info.architecture.clone(),
        base_hash: info.base_hash,
        context_length: u32::try_from(info.context_length).unwrap_or(u32::MAX),
        kv_dtype: match info.kv {
            KvPrecision::F32 => KvDtype::F32,
            KvPrecision::F16 => KvDtype::F16,
            KvPrecision::Int8 => KvDtype::Int8,
            KvPrecision::Bf16 => KvDtype::Bf16,
        },
        adapter_dtype: match info.adapters {
            LoraPrecision::Exact => AdapterDtype::Exact,
            LoraPrecision::Compact => AdapterDtype::F16,
            LoraPrecision::Bf16 => AdapterDtype::Bf16,
        },
        sites: catalog_sites(sites),
        files: catalog_files(&info.plan),
    }
}

/// Returns the maximum bytes of a call's input or output rows.
fn max_frame_bytes(sites: &[Site], settings: &LayerSettings) -> usize {
    let outputs = |site: &Site| site.parts.iter().map(|part| part.rows).sum::<usize>();
    let widest = sites.iter().map(|site| site.columns.max(outputs(site))).max().unwrap_or(0);
    let rows = settings.quotas.tenant_rows.min(MAX_ROWS) as usize;
    let quota = usize::try_from(settings.quotas.tenant_bytes).unwrap_or(usize::MAX);
    widest.saturating_mul(rows).saturating_mul(NUMBER_BYTES).min(quota)
}

//! From the settings and an opened base to a hub with its doors open.

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
    linear_sites::{EvaluateSites, Site},
};
use shmproto::layer::{
    MAX_ROWS,
    control::{AdapterDtype, Catalog, KvDtype},
};

use super::{
    auth::Authenticator,
    base_files::{BaseBlobs, Blobs, catalog_files, catalog_sites, maskable},
    dispatcher::Dispatcher,
    event_queue::inbox,
    local::{LocalParts, LocalServer},
    registry::{Registry, ServedBase},
    remote,
    settings::LayerSettings,
    tls::TlsFiles,
};
use ::scheduling::clock::SystemClock;

/// Bytes of a number, at most.
const NUMBER_BYTES: usize = 4;

/// What there is to say of a base.
#[derive(Debug)]
pub struct BaseFacts {
    /// What the operator calls it.
    pub model: String,
    /// Its architecture, as its files say.
    pub architecture: String,
    /// Content identity.
    pub base_hash: [u8; 32],
    /// Longest sequence of the resident engine, in tokens; 0 without one.
    pub context_length: usize,
    /// How keys and values are kept by an engine beside it, as clients shall keep theirs.
    pub kv: KvPrecision,
    /// How adapters are.
    pub adapters: LoraPrecision,
    /// What clients are given of its files.
    pub plan: ClientWeightsPlan,
}

/// Where the doors are, and who may come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddresses {
    /// For clients of this host; `layers.zmq` is beside it.
    pub socket: PathBuf,
    /// For those of others.
    pub tls: Option<(std::net::SocketAddr, TlsFiles)>,
    /// API keys.
    pub key_file: Option<PathBuf>,
    /// Which gateways of other hosts may drive the executor, where there is TLS.
    pub gateways: Option<remote::GatewayAccess>,
}

/// What tenants are told the model is called: a hub's name as it is, of a path the last part alone.
#[must_use]
pub fn name_of(model: &str) -> String {
    let path = Path::new(model);
    match path.exists() {
        true => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        false => model.to_owned(),
    }
}

/// The open doors. Dropped, they are closed.
#[derive(Debug)]
pub struct RunningServers {
    _remote: remote::RemoteServer,
    _local: LocalServer,
}

/// Opens the layer service over a base; what clients make it hold is charged to `memory`.
///
/// # Errors
/// If a door cannot be opened.
pub fn start(
    settings: LayerSettings,
    places: ListenAddresses,
    base: &dyn EvaluateSites,
    facts: BaseFacts,
    memory: MemoryAccount,
) -> anyhow::Result<(Dispatcher, RunningServers)> {
    let sites = base.sites();
    let catalog = catalog(sites, &facts);
    let (sender, inbox) = inbox();
    let maskable = maskable(&catalog.sites);
    let blobs: Arc<dyn Blobs> = Arc::new(BaseBlobs::new(&catalog, Some(facts.plan))?);
    // The standard library keys its hashers at random: a number no other start of the process has.
    let instance = RandomState::new().hash_one(std::process::id());
    let lent = ServedBase { instance, catalog_bytes: blobs.catalog_bytes(), maskable };
    let registry = Registry::new(settings.quotas, lent, sender, memory);
    let authenticator = Arc::new(match &places.key_file {
        Some(path) => Authenticator::open(path)
            .context("--layer-key-file cannot be used, so split clients cannot be told apart")?,
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
    // The first to bind makes the directory, where there is none.
    let remote = remote::RemoteServer::open(remote, parts)?;
    let local =
        LocalServer::open(&places.socket, LocalParts { registry: registry.clone(), authenticator, blobs })?;
    tracing::info!(
        socket = %places.socket.display(),
        tls = remote.address().map(tracing::field::display),
        sites = sites.len(),
        "split clients are served"
    );
    let hub = Dispatcher::new(base, settings, registry, inbox, Box::new(SystemClock));
    Ok((hub, RunningServers { _remote: remote, _local: local }))
}

fn catalog(sites: &[Site], facts: &BaseFacts) -> Catalog {
    Catalog {
        model: facts.model.clone(),
        architecture: facts.architecture.clone(),
        base_hash: facts.base_hash,
        context_length: u32::try_from(facts.context_length).unwrap_or(u32::MAX),
        kv_dtype: match facts.kv {
            KvPrecision::F32 => KvDtype::F32,
            KvPrecision::F16 => KvDtype::F16,
            KvPrecision::Int8 => KvDtype::Int8,
        },
        adapter_dtype: match facts.adapters {
            LoraPrecision::Exact => AdapterDtype::Exact,
            LoraPrecision::Compact => AdapterDtype::F16,
            LoraPrecision::Bf16 => AdapterDtype::Bf16,
        },
        sites: catalog_sites(sites),
        files: catalog_files(&facts.plan),
    }
}

/// Most bytes of a call's rows, in or out.
fn max_frame_bytes(sites: &[Site], settings: &LayerSettings) -> usize {
    let outputs = |site: &Site| site.parts.iter().map(|part| part.rows).sum::<usize>();
    let widest = sites.iter().map(|site| site.columns.max(outputs(site))).max().unwrap_or(0);
    let rows = settings.quotas.tenant_rows.min(MAX_ROWS) as usize;
    let quota = usize::try_from(settings.quotas.tenant_bytes).unwrap_or(usize::MAX);
    widest.saturating_mul(rows).saturating_mul(NUMBER_BYTES).min(quota)
}

//! One TOML file describes a deployment.
//!
//! Every field may be left out. Three layers say what a field is, the higher wins: flags, the environment
//! (`HOLOBIONT_<SECTION>_<FIELD>`), the file. A key nobody knows is refused by name, never skipped. Limits that
//! nobody set are not passed on: their defaults live in the process that owns them.

mod values;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _},
    net::SocketAddr,
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;

use crate::exit::{Exit, Explain};
use values::setting;
pub(crate) use values::{
    Batching, ByteCount, ColdStart, CoreList, Device, Gbps, LogFormat, MAX_CORES, MAX_WORKERS, WaitFactor,
    WorkerCount,
};

/// Where the gateway listens unless told otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// How long running requests get at a stop unless told otherwise.
const DEFAULT_GRACE_MS: u64 = 10_000;

/// Deaths within a minute that end a deployment unless told otherwise.
const DEFAULT_MAX_DEATHS: u32 = 5;

/// Wait before the first restart unless told otherwise.
const DEFAULT_RESTART_DELAY_MS: u64 = 100;

const PREFIX: &str = "HOLOBIONT_";

/// Longest deployment file read: a room for thousands of adapters.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a deployment's configuration was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the deployment file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not a deployment; the source names key and line.
    #[error("the deployment file {path} is not valid")]
    File {
        /// The file.
        path: PathBuf,
        /// Key, line and what was expected there.
        source: Box<toml::de::Error>,
    },
    /// An environment variable is not a setting, or its value is wrong.
    #[error("the environment variable {name} is not valid")]
    Environment {
        /// The variable.
        name: String,
        /// What was expected.
        source: Box<toml::de::Error>,
    },
}

impl Explain for ConfigError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { .. } => Exit::Failed,
            Self::File { .. } | Self::Environment { .. } => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Read { .. } => None,
            Self::File { .. } => Some("correct or remove that line (the README lists every field)".into()),
            Self::Environment { name, .. } => Some(format!("unset {name}")),
        }
    }
}

/// Declares sections whose fields are all optional, with the rule that lays one layer over another.
macro_rules! sections {
    ($( $(#[$doc:meta])* $section:ident { $( $(#[$field_doc:meta])* $field:ident: $type:ty, )* } )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub(crate) struct $section {
            $( $(#[$field_doc])* #[serde(deserialize_with = "setting")] pub(crate) $field: Option<$type>, )*
        }

        impl $section {
            /// The names of the fields, for the test that finds them in the README.
            #[cfg(test)]
            const FIELDS: &[&str] = &[$( stringify!($field) ),*];

            /// Keeps what is set here and takes the rest from `lower`.
            fn or(self, lower: Self) -> Self {
                Self { $( $field: self.$field.or(lower.$field), )* }
            }
        }
    )* };
}

sections! {
    /// `[model]`: what is served.
    ModelSection {
        /// A path, a name in the models directory, or a hub name.
        name: String,
        /// What clients call the base model; by default its file's name.
        served_name: String,
        /// Longest sequence in tokens; by default the model's own limit.
        context_length: u32,
        /// Makes the weights of this number, for measurements; the model needs no weights then.
        random_weights: u64,
    }

    /// `[executor]`: the process that owns the weights.
    ExecutorSection {
        /// What computes: `cpu`, or a GPU as `cuda:0`.
        device: Device,
        /// Cores it computes on, as `0-3,8`.
        cores: String,
        /// Memory for keys and values.
        kv_bytes: ByteCount,
        /// How keys and values are stored.
        kv_dtype: String,
        /// Memory for adapters.
        adapter_bytes: ByteCount,
        /// How adapters are stored and multiplied.
        adapter_dtype: String,
        /// Memory for adapters on the device.
        device_adapter_bytes: ByteCount,
        /// What a request does whose adapter the device does not hold.
        cold_start: ColdStart,
        /// Emulates a link of so many gigabits a second to the device, for experiments.
        link_gbps: Gbps,
        /// Most sequences that run at once.
        max_running: u32,
        /// Most requests that wait.
        max_waiting: u32,
        /// Most prompt tokens of one step.
        chunk_tokens: u32,
    }

    /// `[workers]`: the processes that compute adapters while they travel to the device.
    WorkersSection {
        /// Cores they are pinned to, as `2-3`.
        cores: CoreList,
        /// How many there are; 0 for none.
        count: WorkerCount,
        /// How long an idle one spins before it parks.
        spin_us: u32,
    }

    /// `[layers]`: base layers for split clients.
    LayersSection {
        /// Serves them on this host, through shared memory and a socket in the state directory.
        local: bool,
        /// Serves them over TLS on this address and port.
        listen: SocketAddr,
        /// Certificate chain of that listener, in PEM.
        cert: PathBuf,
        /// Its private key, in PEM.
        cert_key: PathBuf,
        /// Clients whose certificates this authority has signed need no key.
        client_ca: PathBuf,
        /// File with the keys of tenants, as the gateway's.
        key_file: PathBuf,
        /// How calls are put together: `opportunistic`, `none` or `lockstep`.
        batching: Batching,
        /// Lengthens or shortens how long a call waits for company.
        wait_factor: WaitFactor,
        /// Most sessions at once.
        max_sessions: u32,
        /// Most sessions of a tenant.
        tenant_sessions: u32,
        /// Most rows of a tenant that wait.
        tenant_rows: u32,
        /// Most bytes of a tenant in slabs and messages.
        tenant_bytes: ByteCount,
        /// Rows a tenant may have computed in a second.
        rows_per_s: u32,
    }

    /// `[gateway]`: the process that speaks HTTP.
    GatewaySection {
        /// Address and port; port 0 takes any free one.
        listen: SocketAddr,
        /// Adapters are loaded over HTTP only from below this directory.
        adapter_root: PathBuf,
        /// File with the API keys.
        api_key_file: PathBuf,
        /// Longest body of a request.
        max_body_bytes: ByteCount,
        /// Most sequences under way at once.
        max_sequences: u32,
        /// Threads for HTTP.
        threads: u32,
        /// Listens beyond loopback without keys.
        insecure: bool,
        /// Requests a key may send in a minute; 0 for any number.
        requests_per_min_per_key: u32,
        /// Requests an adapter may get in a minute; 0 for any number.
        requests_per_min_per_adapter: u32,
        /// Most connections at once.
        max_connections: u32,
        /// How long a request's head may take.
        header_timeout_ms: u64,
        /// How long a request's body may take.
        body_timeout_ms: u64,
        /// How long a reader may take nothing of its answer.
        stall_timeout_ms: u64,
        /// Web pages of these origins may ask, separated by commas.
        cors_origins: String,
        /// Publishes vLLM's metric names too.
        vllm_metrics: bool,
        /// Adapters with metrics of their own; the rest share one label.
        max_adapter_labels: u32,
        /// Most adapters in the registry.
        max_adapters: u32,
        /// Longest file of an adapter.
        max_adapter_file_bytes: ByteCount,
        /// How long an executor may owe an answer.
        silence_ms: u64,
        /// Where traces go, in builds of the gateway that can.
        otlp_endpoint: String,
    }

    /// `[deployment]`: the processes together.
    DeploymentSection {
        /// Directory for state; one deployment each.
        state: PathBuf,
        /// `human` or `json`.
        log_format: LogFormat,
        /// How long running requests get at a stop.
        grace_ms: u64,
        /// So many deaths of a process within a minute end the deployment.
        max_deaths: NonZeroU32,
        /// Wait before a dead process is started again; doubled for each death within a minute.
        restart_delay_ms: u64,
    }
}

/// A deployment, or one layer of its description.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// `[model]`.
    pub(crate) model: ModelSection,
    /// `[executor]`.
    pub(crate) executor: ExecutorSection,
    /// `[workers]`.
    pub(crate) workers: WorkersSection,
    /// `[layers]`.
    pub(crate) layers: LayersSection,
    /// `[gateway]`.
    pub(crate) gateway: GatewaySection,
    /// `[deployment]`.
    pub(crate) deployment: DeploymentSection,
    /// `[adapters]`: directories by name.
    pub(crate) adapters: BTreeMap<String, PathBuf>,
}

impl Config {
    /// Flags over environment over file.
    pub(crate) fn layered(flags: Self, file: Option<&Path>) -> Result<Self, ConfigError> {
        let file = file.map(Self::from_file).transpose()?.unwrap_or_default();
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Ok(flags.or(Self::from_environment(variables)?).or(file))
    }

    /// Reads a deployment file. Its relative paths are relative to its directory.
    pub(crate) fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text =
            read_bounded(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let mut layer = Self::parse(&text)
            .map_err(|source| ConfigError::File { path: path.to_owned(), source: Box::new(source) })?;
        layer.resolve_paths(path.parent().unwrap_or(Path::new("")));
        Ok(layer)
    }

    /// Reads the text of a deployment file, and leaves its paths as they are.
    pub(crate) fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// Reads the layer that environment variables make. Variables without a section's name are somebody else's.
    pub(crate) fn from_environment(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut layer = Self::default();
        for (name, value) in variables {
            let Some((section, field)) = section_and_field(&name) else {
                continue;
            };
            let entry = toml::Table::from_iter([(field, toml::Value::String(value))]);
            let document = toml::Table::from_iter([(section, toml::Value::Table(entry))]);
            let one = Self::deserialize(document)
                .map_err(|source| ConfigError::Environment { name, source: Box::new(source) })?;
            layer = layer.or(one);
        }
        Ok(layer)
    }

    /// Keeps what is set here and takes the rest from `lower`.
    pub(crate) fn or(self, lower: Self) -> Self {
        let mut adapters = lower.adapters;
        adapters.extend(self.adapters);
        Self {
            model: self.model.or(lower.model),
            executor: self.executor.or(lower.executor),
            workers: self.workers.or(lower.workers),
            layers: self.layers.or(lower.layers),
            gateway: self.gateway.or(lower.gateway),
            deployment: self.deployment.or(lower.deployment),
            adapters,
        }
    }

    /// Where the gateway listens.
    pub(crate) fn listen(&self) -> SocketAddr {
        let default = || SocketAddr::from(([127, 0, 0, 1], 8080));
        self.gateway.listen.unwrap_or_else(default)
    }

    /// How long running requests get at a stop.
    pub(crate) fn grace(&self) -> Duration {
        Duration::from_millis(self.deployment.grace_ms.unwrap_or(DEFAULT_GRACE_MS))
    }

    /// When a dead process is started again, and when it is given up.
    pub(crate) fn restarts(&self) -> RestartPolicy {
        let deployment = &self.deployment;
        let delay_ms = deployment.restart_delay_ms.unwrap_or(DEFAULT_RESTART_DELAY_MS);
        RestartPolicy {
            max_deaths: deployment.max_deaths.map_or(DEFAULT_MAX_DEATHS, NonZeroU32::get),
            first_delay: Duration::from_millis(delay_ms),
        }
    }

    fn resolve_paths(&mut self, base: &Path) {
        let layers = &mut self.layers;
        let paths = [
            &mut self.gateway.adapter_root,
            &mut self.gateway.api_key_file,
            &mut self.deployment.state,
            &mut layers.cert,
            &mut layers.cert_key,
            &mut layers.client_ca,
            &mut layers.key_file,
        ];
        let adapters = self.adapters.values_mut();
        for path in paths.into_iter().flatten().chain(adapters) {
            *path = base.join(&*path);
        }
        // A model's name may be a name and not a path: it is a path only if something is there.
        if let Some(name) = &mut self.model.name
            && base.join(&*name).exists()
        {
            *name = base.join(&*name).to_string_lossy().into_owned();
        }
    }
}

/// A file's text, if it is short enough to be a deployment's.
fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB"));
    }
    Ok(text)
}

/// How often a process may die, and how soon it is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RestartPolicy {
    /// So many deaths within a minute are enough.
    pub(crate) max_deaths: u32,
    /// Wait after the first death; each further one within the minute doubles it.
    pub(crate) first_delay: Duration,
}

/// `HOLOBIONT_EXECUTOR_CORES` is field `cores` of section `executor`; adapters keep their names as written.
fn section_and_field(variable: &str) -> Option<(String, String)> {
    let (section, field) = variable.strip_prefix(PREFIX)?.split_once('_')?;
    match section {
        "MODEL" | "EXECUTOR" | "WORKERS" | "LAYERS" | "GATEWAY" | "DEPLOYMENT" => {
            Some((section.to_ascii_lowercase(), field.to_ascii_lowercase()))
        }
        "ADAPTERS" => Some(("adapters".into(), field.into())),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

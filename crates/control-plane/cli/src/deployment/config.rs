//! Configuration of a deployment, read from one TOML file.
//!
//! Every field is optional; the crate `settings` declares all fields. Flags take precedence over the
//! environment, and the environment over the file. An unknown key or variable is refused by name. Settings
//! that are not set are not passed on, because each process applies the same preset from `settings`.

pub(crate) mod bases;
pub(crate) mod executors;
mod old_names;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Deserializer, de};
use settings::{
    DeploymentSection, ExecutorSection, GatewaySection, LabSection, LayersSection, MemoryFraction,
    MemorySection, ModelSection, ProcessKind, ServiceClass, Setting, SettingFlags, SpeculationSection,
    TrainingSection, WorkersSection,
    renamed::Renamed,
    variables::{UnknownVariable, Variable},
};

use security::address::HostPort;

pub(crate) use self::executors::Executors;
use self::{bases::BaseEntry, executors::ExecutorEntry};
use crate::exit::{Exit, Explain};

/// Returns the default memory part of each of `executors` on one host; `None` for a single executor.
fn even_part(executors: usize) -> Option<MemoryFraction> {
    let parts = u32::try_from(executors).ok().filter(|parts| *parts > 1)?;
    NonZeroU32::new(parts).map(MemoryFraction::OneOf)
}

/// Maximum size of a deployment file, enough for thousands of adapters.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a deployment's configuration was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeploymentConfigError {
    /// The file could not be read.
    #[error("cannot read the deployment file {path}")]
    Read { path: PathBuf, source: io::Error },
    /// The file is not a deployment; the source names key and line.
    #[error("the deployment file {path} is not valid")]
    File {
        path: PathBuf,
        /// Error with key, line and expected value.
        source: Box<toml::de::Error>,
    },
    /// The value of a flag or of an environment variable is wrong.
    #[error("{name} is not valid")]
    Value {
        name: String,
        /// Error with the expected value.
        source: Box<toml::de::Error>,
    },
    /// The settings of several bases conflict with others.
    #[error("{0}")]
    Bases(String),
    /// The environment has a variable with our prefix that no program reads.
    #[error(transparent)]
    Unknown(#[from] UnknownVariable),
}

impl Explain for DeploymentConfigError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { .. } => Exit::Failed,
            Self::File { .. } | Self::Value { .. } | Self::Bases(_) | Self::Unknown(_) => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Read { .. } | Self::Value { .. } | Self::Bases(_) => None,
            Self::File { .. } => {
                Some("correct or remove that line; docs/reference/configuration.md lists all settings".into())
            }
            Self::Unknown(variable) => Some(format!("unset {}", variable.name)),
        }
    }
}

/// Configuration of a deployment, or one layer of it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DeploymentConfig {
    pub(crate) model: ModelSection,
    /// Section `[executor]`, or one `[[executor]]` for each of several executors.
    pub(crate) executor: Executors,
    /// Sections `[[base]]`: several base models; empty for the one of `[model]`.
    #[serde(deserialize_with = "bases::bases")]
    pub(crate) base: Vec<BaseEntry>,
    pub(crate) memory: MemorySection,
    pub(crate) speculation: SpeculationSection,
    pub(crate) workers: WorkersSection,
    pub(crate) layers: LayersSection,
    pub(crate) gateway: GatewaySection,
    pub(crate) training: TrainingSection,
    pub(crate) deployment: DeploymentSection,
    pub(crate) lab: LabSection,
    /// Section `[adapters]`: directories by adapter name.
    pub(crate) adapters: BTreeMap<String, PathBuf>,
    /// Sections `[[class]]`: service classes.
    #[serde(deserialize_with = "classes")]
    pub(crate) class: Vec<ServiceClass>,
    /// Names of older versions that the file uses.
    #[serde(skip)]
    pub(crate) renamed: Vec<Renamed>,
}

impl DeploymentConfig {
    /// Combines the layers: flags over environment over file.
    pub(crate) fn layered(flags: Self, file: Option<&Path>) -> Result<Self, DeploymentConfigError> {
        let file = file.map(Self::from_file).transpose()?.unwrap_or_default();
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let config = flags.or(Self::from_environment(variables)?).or(file);
        config.check_bases().map(|()| config)
    }

    /// Refuses settings that are not possible beside several bases.
    fn check_bases(&self) -> Result<(), DeploymentConfigError> {
        let mut adapters: Vec<&String> = self
            .adapters
            .keys()
            .chain(self.base.iter().flat_map(|base| base.layer.adapters.keys()))
            .collect();
        adapters.sort();
        if let Some(twice) = adapters.windows(2).find(|pair| pair[0] == pair[1]) {
            let conflict = format!("two bases have an adapter called `{}`; rename one", twice[0]);
            return Err(DeploymentConfigError::Bases(conflict));
        }
        let conflict = match self {
            _ if self.base.is_empty() => return Ok(()),
            _ if self.model.name.is_some() || self.model.served_name.is_some() => {
                "a model is set beside [[base]]; set `model` and `served_name` in a [[base]]"
            }
            _ if !self.executor.each.is_empty() => {
                "[[executor]] is set beside [[base]]; write [[base.executor]] below the base of the executor"
            }
            _ if self.gateway.registry.is_some() => {
                "several bases cannot share a registry with other hosts; start a deployment for each base, or \
                 remove `registry`"
            }
            _ => return Ok(()),
        };
        Err(DeploymentConfigError::Bases(conflict.to_owned()))
    }

    /// Reads a deployment file. Relative paths are resolved against the file's directory.
    pub(crate) fn from_file(path: &Path) -> Result<Self, DeploymentConfigError> {
        let text = read_bounded(path)
            .map_err(|source| DeploymentConfigError::Read { path: path.to_owned(), source })?;
        let mut layer = Self::parse(&text).map_err(|source| DeploymentConfigError::File {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        layer.resolve_paths(path.parent().unwrap_or(Path::new("")));
        Ok(layer)
    }

    /// Parses the text of a deployment file and leaves its paths unchanged.
    pub(crate) fn parse(text: &str) -> Result<Self, toml::de::Error> {
        match old_names::replaced(text) {
            Some((table, renamed)) => Ok(Self { renamed, ..Self::deserialize(table)? }),
            // Parsing the text directly keeps line numbers in errors.
            None => toml::from_str(text),
        }
    }

    /// Returns the layer of the given flags.
    pub(crate) fn from_flags(flags: &SettingFlags) -> Result<Self, DeploymentConfigError> {
        flags.given().try_fold(Self::default(), |layer, (setting, value)| {
            Ok(layer.or(Self::one(setting, value, || format!("--{}", setting.flag))?))
        })
    }

    /// Returns the layer of the environment variables.
    pub(crate) fn from_environment(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, DeploymentConfigError> {
        let mut layer = Self::default();
        let mut variables: Vec<_> = variables.into_iter().collect();
        // Sorting gives a variable precedence over its own older name.
        variables.sort_by_key(|(name, _)| matches!(Variable::named(name), Ok(Variable::Setting(setting)) if setting.variable() != *name));
        for (name, value) in variables {
            match Variable::named(&name)? {
                Variable::Setting(setting) => layer = layer.or(Self::one(setting, &value, || name)?),
                Variable::Adapter(adapter) => drop(layer.adapters.insert(adapter, value.into())),
                Variable::Other => {}
            }
        }
        Ok(layer)
    }

    /// Returns a layer with a single setting; `name` is the flag or variable for error messages.
    fn one(
        setting: &Setting,
        value: &str,
        name: impl FnOnce() -> String,
    ) -> Result<Self, DeploymentConfigError> {
        let entry = toml::Table::from_iter([(setting.field.to_owned(), toml::Value::from(value))]);
        let document = toml::Table::from_iter([(setting.section.to_owned(), toml::Value::Table(entry))]);
        Self::deserialize(document)
            .map_err(|source| DeploymentConfigError::Value { name: name(), source: Box::new(source) })
    }

    /// Keeps the values set here and takes the others from `lower`.
    pub(crate) fn or(self, lower: Self) -> Self {
        let mut adapters = lower.adapters;
        adapters.extend(self.adapters);
        Self {
            model: self.model.or(lower.model),
            executor: self.executor.or(lower.executor),
            base: if self.base.is_empty() { lower.base } else { self.base },
            memory: self.memory.or(lower.memory),
            speculation: self.speculation.or(lower.speculation),
            workers: self.workers.or(lower.workers),
            layers: self.layers.or(lower.layers),
            gateway: self.gateway.or(lower.gateway),
            training: self.training.or(lower.training),
            deployment: self.deployment.or(lower.deployment),
            lab: self.lab.or(lower.lab),
            adapters,
            class: if self.class.is_empty() { lower.class } else { self.class },
            renamed: [self.renamed, lower.renamed].concat(),
        }
    }

    /// Returns all values that are set, except those of single executors, with their declarations.
    pub(crate) fn set(&self) -> impl Iterator<Item = (&'static Setting, OsString)> {
        let computing = self
            .model
            .set()
            .chain(self.executor.common.set())
            .chain(self.memory.set())
            .chain(self.speculation.set())
            .chain(self.workers.set());
        let serving = self.layers.set().chain(self.gateway.set()).chain(self.training.set());
        computing.chain(serving).chain(self.deployment.set()).chain(self.lab.set())
    }

    /// Returns the settings that are passed unchanged to `process`, as options.
    pub(crate) fn arguments_for(&self, process: ProcessKind) -> Vec<OsString> {
        let settings = self.set().filter(|(setting, _)| setting.process == process);
        let arguments = settings.flat_map(|(setting, value)| {
            let flag = OsString::from(format!("--{}", setting.flag));
            match setting.is_switch() {
                true if value == "true" => vec![flag],
                true => Vec::new(),
                false => vec![flag, value],
            }
        });
        arguments.collect()
    }

    /// Returns the deployment of each base as if the base were the only one, with the base's name if there
    /// are several.
    pub(crate) fn bases(&self) -> Vec<(Option<String>, Self)> {
        if self.base.is_empty() {
            return vec![(None, self.clone())];
        }
        let bases = self.base.iter().enumerate();
        bases.map(|(index, base)| (Some(base.name.clone()), self.of_base(index, base))).collect()
    }

    /// Returns the configuration of each executor that is started on this host. A single executor has no
    /// name.
    pub(crate) fn members(&self) -> Vec<DeployedExecutor> {
        let of_base = |(base, config): (Option<String>, Self)| {
            let named = |member: DeployedExecutor| member.of_base(base.as_deref());
            config.members_of_base().into_iter().map(named).collect::<Vec<_>>()
        };
        let mut members: Vec<_> = self.bases().into_iter().flat_map(of_base).collect();
        // Several executors of one base get equal parts of the host's memory by default. The parts of several
        // bases follow from their needs.
        let part = if self.base.is_empty() { even_part(members.len()) } else { None };
        for memory in members.iter_mut().map(|member| &mut member.config.memory) {
            memory.process = memory.process.or(part);
        }
        members
    }

    fn members_of_base(&self) -> Vec<DeployedExecutor> {
        if self.executor.each.is_empty() {
            return vec![DeployedExecutor { name: None, base: None, config: self.clone() }];
        }
        let here: Vec<&ExecutorEntry> =
            self.executor.each.iter().filter(|entry| entry.address.is_none()).collect();
        let member = |(index, entry): (usize, &&ExecutorEntry)| DeployedExecutor {
            name: Some(entry.name.clone()),
            base: None,
            config: self.of(index, entry),
        };
        here.iter().enumerate().map(member).collect()
    }

    /// Returns names and addresses of executors on other hosts, which this deployment drives.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = (&str, &HostPort)> {
        self.executor.each.iter().filter_map(|entry| Some((entry.name.as_str(), entry.address.as_ref()?)))
    }

    /// Returns the deployment of one of several bases. Only the first base has a layer service, and so
    /// training.
    fn of_base(&self, index: usize, base: &BaseEntry) -> Self {
        let common = Self { base: Vec::new(), adapters: BTreeMap::new(), ..self.clone() };
        let mut config = base.layer.clone().or(common);
        config.model.served_name = config.model.served_name.or_else(|| Some(base.name.clone()));
        if base.layer.memory.directory.is_none() {
            config.memory.directory =
                self.memory.directory.as_ref().map(|directory| directory.join(&base.name));
        }
        if index > 0 {
            config.layers = LayersSection { local: Some(false), ..LayersSection::default() };
        } else {
            config.adapters.extend(self.adapters.clone());
        }
        config
    }

    /// Returns the configuration of one of several executors. Only the first executor has a layer service,
    /// because one listener address serves one process.
    fn of(&self, index: usize, entry: &ExecutorEntry) -> Self {
        let mut config = self.clone();
        let common = ExecutorSection::clone(&self.executor);
        config.executor = Executors { common: common.or(entry.executor.clone()), each: Vec::new() };
        config.memory = entry.memory.clone().or(self.memory.clone());
        config.workers = entry.workers.clone().or(self.workers.clone());
        config.lab = entry.lab.clone().or(self.lab.clone());
        if entry.memory.directory.is_none() {
            config.memory.directory =
                self.memory.directory.as_ref().map(|directory| directory.join(&entry.name));
        }
        if index > 0 {
            config.layers = LayersSection { local: Some(false), ..LayersSection::default() };
        }
        config
    }

    /// Returns the address on which the gateway listens.
    pub(crate) fn listen(&self) -> SocketAddr {
        let listen = self.gateway.listen.or(GatewaySection::presets().listen);
        listen.expect("the address has a preset")
    }

    /// Returns the maximum number of trainers; 0 if no executor of this host has a layer service for local
    /// clients.
    pub(crate) fn max_trainers(&self) -> u32 {
        let trainers = self.training.trainers.or(TrainingSection::presets().trainers);
        match self.layers.local {
            Some(false) => 0,
            _ if self.members().is_empty() => 0,
            _ => trainers.expect("the number has a preset"),
        }
    }

    /// Returns the time that running requests get at a stop.
    pub(crate) fn grace(&self) -> Duration {
        let grace_ms = self.deployment.grace_ms.or(DeploymentSection::presets().grace_ms);
        Duration::from_millis(grace_ms.expect("the grace has a preset"))
    }

    /// Returns the maximum time that a process may run without a heartbeat.
    pub(crate) fn watchdog(&self) -> Duration {
        let watchdog_ms = self.deployment.watchdog_ms.or(DeploymentSection::presets().watchdog_ms);
        Duration::from_millis(watchdog_ms.map(NonZeroU64::get).expect("the silence has a preset"))
    }

    /// Returns when a crashed process is restarted, and when the deployment gives up.
    pub(crate) fn restarts(&self) -> RestartPolicy {
        let deployment = self.deployment.clone().or(DeploymentSection::presets());
        let delay_ms = deployment.restart_delay_ms.expect("the delay has a preset");
        RestartPolicy {
            max_crashes_per_min: deployment
                .max_crashes_per_min
                .map(NonZeroU32::get)
                .expect("the number of crashes has a preset"),
            first_delay: Duration::from_millis(delay_ms),
        }
    }

    /// Returns the directory that contains the adapters, as an absolute path.
    pub(crate) fn adapter_root(&self) -> PathBuf {
        let root = self.gateway.adapter_root.clone().or(GatewaySection::presets().adapter_root);
        let root = root.expect("the adapter root has a preset");
        // The gateway reports a directory that does not exist.
        root.canonicalize().unwrap_or(root)
    }

    /// Whether an executor of this host serves layers to split clients and trainers. Random weights have no
    /// files from which the layer service could compute.
    pub(crate) fn serves_layers(&self) -> bool {
        let is_on = self.layers.local != Some(false) && self.lab.random_weights.is_none();
        is_on && !self.members().is_empty()
    }

    fn resolve_paths(&mut self, base: &Path) {
        let layers = &mut self.layers;
        let paths = [
            &mut self.gateway.adapter_root,
            &mut self.gateway.api_key_file,
            &mut self.gateway.executor_ca,
            &mut self.gateway.executor_cert,
            &mut self.gateway.executor_cert_key,
            &mut self.deployment.state,
            &mut self.memory.directory,
            &mut layers.cert,
            &mut layers.cert_key,
            &mut layers.client_ca,
            &mut layers.key_file,
        ];
        let adapters = self.adapters.values_mut();
        for path in paths.into_iter().flatten().chain(adapters).chain(self.executor.paths()) {
            *path = base.join(&*path);
        }
        // `model.name` may be a name of a model, so it is resolved as a path only if the file exists.
        if let Some(name) = &mut self.model.name
            && base.join(&*name).exists()
        {
            *name = base.join(&*name).to_string_lossy().into_owned();
        }
        self.base.iter_mut().for_each(|entry| entry.layer.resolve_paths(base));
    }
}

fn classes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ServiceClass>, D::Error> {
    let classes = Vec::deserialize(deserializer)?;
    ServiceClass::check(&classes).map_err(de::Error::custom)?;
    Ok(classes)
}

/// Reads a file of at most `MAX_FILE_BYTES`.
fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the file is longer than 1 MiB"));
    }
    Ok(text)
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DeployedExecutor {
    /// Name of the executor, if there are several.
    pub(crate) name: Option<String>,
    /// Name of the executor's base, if there are several.
    pub(crate) base: Option<String>,
    /// Deployment as if this executor were the only one.
    pub(crate) config: DeploymentConfig,
}

impl DeployedExecutor {
    /// Names the executor after its base; one of several executors of a base has both names.
    fn of_base(mut self, base: Option<&str>) -> Self {
        let Some(base) = base else { return self };
        self.name = Some(self.name.map_or_else(|| base.to_owned(), |name| format!("{base}-{name}")));
        self.base = Some(base.to_owned());
        self
    }
}

/// Limits and delays for restarts of crashed processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RestartPolicy {
    /// Number of crashes within a minute that ends the deployment.
    pub(crate) max_crashes_per_min: u32,
    /// Delay after the first crash; each further crash within a minute doubles it.
    pub(crate) first_delay: Duration,
}

#[cfg(test)]
mod tests;

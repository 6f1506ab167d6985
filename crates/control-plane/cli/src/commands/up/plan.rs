//! Turns a configuration into checked command lines. [`bases`] plans several bases.

mod bases;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
};

use settings::{LogFormat, ProcessKind, ServiceClass};

pub(crate) use self::bases::BaseProcesses;
use self::bases::PlannedBase;
use super::{
    detach,
    errors::UpError,
    process::{CommandSpec, Instance, ProcessRole, WorkerSpec},
    state_dir::StateDir,
};
use crate::{
    commands::doctor::host_ledger::HostLedger,
    deployment::{
        config::{DeployedExecutor, DeploymentConfig},
        cores::{self, CoreSplit, WorkerCore},
        program_paths,
        registry::Registration,
    },
    home::HomeDirectory,
    terminal::quoted,
};

/// Checked settings and command lines of a start.
#[derive(Debug)]
pub(crate) struct StartPlan {
    /// Name by which clients request the first base.
    pub(crate) served_name: String,
    /// Names by which clients request the other bases.
    pub(crate) other_bases: Vec<String>,
    /// Names of the configured adapters.
    pub(crate) adapters: Vec<String>,
    /// Directory from which adapters are loaded and into which `tune` writes them.
    pub(crate) adapter_root: PathBuf,
    /// Command that stops this deployment and no other.
    pub(crate) stop_command: String,
    /// Entry by which other commands find this deployment; the deployment also runs without it.
    pub(crate) registration: Option<Registration>,
    /// True if requests need an API key, for the banner's examples.
    pub(crate) has_keys: bool,
    /// Format of all logs.
    pub(crate) log_format: LogFormat,
    /// Maximum number of concurrent trainers; 0 for no trainer.
    pub(crate) max_trainers: u32,
    pub(crate) recipes: CommandSpecs,
    /// Deviations from the configuration that do not prevent a start.
    pub(crate) warnings: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct CommandSpecs {
    /// One `base-executor` per instance.
    pub(crate) executors: Vec<(Instance, CommandSpec)>,
    /// Number of executors on other hosts, which this deployment does not start.
    pub(crate) elsewhere: usize,
    pub(crate) gateway: CommandSpec,
    /// Command of `holobiont-trainer`, if training is enabled.
    pub(crate) trainer: Option<CommandSpec>,
    /// One `lora-worker` per core.
    pub(crate) workers: Vec<(WorkerSpec, CommandSpec)>,
    /// Processes of each base.
    pub(crate) bases: Vec<BaseProcesses>,
}

impl StartPlan {
    /// Resolves names to paths and finds the programs.
    pub(crate) fn new(
        config: &DeploymentConfig,
        home: &HomeDirectory,
        state: &StateDir,
    ) -> Result<Self, UpError> {
        let bases = bases::find(config, home)?;
        let ledger = HostLedger::of(config, home)?;
        let first = &bases[0];
        bases.iter().try_for_each(|base| check_adapters(&base.config.adapters))?;
        let is_for_people = io::stderr().is_terminal() || detach::is_for_people();
        let default_format = if is_for_people { LogFormat::Human } else { LogFormat::Json };
        let chosen = config.deployment.log_format.filter(|format| *format != LogFormat::Auto);
        let log_format = chosen.unwrap_or(default_format);
        let mut members = config.members();
        bases::check_cores(&members, &cores::allowed())?;
        bases::divide_memory(&mut members, ledger.as_ref());
        let splits = CoreSplit::each(&members, &cores::allowed());
        let mut processes = bases::processes(&bases, ledger.as_ref());
        let (executors, workers) =
            members_of(&bases, &members, &splits, &mut processes, (state, log_format))?;
        let recipe = |role, program, arguments| recipe(config, state, role, program, arguments);
        let (trainer, warnings) = trainer_program(config);
        let trainer =
            trainer.map(|program| recipe(ProcessRole::Trainer, program, trainer_arguments(config, state)));
        let instances = &processes[0].executors;
        let gateway = gateway_arguments(&first.config, &first.served_name, state, instances, log_format);
        let gateway = with_elsewhere(gateway, config, &first.model);
        let expected = expected_workers(config, &splits[..instances.len()]);
        let mut gateway = with_helpers(gateway, &expected, trainer.as_ref().map(|_| state.trainer_socket()));
        gateway.extend(bases::gateway_options(&bases, &processes, &splits, ledger.as_ref(), state));
        Ok(Self {
            max_trainers: trainer.as_ref().map_or(0, |_| config.max_trainers()),
            recipes: CommandSpecs {
                executors,
                elsewhere: config.elsewhere().count(),
                gateway: recipe(ProcessRole::Gateway, program(ProcessRole::Gateway)?, gateway),
                trainer,
                workers,
                bases: processes,
            },
            warnings,
            adapters: bases.iter().flat_map(|base| base.config.adapters.keys().cloned()).collect(),
            other_bases: bases[1..].iter().map(|base| base.served_name.clone()).collect(),
            adapter_root: config.adapter_root(),
            registration: Registration::new(home, state.path()).ok(),
            stop_command: stop_command(state.path(), &home.state()),
            has_keys: config.gateway.api_key_file.is_some(),
            served_name: first.served_name.clone(),
            log_format,
        })
    }
}

/// Commands of the executors and of their workers.
type MemberCommands = (Vec<(Instance, CommandSpec)>, Vec<(WorkerSpec, CommandSpec)>);

/// Returns the commands of all members, and adds each process to its base.
fn members_of(
    bases: &[PlannedBase],
    members: &[DeployedExecutor],
    splits: &[CoreSplit],
    processes: &mut [BaseProcesses],
    (state, log_format): (&StateDir, LogFormat),
) -> Result<MemberCommands, UpError> {
    let (mut executors, mut workers) = (Vec::new(), Vec::new());
    for (index, (member, split)) in members.iter().zip(splits).enumerate() {
        let instance = Instance::new(index, member.name.as_deref());
        state.check_socket_path(instance)?;
        let base = bases.iter().position(|base| base.name == member.base).unwrap_or(0);
        let model = &bases[base].model;
        let arguments = executor_arguments(&member.config, split, model, (state, instance), log_format);
        let role = ProcessRole::Executor(instance);
        let mut command = recipe(&member.config, state, role, program(role)?, arguments);
        if let Some(directory) = bases::own_directory(base, member, state)? {
            command.set("--precision-file", &directory.join("precision.json").to_string_lossy());
        }
        executors.push((instance, command));
        let before = workers.len();
        add_workers(&mut workers, &member.config, split, (state, instance), log_format)?;
        processes[base].executors.push(instance);
        processes[base].workers.extend(workers[before..].iter().map(|(worker, _)| *worker));
    }
    Ok((executors, workers))
}

fn recipe(
    config: &DeploymentConfig,
    state: &StateDir,
    role: ProcessRole,
    program: PathBuf,
    arguments: Vec<OsString>,
) -> CommandSpec {
    let (notify_socket, longest_silence) = (state.notify_socket(role), config.watchdog());
    CommandSpec { program, arguments, notify_socket, longest_silence }
}

/// Returns the command that stops the deployment in `state`, quoted for a shell.
pub(crate) fn stop_command(state: &Path, default: &Path) -> String {
    match default.canonicalize().is_ok_and(|default| default == state) {
        true => "holobiont down".to_owned(),
        false => format!("holobiont down --state {}", quoted(&state.to_string_lossy())),
    }
}

/// Returns a hub name without its revision, or else the name of the file or directory.
fn default_served_name(config: &DeploymentConfig, model: &Path) -> String {
    match config.model.name.as_deref() {
        Some(name) if crate::models::hub::is_hub_name(name) && !Path::new(name).exists() => {
            name.split('@').next().unwrap_or(name).to_owned()
        }
        _ => {
            // The path `.` has no file name, but its canonical form has one.
            let whole = model.canonicalize().unwrap_or_else(|_| model.to_owned());
            let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
            name.unwrap_or_default().to_string_lossy().into_owned()
        }
    }
}

fn check_adapters(adapters: &BTreeMap<String, PathBuf>) -> Result<(), UpError> {
    let missing = adapters.iter().find(|(_, path)| !path.join("adapter_config.json").is_file());
    missing.map_or(Ok(()), |(name, path)| Err(UpError::NoAdapter { name: name.clone(), path: path.clone() }))
}

#[derive(Default)]
struct ArgumentList(Vec<OsString>);

impl ArgumentList {
    fn with(mut self, flag: &str, value: impl Into<OsString>) -> Self {
        self.0.extend([flag.into(), value.into()]);
        self
    }

    fn with_setting(self, flag: &str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.with(flag, value.to_string()),
            None => self,
        }
    }
}

fn executor_arguments(
    config: &DeploymentConfig,
    split: &CoreSplit,
    model: &Path,
    (state, instance): (&StateDir, Instance),
    log_format: LogFormat,
) -> Vec<OsString> {
    let layers = match config.layers.local {
        Some(false) => "off".into(),
        _ => state.layer_socket().into_os_string(),
    };
    let mut arguments = ArgumentList(vec!["--exit-with-stdin".into()])
        .with("--model", model)
        .with("--precision-file", state.precision())
        .with("--socket", state.socket(instance))
        .with("--worker-socket", state.worker_socket(instance))
        .with("--max-workers", split.workers.len().to_string())
        .with("--log-format", log_format.to_string())
        .with("--grace-ms", config.grace().as_millis().to_string())
        .with("--layers", layers)
        // The devices of a group name their cores themselves.
        .with_setting("--cores", split.executor.as_ref().filter(|_| config.executor.devices.is_none()))
        .with_setting("--max-adapter-file-bytes", config.gateway.max_adapter_file_bytes);
    if config.memory.disk.is_some() && config.memory.directory.is_none() {
        arguments = arguments.with("--disk-directory", state.history(instance));
    }
    for weight in config.class.iter().flat_map(ServiceClass::cache_weights) {
        arguments = arguments.with("--cache-weight", weight.to_string());
    }
    arguments.0.extend(config.arguments_for(ProcessKind::Executor));
    arguments.0
}

fn gateway_arguments(
    config: &DeploymentConfig,
    served_name: &str,
    state: &StateDir,
    instances: &[Instance],
    log_format: LogFormat,
) -> Vec<OsString> {
    let mut arguments = ArgumentList(vec!["--exit-with-stdin".into()]);
    for instance in instances {
        let socket = state.socket(*instance);
        arguments = match instance.name() {
            Some(name) => arguments.with("--executor", pair(name, &socket)),
            None => arguments.with("--socket", socket),
        };
    }
    let mut arguments = arguments
        .with("--listen", config.listen().to_string())
        .with("--state", state.path())
        .with("--served-model-name", served_name)
        .with("--grace-ms", config.grace().as_millis().to_string())
        .with("--log-format", log_format.to_string());
    for (name, path) in &config.adapters {
        arguments = arguments.with("--adapter", pair(name, path));
    }
    for class in &config.class {
        arguments = arguments.with("--class", class.to_string());
    }
    arguments.0.extend(config.arguments_for(ProcessKind::Gateway));
    arguments.0
}

/// Adds the executors of other hosts and the model path. The gateway reads the model's tokenizer there
/// before executors report theirs.
fn with_elsewhere(gateway: Vec<OsString>, config: &DeploymentConfig, model: &Path) -> Vec<OsString> {
    let mut arguments = ArgumentList(gateway);
    for (name, address) in config.elsewhere() {
        arguments = arguments.with("--executor", format!("{name}=tls://{address}"));
    }
    arguments.with("--model", model).0
}

fn pair(name: &str, path: &Path) -> OsString {
    let mut pair = OsString::from(format!("{name}="));
    pair.push(path);
    pair
}

/// Returns the number of workers per executor that the gateway expects here; 0 for executors of other
/// hosts.
fn expected_workers(config: &DeploymentConfig, splits: &[CoreSplit]) -> Vec<usize> {
    let here = splits.iter().map(|split| split.workers.len());
    here.chain(config.elsewhere().map(|_| 0)).collect()
}

/// Adds the number of workers per executor, so that the gateway notices missing ones, and the trainer
/// socket.
fn with_helpers(gateway: Vec<OsString>, workers: &[usize], trainer: Option<PathBuf>) -> Vec<OsString> {
    let mut arguments = ArgumentList(gateway);
    if workers.iter().any(|&count| count > 0) {
        let counts: Vec<_> = workers.iter().map(usize::to_string).collect();
        arguments = arguments.with("--expected-workers", counts.join(","));
    }
    match trainer {
        Some(socket) => arguments.with("--trainer-socket", socket).0,
        None => arguments.0,
    }
}

/// Returns the trainer program, if training is enabled and the program exists. Everything else works
/// without.
fn trainer_program(config: &DeploymentConfig) -> (Option<PathBuf>, Vec<String>) {
    if config.max_trainers() == 0 {
        return (None, Vec::new());
    }
    match program(ProcessRole::Trainer) {
        Ok(program) => (Some(program), Vec::new()),
        Err(error) => (None, vec![format!("training is off: {error}")]),
    }
}

fn trainer_arguments(config: &DeploymentConfig, state: &StateDir) -> Vec<OsString> {
    let mut arguments = ArgumentList(vec!["serve".into(), "--exit-with-stdin".into()])
        .with("--socket", state.trainer_socket())
        .with("--max-trainers", config.max_trainers().to_string());
    arguments.0.push("--".into());
    let cores = config.training.cores.as_ref().map(|cores| {
        let cores: Vec<_> = cores.0.iter().map(u32::to_string).collect();
        cores.join(",")
    });
    arguments.with("--executor", state.layer_socket()).with_setting("--cores", cores).0
}

/// Adds the workers of one executor after those of earlier executors.
fn add_workers(
    workers: &mut Vec<(WorkerSpec, CommandSpec)>,
    config: &DeploymentConfig,
    split: &CoreSplit,
    (state, instance): (&StateDir, Instance),
    log_format: LogFormat,
) -> Result<(), UpError> {
    for place in &split.workers {
        let worker = WorkerSpec { index: workers.len(), core: place.core };
        let recipe = CommandSpec {
            program: program(ProcessRole::Worker(worker))?,
            arguments: worker_arguments(config, *place, (state, instance), log_format),
            notify_socket: state.notify_socket(ProcessRole::Worker(worker)),
            longest_silence: config.watchdog(),
        };
        workers.push((worker, recipe));
    }
    Ok(())
}

fn worker_arguments(
    config: &DeploymentConfig,
    place: WorkerCore,
    (state, instance): (&StateDir, Instance),
    log_format: LogFormat,
) -> Vec<OsString> {
    ArgumentList(vec!["--exit-with-stdin".into()])
        .with("--executor", state.worker_socket(instance))
        .with("--core", place.core.to_string())
        .with("--log-format", log_format.to_string())
        .with_setting("--spin-us", config.workers.spin_us.or(place.spin_us()))
        .0
}

fn program(role: ProcessRole) -> Result<PathBuf, UpError> {
    program_paths::find(role.program()).ok_or(UpError::NoProgram { role })
}

#[cfg(test)]
mod tests;

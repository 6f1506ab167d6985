//! The bases of a start: the options of the gateway for each, and which processes belong to which base.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf};

use settings::{BaseOption, CoreList, ModelSection};

use super::{
    super::{
        errors::UpError,
        process::{Instance, WorkerSpec},
        state_dir::StateDir,
    },
    ArgumentList, default_served_name,
};
use crate::{
    commands::doctor::host_ledger::HostLedger,
    deployment::{
        config::{DeployedExecutor, DeploymentConfig},
        cores::{CoreSplit, named_cores},
    },
    home::HomeDirectory,
    models,
};

/// Name of the only base, by which the gateway calls it too.
const ONLY_BASE: &str = "base";

/// One base of a start.
#[derive(Debug)]
pub(super) struct PlannedBase {
    /// Name in administration; `None` for the only base.
    pub(super) name: Option<String>,
    pub(super) served_name: String,
    pub(super) model: PathBuf,
    /// Deployment as if this base were the only one.
    pub(super) config: DeploymentConfig,
}

/// The processes of one base, which start and end together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BaseProcesses {
    /// Name in the gateway's requests.
    pub(crate) name: String,
    pub(crate) executors: Vec<Instance>,
    pub(crate) workers: Vec<WorkerSpec>,
    /// Whether the processes run at the start.
    pub(crate) is_awake: bool,
}

/// Finds the models of all bases, and refuses one model for two bases.
pub(super) fn find(config: &DeploymentConfig, home: &HomeDirectory) -> Result<Vec<PlannedBase>, UpError> {
    let mut planned: Vec<PlannedBase> = Vec::new();
    for (name, config) in config.bases() {
        let model = models::find(config.model.name.as_deref(), home)?;
        let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
        if let Some(other) = planned.iter().find(|other| real(&other.model) == real(&model)) {
            let names = [&other.name, &name].map(|name| name.clone().unwrap_or_default());
            return Err(UpError::SameModel { names, model });
        }
        let served_name =
            config.model.served_name.clone().unwrap_or_else(|| default_served_name(&config, &model));
        planned.push(PlannedBase { name, served_name, model, config });
    }
    Ok(planned)
}

/// Refuses cores that this machine does not have.
pub(super) fn check_cores(members: &[DeployedExecutor], allowed: &CoreList) -> Result<(), UpError> {
    for member in members.iter().filter(|member| member.base.is_some()) {
        let (executor, workers) = (named_cores(&member.config), &member.config.workers.cores);
        let named = executor.iter().chain(workers).flat_map(|cores| &cores.0);
        if let Some(core) = named.into_iter().find(|core| !allowed.0.contains(core)) {
            let base = member.base.clone().unwrap_or_default();
            return Err(UpError::NoCore { base, core: *core, allowed: allowed.to_string() });
        }
    }
    Ok(())
}

/// Gives each executor its part of the host's memory.
pub(super) fn divide_memory(members: &mut [DeployedExecutor], ledger: Option<&HostLedger>) {
    for member in members {
        let part = member.base.as_deref().and_then(|base| ledger?.part_of(base));
        member.config.memory.process = part.or(member.config.memory.process);
    }
}

/// Returns the gateway's options for the sleep of its bases, and for all bases beside the first.
pub(super) fn gateway_options(
    bases: &[PlannedBase],
    processes: &[BaseProcesses],
    splits: &[CoreSplit],
    ledger: Option<&HostLedger>,
    state: &StateDir,
) -> Vec<OsString> {
    let first = &bases[0];
    let is_supervised = bases.len() > 1 || sleep_after_s(&first.config) > 0;
    if !is_supervised {
        return Vec::new();
    }
    let asleep = ledger.map(HostLedger::asleep).unwrap_or_default().join(",");
    let mut options = ArgumentList(vec!["--supervised".into()]).with("--asleep", asleep);
    let (Some(ledger), Some(name)) = (ledger, &first.name) else { return options.0 };
    options = options
        .with("--base-name", name)
        .with("--base-host-bytes", bytes_of(ledger, name).to_string())
        .with("--bases-host-bytes", ledger.limit_bytes.to_string());
    for (base, processes) in bases.iter().zip(processes).skip(1) {
        options = options.with("--base", option_of(base, processes, splits, ledger, state).to_string());
    }
    options.0
}

fn sleep_after_s(config: &DeploymentConfig) -> u64 {
    config.model.sleep_after_s.or(ModelSection::presets().sleep_after_s).unwrap_or_default()
}

fn bytes_of(ledger: &HostLedger, name: &str) -> u64 {
    ledger.bases.iter().find(|base| base.name == name).map_or(0, |base| base.bytes)
}

fn option_of(
    base: &PlannedBase,
    processes: &BaseProcesses,
    splits: &[CoreSplit],
    ledger: &HostLedger,
    state: &StateDir,
) -> BaseOption {
    let name = processes.name.clone();
    let own = processes.executors.iter().filter_map(|instance| {
        let workers = u32::try_from(splits[instance.index].workers.len()).unwrap_or(u32::MAX);
        Some((instance.name()?.to_owned(), (state.socket(*instance), workers)))
    });
    // The option lists numbers of workers in the order of the executors' names.
    let own: BTreeMap<String, (PathBuf, u32)> = own.collect();
    let gateway = &base.config.gateway;
    BaseOption {
        served_name: base.served_name.clone(),
        model: Some(base.model.to_string_lossy().into_owned()),
        workers: own.values().map(|(_, workers)| *workers).collect(),
        executors: own.into_iter().map(|(name, (socket, _))| (name, socket)).collect(),
        adapters: base.config.adapters.clone(),
        tool_call_parser: gateway.tool_call_parser,
        reasoning_parser: gateway.reasoning_parser,
        classifier_from_token: gateway.classifier_from_token.clone(),
        score_template: gateway.score_template.clone(),
        sleep_after_s: sleep_after_s(&base.config),
        host_bytes: bytes_of(ledger, &name),
        name,
    }
}

/// Returns the processes of each base, without any yet.
pub(super) fn processes(bases: &[PlannedBase], ledger: Option<&HostLedger>) -> Vec<BaseProcesses> {
    let asleep = ledger.map(HostLedger::asleep).unwrap_or_default();
    let of_base = |base: &PlannedBase| {
        let name = base.name.clone().unwrap_or_else(|| ONLY_BASE.to_owned());
        let is_awake = !asleep.contains(&name);
        BaseProcesses { name, executors: Vec::new(), workers: Vec::new(), is_awake }
    };
    bases.iter().map(of_base).collect()
}

/// Returns the state directory of an executor's base; `None` for the first base, which has that of the
/// deployment.
pub(super) fn own_directory(
    index: usize,
    member: &DeployedExecutor,
    state: &StateDir,
) -> Result<Option<PathBuf>, UpError> {
    let base = member.base.as_deref().filter(|_| index > 0);
    base.map(|base| state.base_directory(base)).transpose()
}

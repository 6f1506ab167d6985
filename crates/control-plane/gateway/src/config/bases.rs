//! Settings of the bases: the executors, parsers and adapters of each, and when it sleeps.

use std::{collections::BTreeSet, path::Path, time::Duration};

use settings::{BaseOption, MAX_BASES, ReasoningParser, ToolCallParser};

use super::{
    Args, GatewayConfig, GatewayConfigError, ScoringDefaults,
    args::{BasesArgs, ScoringArgs},
    values::{OutputParsers, StartAdapter},
};
use crate::{
    executor::Endpoint,
    executors::Address,
    served_base::{ONLY_BASE, SleepPhase, SleepSettings, Supervisor},
};

/// Subdirectory of the state directory with the state of the bases beside the first.
const BASES: &str = "bases";

/// One base with its executors.
#[derive(Debug, Clone)]
pub struct BaseConfig {
    /// Unique name in administration.
    pub name: String,
    /// Whether the base is the first, whose state is that of a gateway with one base.
    pub is_first: bool,
    pub executors: Vec<Address>,
    /// Expected number of workers of each executor; a single number applies to all.
    pub expected_workers: Vec<u32>,
    pub model: Option<String>,
    /// Name in requests; `None` takes the name from the file name.
    pub served_model_name: Option<String>,
    pub parsers: OutputParsers,
    pub scoring: ScoringDefaults,
    pub adapters: Vec<StartAdapter>,
    pub sleep: SleepSettings,
}

/// The bases beside the first, and the sleep of all bases.
#[derive(Debug, Clone)]
pub struct BasesConfig {
    /// Name of the first base in administration.
    pub first: String,
    /// Sleep of the first base.
    pub sleep: SleepSettings,
    pub others: Vec<BaseConfig>,
    /// Process that ends and starts executors; `None` keeps all bases awake.
    pub supervisor: Option<Supervisor>,
    /// Host memory for all bases that are awake.
    pub host_bytes: Option<u64>,
    /// Maximum time that a request waits until a sleeping base serves.
    pub wake_timeout: Duration,
}

impl Default for BasesConfig {
    fn default() -> Self {
        Self {
            first: ONLY_BASE.to_owned(),
            sleep: SleepSettings::default(),
            others: Vec::new(),
            supervisor: None,
            host_bytes: None,
            wake_timeout: Duration::from_secs(120),
        }
    }
}

impl BasesConfig {
    /// Takes the settings from `args`, and checks the names.
    pub(super) fn of(args: &Args) -> Result<Self, GatewayConfigError> {
        let bases = &args.bases;
        check_names(args)?;
        let others = bases.bases.iter().map(|base| other(base, bases)).collect::<Result<_, _>>()?;
        Ok(Self {
            sleep: sleep(&bases.base_name, bases.sleep_after_s, bases.base_host_bytes.0, bases),
            first: bases.base_name.clone(),
            others,
            supervisor: bases.supervised.then(Supervisor::on_stdout),
            host_bytes: bases.bases_host_bytes.map(|bytes| bytes.0),
            wake_timeout: Duration::from_millis(bases.wake_timeout_ms),
        })
    }
}

impl GatewayConfig {
    /// Returns all bases, the first one first.
    #[must_use]
    pub fn all_bases(&self) -> Vec<BaseConfig> {
        let first = BaseConfig {
            name: self.bases.first.clone(),
            is_first: true,
            executors: self.executors.clone(),
            expected_workers: self.telemetry.expected_workers.clone(),
            model: self.model.clone(),
            served_model_name: self.served_model_name.clone(),
            parsers: self.parsers,
            scoring: self.scoring.clone(),
            adapters: self.adapters.clone(),
            sleep: self.bases.sleep.clone(),
        };
        std::iter::once(first).chain(self.bases.others.iter().cloned()).collect()
    }
}

/// Returns the state directory of a base beside the first.
#[must_use]
pub(crate) fn state_of(state: &Path, base: &str) -> std::path::PathBuf {
    state.join(BASES).join(base)
}

fn check_names(args: &Args) -> Result<(), GatewayConfigError> {
    let bases = &args.bases;
    if bases.bases.is_empty() {
        return check_asleep(bases);
    }
    if bases.bases.len() >= MAX_BASES {
        return Err(GatewayConfigError::TooManyBases);
    }
    if args.adapters.registry.is_some() {
        return Err(GatewayConfigError::SharedBases);
    }
    let served = args.served_model_name.clone().ok_or(GatewayConfigError::UnnamedBase)?;
    let (mut names, mut served) = (BTreeSet::from([bases.base_name.clone()]), BTreeSet::from([served]));
    let mut executors: BTreeSet<String> =
        args.executors.executors.iter().map(|named| named.name.clone()).collect();
    if executors.is_empty() {
        return Err(GatewayConfigError::UnnamedExecutor);
    }
    for base in &bases.bases {
        let name = base.name.clone();
        if !names.insert(name.clone()) || !served.insert(base.served_name.clone()) {
            return Err(GatewayConfigError::SameBase(name));
        }
        if super::is_no_model_name(&base.served_name) {
            return Err(GatewayConfigError::ModelName(base.served_name.clone()));
        }
        if let Some(same) = base.executors.keys().find(|executor| !executors.insert((*executor).clone())) {
            return Err(GatewayConfigError::SameExecutor(same.clone()));
        }
    }
    check_asleep(bases)
}

fn check_asleep(bases: &BasesArgs) -> Result<(), GatewayConfigError> {
    let names: Vec<&str> = std::iter::once(&bases.base_name)
        .chain(bases.bases.iter().map(|base| &base.name))
        .map(String::as_str)
        .collect();
    // An empty list has one empty name.
    let mut asleep = bases.asleep.iter().filter(|name| !name.is_empty());
    if !bases.supervised
        && (asleep.clone().next().is_some()
            || bases.bases.iter().any(|base| base.sleep_after_s > 0)
            || bases.sleep_after_s > 0)
    {
        return Err(GatewayConfigError::Unsupervised);
    }
    match asleep.find(|name| !names.contains(&name.as_str())) {
        Some(unknown) => Err(GatewayConfigError::UnknownBase(unknown.clone())),
        None => Ok(()),
    }
}

fn sleep(name: &str, after_s: u64, host_bytes: u64, args: &BasesArgs) -> SleepSettings {
    let is_asleep = args.asleep.iter().any(|asleep| asleep == name);
    SleepSettings {
        after: (after_s > 0).then(|| Duration::from_secs(after_s)),
        first: if is_asleep { SleepPhase::Asleep } else { SleepPhase::Awake },
        host_bytes,
    }
}

fn other(base: &BaseOption, args: &BasesArgs) -> Result<BaseConfig, GatewayConfigError> {
    let tokens = base.classifier_from_token.iter().flat_map(|tokens| tokens.split(','));
    let scoring = ScoringArgs {
        classifier_from_token: tokens.map(str::to_owned).collect(),
        score_template: base.score_template.clone(),
    };
    let executors = base.executors.iter();
    let adapters = base.adapters.iter();
    Ok(BaseConfig {
        name: base.name.clone(),
        is_first: false,
        executors: executors
            .map(|(name, socket)| Address { name: name.clone(), endpoint: Endpoint::Socket(socket.clone()) })
            .collect(),
        expected_workers: if base.workers.is_empty() { vec![0] } else { base.workers.clone() },
        model: base.model.clone(),
        served_model_name: Some(base.served_name.clone()),
        parsers: OutputParsers {
            calls: base.tool_call_parser.unwrap_or(ToolCallParser::Auto),
            reasoning: base.reasoning_parser.unwrap_or(ReasoningParser::Auto),
        },
        scoring: ScoringDefaults::read(&scoring)?,
        adapters: adapters
            .map(|(name, path)| StartAdapter { name: name.clone(), path: path.clone() })
            .collect(),
        sleep: sleep(&base.name, base.sleep_after_s, base.host_bytes, args),
    })
}

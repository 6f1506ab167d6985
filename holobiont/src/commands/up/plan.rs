//! A configuration turned into checked command lines.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
};

use settings::LogFormat;

use super::{
    detach,
    errors::UpError,
    process::{Recipe, Role, Worker},
    state_dir::StateDir,
};
use crate::{
    deployment::{
        config::Config,
        cores::{self, Split, WorkerCore},
        registry::Registration,
        sibling,
    },
    home::Home,
    models,
    terminal::quoted,
};

/// Everything a start needs, checked.
#[derive(Debug)]
pub(crate) struct Plan {
    /// What clients call the base model.
    pub(crate) served_name: String,
    /// Names of the adapters that were asked for.
    pub(crate) adapters: Vec<String>,
    /// The command that stops this deployment and no other.
    pub(crate) stop_command: String,
    /// Tells other commands where this deployment is; without it, it runs as well.
    pub(crate) registration: Option<Registration>,
    /// File with API keys, for the greeting's examples.
    pub(crate) has_keys: bool,
    /// Form of all logs.
    pub(crate) log_format: LogFormat,
    /// Command line of `base-executor`.
    pub(crate) executor: Recipe,
    /// Command line of `gateway`.
    pub(crate) gateway: Recipe,
    /// Command line of each `lora-worker`.
    pub(crate) workers: Vec<(Worker, Recipe)>,
}

impl Plan {
    /// Resolves names to paths, and finds the programs.
    pub(crate) fn new(config: &Config, home: &Home, state: &StateDir) -> Result<Self, UpError> {
        let model = models::find(config.model.name.as_deref(), home)?;
        let served_name =
            config.model.served_name.clone().unwrap_or_else(|| default_served_name(config, &model));
        check_adapters(&config.adapters)?;
        let is_for_people = io::stderr().is_terminal() || detach::is_for_people();
        let default_format = if is_for_people { LogFormat::Human } else { LogFormat::Json };
        let chosen = config.deployment.log_format.filter(|format| *format != LogFormat::Auto);
        let log_format = chosen.unwrap_or(default_format);
        let split = Split::new(config, &cores::allowed());
        let gateway = gateway_arguments(config, &served_name, state, log_format);
        Ok(Self {
            executor: Recipe {
                program: program(Role::Executor)?,
                arguments: executor_arguments(config, &split, &model, state, log_format),
                notify_socket: state.notify_socket(Role::Executor),
                longest_silence: config.watchdog(),
            },
            gateway: Recipe {
                program: program(Role::Gateway)?,
                arguments: with_expected_workers(gateway, split.workers.len()),
                notify_socket: state.notify_socket(Role::Gateway),
                longest_silence: config.watchdog(),
            },
            workers: workers(config, &split, state, log_format)?,
            adapters: config.adapters.keys().cloned().collect(),
            registration: Registration::new(home, state.path()).ok(),
            stop_command: stop_command(state.path(), &home.state()),
            has_keys: config.gateway.api_key_file.is_some(),
            served_name,
            log_format,
        })
    }
}

/// The command that stops the deployment in `state`, as a shell reads it.
pub(crate) fn stop_command(state: &Path, default: &Path) -> String {
    match default.canonicalize().is_ok_and(|default| default == state) {
        true => "holobiont down".to_owned(),
        false => format!("holobiont down --state {}", quoted(&state.to_string_lossy())),
    }
}

/// A hub name without its revision, else the name of the file or directory.
fn default_served_name(config: &Config, model: &Path) -> String {
    match config.model.name.as_deref() {
        Some(name) if models::hub::is_hub_name(name) && !Path::new(name).exists() => {
            name.split('@').next().unwrap_or(name).to_owned()
        }
        _ => {
            // `.` has no name, the directory that it means has one.
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

/// Arguments under construction.
#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
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

/// What is set and goes to `process` as it is.
fn handed_on(config: &Config, process: settings::Process) -> Vec<OsString> {
    let settings = config.set().filter(|(setting, _)| setting.process == process);
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

fn executor_arguments(
    config: &Config,
    split: &Split,
    model: &Path,
    state: &StateDir,
    log_format: LogFormat,
) -> Vec<OsString> {
    let layers = match config.layers.local {
        Some(false) => "off".into(),
        _ => state.layer_socket().into_os_string(),
    };
    let mut arguments = Arguments(vec!["--exit-with-stdin".into()])
        .with("--model", model)
        .with("--socket", state.socket())
        .with("--worker-socket", state.worker_socket())
        .with("--max-workers", split.workers.len().to_string())
        .with("--log-format", log_format.to_string())
        .with("--grace-ms", config.grace().as_millis().to_string())
        .with("--layers", layers)
        .with_setting("--cores", split.executor.as_ref());
    arguments.0.extend(handed_on(config, settings::Process::Executor));
    arguments.0
}

fn gateway_arguments(
    config: &Config,
    served_name: &str,
    state: &StateDir,
    log_format: LogFormat,
) -> Vec<OsString> {
    let mut arguments = Arguments(vec!["--exit-with-stdin".into()])
        .with("--socket", state.socket())
        .with("--listen", config.listen().to_string())
        .with("--state", state.path())
        .with("--served-model-name", served_name)
        .with("--grace-ms", config.grace().as_millis().to_string())
        .with("--log-format", log_format.to_string());
    for (name, path) in &config.adapters {
        let mut pair = OsString::from(format!("{name}="));
        pair.push(path);
        arguments = arguments.with("--adapter", pair);
    }
    arguments.0.extend(handed_on(config, settings::Process::Gateway));
    arguments.0
}

/// So that one that is missing is seen.
fn with_expected_workers(mut arguments: Vec<OsString>, count: usize) -> Vec<OsString> {
    if count > 0 {
        arguments.extend(["--expected-workers".into(), count.to_string().into()]);
    }
    arguments
}

fn workers(
    config: &Config,
    split: &Split,
    state: &StateDir,
    log_format: LogFormat,
) -> Result<Vec<(Worker, Recipe)>, UpError> {
    let one = |(index, place): (usize, &WorkerCore)| {
        let worker = Worker { index, core: place.core };
        let recipe = Recipe {
            program: program(Role::Worker(worker))?,
            arguments: worker_arguments(config, *place, state, log_format),
            notify_socket: state.notify_socket(Role::Worker(worker)),
            longest_silence: config.watchdog(),
        };
        Ok((worker, recipe))
    };
    split.workers.iter().enumerate().map(one).collect()
}

fn worker_arguments(
    config: &Config,
    place: WorkerCore,
    state: &StateDir,
    log_format: LogFormat,
) -> Vec<OsString> {
    Arguments(vec!["--exit-with-stdin".into()])
        .with("--executor", state.worker_socket())
        .with("--core", place.core.to_string())
        .with("--log-format", log_format.to_string())
        .with_setting("--spin-us", config.workers.spin_us.or(place.spin_us()))
        .0
}

fn program(role: Role) -> Result<PathBuf, UpError> {
    sibling::find(role.program()).ok_or(UpError::NoProgram { role })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(arguments: &[OsString]) -> String {
        arguments.iter().map(|argument| argument.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    /// A state directory, and what its paths begin with.
    fn state() -> (tempfile::TempDir, StateDir, String) {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::claim(directory.path(), std::time::Duration::ZERO).unwrap();
        let run = state.socket().parent().unwrap().display().to_string();
        (directory, state, run)
    }

    fn split(config: &Config, cores: &str) -> Split {
        Split::new(config, &cores.parse().unwrap())
    }

    #[test]
    fn limits_nobody_set_are_left_to_the_process_that_owns_them() {
        let ((_directory, state, run), config) = (state(), Config::default());
        let split = split(&config, "0");
        let arguments = executor_arguments(&config, &split, Path::new("/m"), &state, LogFormat::Human);
        let expected = format!(
            "--exit-with-stdin --model /m --socket {run}/executor.sock --worker-socket {run}/workers.sock \
             --max-workers 0 --log-format human --grace-ms 10000 --layers {run}/layers.sock"
        );
        assert_eq!(text(&arguments), expected);
        assert!(workers(&config, &split, &state, LogFormat::Human).unwrap().is_empty());
    }

    #[test]
    fn a_worker_is_told_its_core_and_the_executor_and_the_gateway_how_many_there_are() {
        let ((_directory, state, run), config) = (state(), Config::default());
        let split = split(&config, "0-7");
        let executor = text(&executor_arguments(&config, &split, Path::new("/m"), &state, LogFormat::Json));
        assert!(executor.contains("--max-workers 2 ") && executor.ends_with(" --cores 0-5"), "{executor}");
        let worker = text(&worker_arguments(&config, split.workers[1], &state, LogFormat::Json));
        let expected = format!("--exit-with-stdin --executor {run}/workers.sock --core 7 --log-format json");
        assert_eq!(worker, expected);
        assert_eq!(text(&with_expected_workers(Vec::new(), 2)), "--expected-workers 2");
        assert_eq!(text(&with_expected_workers(Vec::new(), 0)), "");
    }

    #[test]
    fn every_setting_reaches_its_process() {
        let file = r#"
            model = { context_length = 7, random_weights = 25 }
            executor = { device = "cuda:1", cores = "0-1", kv_bytes = "1 KiB", kv_dtype = "f16", adapter_bytes = 2, adapter_dtype = "bf16", device_adapter_bytes = "3 KiB", cold_start = "on-demand", link_gbps = 2.5, max_running = 3, max_waiting = 4, max_waiting_tokens = 25, chunk_tokens = 5 }
            gateway = { listen = "127.0.0.1:6", adapter_root = "/r", api_key_file = "/k", max_body_bytes = "2 KiB", max_sequences = 10, target_delay_ms = 26, delay_interval_ms = 27, threads = 8, insecure = true, requests_per_min_per_key = 11, requests_per_min_per_adapter = 12, max_connections = 13, header_timeout_ms = 14, body_timeout_ms = 15, stall_timeout_ms = 16, cors_origins = "http://a,http://b", vllm_metrics = true, max_adapter_labels = 17, max_adapters = 18, max_adapter_file_bytes = "1 KiB", silence_ms = 19, otlp_endpoint = "http://o" }
            training = { tenant_jobs = 28, max_training_file_bytes = "3 KiB", tenant_training_bytes = "4 KiB" }
            workers = { cores = "2", count = 1, spin_us = 20 }
            layers = { local = false, listen = "127.0.0.1:20", cert = "/c", cert_key = "/ck", client_ca = "/ca", key_file = "/lk", batching = "lockstep", wait_factor = 1.5, max_sessions = 21, tenant_sessions = 22, tenant_rows = 23, tenant_bytes = "1 KiB", rows_per_s = 24 }
            deployment = { grace_ms = 9 }
            adapters = { a = "/x", b = "y" }
        "#;
        let config: Config = toml::from_str(file).unwrap();
        let ((_directory, state, _), split) = (state(), split(&config, "0-3"));
        let executor = text(&executor_arguments(&config, &split, Path::new("/m"), &state, LogFormat::Json));
        let expected = "--max-workers 1 --log-format json --grace-ms 9 --layers off --cores 0-1 --context-length 7 --random-weights 25 \
            --device cuda:1 --kv-bytes 1024 --kv-dtype f16 --adapter-bytes 2 --adapter-dtype bf16 --device-adapter-bytes 3072 \
            --cold-start on-demand --link-gbps 2.5 --max-running 3 --max-waiting 4 --max-waiting-tokens 25 --chunk-tokens 5 \
            --layer-listen 127.0.0.1:20 --layer-cert /c --layer-cert-key /ck --layer-client-ca /ca --layer-key-file /lk \
            --layer-batching lockstep --layer-wait-factor 1.5 --layer-max-sessions 21 --layer-tenant-sessions 22 --layer-tenant-rows 23 \
            --layer-tenant-bytes 1024 --layer-rows-per-s 24";
        assert!(executor.ends_with(expected), "{executor}");

        let worker = text(&worker_arguments(&config, split.workers[0], &state, LogFormat::Human));
        assert!(worker.ends_with("--core 2 --log-format human --spin-us 20"), "{worker}");
        let gateway = text(&gateway_arguments(&config, "base", &state, LogFormat::Json));
        let expected = "--served-model-name base --grace-ms 9 --log-format json --adapter a=/x --adapter b=y --adapter-root /r \
            --api-key-file /k --max-body-bytes 2048 --max-sequences 10 --target-delay-ms 26 --delay-interval-ms 27 --threads 8 --insecure --requests-per-min-per-key 11 \
            --requests-per-min-per-adapter 12 --max-connections 13 --header-timeout-ms 14 --body-timeout-ms 15 --stall-timeout-ms 16 \
            --cors-origins http://a,http://b --vllm-metrics --max-adapter-labels 17 --max-adapters 18 --max-adapter-file-bytes 1024 \
            --silence-ms 19 --otlp-endpoint http://o --tenant-jobs 28 --max-training-file-bytes 3072 --tenant-training-bytes 4096";
        assert!(gateway.ends_with(expected), "{gateway}");
    }

    #[test]
    fn a_directory_without_an_adapter_is_not_found_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let adapters = BTreeMap::from([("pirate".to_owned(), directory.path().to_owned())]);
        let error = check_adapters(&adapters).unwrap_err();
        assert!(error.to_string().contains("pirate"), "{error}");
        std::fs::write(directory.path().join("adapter_config.json"), "{}").unwrap();
        check_adapters(&adapters).unwrap();
    }

    #[test]
    fn a_model_is_served_under_its_files_name_or_its_hub_name() {
        let mut config = Config::default();
        assert_eq!(default_served_name(&config, Path::new("/m/SmolLM2.Q4_1.gguf")), "SmolLM2.Q4_1");
        config.model.name = Some("org/name@main".into());
        assert_eq!(default_served_name(&config, Path::new("/cache/snapshots/abc")), "org/name");
    }
}

//! `holobiont check`: checks a deployment file and everything it names, without starting anything.

mod access;
mod drafts;
mod executors;
mod fleet;

pub(crate) use self::executors::named;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use model::{
    shape::source::WeightSource as _,
    sources::random::{RandomSource, RandomSourceError},
};

use settings::{CoreList, DeviceChoice, renamed};

use crate::{
    deployment::{
        config::{DeploymentConfig, DeploymentConfigError},
        cores::{self, CoreSharing, CoreSplit, named_cores},
        program_paths,
    },
    exit::{Exit, Explain},
    home::HomeDirectory,
    models,
    terminal::{
        Terminal,
        findings::{CheckFailure, Finding, report},
        printable,
        table::size,
    },
};

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// Deployment file [default: environment variables and defaults only]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Checks a deployment and prints a line for each finding.
pub(crate) fn run(arguments: &CheckArguments, terminal: Terminal) -> Result<(), CheckFailure> {
    let file = arguments.config.as_deref();
    let name = file.map_or_else(|| "configuration".to_owned(), |file| file.display().to_string());
    let (findings, exit) = match DeploymentConfig::layered(DeploymentConfig::default(), file) {
        Ok(config) => {
            let mut findings = vec![Finding::ok(name, "all settings are known and valid")];
            let renamed = config.renamed.iter().cloned().chain(renamed::in_use());
            findings.extend(renamed.map(|renamed| {
                Finding::warn(renamed.old.clone(), renamed.to_string(), "write the new name")
            }));
            findings.extend(deployment(&config, &HomeDirectory::from_environment()));
            let lines = SettingLines::of(file);
            findings.iter_mut().for_each(|finding| lines.point_at(finding));
            (findings, Exit::Usage)
        }
        Err(error) => (vec![Finding::error(name, &error)], DeploymentConfigError::exit(&error)),
    };
    report(&findings, exit, terminal)
}

/// Returns the findings about everything that a configuration names.
pub(crate) fn deployment(config: &DeploymentConfig, home: &HomeDirectory) -> Vec<Finding> {
    let allowed = cores::allowed();
    let bases = config.bases();
    let mut findings: Vec<_> =
        bases.iter().flat_map(|(name, base)| models_of(name.as_deref(), base, home)).collect();
    let members = config.members();
    let splits = CoreSplit::each(&members, &allowed);
    for (member, split) in members.iter().zip(&splits) {
        let looked_at = executor(&member.config, split, &allowed);
        findings.extend(looked_at.into_iter().map(|finding| named(finding, member)));
    }
    findings.extend(executors::together(&members, &splits));
    // `holobiont doctor` compares the memory of several bases, of which some may sleep.
    if config.base.is_empty() {
        findings.push(executors::memory(config, &members));
    }
    findings.extend(executors::elsewhere(config));
    let adapters = bases.iter().flat_map(|(_, base)| &base.adapters);
    findings.extend(adapters.map(|(name, path)| adapter(name, path)));
    if let Some(path) = &config.gateway.api_key_file
        && (config.gateway.shared_keys != Some(true) || path.exists())
    {
        findings.push(access::keys("[gateway] api_key_file", path));
    }
    findings.extend(access::classes(config));
    findings.push(access::listen(config));
    if let Some(root) = &config.gateway.adapter_root {
        findings.push(match root.is_dir() {
            true => Finding::ok("[gateway] adapter_root", root.display().to_string()),
            false => Finding::fail(
                "[gateway] adapter_root",
                format!("{} is not a directory", root.display()),
                "create it",
            ),
        });
    }
    findings.extend(fleet::shared(config));
    findings.extend(access::layers(&config.layers));
    findings.extend(["base-executor", "gateway"].map(program));
    if splits.iter().any(|split| !split.workers.is_empty()) {
        findings.push(program("lora-worker"));
    }
    findings.extend(trainer(config, &allowed));
    findings
}

/// Checks the model and the draft model of a base, which has a name if there are several.
fn models_of(base: Option<&str>, config: &DeploymentConfig, home: &HomeDirectory) -> Vec<Finding> {
    let findings = [model(config, home)].into_iter().chain(drafts::model(config, home));
    let named = |finding: Finding| match base {
        Some(base) => Finding { name: format!("{base}: {}", finding.name), ..finding },
        None => finding,
    };
    findings.map(named).collect()
}

/// Checks device, cores and workers of one executor.
fn executor(config: &DeploymentConfig, split: &CoreSplit, allowed: &CoreList) -> Vec<Finding> {
    let device = config.executor.device.filter(|device| *device != DeviceChoice::Cpu).map(device);
    device.into_iter().chain([cores(config, split, allowed), workers(config, split, allowed)]).collect()
}

/// Checks a device with the executor program, because this program cannot reach devices.
pub(crate) fn device(device: DeviceChoice) -> Finding {
    const NAME: &str = "[executor] device";
    let Some(program) = program_paths::find("base-executor") else {
        return Finding::warn(
            NAME,
            format!("cannot check {device} without the program base-executor"),
            "install it",
        );
    };
    match Command::new(program).args(["device", &device.to_string()]).output() {
        Ok(output) => {
            let said = [output.stdout, output.stderr].concat();
            said_finding(NAME, output.status.success(), &said, "use device = \"cpu\"")
        }
        Err(error) => Finding::fail(NAME, format!("cannot run base-executor: {error}"), "install it again"),
    }
}

/// Makes a finding of the last output line, which holds cause and next step. The step `else_fix` is for a
/// line without one.
pub(crate) fn said_finding(name: &str, is_usable: bool, said: &[u8], else_fix: &str) -> Finding {
    let said = String::from_utf8_lossy(said);
    let line = printable(said.lines().last().unwrap_or("the program printed nothing").trim());
    match is_usable {
        true => Finding::ok(name, line),
        false => {
            let line = line.strip_prefix("error: ").unwrap_or(&line);
            let (found, fix) = line.split_once("; ").unwrap_or((line, else_fix));
            Finding::fail(name, found, fix)
        }
    }
}

/// Checks a model with random weights: its shape, and a tokenizer for the gateway.
fn random_model(path: &Path, seed: u64) -> Finding {
    const NAME: &str = "[lab] random_weights";
    let shape = match RandomSource::open(path, seed) {
        Ok(source) => source,
        Err(error @ RandomSourceError::Read { .. }) => {
            return Finding::fail(NAME, error.to_string(), "name a directory with a config.json");
        }
        Err(error) => {
            return Finding::fail(NAME, error.to_string(), "choose a model of a supported architecture");
        }
    };
    if !path.join("tokenizer.json").is_file() {
        let found = format!("there is no tokenizer.json in {}", path.display());
        return Finding::fail(NAME, found, "add the tokenizer.json and tokenizer_config.json of the model");
    }
    let architecture = &shape.config().architecture;
    Finding::warn(
        NAME,
        format!("{}: {architecture}", path.display()),
        "random weights give meaningless answers and serve for measurements only",
    )
}

fn model(config: &DeploymentConfig, home: &HomeDirectory) -> Finding {
    const NAME: &str = "[model] name";
    let path = match models::find(config.model.name.as_deref(), home) {
        Ok(path) => path,
        Err(error) => return Finding::error(NAME, &error),
    };
    if let Some(seed) = config.lab.random_weights {
        return random_model(&path, seed);
    }
    let opened = model::sources::open::open(&path).map(|weights| (weights.config().clone(), path.clone()));
    match opened {
        Ok((shape, path)) => {
            let bytes = models::model_at(&path).map_or(0, |model| model.bytes);
            let found = format!("{}: {}, {}", path.display(), shape.architecture, size(bytes));
            match config.model.context_length {
                Some(asked) if asked as usize > shape.context_length => Finding::fail(
                    "[model] context_length",
                    format!("{asked} tokens exceed the model's maximum of {}", shape.context_length),
                    "lower context_length or remove it",
                ),
                _ => Finding::ok(NAME, found),
            }
        }
        Err(error) => Finding::fail(
            NAME,
            format!("{}: {error}", path.display()),
            "fetch the model again: holobiont pull NAME",
        ),
    }
}

/// Checks that the core list is valid and that this machine has the cores.
fn cores(config: &DeploymentConfig, split: &CoreSplit, allowed: &CoreList) -> Finding {
    const NAME: &str = "[executor] cores";
    let Some(wanted) = named_cores(config) else {
        let left = split.executor.as_ref();
        return Finding::ok(
            NAME,
            left.map_or_else(|| format!("all {}", allowed.0.len()), |left| left.to_string()),
        );
    };
    match wanted.0.difference(&allowed.0).next() {
        None => Finding::ok(NAME, wanted.to_string()),
        Some(core) => Finding::fail(
            NAME,
            format!("core {core} is not among the {} this process may use", allowed.0.len()),
            "holobiont doctor shows the cores there are",
        ),
    }
}

/// Checks that every worker has a core and, if possible, shares none with the executor.
fn workers(config: &DeploymentConfig, split: &CoreSplit, allowed: &CoreList) -> Finding {
    const NAME: &str = "[workers] cores";
    let cores = CoreList(split.workers.iter().map(|worker| worker.core).collect());
    let [first, ..] = split.workers.as_slice() else {
        return Finding::ok(NAME, "no workers; the executor computes all adapters");
    };
    if let Some(core) = cores.0.difference(&allowed.0).next() {
        let found = format!("core {core} is not among those this process may use: {allowed}");
        return Finding::fail(NAME, found, "holobiont doctor shows the cores there are");
    }
    let count = split.workers.len();
    let found = format!("{cores}, for {count} worker{}", if count == 1 { "" } else { "s" });
    if split.workers.iter().all(|worker| worker.neighbour == CoreSharing::None) {
        return Finding::ok(NAME, format!("{found}, none shared with the executor"));
    }
    let found = format!("{found}, shared with the executor");
    match allowed.0.len() > cores.0.len() && named_cores(config).is_some() {
        true => Finding::warn(NAME, found, format!("remove core {} from [executor].cores", first.core)),
        false => Finding::ok(NAME, found),
    }
}

/// Checks program and cores of the trainer, without which a deployment still serves.
fn trainer(config: &DeploymentConfig, allowed: &CoreList) -> Option<Finding> {
    const NAME: &str = "[training] trainers";
    const GO_WITHOUT: &str = "install it, or set [training] trainers = 0";
    let count = match config.max_trainers() {
        0 => return None,
        count => count,
    };
    let cores = config.training.cores.as_ref();
    if let Some(core) = cores.and_then(|cores| cores.0.difference(&allowed.0).next()) {
        let found = format!("core {core} is not among those this process may use: {allowed}");
        return Some(Finding::fail("[training] cores", found, "holobiont doctor shows the cores there are"));
    }
    Some(match program_paths::find("holobiont-trainer") {
        Some(program) => Finding::ok(NAME, format!("at most {count}, program {}", program.display())),
        None => {
            Finding::warn(NAME, "holobiont-trainer is neither beside `holobiont` nor on PATH", GO_WITHOUT)
        }
    })
}

fn adapter(name: &str, path: &Path) -> Finding {
    let label = format!("[adapters] {name}");
    let holds = |file: &str| path.join(file).is_file();
    let fix = format!("holobiont adapters check {}", path.display());
    match (holds("adapter_config.json"), holds("adapter_model.safetensors")) {
        (true, true) => Finding::ok(label, path.display().to_string()),
        (false, _) => Finding::fail(
            label,
            format!("there is no adapter_config.json in {}", path.display()),
            "name a PEFT adapter's directory",
        ),
        (true, false) => {
            Finding::fail(label, format!("there is no adapter_model.safetensors in {}", path.display()), fix)
        }
    }
}

fn program(name: &str) -> Finding {
    match program_paths::find(name) {
        Some(path) => Finding::ok(name, path.display().to_string()),
        None => Finding::fail(
            name,
            "neither beside `holobiont` nor on PATH",
            format!("cargo build --release --bin {name}"),
        ),
    }
}

/// Lines of a deployment file, to find settings in it.
struct SettingLines(Vec<String>);

impl SettingLines {
    fn of(file: Option<&Path>) -> Self {
        let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        Self(text.lines().map(str::to_owned).collect())
    }

    /// Adds the line number of a finding's setting, if the file has the setting.
    fn point_at(&self, finding: &mut Finding) {
        let Some((section, field)) = finding.name.split_once("] ") else { return };
        let header = format!("{section}]");
        let sections = self.0.iter().enumerate().skip_while(|(_, line)| line.trim() != header).skip(1);
        let mut fields = sections.take_while(|(_, line)| !line.trim_start().starts_with('['));
        let is_field =
            |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim().trim_matches('"') == field);
        if let Some((index, _)) = fields.find(|(_, line)| is_field(line)) {
            finding.name.push_str(&format!(" (line {})", index + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    #[test]
    fn workers_are_held_against_the_cores_there_are_and_the_executors() {
        let finding = |machine: &str, settings: &str| {
            let (config, machine) = (toml::from_str(settings).unwrap(), machine.parse().unwrap());
            workers(&config, &CoreSplit::new(&config, &machine), &machine)
        };
        let foreign = finding("0-3", "workers.cores = '3-4'");
        assert_eq!(foreign.health, Health::Fail);
        assert!(foreign.found.contains("core 4"), "{foreign:?}");
        let apart = finding("0-7", "");
        assert_eq!(
            (apart.health, apart.found.as_str()),
            (Health::Ok, "6-7, for 2 workers, none shared with the executor")
        );
        assert_eq!(finding("0-1", "").found, "1, for 1 worker, shared with the executor");
        let clash = finding("0-7", "executor.cores = '0-7'");
        assert_eq!(clash.health, Health::Warn, "{clash:?}");
        assert!(finding("0-7", "workers.count = 0").found.starts_with("no workers"));
    }

    #[test]
    fn trainers_are_looked_at_where_there_are_any() {
        let finding = |settings: &str| trainer(&toml::from_str(settings).unwrap(), &"0-3".parse().unwrap());
        assert!(finding("training.trainers = 0").is_none() && finding("layers.local = false").is_none());
        let foreign = finding("training.cores = '3-4'").unwrap();
        assert!(foreign.health == Health::Fail && foreign.found.contains("core 4"), "{foreign:?}");
        assert_ne!(finding("").unwrap().health, Health::Fail, "a deployment serves without its program");
    }

    #[test]
    fn what_the_executor_says_of_a_device_is_a_finding_with_its_next_step() {
        let finding = said_finding("d", true, b"cuda:0: A GPU, 1.0 GiB free of 2.0 GiB\n", "x");
        assert_eq!(
            (finding.health, finding.found.as_str()),
            (Health::Ok, "cuda:0: A GPU, 1.0 GiB free of 2.0 GiB")
        );
        let finding = said_finding("d", false, b"error: there is no GPU; use --device cpu\n", "x");
        assert_eq!((finding.health, finding.found.as_str()), (Health::Fail, "there is no GPU"));
        assert_eq!(finding.fix.as_deref(), Some("use --device cpu"));
    }

    #[test]
    fn random_weights_need_a_shape_and_a_tokenizer() {
        let directory = tempfile::tempdir().unwrap();
        let health = || random_model(directory.path(), 1);
        assert!(health().found.contains("config.json"));
        let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../benches/shapes/llama-2-7b/config.json");
        std::fs::copy(shape, directory.path().join("config.json")).unwrap();
        assert!(health().fix.unwrap().contains("tokenizer_config.json"));
        std::fs::write(directory.path().join("tokenizer.json"), "{}").unwrap();
        assert_eq!(health().health, Health::Warn, "answers mean nothing");
    }

    #[test]
    fn a_finding_points_at_its_line() {
        let lines = SettingLines(
            "[model]\nname = 1\n[executor]\n# c\ncores = \"9\"".lines().map(str::to_owned).collect(),
        );
        let mut finding = Finding::ok("[executor] cores", "");
        lines.point_at(&mut finding);
        assert_eq!(finding.name, "[executor] cores (line 5)");
        let mut finding = Finding::ok("[executor] name", "");
        lines.point_at(&mut finding);
        assert_eq!(finding.name, "[executor] name");
    }
}

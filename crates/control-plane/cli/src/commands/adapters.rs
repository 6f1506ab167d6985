//! `holobiont adapters`: adapters of a running gateway, and of no gateway at all (`check`, `merge`, `diff`, `stats`).

mod diff;
mod list;
mod load;
mod merge;
mod pull;
mod stats;

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use model::adapter::{AdapterError, by_name::MergeError};
use serde_json::{Value, json};

use self::{diff::DiffArguments, merge::MergeArguments, pull::PullArguments, stats::StatsArguments};
use crate::{
    client::{ClientError, GatewayClient},
    deployment::program_paths,
    exit::{Exit, Explain},
    home::HomeDirectory,
    models::{
        self, FindError,
        hub::{self, HubError},
    },
    terminal::{PrintFormat, Terminal, table::size},
};

/// The program that knows what the base model accepts.
const CHECKER: &str = "base-executor";

/// What can be done to adapters.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum AdaptersCommand {
    /// Lists the adapters of a gateway, those on disk too
    Ls(LsArguments),
    /// Serves an adapter under a new name
    Add(AddArguments),
    /// Puts another adapter under a name; requests that run keep the one they started with
    Replace(ReplaceArguments),
    /// Refuses new requests, waits for those that run, and frees the adapter
    Rm(RmArguments),
    /// Keeps an adapter in memory
    Pin(PinArguments),
    /// Downloads the files of an adapter into a new directory
    Pull(PullArguments),
    /// Says by tensor name what of an adapter is unsupported; without a gateway too
    Check(CheckArguments),
    /// Writes several LoRAs, each times a weight, as one: their exact sum
    Merge(MergeArguments),
    /// Says how far two LoRAs are from each other, layer by layer, and which options differ
    Diff(DiffArguments),
    /// Says what is in the files of LoRAs: ranks, layers, norms, bytes, numbers
    Stats(StatsArguments),
}

/// Arguments of `adapters ls`.
#[derive(Debug, clap::Args)]
pub(crate) struct LsArguments {
    /// Those that Tinker's runs keep, instead of those that people have named
    #[arg(long)]
    runs: bool,
}

/// Arguments of `adapters add`.
#[derive(Debug, clap::Args)]
pub(crate) struct AddArguments {
    /// What requests will call it
    name: String,
    /// Directory of a PEFT adapter below the gateway's adapter root, or hf:ORG/REPO@REVISION
    #[arg(value_name = "DIR|hf:ORG/REPO@REV")]
    source: String,
    /// Only this tenant and administrators see and use it
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// Keeps it in memory
    #[arg(long)]
    pin: bool,
}

/// Arguments of `adapters replace`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplaceArguments {
    /// What requests call it
    name: String,
    /// Directory of a PEFT adapter below the gateway's adapter root, or hf:ORG/REPO@REVISION
    #[arg(value_name = "DIR|hf:ORG/REPO@REV")]
    source: String,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Arguments of `adapters rm`.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArguments {
    /// What requests call it
    name: String,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Arguments of `adapters pin`.
#[derive(Debug, clap::Args)]
pub(crate) struct PinArguments {
    /// What requests call it
    name: String,
    /// Lets it go again
    #[arg(long)]
    off: bool,
}

/// Arguments of `adapters check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// Directory of a PEFT adapter
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The base model: a path, or a name that `holobiont ls` shows [default: what the gateway serves, else the only one]
    #[arg(long, value_name = "NAME_OR_PATH")]
    model: Option<String>,
    /// Runs the model with and without it, and says whether any logit changes
    #[arg(long)]
    probe: bool,
}

/// Why an adapter was not changed, or not found good.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdaptersError {
    /// The gateway did not do it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The hub did not give it.
    #[error("the adapter `{name}` cannot be found")]
    Hub {
        /// The name, without `hf:`.
        name: String,
        /// Why.
        source: HubError,
    },
    /// No revision: what is served must not change behind the operator's back.
    #[error("`{0}` names no revision; write hf:ORG/REPO@REVISION")]
    NoRevision(String),
    /// There is no adapter there.
    #[error("there is no adapter in {0}: no adapter_config.json there")]
    NoAdapter(PathBuf),
    /// There is no base model to check against.
    #[error(transparent)]
    Model(#[from] FindError),
    /// The program that checks is not installed.
    #[error("the program `{CHECKER}` is neither beside `holobiont` nor on PATH")]
    NoChecker,
    /// The program that checks cannot be started.
    #[error("cannot start {CHECKER}")]
    Checker(#[source] io::Error),
    /// The adapter is not good; the program has said why.
    #[error("the adapter in {directory} did not pass")]
    NotGood {
        /// Where it lies.
        directory: PathBuf,
        /// How the check ended.
        exit: Exit,
    },
    /// The person said no.
    #[error("nothing was changed")]
    Declined,
    /// Its files are not usable.
    #[error(transparent)]
    Files(#[from] AdapterError),
    /// The files of an adapter were not downloaded.
    #[error("the files of `{name}` were not downloaded")]
    Download {
        /// Of which adapter.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Adapters are not merged.
    #[error("the adapters cannot be merged")]
    Merge(#[from] MergeError),
    /// What would be written is there.
    #[error("{} is there already; name a directory that is not", .0.display())]
    Exists(PathBuf),
    /// What stands behind a colon is no weight.
    #[error("`{0}` is no weight: write a number other than 0, as in DIR:0.7")]
    Weight(String),
}

impl Explain for AdaptersError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::Hub { source, .. } => source.exit(),
            Self::NotGood { exit, .. } => *exit,
            Self::NoRevision(_) | Self::Weight(_) => Exit::Usage,
            Self::NoAdapter(_) | Self::NoChecker => Exit::NotFound,
            Self::Exists(_) => Exit::Conflict,
            Self::Files(AdapterError::Read { .. }) => Exit::NotFound,
            Self::Checker(_) | Self::Declined | Self::Files(_) | Self::Merge(_) | Self::Download { .. } => {
                Exit::Failed
            }
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Model(error) => error.next(),
            Self::Hub { source, .. } => source.next(),
            Self::NoChecker => Some(format!("cargo build --release --bin {CHECKER}")),
            Self::NoAdapter(_) => Some("name the directory that adapter_config.json is in".into()),
            Self::NoRevision(_) | Self::NotGood { .. } | Self::Checker(_) | Self::Declined => None,
            Self::Files(_) | Self::Merge(_) | Self::Exists(_) | Self::Weight(_) | Self::Download { .. } => {
                None
            }
        }
    }

    fn is_said(&self) -> bool {
        matches!(self, Self::NotGood { .. })
    }
}

/// Changes or checks an adapter.
pub(crate) fn run(command: &AdaptersCommand, url: &str, terminal: Terminal) -> Result<(), AdaptersError> {
    let client = || GatewayClient::new(url, terminal);
    match command {
        AdaptersCommand::Ls(arguments) => Ok(list::run(arguments.runs, &client(), terminal)?),
        AdaptersCommand::Add(arguments) => add(arguments, &client(), terminal),
        AdaptersCommand::Replace(arguments) => replace(arguments, &client(), terminal),
        AdaptersCommand::Rm(arguments) => remove(arguments, &client(), terminal),
        AdaptersCommand::Pin(arguments) => pin(arguments, &client(), terminal),
        AdaptersCommand::Pull(arguments) => pull::run(arguments, &client(), terminal),
        AdaptersCommand::Check(arguments) => check(arguments, &client(), terminal),
        AdaptersCommand::Merge(arguments) => merge::run(arguments, terminal),
        AdaptersCommand::Diff(arguments) => diff::run(arguments, terminal),
        AdaptersCommand::Stats(arguments) => stats::run(arguments, terminal),
    }
}

fn add(arguments: &AddArguments, client: &GatewayClient, terminal: Terminal) -> Result<(), AdaptersError> {
    let mut body = json!({"lora_name": arguments.name, "lora_path": located(&arguments.source)?});
    if let Some(tenant) = &arguments.tenant {
        body["tenant"] = tenant.as_str().into();
    }
    if arguments.pin {
        body["pinned"] = true.into();
    }
    load::run(&arguments.name, &body, client, terminal)
}

fn replace(
    arguments: &ReplaceArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let path = located(&arguments.source)?;
    // Whatever is there, but nothing new under a name that was mistyped.
    let expected = arguments.expect.as_deref().unwrap_or("*");
    let body = json!({"lora_name": arguments.name, "lora_path": path, "expected_generation": expected});
    load::run(&arguments.name, &body, client, terminal)
}

fn remove(arguments: &RmArguments, client: &GatewayClient, terminal: Terminal) -> Result<(), AdaptersError> {
    let name = &arguments.name;
    if !terminal.confirm(&format!("unload the adapter {name}?")) {
        return Err(AdaptersError::Declined);
    }
    let mut body = json!({"lora_name": name});
    if let Some(generation) = &arguments.expect {
        body["expected_generation"] = generation.as_str().into();
    }
    let progress = terminal.spinner(format!("waiting for the requests of {name}"));
    let answer = client.post_text("/v1/unload_lora_adapter", &body);
    progress.finish_and_clear();
    print(&answer?, terminal, |answer| {
        format!("{name} is unloaded, {} are free", size(answer["freed_bytes"].as_u64().unwrap_or_default()))
    })
}

fn pin(arguments: &PinArguments, client: &GatewayClient, terminal: Terminal) -> Result<(), AdaptersError> {
    let body = json!({"lora_name": arguments.name, "pinned": !arguments.off});
    let answer = client.post_text("/v1/pin_lora_adapter", &body)?;
    let state = if arguments.off { "no longer pinned" } else { "pinned" };
    print(&answer, terminal, |_| format!("{} is {state}", arguments.name))
}

/// The gateway's answer as it came, or a line made of it.
fn print(answer: &str, terminal: Terminal, line: impl FnOnce(&Value) -> String) -> Result<(), AdaptersError> {
    match terminal.format {
        PrintFormat::Json => terminal.print(answer),
        PrintFormat::Human => {
            let answer = serde_json::from_str(answer).map_err(ClientError::Garbled)?;
            terminal.print(line(&answer));
        }
    }
    Ok(())
}

/// The path that the gateway is told: absolute where it is here, as written where it may be on another host.
fn located(source: &str) -> Result<PathBuf, AdaptersError> {
    let Some(name) = source.strip_prefix("hf:") else {
        let path = Path::new(source);
        let Ok(whole) = path.canonicalize() else {
            return Ok(path.to_owned());
        };
        return match whole.join("adapter_config.json").is_file() {
            true => Ok(whole),
            false => Err(AdaptersError::NoAdapter(path.to_owned())),
        };
    };
    if !name.contains('@') {
        return Err(AdaptersError::NoRevision(source.to_owned()));
    }
    hub::locate(name).map_err(|source| AdaptersError::Hub { name: name.to_owned(), source })
}

/// The model of the gateway, if there is one that says so and has it on this machine.
fn served_here(client: &GatewayClient) -> Result<Option<PathBuf>, ClientError> {
    match client.get("/v1/status") {
        Ok(status) => Ok(status["model_path"].as_str().map(PathBuf::from).filter(|path| path.exists())),
        // None to ask, or none that this user may ask: then the models of this machine decide.
        Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 401 | 403 | 404, .. }) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Lets the program that would serve it look at it.
fn check(
    arguments: &CheckArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let directory = &arguments.directory;
    if !directory.join("adapter_config.json").is_file() {
        return Err(AdaptersError::NoAdapter(directory.clone()));
    }
    let served = match arguments.model {
        Some(_) => None,
        None => served_here(client)?,
    };
    let model = match served {
        Some(path) => path,
        None => models::find(arguments.model.as_deref(), &HomeDirectory::from_environment())?,
    };
    let program = program_paths::find(CHECKER).ok_or(AdaptersError::NoChecker)?;
    let mut command = Command::new(program);
    command.arg("check").arg("--model").arg(model).arg("--adapter").arg(directory).stdin(Stdio::null());
    command.args(arguments.probe.then_some("--probe"));
    command.args((terminal.format == PrintFormat::Json).then_some("--json"));
    let status = command.status().map_err(AdaptersError::Checker)?;
    match Exit::of_code(status.code()) {
        Exit::Ok => Ok(()),
        exit => Err(AdaptersError::NotGood { directory: directory.clone(), exit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_name_without_a_revision_is_refused() {
        assert!(matches!(located("hf:org/repo"), Err(AdaptersError::NoRevision(_))));
    }

    #[test]
    fn a_directory_that_is_here_is_sent_absolute_and_must_hold_an_adapter() {
        let directory = tempfile::tempdir().unwrap();
        let text = directory.path().to_str().unwrap();
        assert!(matches!(located(text), Err(AdaptersError::NoAdapter(_))));
        std::fs::write(directory.path().join("adapter_config.json"), "{}").unwrap();
        assert_eq!(located(text).unwrap(), directory.path().canonicalize().unwrap());
        assert_eq!(located("on/another/host").unwrap(), Path::new("on/another/host"));
    }
}

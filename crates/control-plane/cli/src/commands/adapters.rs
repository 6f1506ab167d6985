//! `holobiont adapters`: manages adapters of a running gateway, or adapter files without a gateway
//! (`check`, `convert`, `merge`, `diff`, `stats`).

mod convert;
mod diff;
mod list;
mod load;
mod merge;
mod pull;
mod push;
mod stats;

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use model::{
    adapter::{AdapterError, AdapterKind, by_name::MergeError},
    sources::open::OpenError,
};
use serde_json::{Value, json};

use self::{
    convert::ConvertArguments, diff::DiffArguments, merge::MergeArguments, pull::PullArguments,
    push::PushArguments, stats::StatsArguments,
};
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

/// Program that knows which adapters the base accepts.
const CHECKER: &str = "base-executor";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum AdaptersCommand {
    /// Lists the adapters of a gateway, in memory and on disk
    Ls(LsArguments),
    /// Serves an adapter under a new name
    Add(AddArguments),
    /// Replaces the adapter of a name; running requests keep the old one
    Replace(ReplaceArguments),
    /// Sends the files of an adapter to the gateway and serves it, in place of one with that name
    Push(PushArguments),
    /// Unloads an adapter after its running requests; new requests are refused
    Rm(RmArguments),
    /// Pins an adapter, so that it stays in memory
    Pin(PinArguments),
    /// Downloads the files of an adapter into a new directory
    Pull(PullArguments),
    /// Checks an adapter and lists its unsupported tensors; needs no gateway
    Check(CheckArguments),
    /// Writes the LoRA that is served for an adapter of another type, or a LoRA of fewer ranks
    Convert(ConvertArguments),
    /// Merges several LoRAs into one: their exact weighted sum, or another combination of PEFT
    Merge(MergeArguments),
    /// Compares two LoRAs: distance of each layer, and options that differ
    Diff(DiffArguments),
    /// Shows ranks, layers, norms, sizes and data types of LoRA files
    Stats(StatsArguments),
}

/// Arguments of the subcommand `adapters ls`.
#[derive(Debug, clap::Args)]
pub(crate) struct LsArguments {
    /// Lists the adapters of Tinker training runs instead of those with names
    #[arg(long)]
    runs: bool,
}

/// Arguments of the subcommand `adapters add`.
#[derive(Debug, clap::Args)]
pub(crate) struct AddArguments {
    /// Name of the adapter in requests
    name: String,
    /// Directory of a PEFT adapter below the gateway's adapter root, hf:ORG/REPO@REVISION, or a URI that the
    /// gateway fetches
    #[arg(value_name = "DIR|hf:ORG/REPO@REV")]
    source: String,
    /// Tenant of the adapter; only this tenant and administrators see and use it
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// Pins the adapter, so that it stays in memory
    #[arg(long)]
    pin: bool,
}

/// Arguments of the subcommand `adapters replace`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplaceArguments {
    /// Name of the adapter in requests
    name: String,
    /// Directory of a PEFT adapter below the gateway's adapter root, hf:ORG/REPO@REVISION, or a URI that the
    /// gateway fetches
    #[arg(value_name = "DIR|hf:ORG/REPO@REV")]
    source: String,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Arguments of the subcommand `adapters rm`.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArguments {
    /// Name of the adapter in requests
    name: String,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Arguments of the subcommand `adapters pin`.
#[derive(Debug, clap::Args)]
pub(crate) struct PinArguments {
    /// Name of the adapter in requests
    name: String,
    /// Unpins the adapter
    #[arg(long)]
    off: bool,
}

/// Arguments of the subcommand `adapters check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// Directory of a PEFT adapter
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Base model: a path, or a name that `holobiont ls` shows [default: the gateway's model, else the only
    /// one]
    #[arg(long, value_name = "NAME_OR_PATH")]
    model: Option<String>,
    /// Runs the model with and without the adapter, and reports whether any logit changes
    #[arg(long)]
    probe: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdaptersError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot find the adapter `{name}` on the hub")]
    Hub {
        /// Name without the prefix `hf:`.
        name: String,
        source: HubError,
    },
    /// The source has no revision, without which the served files could change unnoticed.
    #[error("`{0}` has no revision; write hf:ORG/REPO@REVISION")]
    NoRevision(String),
    #[error("there is no adapter in {0}: the file adapter_config.json is missing")]
    NoAdapter(PathBuf),
    #[error(transparent)]
    Model(#[from] FindError),
    #[error("the program `{CHECKER}` is neither beside `holobiont` nor on PATH")]
    NoChecker,
    #[error("cannot start {CHECKER}")]
    Checker(#[source] io::Error),
    /// The adapter failed the check, and the checker has printed the reason.
    #[error("the adapter in {directory} failed the check")]
    NotGood { directory: PathBuf, exit: Exit },
    #[error("nothing was changed")]
    Declined,
    #[error(transparent)]
    Files(#[from] AdapterError),
    #[error("the files of `{name}` were not downloaded")]
    Download { name: String, source: io::Error },
    #[error("cannot read {}", path.display())]
    Unread { path: PathBuf, source: io::Error },
    #[error("the base model cannot be read")]
    Base(#[source] OpenError),
    /// The adapter is not served as a LoRA, or not as a LoRA alone.
    #[error("the adapter in {} has the kind {kind}, which is no LoRA alone", directory.display())]
    NoLora { directory: PathBuf, kind: AdapterKind },
    #[error("the adapters cannot be merged")]
    Merge(#[from] MergeError),
    /// The output directory exists already.
    #[error("{} exists already; name a new directory", .0.display())]
    Exists(PathBuf),
    #[error("`{0}` is not a weight; write a number other than 0, as in DIR:0.7")]
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
            Self::NoAdapter(_) | Self::NoChecker | Self::Unread { .. } => Exit::NotFound,
            Self::Exists(_) => Exit::Conflict,
            Self::Files(AdapterError::Read { .. }) => Exit::NotFound,
            Self::Checker(_)
            | Self::Declined
            | Self::Files(_)
            | Self::Base(_)
            | Self::NoLora { .. }
            | Self::Merge(_)
            | Self::Download { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Model(error) => error.next(),
            Self::Hub { source, .. } => source.next(),
            Self::NoChecker => Some(format!("cargo build --release --bin {CHECKER}")),
            Self::NoAdapter(_) => Some("name the directory that contains adapter_config.json".into()),
            Self::NoRevision(_) | Self::NotGood { .. } | Self::Checker(_) | Self::Declined => None,
            Self::NoLora { .. } => Some("holobiont adapters check DIR".into()),
            Self::Unread { .. }
            | Self::Files(_)
            | Self::Base(_)
            | Self::Merge(_)
            | Self::Exists(_)
            | Self::Weight(_)
            | Self::Download { .. } => None,
        }
    }

    fn is_said(&self) -> bool {
        matches!(self, Self::NotGood { .. })
    }
}

pub(crate) fn run(command: &AdaptersCommand, url: &str, terminal: Terminal) -> Result<(), AdaptersError> {
    let client = || GatewayClient::new(url, terminal);
    match command {
        AdaptersCommand::Ls(arguments) => Ok(list::run(arguments.runs, &client(), terminal)?),
        AdaptersCommand::Add(arguments) => add(arguments, &client(), terminal),
        AdaptersCommand::Replace(arguments) => replace(arguments, &client(), terminal),
        AdaptersCommand::Push(arguments) => push::run(arguments, &client(), terminal),
        AdaptersCommand::Rm(arguments) => remove(arguments, &client(), terminal),
        AdaptersCommand::Pin(arguments) => pin(arguments, &client(), terminal),
        AdaptersCommand::Pull(arguments) => pull::run(arguments, &client(), terminal),
        AdaptersCommand::Check(arguments) => check(arguments, &client(), terminal),
        AdaptersCommand::Convert(arguments) => convert::run(arguments, &client(), terminal),
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
    // `*` accepts any current version, but fails for a mistyped name.
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

/// Prints the gateway's JSON answer unchanged, or the text line made of it.
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

/// Returns the path for the gateway: absolute if it exists on this host, unchanged if it may be on the
/// gateway's host or is a URI.
fn located(source: &str) -> Result<PathBuf, AdaptersError> {
    if source.contains("://") {
        return Ok(source.into());
    }
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

/// Returns the gateway's model path, if the gateway tells it and the model is on this machine.
fn served_here(client: &GatewayClient) -> Result<Option<PathBuf>, ClientError> {
    match client.get("/v1/status") {
        Ok(status) => Ok(status["model_path"].as_str().map(PathBuf::from).filter(|path| path.exists())),
        // Without a gateway, or without the right to ask, the models of this machine decide.
        Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 401 | 403 | 404, .. }) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the path of the base model that is named, that the gateway serves, or that is the only one.
fn base_model(named: Option<&str>, client: &GatewayClient) -> Result<PathBuf, AdaptersError> {
    let served = if named.is_none() { served_here(client)? } else { None };
    match served {
        Some(path) => Ok(path),
        None => Ok(models::find(named, &HomeDirectory::from_environment())?),
    }
}

/// Runs the program that would serve the adapter, as a checker.
fn check(
    arguments: &CheckArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let directory = &arguments.directory;
    if !directory.join("adapter_config.json").is_file() {
        return Err(AdaptersError::NoAdapter(directory.clone()));
    }
    let model = base_model(arguments.model.as_deref(), client)?;
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
        for uri in ["hf://org/repo", "s3://bucket/adapters/a"] {
            assert_eq!(located(uri).unwrap(), Path::new(uri), "the gateway fetches it");
        }
        assert_eq!(located("on/another/host").unwrap(), Path::new("on/another/host"));
    }
}

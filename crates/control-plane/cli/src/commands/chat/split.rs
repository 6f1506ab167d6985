//! `chat --split`: runs the conversation as a split client, so that adapter and KV cache stay in the user's
//! process.
//!
//! This process is replaced by `holobiont-client`. Nothing falls back to the gateway: without that program
//! or an executor with a layer service, the command fails.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use super::ChatArguments;
use crate::{
    deployment::{
        paths::layer_socket,
        program_paths,
        selection::{GatewayArguments, SelectionError},
    },
    exit::{Exit, Explain},
};

const CLIENT: &str = "holobiont-client";

/// Arguments of a split conversation.
#[derive(Debug, clap::Args)]
pub(crate) struct SplitArguments {
    /// Computes only base layers on an executor, while adapter and KV cache stay in this process; EXECUTOR is
    /// tls://HOST:PORT or a socket, by default of this host's deployment
    #[arg(long, value_name = "EXECUTOR", num_args = 0..=1, require_equals = true)]
    split: Option<Option<String>>,
    /// Directory of the PEFT adapter for --split
    #[arg(long, value_name = "DIR", requires = "split")]
    adapter: Option<PathBuf>,
    /// Obfuscates the activations that are sent: off or paper
    #[arg(long, value_name = "MODE", requires = "split")]
    masking: Option<String>,
    /// Certificate authority of the executor, in PEM
    #[arg(long, value_name = "FILE", requires = "split")]
    ca: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SplitError {
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error("the program {CLIENT} is neither beside `holobiont` nor on PATH")]
    NoClient,
    #[error("cannot start {}", program.display())]
    Run { program: PathBuf, source: io::Error },
    /// The gateway has the files of a registered adapter, so a split client cannot use it.
    #[error("{0:?} is an adapter of the gateway, which --split cannot use; name a directory with --adapter")]
    RegisteredAdapter(String),
}

impl Explain for SplitError {
    fn exit(&self) -> Exit {
        match self {
            Self::Selection(error) => error.exit(),
            Self::NoClient => Exit::NotFound,
            Self::Run { .. } => Exit::Failed,
            Self::RegisteredAdapter(_) => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Selection(error) => error.next(),
            Self::NoClient => Some("cargo build --release --bin holobiont-client".into()),
            Self::Run { .. } => None,
            Self::RegisteredAdapter(_) => Some("holobiont chat --split --adapter DIR".into()),
        }
    }
}

/// Replaces this process by the split client if `--split` is given; returns only without `--split` or on
/// failure.
pub(super) fn run(arguments: &ChatArguments, gateway: &GatewayArguments) -> Result<(), SplitError> {
    let Some(executor) = &arguments.split.split else { return Ok(()) };
    let program = program_paths::find(CLIENT).ok_or(SplitError::NoClient)?;
    let executor = match executor {
        Some(executor) => PathBuf::from(executor),
        None => layer_socket(&gateway.state()?),
    };
    let source = command(arguments, &executor, &program)?.exec();
    Err(SplitError::Run { program, source })
}

fn command(arguments: &ChatArguments, executor: &Path, program: &Path) -> Result<Command, SplitError> {
    let (prompt, split) = (question(arguments)?, &arguments.split);
    let mut command = Command::new(program);
    command.arg(if prompt.is_some() { "generate" } else { "chat" }).arg("--executor").arg(executor);
    let text = |number: Option<String>| number.map(OsString::from);
    let options = [
        ("--adapter", split.adapter.clone().map(PathBuf::into_os_string)),
        ("--ca", split.ca.clone().map(PathBuf::into_os_string)),
        ("--masking", text(split.masking.clone())),
        ("--max-tokens", text(arguments.max_tokens.map(|most| most.to_string()))),
        ("--temperature", text(arguments.temperature.map(|temperature| temperature.to_string()))),
        // The gateway reads a negative seed as the same unsigned bits.
        ("--seed", text(arguments.seed.map(|seed| seed.cast_unsigned().to_string()))),
        ("--system", text(arguments.system.clone())),
    ];
    for (flag, value) in options {
        if let Some(value) = value {
            command.arg(flag).arg(value);
        }
    }
    if let Some(prompt) = prompt {
        // `--` keeps a question that begins with a dash from being a flag.
        command.args(["--", prompt]);
    }
    Ok(command)
}

/// Returns the question. With `--split` there is one base and no registry, so a target that is no adapter
/// is the question.
fn question(arguments: &ChatArguments) -> Result<Option<&str>, SplitError> {
    match (arguments.target.as_str(), arguments.prompt.as_deref()) {
        ("", prompt) => Ok(prompt),
        (question, None) if !question.starts_with(':') => Ok(Some(question)),
        (target, _) => Err(SplitError::RegisteredAdapter(target.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct SplitCommandLine {
        #[command(flatten)]
        arguments: ChatArguments,
    }

    fn words(line: &[&str]) -> Result<Vec<String>, SplitError> {
        let arguments = SplitCommandLine::parse_from([&["chat"], line].concat()).arguments;
        let executor = arguments.split.split.clone().unwrap().unwrap();
        let command = command(&arguments, Path::new(&executor), Path::new("client"))?;
        Ok(command.get_args().map(|word| word.to_string_lossy().into_owned()).collect())
    }

    #[test]
    fn a_question_and_its_options_are_handed_on_as_they_are() {
        let line = [
            "--split=tls://h:1",
            "--adapter",
            "d",
            "--masking",
            "paper",
            "--max-tokens",
            "7",
            "--seed=-1",
            "--system",
            "Be brief.",
            "--",
            "-- why?",
        ];
        let expected = [
            "generate",
            "--executor",
            "tls://h:1",
            "--adapter",
            "d",
            "--masking",
            "paper",
            "--max-tokens",
            "7",
            "--seed",
            "18446744073709551615",
            "--system",
            "Be brief.",
            "--",
            "-- why?",
        ];
        assert_eq!(words(&line).unwrap(), expected);
        assert_eq!(words(&["--split=s"]).unwrap(), ["chat", "--executor", "s"]);
    }

    #[test]
    fn an_adapter_of_the_gateway_is_refused_by_name() {
        let error = words(&["--split=s", ":pirate", "who?"]).unwrap_err();
        assert!(error.to_string().contains(":pirate"), "{error}");
        assert_eq!(error.exit(), Exit::Usage);
    }

    #[test]
    fn what_belongs_to_a_split_is_refused_without_one() {
        assert!(SplitCommandLine::try_parse_from(["chat", "--adapter", "d", "", "why?"]).is_err());
    }
}

//! The program `holobiont-trainer`.
//!
//! `run` trains one adapter over the layer service and reports events as lines of JSON. `session` trains one
//! adapter by commands. `serve` starts such a process for each connection.

mod arguments;
mod error;
mod event_output;
mod grpo_arguments;
mod job_console;
mod layers;
mod method;
mod prompts;
mod run;
mod serve;
mod session;

use std::io::{self, Write as _};

use clap::{Parser, Subcommand};
use control_protocol::training::TrainingEvent;
use settings::exit::Exit;

use self::error::TunerError;

/// Trains adapters of a base model whose linear layers an executor computes.
#[derive(Debug, Parser)]
#[command(name = "holobiont-trainer", version, about, max_term_width = 100)]
pub struct TrainerCli {
    #[command(subcommand)]
    command: TrainerCommand,
}

#[derive(Debug, Subcommand)]
enum TrainerCommand {
    /// Runs one job to its end, or until SIGINT or SIGTERM; events are printed as lines of JSON
    Run(Box<arguments::RunArguments>),
    /// Prints the prompts of training data, one per line, for a teacher model of a draft
    Prompts(prompts::PromptArguments),
    /// Trains one adapter by commands from stdin, and answers each on stdout
    Session(Box<session::SessionArguments>),
    /// Starts a trainer for each client that connects and sends a request
    Serve(serve::ServeArguments),
}

/// How the program ends: with an exit code, or with the shell's code for a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramExit {
    Exit(Exit),
    /// Number of the signal that stopped the program.
    Signal(u8),
}

impl From<ProgramExit> for std::process::ExitCode {
    fn from(end: ProgramExit) -> Self {
        match end {
            ProgramExit::Exit(exit) => exit.into(),
            ProgramExit::Signal(signal) => Self::from(128 + signal),
        }
    }
}

/// Runs the command of the command line.
#[must_use]
pub fn run(cli: TrainerCli) -> ProgramExit {
    // The error is also an event on stdout, so that a reader of the events need not read stderr.
    let tell = |error: &TunerError| {
        let _ = writeln!(io::stdout().lock(), "{}", failure(error.to_string(), error.exit()));
    };
    let done = match cli.command {
        TrainerCommand::Run(arguments) => run::run(&arguments).inspect_err(tell),
        TrainerCommand::Prompts(arguments) => prompts::prompts(&arguments).inspect_err(tell),
        TrainerCommand::Session(arguments) => session::session(&arguments).inspect_err(tell),
        TrainerCommand::Serve(arguments) => serve::serve(arguments),
    };
    done.unwrap_or_else(|error: TunerError| {
        let _ = writeln!(io::stderr().lock(), "error: {error}");
        ProgramExit::Exit(error.exit())
    })
}

/// Returns the event line of a failed trainer.
fn failure(message: String, exit: Exit) -> String {
    serde_json::to_string(&TrainingEvent::Failed { message, exit: exit.as_str().to_owned() })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        TrainerCli::command().debug_assert();
    }
}

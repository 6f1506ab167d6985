//! The program `holobiont-trainer`: one job, over rented base layers, told in lines of JSON; one adapter as somebody orders it
//! step by step; or either for everybody who connects.

mod arguments;
mod error;
mod event_output;
mod layers;
mod prompts;
mod run;
mod serve;
mod session;

use std::io::{self, Write as _};

use clap::{Parser, Subcommand};
use client::cli::exit::Exit;
use control_protocol::training::TrainingEvent;

use self::error::TunerError;

/// Trains adapters of a base model whose linear layers are rented from an executor.
#[derive(Debug, Parser)]
#[command(name = "holobiont-trainer", version, about, max_term_width = 100)]
pub struct TrainerCli {
    #[command(subcommand)]
    command: TrainerCommand,
}

#[derive(Debug, Subcommand)]
enum TrainerCommand {
    /// Runs one job to its end, or until SIGINT or SIGTERM; what happens is printed as lines of JSON
    Run(Box<arguments::RunArguments>),
    /// Tells the prompts of the training data on stdin, a line each, so that a model can be asked them, for a draft
    Prompts,
    /// Trains one adapter as the orders on stdin say, and answers each on stdout
    Session(Box<session::SessionArguments>),
    /// Starts a trainer for everybody who connects and says what it is to do
    Serve(serve::ServeArguments),
}

/// How the program ends: as others do, or as a shell says that a signal ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramExit {
    /// By itself.
    Exit(Exit),
    /// A signal of this number wanted it.
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

/// Does what the command line says.
#[must_use]
pub fn run(cli: TrainerCli) -> ProgramExit {
    // Whoever reads the lines need not also listen to stderr.
    let tell = |error: &TunerError| {
        let _ = writeln!(io::stdout().lock(), "{}", failure(error.to_string(), error.exit()));
    };
    let done = match cli.command {
        TrainerCommand::Run(arguments) => run::run(&arguments).inspect_err(tell),
        TrainerCommand::Prompts => prompts::prompts().inspect_err(tell),
        TrainerCommand::Session(arguments) => session::session(&arguments).inspect_err(tell),
        TrainerCommand::Serve(arguments) => serve::serve(arguments),
    };
    done.unwrap_or_else(|error: TunerError| {
        let _ = writeln!(io::stderr().lock(), "error: {error}");
        ProgramExit::Exit(error.exit())
    })
}

/// The line of a trainer that failed.
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

//! The program `holobiont-trainer`: one job, over rented base layers, told in lines of JSON.

mod arguments;
mod error;
mod run;

use std::io::{self, Write as _};

use clap::{Parser, Subcommand};
use client::cli::exit::Exit;

use self::error::TunerError;

/// Trains adapters of a base model whose linear layers are rented from an executor.
#[derive(Debug, Parser)]
#[command(name = "holobiont-trainer", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs one job to its end, or until SIGINT or SIGTERM; what happens is printed as lines of JSON
    Run(Box<arguments::RunArguments>),
}

/// How the program ends: as others do, or as a shell says that a signal ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Exit(Exit),
    /// A signal of this number wanted it.
    Signal(u8),
}

impl From<End> for std::process::ExitCode {
    fn from(end: End) -> Self {
        match end {
            End::Exit(exit) => exit.into(),
            End::Signal(signal) => Self::from(128 + signal),
        }
    }
}

/// Does what the command line says.
#[must_use]
pub fn run(cli: Cli) -> End {
    let Command::Run(arguments) = cli.command;
    run::run(&arguments).unwrap_or_else(|error: TunerError| {
        let _ = writeln!(io::stderr().lock(), "error: {error}");
        End::Exit(error.exit())
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

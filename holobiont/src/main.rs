//! The `holobiont` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    holobiont::cli::run(holobiont::cli::Cli::parse()).into()
}

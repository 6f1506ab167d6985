//! The command `holobiont-client`, for tenants whose adapter and KV cache stay on their own machine.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    client::cli::run(client::cli::ClientCli::parse()).into()
}

//! The command of a tenant who keeps adapter and KV cache to themselves.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    client::cli::run(client::cli::ClientCli::parse()).into()
}

//! Entry point of the worker.

use std::{error::Error, process::ExitCode};

use clap::Parser as _;
use lora_worker::config::{WorkerConfig, WorkerConfigError};
use settings::{
    completions,
    exit::{Exit, in_one_line},
    variables::{UnknownVariable, check_environment},
};
use shmproto::fd_passing::ConnectError;

fn main() -> ExitCode {
    run().map_or_else(
        |error| {
            // One line holds the cause and the next step; a backtrace would hide them.
            eprintln!("error: {}", in_one_line(&*error));
            exit_of(&error).into()
        },
        |()| ExitCode::SUCCESS,
    )
}

/// Returns the usage code for wrong settings or an impossible socket path, else the system error's.
fn exit_of(error: &anyhow::Error) -> Exit {
    let is_usage = |cause: &(dyn Error + 'static)| {
        let is_no_socket = matches!(cause.downcast_ref(), Some(ConnectError::Path(_)));
        is_no_socket || cause.is::<WorkerConfigError>() || cause.is::<UnknownVariable>()
    };
    match error.chain().any(is_usage) {
        true => Exit::Usage,
        false => Exit::of_system(&**error),
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<_> = std::env::args_os().collect();
    if completions::are_asked_for::<WorkerConfig>(&arguments) {
        return Ok(());
    }
    check_environment()?;
    lora_worker::run(&WorkerConfig::parse_from(arguments).validated()?)
}

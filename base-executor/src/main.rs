//! Entry point of the executor.

use std::{error::Error, ffi::OsString, process::ExitCode};

use base_executor::{
    bench, capacity, check,
    config::{ExecutorConfig, ExecutorConfigError},
    device_check, device_group,
};
use clap::Parser as _;
use draft_model::load::DraftError;
use model::{client_weights::ClientWeightsError, sources::open::OpenError};
use model_files::location::LocationError;
use settings::{
    completions,
    exit::{Exit, in_one_line},
    renamed,
    variables::{UnknownVariable, check_environment},
};
use text::sandbox;

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        // One line holds the cause and the next step; a backtrace would hide them.
        eprintln!("error: {}", in_one_line(&*error));
        exit_of(&error).into()
    })
}

/// Returns the usage code for wrong settings or an unusable model, the not-found code for a missing model,
/// else the system error's.
fn exit_of(error: &anyhow::Error) -> Exit {
    let is_usage = |cause: &(dyn Error + 'static)| {
        let is_no_model = cause.is::<OpenError>() || cause.is::<ClientWeightsError>();
        is_no_model
            || cause.is::<DraftError>()
            || cause.is::<ExecutorConfigError>()
            || cause.is::<UnknownVariable>()
    };
    match Exit::of_system(&**error) {
        Exit::Failed if error.is::<LocationError>() => Exit::NotFound,
        Exit::Failed if error.chain().any(is_usage) => Exit::Usage,
        exit => exit,
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if let Some(served) = sandbox::serve(arguments.get(1).map(OsString::as_os_str)) {
        served?;
        return Ok(ExitCode::SUCCESS);
    }
    let first = arguments.get(1).and_then(|first| first.to_str());
    if first == Some(device_group::MEMBER_COMMAND) {
        device_group::run_member()?;
        return Ok(ExitCode::SUCCESS);
    }
    check_environment()?;
    match first {
        Some("bench") => {
            arguments.remove(1);
            bench::run(&bench::BenchConfig::parse_from(arguments))?;
        }
        Some("capacity") => {
            arguments.remove(1);
            capacity::run(capacity::CapacityConfig::parse_from(arguments))?;
        }
        Some("check") => {
            arguments.remove(1);
            return check::run(&check::CheckConfig::parse_from(arguments));
        }
        Some("device") => {
            arguments.remove(1);
            device_check::run(&device_check::ProbeConfig::parse_from(arguments))?;
        }
        _ if completions::are_asked_for::<ExecutorConfig>(&arguments) => {}
        _ => {
            renamed::in_use().iter().for_each(|renamed| eprintln!("warning: {renamed}"));
            base_executor::run(&ExecutorConfig::parse_from(arguments).validated()?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

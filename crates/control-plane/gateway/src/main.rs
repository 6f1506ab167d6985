//! The gateway process: parses the arguments, validates them, runs.

use std::{error::Error, ffi::OsString, process::ExitCode};

use clap::Parser as _;
use gateway::{
    config::{Args, GatewayConfig, GatewayConfigError},
    maintenance,
    server::{self, RunError},
};
use settings::{
    completions,
    exit::{Exit, in_one_line},
    renamed,
    variables::{UnknownVariable, check_environment},
};
use text::sandbox;

fn main() -> ExitCode {
    serve().map_or_else(
        |error| {
            // Cause and next step go into one line, which a supervisor may pass on.
            eprintln!("error: {}", in_one_line(&*error));
            exit_of(&*error).into()
        },
        |()| ExitCode::SUCCESS,
    )
}

fn serve() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if let Some(served) = sandbox::serve(arguments.get(1).map(OsString::as_os_str)) {
        return Ok(served?);
    }
    if arguments.get(1).is_some_and(|first| first == "registry") {
        arguments.remove(1);
        check_environment()?;
        return Ok(maintenance::run(maintenance::MaintenanceTask::parse_from(arguments))?);
    }
    if completions::are_asked_for::<Args>(&arguments) {
        return Ok(());
    }
    let args = Args::parse();
    check_environment()?;
    renamed::in_use().iter().for_each(|renamed| eprintln!("warning: {renamed}"));
    Ok(server::run(GatewayConfig::try_from(args)?)?)
}

fn exit_of(error: &(dyn Error + 'static)) -> Exit {
    let is_traces = matches!(error.downcast_ref(), Some(RunError::Traces(_)));
    match is_traces || error.is::<GatewayConfigError>() || error.is::<UnknownVariable>() {
        true => Exit::Usage,
        false => Exit::of_system(error),
    }
}

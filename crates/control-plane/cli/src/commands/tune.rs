//! `holobiont tune`: trains an adapter on the base of a running deployment, and serves it.
//!
//! The training is done by `holobiont-trainer`, a child that rents the base's layers as split clients do, so that
//! requests are served meanwhile. This command finds it a deployment and a place, shows how far it is, keeps what it
//! says, and puts the adapter under its name.
//!
//! # Layout
//!
//! - [`name`]: what a run and its adapter are called
//! - [`options`]: how is trained
//! - [`record`]: what is kept of a run, and where
//! - [`gateway`]: what has the name before, and the adapter put under it
//! - [`trainer`]: the child
//! - [`progress`]: what is shown of a run under way; [`format`]: its figures for people
//! - [`plot`]: losses drawn
//! - [`request`]: a run as it is asked for; [`run`]: from its plan to its end
//! - [`teacher_prompts`]: of a draft, whom it is to guess, who is asked for it; [`prompts`]: what; [`teacher_outputs`]: what is answered
//! - [`history`]: runs that are kept: listed, shown, stopped
//! - [`errors`]: what may go wrong

mod errors;
mod format;
mod gateway;
mod history;
mod name;
mod options;
mod plot;
mod progress;
mod prompts;
mod record;
mod request;
mod run;
mod teacher_outputs;
mod teacher_prompts;
mod trainer;

use crate::{deployment::selection::GatewayArguments, home::HomeDirectory, terminal::Terminal};
use errors::TuneError;
use history::RunHistoryCommand;
use request::RunArguments;

/// Arguments of `tune`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct TuneArguments {
    #[command(subcommand)]
    past: Option<RunHistoryCommand>,
    #[command(flatten)]
    run: RunArguments,
}

/// Trains an adapter, or tells of what was trained.
pub(crate) fn run(
    arguments: TuneArguments,
    gateway: &GatewayArguments,
    terminal: Terminal,
) -> Result<(), TuneError> {
    let home = HomeDirectory::from_environment();
    match arguments.past {
        Some(command) => history::run(&command, &home, terminal),
        None => run::run(arguments.run, gateway, &home, terminal),
    }
}

//! `holobiont tune`: trains an adapter on the base of a running deployment, and serves it.
//!
//! `holobiont-trainer` does the training. This child calls the base's layers as split clients do, so the
//! deployment serves requests meanwhile. The command chooses deployment and output directory, shows
//! progress, records events and publishes the adapter under its name.
//!
//! # Layout
//!
//! - [`name`]: name of a run and its adapter
//! - [`options`]: training options
//! - [`record`]: record of a run and its directory
//! - [`gateway`]: requests to the gateway before and after a run
//! - [`trainer`]: the trainer child
//! - [`progress`]: progress output of a run; [`format`]: texts for people
//! - [`plot`]: chart of the losses
//! - [`request`]: the requested run; [`run`]: its execution
//! - [`teacher_prompts`]: model and settings for the answers that a draft adapter learns from; [`prompts`]:
//!   the prompts; [`teacher_outputs`]: the answers
//! - [`rollouts`]: answers of the adapter in training and their rewards, for GRPO
//! - [`evaluation`]: lm-eval on the base and the adapter
//! - [`calls`]: calls of other programs, repeated and several at once
//! - [`history`]: listing, showing and stopping recorded runs
//! - [`errors`]: errors of `tune`

mod calls;
mod errors;
mod evaluation;
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
mod rollouts;
mod run;
mod teacher_outputs;
mod teacher_prompts;
mod trainer;

use crate::{deployment::selection::GatewayArguments, home::HomeDirectory, terminal::Terminal};
use errors::TuneError;
use history::RunHistoryCommand;
use request::RunArguments;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct TuneArguments {
    #[command(subcommand)]
    past: Option<RunHistoryCommand>,
    #[command(flatten)]
    run: RunArguments,
}

/// Trains an adapter, or runs a subcommand about recorded runs.
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

//! What the program can do. Everything is printed as one JSON object a line, the first with all parameters.
//!
//! # Layout
//!
//! - `options`: what is simulated.
//! - `side_by_side`: many runs at once.
//! - `run`: one run. `compare`: all variants. `peak`: the highest rate.
//! - `phases`, `knee`, `starvation`, `correlation`: the paper's stories.
//! - `fleet`: several executors behind one gateway.
//! - `flood`: some tenants beside one that asks for too much.
//! - `forecast`: what a load would see on a number of executors.
//! - `fault_scenarios`: small fleets in which everything goes wrong.
//! - `drawing`: charts of a run. `bench`: what decisions take.

mod bench;
mod compare;
mod correlation;
mod drawing;
mod fault_scenarios;
mod fleet;
mod flood;
mod forecast;
mod knee;
mod options;
mod peak;
mod phases;
mod run;
mod side_by_side;
mod starvation;

use std::io::{self, Write};

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use serde::Serialize;

pub use self::options::{Preset, SimulationOptions};
use crate::{
    cost::CostError, engine::SimulationError, fleet::fault_scenario::InvariantBroken,
    workload::replay::TraceError,
};

/// The cache and the scheduler of an executor on a virtual clock.
#[derive(Debug, Parser)]
#[command(name = "holobiont-simulator", version)]
pub struct SimulatorCli {
    #[command(subcommand)]
    command: SimulatorCommand,
}

#[derive(Debug, Subcommand)]
enum SimulatorCommand {
    /// One run.
    Run(run::RunCommand),
    /// All variants on the same workloads, seed by seed.
    Compare(compare::Compare),
    /// The highest rate at which the mean time to the first token is below a limit.
    Peak(peak::Peak),
    /// What the device holds as the load rises (E-24).
    Phases(phases::Phases),
    /// Times to the first token over the share that adapters have to themselves (E-26).
    Knee(knee::Knee),
    /// What each side of a divided device has in use, with few adapters and then with more (E-26).
    Starvation(starvation::Starvation),
    /// Whether last use, frequency and cost agree (E-27).
    Correlation(correlation::Correlation),
    /// Several executors behind one gateway, with every policy on the same requests (C-23).
    Fleet(fleet::FleetCommand),
    /// Four tenants beside one that asks for ten times as much as each of them.
    Flood(flood::Flood),
    /// What a load would see on a number of executors, and how many it needs.
    Forecast(Box<forecast::Forecast>),
    /// Lives through worlds in which executors die, messages are lost and clocks jump, and checks what must hold.
    Worlds(fault_scenarios::FaultScenarios),
    /// Times of the cache's own work on this machine (E-17), and of a choice among executors.
    Bench(bench::DecisionBench),
    /// The cost model in JSON, to be changed and given back by --cost-model.
    Costs(SimulationOptions),
    /// A completion script for a shell.
    Completions {
        /// The shell that will read it
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Why a command came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// A number that an option cannot have.
    #[error("{0} has a value that it cannot have; see --help")]
    Option(&'static str),
    /// The file of costs.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The run.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// Something that must hold does not.
    #[error(transparent)]
    World(#[from] InvariantBroken),
    /// A result cannot be written.
    #[error("cannot write the results")]
    Write(#[from] io::Error),
}

impl SimulatorCli {
    /// Does what it says.
    ///
    /// # Errors
    /// What is asked for makes no sense, or results cannot be written.
    pub fn run(self, out: &mut impl Write) -> Result<(), CommandError> {
        match self.command {
            SimulatorCommand::Run(run) => run.run(out),
            SimulatorCommand::Compare(compare) => compare.run(out),
            SimulatorCommand::Peak(peak) => peak.run(out),
            SimulatorCommand::Phases(phases) => phases.run(out),
            SimulatorCommand::Knee(knee) => knee.run(out),
            SimulatorCommand::Starvation(starvation) => starvation.run(out),
            SimulatorCommand::Correlation(correlation) => correlation.run(out),
            SimulatorCommand::Fleet(fleet) => fleet.run(out),
            SimulatorCommand::Flood(flood) => flood.run(out),
            SimulatorCommand::Forecast(forecast) => forecast.run(out),
            SimulatorCommand::Worlds(worlds) => worlds.run(out),
            SimulatorCommand::Bench(bench) => bench.run(out),
            SimulatorCommand::Costs(options) => print(out, &options.setup()?.cost),
            SimulatorCommand::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "holobiont-simulator", &mut script);
                Ok(out.write_all(&script)?)
            }
        }
    }
}

/// One line of JSON.
fn print(out: &mut impl Write, what: &impl Serialize) -> Result<(), CommandError> {
    let line = serde_json::to_string(what).map_err(io::Error::from)?;
    Ok(writeln!(out, "{line}")?)
}

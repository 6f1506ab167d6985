//! Commands of the program. Output is one JSON object a line; the first holds all parameters.
//!
//! # Layout
//!
//! - `options`: parameters of all commands.
//! - `side_by_side`: parallel runs.
//! - `run`: one run. `compare`: all variants. `peak`: the highest rate.
//! - `phases`, `knee`, `starvation`, `correlation`: experiments of the paper.
//! - `fleet`: several executors behind one gateway.
//! - `flood`: four tenants beside one with excessive load.
//! - `forecast`: latencies of a load on a number of executors.
//! - `fault_scenarios`: small fleets with injected faults.
//! - `drawing`: charts of a run. `bench`: times of decisions.

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

/// Simulates an executor's cache and scheduler on a virtual clock.
#[derive(Debug, Parser)]
#[command(name = "holobiont-simulator", version)]
pub struct SimulatorCli {
    #[command(subcommand)]
    command: SimulatorCommand,
}

#[derive(Debug, Subcommand)]
enum SimulatorCommand {
    /// Simulates one run of the options.
    Run(run::RunCommand),
    /// Compares all variants on the same workloads, seed by seed.
    Compare(compare::Compare),
    /// Finds the highest rate at which the mean time to first token stays below a limit.
    Peak(peak::Peak),
    /// Shows the device's content as the load rises (E-24).
    Phases(phases::Phases),
    /// Measures times to first token over the device share reserved for adapters (E-26).
    Knee(knee::Knee),
    /// Measures the used part of each side of a divided device, with few adapters and with more (E-26).
    Starvation(starvation::Starvation),
    /// Measures whether recency, frequency and cost agree (E-27).
    Correlation(correlation::Correlation),
    /// Simulates several executors behind one gateway, with every policy on the same requests (C-23).
    Fleet(fleet::FleetCommand),
    /// Simulates four tenants beside one that sends ten times as many requests as each of them.
    Flood(flood::Flood),
    /// Forecasts the latencies of a load on a number of executors, and the number that it needs.
    Forecast(Box<forecast::Forecast>),
    /// Runs fault scenarios in which executors fail, messages are lost and clocks jump, and checks
    /// invariants.
    Worlds(fault_scenarios::FaultScenarios),
    /// Times the cache's own work on this machine (E-17), and a choice among executors.
    Bench(bench::DecisionBench),
    /// Prints the cost model in JSON, to be changed and passed to --cost-model.
    Costs(SimulationOptions),
    /// Prints a completion script for a shell.
    Completions {
        /// Shell that reads the script
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The value of an option is out of range.
    #[error("{0} has an invalid value; see --help")]
    Option(&'static str),
    /// The cost file cannot be used.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The simulation cannot be set up or run.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// A checked invariant is broken.
    #[error(transparent)]
    World(#[from] InvariantBroken),
    /// The output cannot be written.
    #[error("cannot write the results")]
    Write(#[from] io::Error),
}

impl SimulatorCli {
    /// Runs the command.
    ///
    /// # Errors
    /// If an option's value is invalid, or results cannot be written.
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

fn print(out: &mut impl Write, what: &impl Serialize) -> Result<(), CommandError> {
    let line = serde_json::to_string(what).map_err(io::Error::from)?;
    Ok(writeln!(out, "{line}")?)
}

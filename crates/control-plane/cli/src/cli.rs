//! Parses the command line and runs one command of `commands`.

#[cfg(test)]
mod reference;

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser as _};

use crate::{
    commands::{
        adapters::{self, AdaptersCommand},
        bench::{self, BenchArguments},
        cert::{self, CertArguments},
        chat::{self, ChatArguments},
        check::{self, CheckArguments},
        doctor::{self, DoctorArguments},
        down,
        drain::{self, DrainArguments},
        key::{self, KeyCommand},
        logs::{self, LogsArguments},
        ls,
        manual::{self, CompletionsArguments, ManArguments},
        ps::{self, PsArguments},
        pull::{self, PullArguments},
        registry::{self, RegistryCommand},
        show::{self, ShowArguments},
        simulate::{self, SimulateArguments},
        slo, status,
        top::{self, TopArguments},
        tune::{self, TuneArguments},
        up::{self, UpArguments},
        verify::{self, VerifyArguments},
    },
    deployment::selection::{GatewayArguments, StateArguments},
    exit::{self, Exit, Explain},
    terminal::{ColorChoice, ConfirmMode, PrintFormat, Terminal, Verbosity},
};

/// Serves many LoRA adapters over one base model.
#[derive(Debug, clap::Parser)]
#[command(name = "holobiont", version, about, after_help = exit::HELP, propagate_version = true)]
pub struct HolobiontCli {
    #[command(subcommand)]
    command: HolobiontCommand,
    /// Prints data and errors as JSON; answers of the gateway are printed unchanged
    #[arg(long, global = true)]
    json: bool,
    /// Prints no progress and no hints
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Prints requests to the gateway, and errors in full
    #[arg(long, short, global = true, conflicts_with = "quiet")]
    verbose: bool,
    /// When the output has colours
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = ColorChoice::Auto)]
    color: ColorChoice,
    /// Answers every question with yes
    #[arg(long, short, global = true)]
    yes: bool,
}

#[derive(Debug, clap::Subcommand)]
enum HolobiontCommand {
    /// Starts a deployment and keeps it running until Ctrl-C
    #[command(visible_alias = "serve", after_help = exit::HELP)]
    Up(UpArguments),
    /// Stops a running deployment, in order
    #[command(visible_alias = "stop", after_help = exit::HELP)]
    Down(StateArguments),
    /// Downloads a model and prints its path
    #[command(after_help = exit::HELP)]
    Pull(PullArguments),
    /// Chats with the base or an adapter of a running gateway
    #[command(visible_alias = "run", after_help = exit::HELP)]
    Chat(ToGateway<ChatArguments>),
    /// Lists models on disk, and those that a running gateway serves
    #[command(visible_alias = "list", after_help = exit::HELP)]
    Ls(ToGateway<LsArguments>),
    /// Shows the base and the adapters that are resident or in use
    #[command(after_help = exit::HELP)]
    Ps(ToGateway<PsArguments>),
    /// Shows live figures of a deployment: tokens, waits, memory, executors, adapters
    #[command(after_help = exit::HELP)]
    Top(ToGateway<TopArguments>),
    /// Shows the state of a deployment: requests, adapters, memory, executors, waiting times
    #[command(after_help = exit::HELP)]
    Status(ToGateway<StatusArguments>),
    /// Shows the SLO targets of each service class, measured latencies, and who waits
    #[command(after_help = exit::HELP)]
    Slo(ToGateway<SloArguments>),
    /// Stops new requests to one of several executors, and waits until its running requests end
    #[command(after_help = exit::HELP)]
    Drain(ToGateway<DrainArguments>),
    /// Sends new requests to a drained executor again
    #[command(after_help = exit::HELP)]
    Undrain(ToGateway<DrainArguments>),
    /// Shows everything known about a model or an adapter
    #[command(after_help = exit::HELP)]
    Show(ToGateway<ShowArguments>),
    /// Adds, replaces, removes, pins, checks, merges and compares adapters
    #[command(after_help = exit::HELP)]
    Adapters(ToGateway<AdaptersArguments>),
    /// Trains an adapter on the base of a running deployment and serves it
    #[command(after_help = exit::HELP)]
    Tune(Box<ToGateway<TuneArguments>>),
    /// Checks a deployment file and everything it names, without starting it
    #[command(after_help = exit::HELP)]
    Check(CheckArguments),
    /// Checks hardware, system limits and configuration of this machine, or computes what fits beside a model
    #[command(after_help = exit::HELP, mut_args(doctor::without_settings))]
    Doctor(DoctorArguments),
    /// Predicts the latency of a load on N executors, and how many executors it needs
    #[command(after_help = exit::HELP)]
    Simulate(SimulateArguments),
    /// Measures a running gateway under load
    #[command(after_help = exit::HELP)]
    Bench(ToGateway<BenchArguments>),
    /// Verifies the receipt of an answer: signature, chain, and every token by a replay
    #[command(after_help = exit::HELP)]
    Verify(ToGateway<VerifyArguments>),
    /// Shows the log of a deployment, or its lines about one request
    #[command(after_help = exit::HELP)]
    Logs(LogsArguments),
    /// Makes, lists and revokes API keys
    #[command(subcommand, after_help = exit::HELP)]
    Key(KeyCommand),
    /// Copies the adapter registry between one host and a shared database
    #[command(subcommand, after_help = exit::HELP)]
    Registry(RegistryCommand),
    /// Makes TLS certificates for the layer service and its clients
    #[command(after_help = exit::HELP)]
    Cert(CertArguments),
    /// Prints a completion script for a shell
    #[command(after_help = exit::HELP)]
    Completions(CompletionsArguments),
    /// Prints the manual page, or writes one for every command
    #[command(after_help = exit::HELP)]
    Man(ManArguments),
}

/// Arguments of a command that sends requests to a gateway.
#[derive(Debug, clap::Args)]
struct ToGateway<A: clap::Args> {
    #[command(flatten)]
    arguments: A,
    #[command(flatten)]
    gateway: GatewayArguments,
}

impl<A: clap::Args> ToGateway<A> {
    fn url(&self) -> Result<String, Box<dyn Explain>> {
        self.gateway.url().map_err(boxed)
    }
}

#[derive(Debug, clap::Args)]
struct LsArguments {}

#[derive(Debug, clap::Args)]
struct StatusArguments {}

#[derive(Debug, clap::Args)]
struct SloArguments {}

#[derive(Debug, clap::Args)]
struct AdaptersArguments {
    #[command(subcommand)]
    command: AdaptersCommand,
}

/// Parses a command line, runs its command and returns the exit code.
pub fn main(arguments: impl Iterator<Item = OsString>) -> Exit {
    let arguments: Vec<OsString> = arguments.collect();
    match HolobiontCli::try_parse_from(&arguments) {
        Ok(cli) => run(cli),
        Err(error) if error.use_stderr() && arguments.iter().any(|argument| argument == "--json") => {
            Terminal::new(PrintFormat::Json, Verbosity::Quiet).error(&UsageError::from(error));
            Exit::Usage
        }
        // Clap prints help, the version and errors for people itself.
        Err(error) => error.exit(),
    }
}

/// Error of a command line that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

impl From<clap::Error> for UsageError {
    /// Keeps the first paragraph of clap's text; the usage text after it is dropped.
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        Self(first.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

impl Explain for UsageError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }

    fn next(&self) -> Option<String> {
        Some("holobiont --help".into())
    }
}

/// Runs a parsed command, prints its error and returns the exit code.
pub fn run(cli: HolobiontCli) -> Exit {
    let terminal = terminal(&cli);
    match dispatch(cli.command, terminal) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            if !error.is_said() {
                terminal.error(error.as_ref());
            }
            error.exit()
        }
    }
}

fn terminal(cli: &HolobiontCli) -> Terminal {
    let format = if cli.json { PrintFormat::Json } else { PrintFormat::Human };
    let volume = match (cli.quiet, cli.verbose) {
        (true, _) => Verbosity::Quiet,
        (false, true) => Verbosity::Verbose,
        (false, false) => Verbosity::Normal,
    };
    let questions = if cli.yes { ConfirmMode::AnsweredYes } else { ConfirmMode::OnATerminal };
    Terminal::new(format, volume).with_colors(cli.color).with_questions(questions)
}

fn dispatch(command: HolobiontCommand, terminal: Terminal) -> Result<(), Box<dyn Explain>> {
    match command {
        HolobiontCommand::Up(arguments) => up::run(arguments, terminal).map_err(boxed),
        HolobiontCommand::Down(arguments) => down::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Pull(arguments) => pull::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Chat(to) => chat::run(to.arguments, &to.gateway, terminal).map_err(boxed),
        HolobiontCommand::Ls(to) => ls::run(&to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Ps(to) => ps::run(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Top(to) => top::run(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Status(to) => status::run(&to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Slo(to) => slo::run(&to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Drain(to) => drain::drain(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Undrain(to) => drain::undrain(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Show(to) => show::run(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Adapters(to) => {
            adapters::run(&to.arguments.command, &to.url()?, terminal).map_err(boxed)
        }
        HolobiontCommand::Tune(to) => tune::run(to.arguments, &to.gateway, terminal).map_err(boxed),
        HolobiontCommand::Check(arguments) => check::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Doctor(arguments) => doctor::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Simulate(arguments) => simulate::run(&arguments).map_err(boxed),
        HolobiontCommand::Bench(to) => bench::run(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Verify(to) => verify::run(&to.arguments, &to.url()?, terminal).map_err(boxed),
        HolobiontCommand::Logs(arguments) => logs::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Key(command) => key::run(&command, terminal).map_err(boxed),
        HolobiontCommand::Registry(command) => registry::run(&command).map_err(boxed),
        HolobiontCommand::Cert(arguments) => cert::run(&arguments, terminal).map_err(boxed),
        HolobiontCommand::Completions(arguments) => {
            manual::completions(&arguments, HolobiontCli::command(), terminal);
            Ok(())
        }
        HolobiontCommand::Man(arguments) => {
            manual::man(&arguments, HolobiontCli::command(), terminal).map_err(boxed)
        }
    }
}

fn boxed<E: Explain + 'static>(error: E) -> Box<dyn Explain> {
    Box::new(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        HolobiontCli::command().debug_assert();
    }
}

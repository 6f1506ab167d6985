//! The command line.

use crate::{
    bench::{self, BenchArguments},
    chat::{self, ChatArguments},
    client::DEFAULT_URL,
    exit::{self, Exit, Explain},
    ls,
    pull::{self, PullArguments},
    terminal::{Format, Terminal, Volume},
    up::{self, UpArguments},
};

/// Serves many LoRA adapters over one base model.
#[derive(Debug, clap::Parser)]
#[command(name = "holobiont", version, about, after_help = exit::HELP, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Data and errors as JSON
    #[arg(long, global = true)]
    json: bool,
    /// No progress and no hints
    #[arg(long, short, global = true)]
    quiet: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Starts a deployment and keeps it running until Ctrl-C
    #[command(visible_alias = "serve", after_help = exit::HELP)]
    Up(UpArguments),
    /// Brings a model to this machine and prints its path
    #[command(after_help = exit::HELP)]
    Pull(PullArguments),
    /// Talks to the base or an adapter of a running gateway
    #[command(visible_alias = "run", after_help = exit::HELP)]
    Chat(ToGateway<ChatArguments>),
    /// Lists models on disk and, if a gateway answers, what it serves
    #[command(visible_alias = "list", after_help = exit::HELP)]
    Ls(ToGateway<LsArguments>),
    /// Measures a running gateway under load
    #[command(after_help = exit::HELP)]
    Bench(ToGateway<BenchArguments>),
}

/// Arguments of a command that talks to a gateway.
#[derive(Debug, clap::Args)]
struct ToGateway<A: clap::Args> {
    #[command(flatten)]
    arguments: A,
    /// The gateway
    #[arg(long, value_name = "URL", env = "HOLOBIONT_URL", default_value = DEFAULT_URL)]
    url: String,
}

#[derive(Debug, clap::Args)]
struct LsArguments {}

/// Runs a command and says how it ended.
pub fn run(cli: Cli) -> Exit {
    let format = if cli.json { Format::Json } else { Format::Human };
    let volume = if cli.quiet { Volume::Quiet } else { Volume::Normal };
    let terminal = Terminal::new(format, volume);
    let result: Result<(), Box<dyn Explain>> = match cli.command {
        Command::Up(arguments) => up::run(arguments, terminal).map_err(boxed),
        Command::Pull(arguments) => pull::run(&arguments, terminal).map_err(boxed),
        Command::Chat(to) => chat::run(to.arguments, &to.url, terminal).map_err(boxed),
        Command::Ls(to) => ls::run(&to.url, terminal).map_err(boxed),
        Command::Bench(to) => bench::run(&to.arguments, &to.url, terminal).map_err(boxed),
    };
    match result {
        Ok(()) => Exit::Ok,
        Err(error) => {
            terminal.error(error.as_ref());
            error.exit()
        }
    }
}

fn boxed<E: Explain + 'static>(error: E) -> Box<dyn Explain> {
    Box::new(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

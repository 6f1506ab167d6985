//! The command `holobiont-client`.
//!
//! # Layout
//!
//! - this file: from arguments to an exit code
//! - [`exit`]: exit codes of errors, and their form
//! - `connect`: sessions; [`remote_base`]: a session with the client weights; [`masking`]: masking options
//! - `setup`: a model that is ready to generate; `drafts`: drafters
//! - `generate`, `chat`, `show`, `pads`, `checks`, `privacy`, `bench`: the commands
//! - [`terminal`]: data on stdout, everything else on stderr

mod bench;
mod chat;
mod checks;
mod connect;
mod drafts;
pub mod exit;
mod generate;
pub mod masking;
mod pads;
mod privacy;
pub mod remote_base;
mod setup;
mod show;
pub mod terminal;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use settings::exit::Exit;

use self::{
    exit::CliError,
    terminal::{OutputFormat, Terminal},
};

/// Runs a model whose linear layers an executor computes: adapter, KV cache and sampling stay local.
#[derive(Debug, Parser)]
#[command(name = "holobiont-client", version, about, after_help = exit::HELP, max_term_width = 100)]
pub struct ClientCli {
    #[command(subcommand)]
    command: ClientCommand,
    /// Prints JSON, for programs
    #[arg(long, global = true)]
    json: bool,
    /// Prints nothing but data and errors
    #[arg(long, short, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum ClientCommand {
    /// Answers a prompt, token by token
    Generate(generate::GenerateArguments),
    /// Holds a conversation with the model
    Chat(chat::SplitChatArguments),
    /// Lists the base's sites, the linear groups that a client can call
    Sites(show::SitesArguments),
    /// Shows the quota that the executor grants this client, and its usage
    Stats(show::StatsArguments),
    /// Makes pads for --masking pads in advance
    Pads(pads::PadPoolArguments),
    /// Writes a file with which the Python package checks answers
    Checks(checks::ChecksArguments),
    /// Describes what each party sees in each masking mode
    Privacy(privacy::PrivacyArguments),
    /// Measures decoding and prints JSON lines
    Bench(bench::SplitBenchArguments),
    /// Prints a completion script for a shell
    Completions {
        /// Shell that will read the script
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Runs the command of the command line.
#[must_use]
pub fn run(cli: ClientCli) -> Exit {
    let format = if cli.json { OutputFormat::Json } else { OutputFormat::Human };
    let terminal = Terminal { format, quiet: cli.quiet };
    let done: Result<(), CliError> = match cli.command {
        ClientCommand::Generate(arguments) => generate::run(&arguments, terminal),
        ClientCommand::Chat(arguments) => chat::run(&arguments, terminal),
        ClientCommand::Sites(arguments) => show::sites(&arguments, terminal),
        ClientCommand::Stats(arguments) => show::stats(&arguments, terminal),
        ClientCommand::Pads(arguments) => pads::run(&arguments, terminal),
        ClientCommand::Checks(arguments) => checks::run(&arguments, terminal),
        ClientCommand::Privacy(arguments) => privacy::run(&arguments, terminal),
        ClientCommand::Bench(arguments) => bench::run(&arguments, terminal),
        ClientCommand::Completions { shell } => completions(shell, terminal),
    };
    match done {
        Ok(()) => Exit::Ok,
        Err(error) => {
            terminal.error(&error);
            error.exit()
        }
    }
}

fn completions(shell: Shell, terminal: Terminal) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut ClientCli::command(), "holobiont-client", &mut script);
    Ok(terminal.print(String::from_utf8_lossy(&script).trim_end())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        ClientCli::command().debug_assert();
    }

    #[test]
    fn a_split_chat_of_the_holobiont_command_is_understood() {
        let options = [
            ["--adapter", "d"],
            ["--ca", "c"],
            ["--masking", "paper"],
            ["--max-tokens", "7"],
            ["--temperature", "0"],
            ["--seed", "18446744073709551615"],
            ["--system", "Be brief."],
        ]
        .concat();
        let line = ["holobiont-client", "generate", "--executor", "tls://h:1"];
        assert!(ClientCli::try_parse_from([&line[..], &options, &["--", "-- why?"]].concat()).is_ok());
        let line = ["holobiont-client", "chat", "--executor", "/run/layers.sock"];
        assert!(ClientCli::try_parse_from([&line[..], &options].concat()).is_ok());
    }

    #[test]
    fn options_that_contradict_each_other_are_a_usage_error() {
        let line =
            ["holobiont-client", "generate", "--executor", "tls://h:1", "--masking", "perfect", "hello"];
        assert!(ClientCli::try_parse_from(line).is_err());
        let line = ["holobiont-client", "generate", "--executor", "tls://h:1", "--cert", "c.pem", "hello"];
        assert!(ClientCli::try_parse_from(line).is_err(), "a certificate without its key");
    }
}

//! Completion scripts of programs without subcommands, printed by `PROGRAM completions SHELL`.

use std::{
    ffi::OsString,
    io::{self, Write as _},
};

use clap::{CommandFactory, Parser};
use clap_complete::Shell;

/// Arguments after the word `completions`.
#[derive(Debug, Parser)]
#[command(name = "completions", about = "Prints a completion script for a shell")]
struct ShellChoice {
    /// The shell that will read it
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completion script of the parser `C` if `arguments` ask for it, else returns false. `arguments`
/// begin with the program's name. Exits with a usage error if no shell is named.
pub fn are_asked_for<C: CommandFactory>(arguments: &[OsString]) -> bool {
    let asked = arguments.get(1).is_some_and(|first| first == "completions");
    if asked {
        let asked = ShellChoice::parse_from(&arguments[1..]);
        // A closed pipe is not an error.
        let _ = io::stdout().lock().write_all(&script(asked.shell, C::command()));
    }
    asked
}

/// Generates the script under the command's own name.
fn script(shell: Shell, mut command: clap::Command) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "a-program")]
    struct CompletionCli {
        /// How many rows there are
        #[arg(long)]
        rows: u32,
    }

    #[test]
    fn a_script_completes_the_options_of_its_program() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell, CompletionCli::command())).unwrap();
            assert!(script.contains("a-program") && script.contains("rows"), "{shell}: {script}");
        }
    }

    #[test]
    fn nothing_else_is_taken_for_the_word() {
        assert_eq!(CompletionCli::parse_from(["a-program", "--rows", "1"]).rows, 1);
        for line in [&["a-program"][..], &["a-program", "--rows", "1"], &["a-program", "completion"]] {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert!(!are_asked_for::<CompletionCli>(&line));
        }
    }
}

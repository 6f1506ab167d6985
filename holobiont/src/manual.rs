//! What is generated from the command line itself: shell completions, man pages, and `docs/guides/command.md`.
//!
//! One source, three forms: none of them can say what the parser does not do.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    exit::{self, Exit, Explain},
    terminal::Terminal,
};

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArguments {
    /// The shell that will read them
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArguments {
    /// Writes a page for every command into DIR instead of the first one to stdout
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Why no pages were written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the pages to {path}")]
pub(crate) struct ManError {
    path: PathBuf,
    source: io::Error,
}

impl Explain for ManError {
    fn exit(&self) -> Exit {
        match self.source.kind() {
            io::ErrorKind::PermissionDenied => Exit::Refused,
            io::ErrorKind::NotFound => Exit::NotFound,
            _ => Exit::Failed,
        }
    }
}

/// Prints a completion script.
pub(crate) fn completions(arguments: &CompletionsArguments, mut root: clap::Command, terminal: Terminal) {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut root, "holobiont", &mut script);
    terminal.print(String::from_utf8_lossy(&script).trim_end());
}

/// Prints or writes manual pages.
pub(crate) fn man(arguments: &ManArguments, root: clap::Command, terminal: Terminal) -> Result<(), ManError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| ManError { path, source }
    };
    let Some(directory) = &arguments.out else {
        let mut page = Vec::new();
        let rendered = clap_mangen::Man::new(root).render(&mut page);
        rendered.map_err(failed(Path::new("standard output")))?;
        terminal.print(String::from_utf8_lossy(&page).trim_end());
        return Ok(());
    };
    fs::create_dir_all(directory).map_err(failed(directory))?;
    for (names, command) in visible_commands(root) {
        let title = names.join("-");
        let path = directory.join(format!("{title}.1"));
        let mut page = Vec::new();
        let command = command.name(title).bin_name(names.join(" "));
        clap_mangen::Man::new(command).render(&mut page).map_err(failed(&path))?;
        fs::write(&path, page).map_err(failed(&path))?;
        terminal.print(path.display());
    }
    Ok(())
}

/// Every command with its full name, outer ones first; what is hidden or only prints help is left out.
fn visible_commands(mut root: clap::Command) -> Vec<(Vec<String>, clap::Command)> {
    root.build();
    let mut found = Vec::new();
    collect(&mut found, Vec::new(), &root);
    found
}

fn collect(found: &mut Vec<(Vec<String>, clap::Command)>, above: Vec<String>, command: &clap::Command) {
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let names: Vec<String> = above.into_iter().chain([command.get_name().to_owned()]).collect();
    found.push((names.clone(), command.clone()));
    for below in command.get_subcommands() {
        collect(found, names.clone(), below);
    }
}

/// Options that every command takes; the reference names them once.
const EVERYWHERE: [&str; 7] = ["json", "quiet", "verbose", "color", "yes", "help", "version"];

/// `docs/guides/command.md`, of the command line `root`.
#[must_use]
pub fn reference(root: clap::Command) -> String {
    let mut text = String::from(
        "# The command `holobiont`\n\n\
         Made from the command line itself by a test; edit the sources in `holobiont/src` and run\n\
         `UPDATE_REFERENCE=1 cargo test -p holobiont the_reference` to write it again.\n\n\
         Data goes to stdout, progress and hints to stderr. Nothing is asked unless stdin and stderr are a terminal.\n\
         The options of `holobiont` itself work for every command.\n\n",
    );
    text.push_str(&format!("```text\n{}\n```\n", exit::HELP));
    for (names, command) in visible_commands(root) {
        let level = "#".repeat(names.len().min(2) + 1);
        let is_root = names.len() == 1;
        let is_everywhere = |arg: &clap::Arg| EVERYWHERE.contains(&arg.get_id().as_str());
        let command = command.mut_args(|arg| {
            let hide = arg.is_hide_set() || (!is_root && is_everywhere(&arg));
            arg.hide(hide)
        });
        let help = command.after_help("").render_help().to_string();
        text.push_str(&format!("\n{level} `{}`\n\n```text\n{}\n```\n", names.join(" "), tidy(&help)));
    }
    text
}

/// No spaces at the ends of lines, no empty lines at the end.
fn tidy(help: &str) -> String {
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn the_reference_of_all_commands_is_what_the_parser_knows() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/command.md");
        let expected = reference(Cli::command());
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &expected).unwrap();
        }
        let written = fs::read_to_string(&path).unwrap_or_default();
        assert!(written == expected, "{} is old; see its second paragraph", path.display());
    }

    #[test]
    fn every_command_of_the_list_exists() {
        let names: Vec<String> =
            visible_commands(Cli::command()).into_iter().map(|(names, _)| names[1..].join(" ")).collect();
        for name in [
            "up",
            "down",
            "pull",
            "chat",
            "ls",
            "ps",
            "status",
            "show",
            "adapters add",
            "adapters replace",
            "adapters rm",
            "adapters pin",
            "adapters check",
            "check",
            "doctor",
            "bench",
            "logs",
            "key add",
            "key ls",
            "key rm",
            "completions",
            "man",
        ] {
            assert!(names.iter().any(|known| known == name), "there is no `{name}`");
        }
    }
}

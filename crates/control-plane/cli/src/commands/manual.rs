//! Output generated from the command line definition: shell completions, man pages and, in a test of
//! [`cli`](crate::cli), `docs/guides/command.md`.
//!
//! All three forms come from the parser, so none can describe an option that does not exist.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    exit::{Exit, Explain},
    terminal::Terminal,
};

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArguments {
    /// Shell that the script is for
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArguments {
    /// Directory for one page per command; without it, the main page goes to stdout
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

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

pub(crate) fn completions(arguments: &CompletionsArguments, mut root: clap::Command, terminal: Terminal) {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut root, "holobiont", &mut script);
    terminal.print(String::from_utf8_lossy(&script).trim_end());
}

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

/// Returns every command with its full name, parents first, without hidden and help-only commands.
pub(crate) fn visible_commands(mut root: clap::Command) -> Vec<(Vec<String>, clap::Command)> {
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

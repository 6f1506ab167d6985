//! Tests that `docs/guides/command.md` is the reference generated from the command line.

use std::{fs, path::Path};

use clap::CommandFactory as _;

use super::HolobiontCli;
use crate::{commands::manual::visible_commands, exit};

/// Options that every command takes, documented only once.
const EVERYWHERE: [&str; 7] = ["json", "quiet", "verbose", "color", "yes", "help", "version"];

/// Returns the text of `docs/guides/command.md` for the command line `root`.
fn reference(root: clap::Command) -> String {
    let mut text = String::from(
        "# The command `holobiont`\n\n\
         Made from the command line itself by a test; edit the sources in `crates/control-plane/cli/src` and run\n\
         `UPDATE_REFERENCE=1 cargo test -p holobiont the_reference` to write it again.\n\n\
         Data goes to stdout, progress and hints to stderr. Commands ask questions only if stdin and stderr are a terminal.\n\
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

/// Removes spaces at the ends of lines and empty lines at the end.
fn tidy(help: &str) -> String {
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

#[test]
fn the_reference_of_all_commands_is_what_the_parser_knows() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/guides/command.md");
    let expected = reference(HolobiontCli::command());
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &expected).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == expected, "{} is old; see its second paragraph", path.display());
}

#[test]
fn every_command_of_the_list_exists() {
    let names: Vec<String> = visible_commands(HolobiontCli::command())
        .into_iter()
        .map(|(names, _)| names[1..].join(" "))
        .collect();
    for name in [
        "up",
        "down",
        "pull",
        "chat",
        "ls",
        "ps",
        "status",
        "top",
        "show",
        "adapters ls",
        "adapters add",
        "adapters replace",
        "adapters rm",
        "adapters pin",
        "adapters check",
        "tune ls",
        "tune show",
        "tune logs",
        "tune cancel",
        "check",
        "doctor",
        "simulate",
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

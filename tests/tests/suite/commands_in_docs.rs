//! Commands and options in messages and guides exist in the programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command as Process,
};
use testkit::paths::root;

use clap::{Command, CommandFactory as _, Parser as _};

/// Text of every file below `directory` that ends in `ending`, except tests.
fn texts(directory: &Path, ending: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(texts(&path, ending));
        } else if path.extension().is_some_and(|it| it == ending) && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).unwrap();
            let shipped = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            found.push((path, shipped.to_owned()));
        }
    }
    found
}

/// Texts for users: the README, the quickstart, the installation, the tutorial and the guides.
fn guides() -> Vec<(PathBuf, String)> {
    let mut found = texts(&root().join("docs/guides"), "md");
    for page in ["README.md", "docs/quickstart.md", "docs/installation.md", "docs/tutorial.md"] {
        let page = root().join(page);
        let text = fs::read_to_string(&page).unwrap();
        found.push((page, text));
    }
    found
}

fn messages(programs: &[&str]) -> Vec<(PathBuf, String)> {
    programs.iter().flat_map(|program| texts(&root().join(program).join("src"), "rs")).collect()
}

/// Collects the options of a command and its subcommands.
fn options(command: &Command, found: &mut BTreeSet<String>) {
    found.extend(command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_owned));
    found.extend(["help".to_owned(), "version".to_owned()]);
    command.get_subcommands().for_each(|below| options(below, found));
}

fn options_of(commands: &[Command]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    commands.iter().for_each(|command| options(command, &mut found));
    found
}

fn processes() -> Vec<Command> {
    vec![
        base_executor::config::ExecutorConfig::command(),
        base_executor::bench::BenchConfig::command(),
        base_executor::check::CheckConfig::command(),
        base_executor::device_check::ProbeConfig::command(),
        gateway::config::Args::command(),
        gateway::maintenance::MaintenanceTask::command(),
        endpoint_picker::config::Args::command(),
        lora_worker::config::WorkerConfig::command(),
        client::cli::ClientCli::command(),
    ]
}

/// Options that a text names, such as `--kv-bytes`, each with its line.
fn named(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().flat_map(|line| {
        line.match_indices("--").filter_map(move |(at, _)| {
            let before = line[..at].chars().next_back();
            let rest = &line[at + 2..];
            let end = rest.find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-');
            let name = rest[..end.unwrap_or(rest.len())].trim_end_matches('-');
            let is_one = name.len() > 1 && before.is_none_or(|c| " `'\"([|/".contains(c));
            is_one.then_some((name, line))
        })
    })
}

#[test]
fn every_option_that_a_message_names_is_one_of_up_or_of_the_process() {
    let mut up = BTreeSet::new();
    options(holobiont::cli::HolobiontCli::command().find_subcommand("up").unwrap(), &mut up);
    for setting in settings::all() {
        assert!(up.contains(setting.flag), "up lacks --{}", setting.flag);
    }
    let known = &options_of(&processes()) | &up;
    let mut wrong = BTreeMap::new();
    let programs = [
        "crates/control-plane/gateway",
        "base-executor",
        "lora-worker",
        "crates/control-plane/endpoint-picker",
    ];
    for (path, text) in messages(&programs) {
        let strings = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (option, line) in strings.flat_map(named).filter(|(option, _)| !known.contains(*option)) {
            wrong.insert(format!("{}: --{option}", path.display()), line.to_owned());
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether a line calls another program, or a script of ours.
fn is_of_others(line: &str) -> bool {
    [
        "cargo",
        "systemctl",
        "container",
        "scripts/",
        "apt",
        "pip",
        "curl",
        "podman",
        "journalctl",
        "kubectl",
        "helm",
        "tar -",
        "python",
        "vllm",
        "nvidia",
        "sudo",
    ]
    .iter()
    .any(|other| line.contains(other))
}

/// Removes the first column of the tables that map options of other programs to ours.
fn without_foreign_options(page: &Path, text: String) -> String {
    if !page.ends_with("migrating.md") {
        return text;
    }
    let own = |line: &str| {
        let row = line.strip_prefix("| ").and_then(|row| row.split_once(" | "));
        row.map_or(line, |(_, own)| own).to_owned()
    };
    text.lines().map(own).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_option_that_a_guide_names_is_one() {
    let mut commands = processes();
    commands.push(holobiont::cli::HolobiontCli::command());
    let known = options_of(&commands);
    let mut wrong = BTreeMap::new();
    for (path, text) in guides() {
        let text = without_foreign_options(&path, text);
        let unknown = named(&text).filter(|(option, _)| !known.contains(*option));
        for (option, line) in unknown.filter(|(_, line)| !is_of_others(line)) {
            wrong.insert(format!("{}: --{option}", path.display()), line.to_owned());
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Words of a command line as a shell splits them, up to a comment or a pipe.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut is_word) = (Vec::new(), String::new(), None, false);
    for c in line.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            (c, Some(_)) => word.push(c),
            ('"' | '\'', None) => (quote, is_word) = (Some(c), true),
            ('#' | '|' | '>' | ';', None) if !is_word => break,
            (' ', None) if is_word => {
                words.push(std::mem::take(&mut word));
                is_word = false;
            }
            (' ', None) => {}
            (c, None) => {
                word.push(c);
                is_word = true;
            }
        }
    }
    words.extend(is_word.then_some(word));
    words
}

/// Command lines of a guide that begin with `program`.
fn typed(text: &str, program: &str) -> impl Iterator<Item = Vec<String>> {
    let mut is_code = false;
    let lines: Vec<Vec<String>> = text
        .lines()
        .filter(move |line| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            is_code && !is_fence
        })
        .map(|line| line.trim_start().trim_start_matches("$ ").trim_start_matches("sudo "))
        .filter(|line| {
            line.starts_with(&format!("{program} ")) && !line.contains('[') && !line.ends_with('\\')
        })
        .map(words)
        .collect();
    lines.into_iter()
}

#[test]
fn every_command_that_a_guide_shows_is_understood() {
    let mut tried = 0;
    for (path, text) in guides().into_iter().filter(|(path, _)| !path.ends_with("command.md")) {
        for line in typed(&text, "holobiont") {
            tried += 1;
            if let Err(error) = holobiont::cli::HolobiontCli::try_parse_from(&line) {
                assert!(!error.use_stderr(), "{}: {line:?}: {error}", path.display());
            }
        }
        for line in typed(&text, "holobiont-client") {
            tried += 1;
            if let Err(error) = client::cli::ClientCli::try_parse_from(&line) {
                assert!(!error.use_stderr(), "{}: {line:?}: {error}", path.display());
            }
        }
    }
    assert!(tried > 20, "only {tried} commands were found");
}

/// Commands that a text quotes, such as 'holobiont key add': the words up to the closing quote.
fn quoted(text: &str) -> impl Iterator<Item = Vec<&str>> {
    ["'holobiont ", "`holobiont ", "\"holobiont "].into_iter().flat_map(move |open| {
        text.match_indices(open).map(move |(at, _)| {
            let rest = &text[at + open.len()..];
            let end = rest.find(['\'', '`', '"', '\n', ';', ',', ':', '(']).unwrap_or(rest.len());
            rest[..end].split_whitespace().collect()
        })
    })
}

#[test]
fn every_command_that_a_message_or_guide_names_exists() {
    let mut root = holobiont::cli::HolobiontCli::command();
    root.build();
    let programs = [
        "base-executor",
        "lora-worker",
        "client",
        "crates/control-plane/gateway",
        "crates/control-plane/cli",
        "crates/shared/security",
    ];
    for (path, text) in [guides(), messages(&programs)].concat() {
        for words in quoted(&text).filter(|words| words.first().is_some_and(|word| is_plain(word))) {
            let first = root.find_subcommand(words[0]);
            let command =
                first.unwrap_or_else(|| panic!("{}: holobiont {}", path.display(), words.join(" ")));
            if command.has_subcommands() {
                let second = words.get(1).filter(|word| is_plain(word));
                assert!(
                    second.is_none_or(
                        |second| second.contains('|') || command.find_subcommand(second).is_some()
                    ),
                    "{}: holobiont {}",
                    path.display(),
                    words.join(" ")
                );
            }
        }
    }
}

fn is_plain(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-')
}

/// Program, beginning of an argument, and its completion.
const COMPLETED: [(&str, &str, &str); 8] = [
    ("holobiont", "adap", "adapters"),
    ("holobiont-client", "gene", "generate"),
    ("holobiont-trainer", "sess", "session"),
    ("holobiont-simulator", "starv", "starvation"),
    ("gateway", "--served-m", "--served-model-name"),
    ("base-executor", "--kv-by", "--kv-bytes"),
    ("lora-worker", "--execu", "--executor"),
    ("endpoint-picker", "--picker-endp", "--picker-endpoints"),
];

/// Bash script that prints the completions for `SCRIPT PROGRAM WORD`.
const PRESSED: &str = r#"
source "$1"
COMP_WORDS=("$2" "$3") COMP_CWORD=1
"$(complete -p "$2" | sed 's/.* -F \([^ ]*\).*/\1/')" "$2" "$3" "$2"
echo "${COMPREPLY[@]}"
"#;

#[test]
fn shells_complete_what_is_typed_of_every_program() {
    let folder = tempfile::tempdir().unwrap();
    for (program, word, whole) in COMPLETED {
        for shell in ["bash", "zsh", "fish"] {
            let made = Process::new(e2e_tests::fixtures::program(program))
                .args(["completions", shell])
                .output()
                .unwrap();
            assert!(made.status.success() && !made.stdout.is_empty(), "{program} {shell}");
            let script = folder.path().join(format!("{program}.{shell}"));
            fs::write(&script, made.stdout).unwrap();
            // Further shells may be missing on this machine.
            if let Ok(read) = Process::new(shell).arg("-n").arg(&script).output() {
                assert!(
                    read.status.success(),
                    "{program} {shell}: {}",
                    String::from_utf8_lossy(&read.stderr)
                );
            }
        }
        let script = folder.path().join(format!("{program}.bash"));
        let pressed =
            Process::new("bash").args(["-c", PRESSED, "bash"]).arg(script).args([program, word]).output();
        let said = String::from_utf8(pressed.unwrap().stdout).unwrap();
        assert_eq!(said.trim(), whole, "{program}");
    }
}

//! Settings in the repository's files match their declarations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};
use testkit::paths::root;

use settings::{PICKER, Preset, SECTIONS, Setting, variables::Variable};

/// Extensions of the files that are searched for variables.
const TEXTS: [&str; 9] = ["rs", "md", "py", "sh", "toml", "env", "service", "yml", "html"];

/// Paths with foreign text, or with intentionally wrong variables.
const ELSEWHERE: [&str; 6] = ["target", ".git", ".venv", "CHANGELOG.md", "settings", "node_modules"];

fn texts(directory: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        let kind = entry.file_type().unwrap();
        if ELSEWHERE.contains(&name.as_str()) || (kind.is_dir() && name.starts_with('.')) {
            continue;
        }
        if kind.is_dir() {
            texts(&path, found);
        } else if is_text(&path)
            && let Ok(text) = fs::read_to_string(&path)
        {
            found.push((path, text));
        }
    }
}

fn is_text(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.map_or_else(
        || path.parent().is_some_and(|parent| parent.ends_with("scripts")),
        |e| TEXTS.contains(&e),
    )
}

/// Names in `text` with the prefix of our variables.
fn variables(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("HOLOBIONT_").map(|(at, _)| {
        let rest = &text[at..];
        let end = rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
        &rest[..end.unwrap_or(rest.len())]
    })
}

/// Wrong names in tests, which no program reads.
const WRONG: [&str; 3] = ["HOLOBIONT_APIKEY_FILE", "HOLOBIONT_KV_BYTE", "HOLOBIONT_LISTENS"];

#[test]
fn every_variable_that_the_tree_names_is_known() {
    let mut found = Vec::new();
    texts(&root(), &mut found);
    assert!(found.len() > 500, "{} files", found.len());
    let mut unknown = BTreeSet::new();
    for (path, text) in &found {
        let named = variables(text).filter(|name| !name.ends_with('_') && !WRONG.contains(name));
        unknown.extend(named.filter(|name| Variable::named(name).is_err()).map(|name| (name, path)));
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

fn table(section: &[Setting]) -> String {
    let mut text = String::from("| Field | Option | Default | Meaning |\n|---|---|---|---|\n");
    for setting in section {
        let (field, option, preset) = (setting.field, setting.flag, preset(setting));
        text.push_str(&format!("| `{field}` | `--{option}` | {preset} | {} |\n", setting.help));
    }
    text
}

fn preset(setting: &Setting) -> String {
    match setting.preset {
        Preset::Is(value) if value.parse::<f64>().is_ok() || setting.is_switch() => value.to_owned(),
        Preset::Is(value) => format!("`\"{value}\"`"),
        Preset::Depends(words) => words.to_owned(),
        Preset::None => "none".to_owned(),
    }
}

/// The page of each section has a heading with the section's name, and the first table below it is generated.
/// `UPDATE_REFERENCE=1` writes the tables instead of comparing them.
#[test]
fn the_documents_have_the_tables_of_all_settings() {
    for section in SECTIONS.iter().copied().chain([PICKER]) {
        let page = if section[0].is_lab() { "performance/README.md" } else { "reference/configuration.md" };
        let path = root().join("docs").join(page);
        let mut text = fs::read_to_string(&path).unwrap();
        let heading = format!("## `[{}]`\n", section[0].section);
        let heading = text.find(&heading).unwrap_or_else(|| panic!("{page} lacks the heading {heading}"));
        let begin = heading + text[heading..].find("| Field |").unwrap();
        let end = begin + text[begin..].find("\n\n").unwrap() + 1;
        let table = table(section);
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            text.replace_range(begin..end, &table);
            fs::write(&path, text).unwrap();
        } else {
            assert_eq!(&text[begin..end], table, "UPDATE_REFERENCE=1 writes it again");
        }
    }
}

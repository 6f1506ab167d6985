//! Commits since this rule have a subject of one form, and a body with the reason.

use std::process::Command;

use super::root;

const BEFORE: &str = "7be2e1500a5833eb10bca76ef58442d5897ac92c";
const MAX_SUBJECT: usize = 72;
/// Separators of commits, and of a commit's subject and body.
const SEPARATORS: [char; 2] = ['\u{1e}', '\u{1f}'];

/// Output of git; `None` without history, as in an archive or a shallow clone.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn fault(subject: &str, body: &str) -> Option<&'static str> {
    let Some((area, rest)) = subject.split_once(": ") else { return Some("it has no `area: `") };
    let is_area = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ", -/.".contains(c);
    if area.is_empty() || !area.chars().all(is_area) {
        return Some("its area is no list of small words");
    }
    if subject.chars().count() > MAX_SUBJECT {
        return Some("its subject is too long");
    }
    if rest.ends_with('.') || rest.to_lowercase().starts_with("wip") {
        return Some("its subject ends in a full stop, or is unfinished work");
    }
    body.trim().is_empty().then_some("its body does not say why")
}

#[test]
fn a_commit_has_an_area_a_short_subject_and_a_body() {
    let range = format!("{BEFORE}..HEAD");
    let Some(log) = git(&["log", "--no-merges", "--format=%h %s%x1f%b%x1e", &range]) else { return };
    let [between, within] = SEPARATORS;
    let wrong: Vec<_> = log
        .split(between)
        .filter_map(|commit| commit.trim().split_once(within))
        .filter_map(|(head, body)| {
            let (id, subject) = head.split_once(' ')?;
            fault(subject, body).map(|fault| format!("{id} {subject}: {fault}"))
        })
        .collect();
    assert!(wrong.is_empty(), "see CONTRIBUTING.md, Commits: {wrong:#?}");
}

#[test]
fn the_rule_of_commits_finds_what_is_wrong() {
    assert_eq!(fault("model, kernels: read bf16 weights", "Why."), None);
    for (subject, body) in [
        ("Read bf16 weights", "Why."),
        ("model: wip", "Why."),
        ("model: read bf16 weights.", "Why."),
        ("model: read bf16 weights", "\n"),
        ("Model: read bf16 weights", "Why."),
    ] {
        assert!(fault(subject, body).is_some(), "{subject}");
    }
    assert!(fault(&format!("model: {}", "x".repeat(MAX_SUBJECT)), "Why.").is_some());
}

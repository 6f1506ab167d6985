//! Findings of `check` and `doctor`: one line each, with health and fix.

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal, TextStyle},
};

/// Health of a checked item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Health {
    Ok,
    /// The item works but could be better.
    Warn,
    Fail,
}

impl Health {
    fn shown(self, ink: TextStyle) -> String {
        match self {
            Self::Ok => ink.green("ok  "),
            Self::Warn => ink.yellow("warn"),
            Self::Fail => ink.red("fail"),
        }
    }
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// Name of the checked item.
    pub(crate) name: String,
    pub(crate) health: Health,
    /// Description of the item's state.
    pub(crate) found: String,
    /// Next step, if the item is not healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(crate) fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), health: Health::Ok, found: found.into(), fix: None }
    }

    pub(crate) fn warn(name: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { health: Health::Warn, fix: Some(fix.into()), ..Self::ok(name, found) }
    }

    pub(crate) fn fail(name: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { health: Health::Fail, fix: Some(fix.into()), ..Self::ok(name, found) }
    }

    /// Returns a failed finding with the error and its causes in one line, and the next step as fix.
    pub(crate) fn error(name: impl Into<String>, error: &dyn Explain) -> Self {
        let why = crate::exit::why(error).map(|why| format!(": {why}")).unwrap_or_default();
        Self { health: Health::Fail, fix: error.next(), ..Self::ok(name, format!("{error}{why}")) }
    }
}

/// Error after a report with failed findings, whose lines say what failed.
#[derive(Debug, thiserror::Error)]
#[error("{failed} of {looked_at} checks failed")]
pub(crate) struct CheckFailure {
    failed: usize,
    looked_at: usize,
    exit: Exit,
}

impl Explain for CheckFailure {
    fn exit(&self) -> Exit {
        self.exit
    }

    fn is_said(&self) -> bool {
        true
    }
}

/// Prints the findings; returns an error with the exit code `exit` if any failed.
pub(crate) fn report(findings: &[Finding], exit: Exit, terminal: Terminal) -> Result<(), CheckFailure> {
    report_with(findings, &json!({}), exit, terminal)
}

/// Prints the findings like [`report`]; the JSON object also gets the members of the object `figures`.
pub(crate) fn report_with(
    findings: &[Finding],
    figures: &Value,
    exit: Exit,
    terminal: Terminal,
) -> Result<(), CheckFailure> {
    let failed = findings.iter().filter(|finding| finding.health == Health::Fail).count();
    match terminal.format {
        PrintFormat::Json => {
            let mut object = json!({"ok": failed == 0, "findings": findings});
            for (name, value) in figures.as_object().into_iter().flatten() {
                object[name] = value.clone();
            }
            terminal.print(object);
        }
        PrintFormat::Human => terminal.print(text(terminal.ink(), findings)),
    }
    match failed {
        0 => Ok(()),
        _ => Err(CheckFailure { failed, looked_at: findings.len(), exit }),
    }
}

fn text(ink: TextStyle, findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.chars().count()).max().unwrap_or_default();
    let mut lines = Vec::new();
    for Finding { name, health, found, fix } in findings {
        let indent = " ".repeat(width + 8);
        let found = found.lines().collect::<Vec<_>>().join(&format!("\n{indent}"));
        lines.push(format!("{}  {name:<width$}  {found}", health.shown(ink)));
        if let Some(fix) = fix {
            lines.push(format!("{indent}{} {fix}", ink.dim("fix:")));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::Verbosity;

    #[test]
    fn each_finding_is_a_line_and_its_fix_stands_below() {
        let findings = [Finding::ok("cores", "2"), Finding::warn("disk space", "1 GiB", "free some")];
        let expected = "ok    cores       2\nwarn  disk space  1 GiB\n                  fix: free some";
        assert_eq!(text(TextStyle::None, &findings), expected);
    }

    #[test]
    fn a_warning_is_no_failure() {
        let terminal = Terminal::new(PrintFormat::Json, Verbosity::Quiet);
        report(&[Finding::warn("a", "b", "c")], Exit::Failed, terminal).unwrap();
        let error = report(&[Finding::fail("a", "b", "c")], Exit::Usage, terminal).unwrap_err();
        assert_eq!(error.exit(), Exit::Usage);
    }
}

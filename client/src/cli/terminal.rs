//! Output: data on stdout, everything else on stderr; progress only on a terminal.

use std::io::{self, IsTerminal as _, Write as _};

use super::exit::CliError;

/// Format of printed data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputFormat {
    /// Text for a user.
    Human,
    /// JSON for other programs.
    Json,
}

/// Output options of a command.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    /// Format of data on stdout and of errors on stderr.
    pub format: OutputFormat,
    /// Whether only data and errors are printed.
    pub quiet: bool,
}

impl Terminal {
    /// Prints a line of data to stdout.
    pub fn print(self, line: impl std::fmt::Display) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}").and_then(|()| out.flush())
    }

    pub(super) fn stream(self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(printable(text).as_bytes()).and_then(|()| out.flush())
    }

    /// Prints a note to stderr, unless `quiet` is set.
    pub fn note(self, line: impl std::fmt::Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    pub(super) fn error(self, error: &CliError) {
        let text = match self.format {
            OutputFormat::Human => error.text(),
            OutputFormat::Json => error.json().to_string(),
        };
        let _ = writeln!(io::stderr().lock(), "{}", printable(&text));
    }

    /// Returns a function that shows progress in place; it prints only to a terminal.
    pub fn progress(self, what: &'static str) -> impl FnMut(u64, u64) {
        let is_shown = !self.quiet && self.format == OutputFormat::Human && io::stderr().is_terminal();
        let mut shown = u64::MAX;
        move |done: u64, total: u64| {
            let percent = done * 100 / total.max(1);
            if is_shown && percent != shown {
                shown = percent;
                let end = if done >= total { "\r\u{1b}[K" } else { "" };
                let _ = write!(io::stderr().lock(), "\r{what}: {percent} %{end}");
            }
        }
    }
}

/// Removes control characters, so that neither a model nor an executor can control the user's terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\tc\u{7}"), "a[2Jb\n\tc");
    }
}

//! How answers reach the person: data on stdout, everything else on stderr, colours only where they are wanted.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::exit::{Explain, why};

/// In which form data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Human,
    /// One JSON value a line, for programs.
    Json,
}

/// How much is said besides the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Volume {
    /// Progress and hints.
    Normal,
    /// Errors only.
    Quiet,
}

/// The terminal a command talks to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terminal {
    /// Form of the data on stdout and of errors on stderr.
    pub(crate) format: Format,
    volume: Volume,
}

impl Terminal {
    /// A terminal of the given form and volume.
    pub(crate) fn new(format: Format, volume: Volume) -> Self {
        Self { format, volume }
    }

    /// Prints a line of data. A reader that went away is no error.
    pub(crate) fn print(self, line: impl std::fmt::Display) {
        let _ = writeln!(io::stdout().lock(), "{line}");
    }

    /// Prints a line beside the data, unless quiet.
    pub(crate) fn note(self, line: impl std::fmt::Display) {
        if self.volume == Volume::Normal {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// Prints why a command failed.
    pub(crate) fn error(self, error: &dyn Explain) {
        let mut out = io::stderr().lock();
        let _ = match self.format {
            Format::Json => writeln!(out, "{}", error_json(error)),
            Format::Human => writeln!(out, "{}", error_text(error)),
        };
    }

    /// A spinner on a terminal, nothing elsewhere.
    pub(crate) fn spinner(self, message: String) -> ProgressBar {
        if !self.animates() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new_spinner().with_message(message);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(100));
        bar
    }

    /// A bar over `total_bytes` on a terminal, nothing elsewhere.
    pub(crate) fn byte_bar(self, message: String, total_bytes: u64) -> ProgressBar {
        if !self.animates() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(total_bytes).with_message(message);
        let template = "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar
    }

    /// True if progress may be drawn.
    fn animates(self) -> bool {
        self.volume == Volume::Normal && self.format == Format::Human && io::stderr().is_terminal()
    }
}

/// Marks up text where the stream is a terminal and `NO_COLOR` is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ink {
    /// ANSI styles.
    Ansi,
    /// Plain text.
    None,
}

impl Ink {
    /// The ink for stdout.
    pub(crate) fn stdout() -> Self {
        Self::choose(io::stdout().is_terminal(), std::env::var_os("NO_COLOR").as_deref())
    }

    fn choose(is_terminal: bool, no_color: Option<&std::ffi::OsStr>) -> Self {
        match (is_terminal, no_color) {
            (true, None) => Self::Ansi,
            (true, Some(value)) if value.is_empty() => Self::Ansi,
            _ => Self::None,
        }
    }

    /// For what matters.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap(text, "1")
    }

    /// For what matters less.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap(text, "2")
    }

    fn wrap(self, text: &str, code: &str) -> String {
        match self {
            Self::Ansi => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            Self::None => text.to_owned(),
        }
    }
}

/// Text without control characters, so that neither a model nor a peer can drive the reader's terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

fn error_json(error: &dyn Explain) -> serde_json::Value {
    json!({"error": {
        "message": error.to_string(),
        "code": error.exit().word(),
        "why": why(error),
        "next": error.next(),
    }})
}

fn error_text(error: &dyn Explain) -> String {
    let mut text = format!("error: {error}");
    for (label, part) in [("why", why(error)), ("try", error.next())] {
        if let Some(part) = part {
            let indented = part.lines().collect::<Vec<_>>().join("\n       ");
            text.push_str(&format!("\n  {label}: {indented}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open the door")]
    struct Door {
        #[source]
        cause: io::Error,
    }

    impl Explain for Door {
        fn exit(&self) -> Exit {
            Exit::Refused
        }
        fn next(&self) -> Option<String> {
            Some("knock".into())
        }
    }

    fn door() -> Door {
        Door { cause: io::Error::other("it is locked") }
    }

    #[test]
    fn an_error_says_cause_why_and_what_to_try() {
        let expected = "error: cannot open the door\n  why: it is locked\n  try: knock";
        assert_eq!(error_text(&door()), expected);
    }

    #[test]
    fn an_error_in_json_carries_the_word_of_its_exit_code() {
        let value = error_json(&door());
        assert_eq!(value["error"]["code"], "refused");
        assert_eq!(value["error"]["why"], "it is locked");
    }

    #[test]
    fn colours_need_a_terminal_and_no_no_color() {
        assert_eq!(Ink::choose(true, None), Ink::Ansi);
        assert_eq!(Ink::choose(true, Some("1".as_ref())), Ink::None);
        assert_eq!(Ink::choose(true, Some("".as_ref())), Ink::Ansi);
        assert_eq!(Ink::choose(false, None), Ink::None);
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\tc\u{7}"), "a[2Jb\n\tc");
    }
}

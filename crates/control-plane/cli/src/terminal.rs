//! Output of commands: data on stdout, all else on stderr, colours only where the user wants them.

pub(crate) mod findings;
pub(crate) mod interval;
pub(crate) mod progress;
pub(crate) mod sparkline;
pub(crate) mod stop_signals;
pub(crate) mod table;

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::exit::{Explain, why};
use progress::MonotonicProgress;

/// Format of printed data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrintFormat {
    Human,
    /// One JSON value per line, for programs.
    Json,
}

/// Amount of output besides the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verbosity {
    Quiet,
    Normal,
    /// Progress, hints, actions of the command, and errors in full.
    Verbose,
}

/// Where colours are wanted, as `--color` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set; elsewhere if CLICOLOR_FORCE is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Terminal on which a command prints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terminal {
    /// Format of data on stdout and of errors on stderr.
    pub(crate) format: PrintFormat,
    volume: Verbosity,
    ink: TextStyle,
    questions: ConfirmMode,
}

/// Source of answers to questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConfirmMode {
    /// The user, if stdin and stderr are terminals; else the command goes on without a question.
    OnATerminal,
    /// Answer yes to all questions, set by `--yes`.
    AnsweredYes,
}

impl Terminal {
    /// Creates a terminal without colours.
    pub(crate) fn new(format: PrintFormat, volume: Verbosity) -> Self {
        Self { format, volume, ink: TextStyle::None, questions: ConfirmMode::OnATerminal }
    }

    /// Enables colours on stdout according to `choice` and the environment.
    pub(crate) fn with_colors(self, choice: ColorChoice) -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let force = set("CLICOLOR_FORCE").is_some_and(|value| value != "0");
        let wishes = ColorSettings { no_color: set("NO_COLOR").is_some(), force };
        Self { ink: TextStyle::choose(choice, io::stdout().is_terminal(), wishes), ..self }
    }

    /// Sets the source of answers to questions.
    pub(crate) fn with_questions(self, questions: ConfirmMode) -> Self {
        Self { questions, ..self }
    }

    /// Asks whether to do something that cannot be undone. With `--yes`, with `--json` or without a terminal,
    /// returns true without a question.
    pub(crate) fn confirm(self, question: &str) -> bool {
        let is_person = io::stdin().is_terminal() && io::stderr().is_terminal();
        if self.questions == ConfirmMode::AnsweredYes || self.format == PrintFormat::Json || !is_person {
            return true;
        }
        let _ = write!(io::stderr().lock(), "{question} [y/N] ");
        let mut answer = String::new();
        let _ = io::stdin().read_line(&mut answer);
        matches!(answer.trim(), "y" | "Y" | "yes")
    }

    /// True if the command may redraw parts of stdout.
    pub(crate) fn draws(self) -> bool {
        let is_dumb = std::env::var("TERM").is_ok_and(|kind| kind == "dumb");
        self.format == PrintFormat::Human
            && self.ink == TextStyle::Ansi
            && !is_dumb
            && io::stdout().is_terminal()
    }

    /// Returns the text style of stdout.
    pub(crate) fn ink(self) -> TextStyle {
        self.ink
    }

    /// Prints a line of data. A closed pipe is not an error.
    pub(crate) fn print(self, line: impl std::fmt::Display) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// Prints a line on stderr, unless `--quiet` is set.
    pub(crate) fn note(self, line: impl std::fmt::Display) {
        if self.volume != Verbosity::Quiet {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// Prints a line on stderr if `--verbose` is set.
    pub(crate) fn detail(self, line: impl std::fmt::Display) {
        if self.volume == Verbosity::Verbose {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// Prints why a command failed, with the error itself in the first line.
    pub(crate) fn error(self, error: &dyn Explain) {
        let mut out = io::stderr().lock();
        let _ = match self.format {
            PrintFormat::Json => writeln!(out, "{}", error_json(error)),
            PrintFormat::Human => writeln!(out, "{}", error_text(error)),
        };
        drop(out);
        self.detail(format_args!("  in full: {error:?}"));
    }

    /// Returns a spinner on a terminal, and a hidden one elsewhere.
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

    /// Returns a progress bar of known length, drawn on a terminal only.
    pub(crate) fn progress(self, message: String) -> MonotonicProgress {
        if self.animates() { MonotonicProgress::drawn(message) } else { MonotonicProgress::hidden() }
    }

    /// True if progress may be drawn on stderr.
    pub(crate) fn animates(self) -> bool {
        self.volume != Verbosity::Quiet && self.format == PrintFormat::Human && io::stderr().is_terminal()
    }
}

/// Colour settings of the environment.
#[derive(Debug, Clone, Copy)]
struct ColorSettings {
    no_color: bool,
    force: bool,
}

/// Markup of text, empty where colours are not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStyle {
    Ansi,
    None,
}

impl TextStyle {
    /// Chooses the style: `--color` takes precedence over the environment, and the environment over the kind
    /// of stdout.
    fn choose(choice: ColorChoice, is_terminal: bool, wishes: ColorSettings) -> Self {
        let wanted = match choice {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => !wishes.no_color && (is_terminal || wishes.force),
        };
        if wanted { Self::Ansi } else { Self::None }
    }

    /// Marks important text in bold.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap(text, "1")
    }

    /// Marks less important text.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap(text, "2")
    }

    /// Marks text about success.
    pub(crate) fn green(self, text: &str) -> String {
        self.wrap(text, "32")
    }

    /// Marks text about possible problems.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.wrap(text, "33")
    }

    /// Marks text about failures.
    pub(crate) fn red(self, text: &str) -> String {
        self.wrap(text, "31")
    }

    fn wrap(self, text: &str, code: &str) -> String {
        match self {
            Self::Ansi => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            Self::None => text.to_owned(),
        }
    }
}

/// Removes control characters, so that neither a model nor a peer can control the user's terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Quotes a word for a shell, if the word needs quotes.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%=,".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn error_json(error: &dyn Explain) -> serde_json::Value {
    json!({"error": {
        "message": error.to_string(),
        "code": error.exit().as_str(),
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
    struct SampleError {
        #[source]
        cause: io::Error,
    }

    impl Explain for SampleError {
        fn exit(&self) -> Exit {
            Exit::Refused
        }
        fn next(&self) -> Option<String> {
            Some("knock".into())
        }
    }

    fn door() -> SampleError {
        SampleError { cause: io::Error::other("it is locked") }
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
    fn the_flag_wins_over_the_environment_and_the_environment_over_the_terminal() {
        let ink = |choice, is_terminal, no_color, force| {
            TextStyle::choose(choice, is_terminal, ColorSettings { no_color, force }) == TextStyle::Ansi
        };
        assert!(ink(ColorChoice::Auto, true, false, false) && !ink(ColorChoice::Auto, false, false, false));
        assert!(ink(ColorChoice::Auto, false, false, true), "CLICOLOR_FORCE");
        assert!(!ink(ColorChoice::Auto, true, true, true), "NO_COLOR wins over CLICOLOR_FORCE");
        assert!(ink(ColorChoice::Always, false, true, false) && !ink(ColorChoice::Never, true, false, true));
    }

    #[test]
    fn a_word_is_quoted_for_the_shell_where_it_needs_it() {
        assert_eq!(quoted("a'; rm -rf /"), r"'a'\''; rm -rf /'");
        assert_eq!((quoted("/a-b/c"), quoted("")), ("/a-b/c".to_owned(), "''".to_owned()));
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\tc\u{7}"), "a[2Jb\n\tc");
    }
}

//! How answers reach the person: data on stdout, everything else on stderr, colours only where they are wanted.

pub(crate) mod findings;
pub(crate) mod interval;
pub(crate) mod progress;
pub(crate) mod stop_signals;
pub(crate) mod table;

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::exit::{Explain, why};
use progress::MonotonicProgress;

/// In which form data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrintFormat {
    /// For people.
    Human,
    /// One JSON value a line, for programs.
    Json,
}

/// How much is said besides the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Volume {
    /// Errors only.
    Quiet,
    /// Progress and hints.
    Normal,
    /// Also what the command does, and errors in full.
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

/// The terminal a command talks to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terminal {
    /// Form of the data on stdout and of errors on stderr.
    pub(crate) format: PrintFormat,
    volume: Volume,
    ink: TextStyle,
    questions: ConfirmMode,
}

/// Who answers questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConfirmMode {
    /// The person, if there is a terminal; nobody else is asked, and the command goes on.
    OnATerminal,
    /// `--yes` has.
    AnsweredYes,
}

impl Terminal {
    /// A terminal of the given form and volume, without colours.
    pub(crate) fn new(format: PrintFormat, volume: Volume) -> Self {
        Self { format, volume, ink: TextStyle::None, questions: ConfirmMode::OnATerminal }
    }

    /// The same with colours on stdout where they are wanted.
    pub(crate) fn with_colors(self, choice: ColorChoice) -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let force = set("CLICOLOR_FORCE").is_some_and(|value| value != "0");
        let wishes = ColorSettings { no_color: set("NO_COLOR").is_some(), force };
        Self { ink: TextStyle::choose(choice, io::stdout().is_terminal(), wishes), ..self }
    }

    /// The same with questions answered by whom is said.
    pub(crate) fn with_questions(self, questions: ConfirmMode) -> Self {
        Self { questions, ..self }
    }

    /// Whether to go on with what cannot be undone. Without a person at a terminal nothing is asked: yes.
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

    /// True if something may be drawn on stdout and taken back.
    pub(crate) fn draws(self) -> bool {
        let is_dumb = std::env::var("TERM").is_ok_and(|kind| kind == "dumb");
        self.format == PrintFormat::Human
            && self.ink == TextStyle::Ansi
            && !is_dumb
            && io::stdout().is_terminal()
    }

    /// The ink for stdout.
    pub(crate) fn ink(self) -> TextStyle {
        self.ink
    }

    /// Prints a line of data. A reader that went away is no error.
    pub(crate) fn print(self, line: impl std::fmt::Display) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// Prints a line beside the data, unless quiet.
    pub(crate) fn note(self, line: impl std::fmt::Display) {
        if self.volume != Volume::Quiet {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// Prints a line for those who asked for details.
    pub(crate) fn detail(self, line: impl std::fmt::Display) {
        if self.volume == Volume::Verbose {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// Prints why a command failed: the cause in one line first.
    pub(crate) fn error(self, error: &dyn Explain) {
        let mut out = io::stderr().lock();
        let _ = match self.format {
            PrintFormat::Json => writeln!(out, "{}", error_json(error)),
            PrintFormat::Human => writeln!(out, "{}", error_text(error)),
        };
        drop(out);
        self.detail(format_args!("  in full: {error:?}"));
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

    /// Progress of something whose length is known, drawn on a terminal only.
    pub(crate) fn progress(self, message: String) -> MonotonicProgress {
        if self.animates() { MonotonicProgress::drawn(message) } else { MonotonicProgress::hidden() }
    }

    /// True if progress may be drawn.
    pub(crate) fn animates(self) -> bool {
        self.volume != Volume::Quiet && self.format == PrintFormat::Human && io::stderr().is_terminal()
    }
}

/// What the environment says about colours.
#[derive(Debug, Clone, Copy)]
struct ColorSettings {
    no_color: bool,
    force: bool,
}

/// Marks up text where colours are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStyle {
    /// ANSI styles.
    Ansi,
    /// Plain text.
    None,
}

impl TextStyle {
    /// `--color` wins over the environment, which wins over what stdout is.
    fn choose(choice: ColorChoice, is_terminal: bool, wishes: ColorSettings) -> Self {
        let wanted = match choice {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => !wishes.no_color && (is_terminal || wishes.force),
        };
        if wanted { Self::Ansi } else { Self::None }
    }

    /// For what matters.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap(text, "1")
    }

    /// For what matters less.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap(text, "2")
    }

    /// For what is well.
    pub(crate) fn green(self, text: &str) -> String {
        self.wrap(text, "32")
    }

    /// For what may become a problem.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.wrap(text, "33")
    }

    /// For what is wrong.
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

/// Text without control characters, so that neither a model nor a peer can drive the reader's terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// A word as a shell reads it back.
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

//! Line editor of the conversation: keys as in a shell, persistent history, completion of names.
//!
//! The editor draws on the terminal itself, so that stdout holds only answers, also if redirected to a
//! file.

use std::{io, path::PathBuf};

use rustyline::{
    Behavior, Config, Context, Editor, Helper,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::DefaultHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};

use super::{
    input::{self, COMMANDS},
    settings,
};

/// Maximum number of history lines kept across conversations.
const MAX_HISTORY_LINES: usize = 1000;

/// Result of reading a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EditedLine {
    /// Text of one or several lines.
    Text(String),
    /// Ctrl-C: the user discarded the line.
    GivenUp,
    /// Ctrl-D, or the end of the input.
    End,
}

pub(super) struct LineEditor {
    editor: Editor<NameCompleter, DefaultHistory>,
    history: PathBuf,
}

impl LineEditor {
    /// Creates an editor with its history in the file `history`, which only its owner may read.
    pub(super) fn new(history: PathBuf) -> io::Result<Self> {
        let config = Config::builder()
            .behavior(Behavior::PreferTerm)
            .max_history_size(MAX_HISTORY_LINES)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(io::Error::other)?
            // As in shells, a line that begins with a space is not kept.
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config).map_err(io::Error::other)?;
        editor.set_helper(Some(NameCompleter::default()));
        // The first conversation has no history, and an unreadable history must not prevent a conversation.
        let _ = editor.load_history(&history);
        Ok(Self { editor, history })
    }

    /// Sets the model names offered for completion.
    pub(super) fn complete(&mut self, served: Vec<String>) {
        self.editor.set_helper(Some(NameCompleter { served }));
    }

    /// Reads one line, or one text of several lines.
    pub(super) fn read(&mut self, model: &str) -> io::Result<EditedLine> {
        match self.editor.readline(&format!("{model}> ")) {
            Ok(text) => {
                self.remember(&text);
                Ok(EditedLine::Text(text))
            }
            Err(ReadlineError::Interrupted) => Ok(EditedLine::GivenUp),
            Err(ReadlineError::Eof) => Ok(EditedLine::End),
            Err(ReadlineError::Io(error)) => Err(error),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Saves a line at once, so that a killed conversation and parallel conversations keep their history.
    fn remember(&mut self, text: &str) {
        if self.editor.add_history_entry(text).is_ok_and(|is_new| is_new) {
            if let Some(home) = self.history.parent() {
                let _ = std::fs::create_dir_all(home);
            }
            // A full disk must not end the conversation.
            let _ = self.editor.append_history(&self.history);
        }
    }
}

#[derive(Debug, Default)]
struct NameCompleter {
    served: Vec<String>,
}

impl NameCompleter {
    /// Returns the start of the last word in `typed` and its possible completions.
    fn candidates(&self, typed: &str) -> (usize, Vec<String>) {
        let start = typed.rfind(char::is_whitespace).map_or(0, |space| space + 1);
        let (before, word) = typed.split_at(start);
        let fits = |name: &str| name.starts_with(word);
        let found = match before.split_whitespace().collect::<Vec<_>>().as_slice() {
            [] if word.starts_with('/') => {
                let fitting = COMMANDS.iter().filter(|command| fits(command.name));
                fitting.map(|command| with_room_for(command.name, command.argument)).collect()
            }
            ["/adapter"] => self.served.iter().filter(|name| fits(name)).cloned().collect(),
            ["/set"] => settings::names().filter(|name| fits(name)).map(|name| format!("{name} ")).collect(),
            _ => Vec::new(),
        };
        (start, found)
    }
}

/// Adds a space to a completed command that takes an argument.
fn with_room_for(name: &str, argument: &str) -> String {
    if argument.is_empty() { name.to_owned() } else { format!("{name} ") }
}

impl Completer for NameCompleter {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(self.candidates(&line[..position]))
    }
}

impl Validator for NameCompleter {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match input::is_unfinished(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Hinter for NameCompleter {
    type Hint = String;
}

impl Highlighter for NameCompleter {}

impl Helper for NameCompleter {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_adapters_and_settings_are_completed_and_what_is_said_is_not() {
        let names = NameCompleter { served: vec!["smol".into(), "pirate".into()] };
        let cases = [
            ("/se", 0, vec!["/set "]),
            ("/st", 0, vec!["/stats"]),
            ("/adapter pi", 9, vec!["pirate"]),
            ("/adapter ", 9, vec!["smol", "pirate"]),
            ("/set temp", 5, vec!["temperature "]),
            ("/set temperature 0", 17, vec![]),
            ("say /se", 4, vec![]),
            ("", 0, vec![]),
        ];
        for (typed, start, expected) in cases {
            let (at, found) = names.candidates(typed);
            assert_eq!(
                (at, found.iter().map(String::as_str).collect::<Vec<_>>()),
                (start, expected),
                "{typed:?}"
            );
        }
    }
}

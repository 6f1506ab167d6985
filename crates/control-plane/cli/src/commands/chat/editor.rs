//! The line that a person edits: keys as in a shell, a history that lasts, names completed.
//!
//! It is drawn on the terminal itself, so that stdout holds answers only, also where it goes into a file.

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

/// Lines kept from earlier conversations.
const MAX_HISTORY_LINES: usize = 1000;

/// What came of reading.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EditedLine {
    /// A text, perhaps of several lines.
    Text(String),
    /// Ctrl-C: the line was given up.
    GivenUp,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Reads lines from a terminal.
pub(super) struct LineEditor {
    editor: Editor<NameCompleter, DefaultHistory>,
    history: PathBuf,
}

impl LineEditor {
    /// An editor whose history lasts in the file `history`, which only its owner may read.
    pub(super) fn new(history: PathBuf) -> io::Result<Self> {
        let config = Config::builder()
            .behavior(Behavior::PreferTerm)
            .max_history_size(MAX_HISTORY_LINES)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(io::Error::other)?
            // As in shells: a line that begins with a space is not kept.
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config).map_err(io::Error::other)?;
        editor.set_helper(Some(NameCompleter::default()));
        // The first conversation has none, and one that cannot be read is no reason not to talk.
        let _ = editor.load_history(&history);
        Ok(Self { editor, history })
    }

    /// From now on these names are completed.
    pub(super) fn complete(&mut self, served: Vec<String>) {
        self.editor.set_helper(Some(NameCompleter { served }));
    }

    /// Reads one line, or one text of several.
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

    /// At once, so that a conversation that is killed is remembered, and two at a time both are.
    fn remember(&mut self, text: &str) {
        if self.editor.add_history_entry(text).is_ok_and(|is_new| is_new) {
            if let Some(home) = self.history.parent() {
                let _ = std::fs::create_dir_all(home);
            }
            // A disk that is full is no reason to stop talking.
            let _ = self.editor.append_history(&self.history);
        }
    }
}

/// Knows what a word may become.
#[derive(Debug, Default)]
struct NameCompleter {
    served: Vec<String>,
}

impl NameCompleter {
    /// Where the word at the end of `typed` begins, and what it may become.
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

/// A space follows where something else may.
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

//! Display of an answer as it arrives. On a terminal, provisional tokens follow the text in dim letters
//! until they are accepted or retracted.
//!
//! Dim text stays within the line in which the text ends, short of the last column, and the cursor stays at
//! the text's end. Erasing the rest of the line then removes the dim text, even after scrolling. The program
//! must know the column in which the text ends. If the column is uncertain (characters of ambiguous width, a
//! resized window), no dim text is shown.

use std::io::{self, IsTerminal as _, Write};

use unicode_width::UnicodeWidthChar as _;

use crate::{
    client::StreamDelta,
    terminal::{PrintFormat, Terminal, printable},
};

/// Erases from the cursor to the end of the line.
const ERASE: &str = "\u{1b}[K";
/// Saves the cursor position, turns off line wrapping and selects dim letters.
const BEGIN_DIM: &str = "\u{1b}7\u{1b}[?7l\u{1b}[2m";
const END_DIM: &str = "\u{1b}[0m\u{1b}[?7h\u{1b}8";
/// Columns between tab stops.
const TAB: usize = 8;

/// Output of an answer while it arrives.
pub(super) enum AnswerScreen {
    /// Output nothing now; the caller prints the whole answer at its end.
    Whole,
    /// Output plain text to a file or program.
    Plain,
    /// Draw on a terminal.
    Drawn(TerminalAnswer<io::Stdout>),
}

impl AnswerScreen {
    /// Creates the output for an answer that begins now.
    pub(super) fn new(terminal: Terminal) -> Self {
        match terminal.format {
            PrintFormat::Json => Self::Whole,
            PrintFormat::Human if io::stdout().is_terminal() => {
                Self::Drawn(TerminalAnswer::new(io::stdout(), columns))
            }
            PrintFormat::Human => Self::Plain,
        }
    }

    /// Shows a piece of the answer. A closed stdout is no error.
    pub(super) fn show(&mut self, piece: &StreamDelta) {
        let _ = match self {
            Self::Whole => Ok(()),
            Self::Plain => {
                let mut out = io::stdout().lock();
                out.write_all(piece.text.as_bytes()).and_then(|()| out.flush())
            }
            Self::Drawn(drawing) => drawing.show(piece),
        };
    }

    /// Ends the display of the answer.
    pub(super) fn end(mut self) {
        if let Self::Drawn(drawing) = &mut self {
            let _ = drawing.end();
        }
    }
}

/// Returns the number of columns of the terminal on stdout.
fn columns() -> Option<usize> {
    rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| size.ws_col.into())
}

/// A terminal with an answer that began in the first column.
pub(super) struct TerminalAnswer<W> {
    out: W,
    columns_now: fn() -> Option<usize>,
    columns: Option<usize>,
    /// Column in which the text ends, if certain.
    column: Option<usize>,
    /// Provisional text that may follow.
    provisional: String,
    is_dimmed: bool,
    /// True while only reasoning content has arrived.
    thinks: bool,
}

impl<W: Write> TerminalAnswer<W> {
    fn new(out: W, columns_now: fn() -> Option<usize>) -> Self {
        let columns = columns_now();
        let (column, provisional) = (Some(0), String::new());
        Self { out, columns_now, columns, column, provisional, is_dimmed: false, thinks: false }
    }

    fn show(&mut self, piece: &StreamDelta) -> io::Result<()> {
        if (self.columns_now)() != self.columns {
            // After a resize, the terminal may have wrapped the line differently.
            (self.columns, self.column) = ((self.columns_now)(), None);
        }
        let left = self.provisional.chars().count().saturating_sub(piece.retracted);
        self.provisional = self.provisional.chars().take(left).collect();
        if !piece.text.is_empty() {
            self.provisional.clear();
        }
        self.provisional.push_str(&piece.provisional);
        self.think(&piece.thought)?;
        let text = printable(&piece.text);
        let text = if self.thinks && !text.is_empty() { format!("\n\n{text}") } else { text };
        self.thinks &= text.is_empty();
        text.chars().for_each(|c| self.advance(c));
        self.write(&text)
    }

    /// Writes reasoning content in dim letters before the answer.
    fn think(&mut self, thought: &str) -> io::Result<()> {
        let thought = printable(thought);
        if thought.is_empty() {
            return Ok(());
        }
        self.thinks = true;
        thought.chars().for_each(|c| self.advance(c));
        self.write(&format!("\u{1b}[2m{thought}\u{1b}[0m"))
    }

    fn end(&mut self) -> io::Result<()> {
        self.provisional.clear();
        self.write("")
    }

    /// Writes `text` and then the provisional text, in one write to avoid flicker.
    fn write(&mut self, text: &str) -> io::Result<()> {
        let dimmed = self.fitting();
        let erase = if self.is_dimmed { ERASE } else { "" };
        self.is_dimmed = !dimmed.is_empty();
        let frame = match self.is_dimmed {
            true => format!("{erase}{text}{BEGIN_DIM}{dimmed}{END_DIM}"),
            false => format!("{erase}{text}"),
        };
        self.out.write_all(frame.as_bytes()).and_then(|()| self.out.flush())
    }

    /// Updates the column after the character `c`.
    fn advance(&mut self, c: char) {
        self.column = match (c, c.width(), self.column, self.columns) {
            ('\n', ..) => Some(0),
            ('\t', _, Some(column), Some(columns)) => {
                Some((column / TAB * TAB + TAB).min(columns.saturating_sub(1)))
            }
            (_, Some(width @ 1..), Some(column), Some(columns)) if column + width <= columns => {
                Some(column + width)
            }
            (_, Some(width @ 1..), Some(_), Some(_)) => Some(width),
            _ => None,
        };
    }

    /// Returns the part of the provisional text that fits into the line in which the text ends.
    fn fitting(&self) -> String {
        let (Some(column), Some(columns)) = (self.column, self.columns) else { return String::new() };
        let mut free_columns = columns.saturating_sub(column + 1);
        let fits = |c: &char| match c.width().filter(|width| (1..=free_columns).contains(width)) {
            Some(width) if !c.is_control() => {
                free_columns -= width;
                true
            }
            _ => false,
        };
        self.provisional.chars().take_while(fits).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROWS: u16 = 4;
    const COLUMNS: u16 = 20;

    fn twenty() -> Option<usize> {
        Some(COLUMNS.into())
    }

    fn said(text: &str) -> StreamDelta {
        StreamDelta { text: text.to_owned(), ..StreamDelta::default() }
    }

    fn provisional(text: &str) -> StreamDelta {
        StreamDelta { provisional: text.to_owned(), ..StreamDelta::default() }
    }

    fn retracted(characters: usize) -> StreamDelta {
        StreamDelta { retracted: characters, ..StreamDelta::default() }
    }

    /// Returns a small terminal that received all output of `drawing`.
    fn seen(drawing: &TerminalAnswer<Vec<u8>>) -> vt100::Parser {
        let mut terminal = vt100::Parser::new(ROWS, COLUMNS, 0);
        // A line discipline translates line ends in the same way.
        let text = String::from_utf8_lossy(&drawing.out).replace('\n', "\r\n");
        terminal.process(text.as_bytes());
        terminal
    }

    fn after(pieces: &[StreamDelta]) -> vt100::Parser {
        let mut drawing = TerminalAnswer::new(Vec::new(), twenty);
        pieces.iter().for_each(|piece| drawing.show(piece).unwrap());
        seen(&drawing)
    }

    /// Returns the dim text on the screen.
    fn dimmed(terminal: &vt100::Parser) -> String {
        let cell = |row, column| terminal.screen().cell(row, column).filter(|cell| cell.dim());
        let cells = (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
        cells.filter_map(|(row, column)| cell(row, column)).map(vt100::Cell::contents).collect()
    }

    #[test]
    fn what_is_drafted_stands_dimmed_behind_the_text_until_it_is_said_or_taken_back() {
        let begun = [said("The quick"), provisional(" brown fox")];
        let terminal = after(&begun);
        assert_eq!(terminal.screen().contents(), "The quick brown fox");
        assert_eq!((dimmed(&terminal).as_str(), terminal.screen().cursor_position()), (" brown fox", (0, 9)));
        let terminal = after(&[&begun[..], &[retracted(4)]].concat());
        assert_eq!(terminal.screen().contents(), "The quick brown");
        let terminal = after(&[&begun[..], &[retracted(4), said(" brown\ndog")]].concat());
        assert_eq!(
            (terminal.screen().contents(), dimmed(&terminal)),
            ("The quick brown\ndog".into(), "".into())
        );
    }

    #[test]
    fn what_is_thought_stands_dimmed_before_what_is_said() {
        let thought = |text: &str| StreamDelta { thought: text.to_owned(), ..StreamDelta::default() };
        let terminal = after(&[thought("hm, "), thought("so\n"), said("Yes."), said(" No")]);
        assert_eq!(terminal.screen().contents(), "hm, so\n\n\nYes. No");
        assert_eq!((dimmed(&terminal).as_str(), terminal.screen().cursor_position()), ("hm, so", (3, 7)));
    }

    #[test]
    fn what_does_not_fit_into_the_line_is_not_shown() {
        for (text, guess, shown) in [
            ("0123456789", "abcdefghijklm", "abcdefghi"),
            ("0123456789", "ab\ncd", "ab"),
            ("0123456789012345678", "abc", ""),
            ("01234567890123456789", "abc", ""),
            ("012345678901234567890", "abc", "abc"),
            ("012345678901234", "日本語", "日本"),
            ("a\u{301}", "bc", ""),
            ("a\u{301}\n", "b\u{301}c", "b"),
            ("\ttab", "abcdefghij", "abcdefgh"),
        ] {
            assert_eq!(dimmed(&after(&[said(text), provisional(guess)])), shown, "{text} {guess}");
        }
    }

    #[test]
    fn a_window_of_another_size_or_of_none_shows_no_drafts_until_the_next_line() {
        let mut drawing = TerminalAnswer::new(Vec::new(), twenty);
        drawing.show(&said("one ")).unwrap();
        drawing.columns_now = || Some(30);
        drawing.show(&provisional("two")).unwrap();
        assert_eq!(drawing.out, b"one ");
        drawing.show(&said("2\n")).unwrap();
        drawing.show(&provisional("three")).unwrap();
        assert_eq!(dimmed(&seen(&drawing)), "three");
        let mut drawing = TerminalAnswer::new(Vec::new(), || None);
        drawing.show(&provisional("one")).unwrap();
        assert!(drawing.out.is_empty());
    }

    proptest! {
        #[test]
        fn however_much_was_drafted_and_taken_back_nothing_of_it_is_left(
            steps in proptest::collection::vec(("[ab日 \t\n]{0,12}", "[ab日e\u{301}\n]{0,30}", 0..9usize), 0..20),
        ) {
            let (mut drawing, mut plain) =
                (TerminalAnswer::new(Vec::new(), twenty), TerminalAnswer::new(Vec::new(), twenty));
            for (text, guess, back) in &steps {
                [said(text), provisional(guess), retracted(*back)].iter().for_each(|piece| drawing.show(piece).unwrap());
                plain.show(&said(text)).unwrap();
            }
            drawing.end().unwrap();
            let (with, without) = (seen(&drawing), seen(&plain));
            prop_assert_eq!(with.screen().contents(), without.screen().contents());
            prop_assert_eq!(with.screen().cursor_position(), without.screen().cursor_position());
            prop_assert_eq!(dimmed(&with), "");
        }
    }
}

//! Finds stop strings in streamed text, also across token borders.
//!
//! Text that may begin a stop string is held back until that is decided; all text before it is released at
//! once. One Knuth-Morris-Pratt automaton runs for each stop string, so the work is linear in the text for
//! any overlaps.

use std::sync::Arc;

/// Maximum number of stop strings of a request, since each costs a step per byte of text.
pub const MAX_STOP_STRINGS: usize = 64;
/// Maximum length of a stop string in bytes, which bounds the text that is held back.
pub const MAX_STOP_STRING_BYTES: usize = 4096;

/// Why stop strings are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string would match everywhere.
    #[error("a stop string is empty, which would stop before the first token; remove it")]
    Empty,
    /// A string is longer than [`MAX_STOP_STRING_BYTES`].
    #[error("a stop string has {bytes} bytes, and the limit is {MAX_STOP_STRING_BYTES}; use a shorter one")]
    TooLong {
        /// Length of the string in bytes.
        bytes: usize,
    },
    /// More strings than [`MAX_STOP_STRINGS`].
    #[error("there are {count} stop strings, and the limit is {MAX_STOP_STRINGS}; use fewer")]
    TooMany {
        /// Number of strings in the request.
        count: usize,
    },
}

/// A stop string with its KMP failure table: for each matched length, the next shorter prefix that is a
/// suffix.
#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    fallback: Vec<usize>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut pattern = Self { fallback: vec![0; bytes.len() + 1], bytes };
        let mut matched = 0;
        for index in 1..pattern.bytes.len() {
            matched = pattern.step(matched, pattern.bytes[index]);
            pattern.fallback[index + 1] = matched;
        }
        pattern
    }

    /// Returns the matched length after `byte`, if `matched` bytes (fewer than all) matched before it.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.fallback[matched];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

/// The checked stop strings of a request, shared by its choices.
#[derive(Debug, Clone)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
}

impl StopStrings {
    /// Prepares `strings`, which may be empty.
    ///
    /// # Errors
    /// If a string is empty or too long, or there are too many.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self, StopError> {
        if strings.len() > MAX_STOP_STRINGS {
            return Err(StopError::TooMany { count: strings.len() });
        }
        let pattern = |string: &S| match string.as_ref().len() {
            0 => Err(StopError::Empty),
            bytes if bytes > MAX_STOP_STRING_BYTES => Err(StopError::TooLong { bytes }),
            _ => Ok(Pattern::new(string.as_ref())),
        };
        Ok(Self { patterns: strings.iter().map(pattern).collect::<Result<_, _>>()? })
    }

    /// Returns the string of an index that [`Scan::Stopped`] reports.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&str> {
        std::str::from_utf8(&self.patterns.get(index)?.bytes).ok()
    }
}

/// Result of scanning a piece of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scan {
    /// No stop string is complete; this text can be released.
    Text(String),
    /// A stop string is complete.
    Stopped {
        /// Remaining text before the stop string.
        text: String,
        /// Index of the stop string in the given list.
        stop: usize,
    },
}

/// Looks for stop strings in one stream of text.
#[derive(Debug, Clone)]
pub struct StopScanner {
    strings: StopStrings,
    /// Length of each pattern's prefix that the text so far ends with.
    matched: Vec<usize>,
    held: String,
    stopped: bool,
}

impl StopScanner {
    /// Creates a scanner at the beginning of a text.
    #[must_use]
    pub fn new(strings: StopStrings) -> Self {
        Self { matched: vec![0; strings.patterns.len()], strings, held: String::new(), stopped: false }
    }

    /// Takes the next piece of text and returns the text that can be released. The string that completes
    /// first wins; of several that complete at the same byte, the one that begins first. After a stop all
    /// further text is dropped.
    pub fn push(&mut self, text: &str) -> Scan {
        if self.stopped {
            return Scan::Text(String::new());
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            if let Some(stop) = self.advance(byte) {
                self.stopped = true;
                let end = before + index + 1;
                let mut text = std::mem::take(&mut self.held);
                text.truncate(end - self.strings.patterns[stop].bytes.len());
                return Scan::Stopped { text, stop };
            }
        }
        let undecided = self.matched.iter().copied().max().unwrap_or(0);
        Scan::Text(self.release(undecided))
    }

    /// Advances every automaton; returns the longest pattern that is now complete, if any.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut complete: Option<usize> = None;
        for (index, (pattern, matched)) in self.strings.patterns.iter().zip(&mut self.matched).enumerate() {
            *matched = pattern.step(*matched, byte);
            let longer = |other: usize| self.strings.patterns[other].bytes.len() < pattern.bytes.len();
            if *matched == pattern.bytes.len() && complete.is_none_or(longer) {
                complete = Some(index);
            }
        }
        complete
    }

    /// Releases the held text except its last `undecided` bytes. A stop string begins at a character
    /// boundary, so its possible prefix does too.
    fn release(&mut self, undecided: usize) -> String {
        let kept = self.held.split_off(self.held.len() - undecided);
        std::mem::replace(&mut self.held, kept)
    }

    /// Ends the text without a stop and returns the text that was held back.
    #[must_use]
    pub fn finish(mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut scanner = StopScanner::new(StopStrings::new(stops).unwrap());
        let mut out = String::new();
        for piece in pieces {
            match scanner.push(piece) {
                Scan::Text(text) => out.push_str(&text),
                Scan::Stopped { text, stop } => return (out + &text, Some(stop)),
            }
        }
        (out + &scanner.finish(), None)
    }

    /// Reference definition without streaming: the earliest end, then the earliest beginning.
    fn whole(stops: &[&str], text: &str) -> (String, Option<usize>) {
        let found = stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = text.find(stop)?;
            Some((start + stop.len(), start, index))
        });
        match found.min() {
            Some((_, start, index)) => (text[..start].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    #[test]
    fn text_is_cut_before_a_stop_string_that_crosses_pieces() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), Some(0)));
        assert_eq!(run(&["\n\n"], &["a\n", "\nb"]), ("a".into(), Some(0)));
    }

    #[test]
    fn a_prefix_that_turns_out_otherwise_is_released() {
        let mut scanner = StopScanner::new(StopStrings::new(&["END"]).unwrap());
        assert_eq!(scanner.push("the E"), Scan::Text("the ".into()));
        assert_eq!(scanner.push("N"), Scan::Text(String::new()));
        assert_eq!(scanner.push("E"), Scan::Text("EN".into()));
        assert_eq!(scanner.finish(), "E");
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        assert_eq!(run(&["é"], &["è", "ê", "é", "x"]), ("èê".into(), Some(0)));
        assert_eq!(run(&["日本語"], &["今日", "本", "日本", "語"]), ("今日本".into(), Some(0)));
    }

    #[test]
    fn the_earlier_and_then_the_longer_stop_string_wins() {
        assert_eq!(run(&["cd", "bcd", "d"], &["abcd"]), ("a".into(), Some(1)));
        assert_eq!(run(&["abcde", "bc"], &["abcde"]), ("a".into(), Some(1)));
    }

    #[test]
    fn nothing_follows_a_stop() {
        let strings = StopStrings::new(&["."]).unwrap();
        assert_eq!((strings.get(0), strings.get(1)), (Some("."), None));
        let mut scanner = StopScanner::new(strings);
        assert_eq!(scanner.push("a.b"), Scan::Stopped { text: "a".into(), stop: 0 });
        assert_eq!(scanner.push("c"), Scan::Text(String::new()));
        assert_eq!(scanner.finish(), "");
    }

    #[test]
    fn stop_strings_that_cannot_be_honoured_are_refused() {
        assert_eq!(StopStrings::new(&["a", ""]).unwrap_err(), StopError::Empty);
        assert!(matches!(
            StopStrings::new(&["a".repeat(5000)]).unwrap_err(),
            StopError::TooLong { bytes: 5000 }
        ));
        assert!(matches!(StopStrings::new(&vec!["a"; 65]).unwrap_err(), StopError::TooMany { count: 65 }));
    }

    proptest! {
        #[test]
        fn streaming_equals_searching_the_whole(
            text in "[abé]{0,40}",
            stops in proptest::collection::vec("[abé]{1,5}", 0..4),
            cuts in proptest::collection::vec(0usize..40, 0..6),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let characters: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(characters.len())).collect();
            cuts.extend([0, characters.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> =
                cuts.windows(2).map(|pair| characters[pair[0]..pair[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &pieces), whole(&stops, &text));
        }
    }
}

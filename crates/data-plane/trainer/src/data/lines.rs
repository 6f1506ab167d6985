//! Lines of a file and the file's hash, in one pass.
//!
//! Additions of editors and systems are removed: a byte order mark at the start, a carriage return at the end
//! of a line, blank lines at the end of the file.

use std::io::{self, BufRead, BufReader, Read};

use super::fault::LineFault;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
const BUFFER_BYTES: usize = 1 << 16;

/// A file, read line by line.
pub(super) struct DataLines<R> {
    file: BufReader<R>,
    hasher: blake3::Hasher,
    limit_bytes: usize,
    number: usize,
    line: Vec<u8>,
    /// Number of the first blank line that has not been reported yet.
    blank: Option<usize>,
    /// `line` was read ahead, and the fault of the blank lines before it comes first.
    is_waiting: bool,
    is_too_long: bool,
}

/// A line and its number, from 1.
pub(super) type NumberedLine<'a> = (usize, Result<&'a str, LineFault>);

impl<R: Read> DataLines<R> {
    pub(super) fn new(file: R, limit_bytes: usize) -> Self {
        Self {
            file: BufReader::with_capacity(BUFFER_BYTES, file),
            hasher: blake3::Hasher::new(),
            limit_bytes,
            number: 0,
            line: Vec::new(),
            blank: None,
            is_waiting: false,
            is_too_long: false,
        }
    }

    /// Returns the hash of all bytes read so far.
    pub(super) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Returns the next line; `None` at the end.
    pub(super) fn next_line(&mut self) -> io::Result<Option<NumberedLine<'_>>> {
        if !std::mem::take(&mut self.is_waiting) {
            loop {
                if !self.read_line()? {
                    return Ok(None);
                }
                if !self.line.iter().all(u8::is_ascii_whitespace) || self.is_too_long {
                    break;
                }
                self.blank.get_or_insert(self.number);
            }
        }
        if let Some(number) = self.blank.take() {
            self.is_waiting = true;
            return Ok(Some((number, Err(LineFault::Blank))));
        }
        Ok(Some((self.number, self.text())))
    }

    fn text(&self) -> Result<&str, LineFault> {
        if self.is_too_long {
            return Err(LineFault::LineTooLong { limit: self.limit_bytes });
        }
        std::str::from_utf8(&self.line).map_err(|error| LineFault::Utf8 { at: error.valid_up_to() + 1 })
    }

    /// Reads a line, of which only the beginning is kept if it is too long. Returns false at the end.
    fn read_line(&mut self) -> io::Result<bool> {
        self.line.clear();
        self.is_too_long = false;
        let mut read_bytes = 0;
        loop {
            let buffer = match self.file.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                buffer => buffer?,
            };
            let end = buffer.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let piece = &buffer[..end.unwrap_or(buffer.len())];
            let is_last = end.is_some() || piece.is_empty();
            let length = piece.len();
            self.hasher.update(piece);
            read_bytes += length;
            // The end of the line and a byte order mark do not count towards the limit.
            let left = self.limit_bytes + BYTE_ORDER_MARK.len() + 2 - self.line.len();
            self.line.extend_from_slice(&piece[..length.min(left)]);
            self.file.consume(length);
            if is_last {
                break;
            }
        }
        self.number += usize::from(read_bytes > 0);
        self.trim();
        self.is_too_long = self.line.len() > self.limit_bytes;
        Ok(read_bytes > 0)
    }

    fn trim(&mut self) {
        if self.number == 1 && self.line.starts_with(BYTE_ORDER_MARK) {
            self.line.drain(..BYTE_ORDER_MARK.len());
        }
        for end in *b"\n\r" {
            if self.line.last() == Some(&end) {
                self.line.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(bytes: &[u8], limit_bytes: usize) -> Vec<(usize, Result<String, String>)> {
        let mut lines = DataLines::new(bytes, limit_bytes);
        let mut found = Vec::new();
        while let Some((number, line)) = lines.next_line().unwrap() {
            found.push((number, line.map(str::to_owned).map_err(|fault| fault.to_string())));
        }
        assert_eq!(lines.hash(), blake3::hash(bytes));
        found
    }

    fn texts(bytes: &[u8]) -> Vec<String> {
        lines(bytes, 100).into_iter().map(|(_, line)| line.unwrap()).collect()
    }

    #[test]
    fn what_editors_add_is_taken_away() {
        assert_eq!(texts("\u{feff}{}\r\n[]\r\n\r\n \n".as_bytes()), ["{}", "[]"]);
        assert_eq!(texts(b"one\ntwo"), ["one", "two"]);
        assert!(texts(b"").is_empty());
        assert!(texts("\u{feff}\r\n".as_bytes()).is_empty());
    }

    #[test]
    fn a_blank_line_before_others_is_a_fault_of_its_own() {
        let found = lines(b"one\n\n\ntwo\n", 100);
        assert_eq!(found.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 4]);
        assert!(found[1].1.as_ref().unwrap_err().contains("blank"));
        assert_eq!(found[2].1.as_deref(), Ok("two"));
    }

    #[test]
    fn a_line_that_is_no_text_says_where() {
        let found = lines(b"one\nt\xffo\nthree", 100);
        assert!(found[1].1.as_ref().unwrap_err().contains("byte 2 is not UTF-8"));
        assert_eq!(found[2], (3, Ok("three".to_owned())));
    }

    #[test]
    fn a_line_may_be_as_long_as_the_limit_and_one_that_is_longer_does_not_hide_the_next() {
        let long = "x".repeat(BUFFER_BYTES);
        let file = ["\u{feff}12345\r\n123456\n".as_bytes(), long.as_bytes(), b"\nfour\n"].concat();
        let found = lines(&file, 5);
        assert_eq!(found[0], (1, Ok("12345".to_owned())));
        for at in [1, 2] {
            assert!(found[at].1.as_ref().unwrap_err().contains("more than 5 bytes"), "{found:?}");
        }
        assert_eq!(found[3], (4, Ok("four".to_owned())));
    }

    proptest! {
        #[test]
        fn any_bytes_are_lines(bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(0xef), any::<u8>()], 0..200)) {
            let found = lines(&bytes, 20);
            prop_assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }
}

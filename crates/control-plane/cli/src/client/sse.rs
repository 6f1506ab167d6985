//! Parser of server-sent events, limited to the `data:` fields of completion streams.

use std::io::{self, BufRead, Read as _};

/// Maximum length of a line, which bounds the memory that a peer can occupy.
const MAX_LINE_BYTES: u64 = 4 << 20;

/// Maximum length of the data of one event, which may span any number of lines.
const MAX_DATA_BYTES: usize = 4 << 20;

/// Splits a byte stream into the data of its events.
#[derive(Debug)]
pub(crate) struct Events<R> {
    reader: R,
}

impl<R: BufRead> Events<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { reader }
    }

    /// Returns the data of the next event, its lines joined by newlines; `None` at the end of the stream.
    pub(crate) fn next_data(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<String> = None;
        while let Some(line) = self.line()? {
            if line.is_empty() {
                if data.is_some() {
                    break;
                }
            } else if let Some(value) = line.strip_prefix("data:") {
                let value = value.strip_prefix(' ').unwrap_or(value);
                if data.as_ref().map_or(0, String::len) + value.len() >= MAX_DATA_BYTES {
                    return Err(too_long("an event"));
                }
                match &mut data {
                    None => data = Some(value.to_owned()),
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                }
            }
        }
        Ok(data)
    }

    /// Returns the next line without its end; `None` at the end of the stream.
    fn line(&mut self) -> io::Result<Option<String>> {
        let mut bytes = Vec::new();
        let read = self.reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
        if read == 0 {
            return Ok(None);
        }
        if bytes.pop_if(|byte| *byte == b'\n').is_none() && read as u64 == MAX_LINE_BYTES {
            return Err(too_long("a line"));
        }
        bytes.pop_if(|byte| *byte == b'\r');
        let line = String::from_utf8(bytes);
        line.map(Some).map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause))
    }
}

fn too_long(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} of the stream is longer than 4 MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(stream: &[u8]) -> Vec<String> {
        // The reader returns one byte at a time, because events must not depend on the packets of the
        // network.
        let reader = io::BufReader::with_capacity(1, stream);
        let mut events = Events::new(reader);
        std::iter::from_fn(|| events.next_data().unwrap()).collect()
    }

    #[test]
    fn data_is_split_at_blank_lines_and_other_fields_are_skipped() {
        let stream = b": hello\n\nid: 3\ndata: {\"a\":1}\n\ndata:x\r\n\r\nretry: 5\n\ndata: [DONE]\n\n";
        assert_eq!(events(stream), ["{\"a\":1}", "x", "[DONE]"]);
    }

    #[test]
    fn several_data_lines_are_one_event() {
        assert_eq!(events(b"data: a\ndata: b\n\n"), ["a\nb"]);
    }

    #[test]
    fn an_event_cut_off_by_the_end_of_the_stream_still_arrives() {
        assert_eq!(events(b"data: a\n\ndata: b"), ["a", "b"]);
    }

    #[test]
    fn a_line_without_end_is_an_error() {
        let stream = io::repeat(b'a').take(MAX_LINE_BYTES + 9);
        let mut events = Events::new(io::BufReader::new(stream));
        assert_eq!(events.next_data().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn an_event_of_lines_without_end_is_an_error() {
        let stream = b"data: a line of many\n".repeat(1 << 19);
        let mut events = Events::new(stream.as_slice());
        assert_eq!(events.next_data().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

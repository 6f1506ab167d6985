//! Input files of batches: one request per line, as JSON.
//!
//! A batch is computed only if its whole input file is valid. The body of a line is not checked here: the
//! route that answers the line checks it as it checks online requests.

use std::{
    collections::HashSet,
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
};

use serde::Deserialize;
use serde_json::{error::Category, value::RawValue};

use super::records::{BatchEndpoint, InputFault};

/// Maximum number of lines, as in OpenAI's API.
const MAX_LINES: u64 = 50_000;
/// Maximum length of an input file, as in OpenAI's API.
const MAX_INPUT_BYTES: u64 = 200 << 20;
/// Maximum length of a custom id. OpenAI states no limit; results repeat the id.
const MAX_CUSTOM_ID_BYTES: usize = 512;
/// Bytes that a line may have around its body.
const MAX_ENVELOPE_BYTES: u64 = 4 << 10;
/// Maximum number of reported faults, since the database stores them.
const MAX_FAULTS: usize = 100;

/// Hash of a custom id; a set of ids has a bounded size then.
pub(super) type CustomIdHash = [u8; 16];

pub(super) fn hash_of(custom_id: &str) -> CustomIdHash {
    let mut hash = [0; 16];
    blake3::Hasher::new().update(custom_id.as_bytes()).finalize_xof().fill(&mut hash);
    hash
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineFields<'a> {
    custom_id: Option<String>,
    method: Option<String>,
    url: Option<String>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

/// One request of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputLine {
    /// Number of the line from 1.
    pub(super) number: u64,
    pub(super) custom_id: String,
    /// Body of the request, as the file has it.
    pub(super) body: String,
}

/// Reads a file line by line, without blank lines.
struct LineReader {
    file: BufReader<File>,
    /// Number of the last line.
    number: u64,
    line: Vec<u8>,
}

impl LineReader {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: BufReader::new(File::open(path)?), number: 0, line: Vec::new() })
    }

    /// Reads the next line up to `max_bytes`; false at the end of the file. A longer line is cut.
    fn advance(&mut self, max_bytes: u64) -> io::Result<bool> {
        loop {
            self.line.clear();
            if self.file.by_ref().take(max_bytes + 1).read_until(b'\n', &mut self.line)? == 0 {
                return Ok(false);
            }
            self.number += 1;
            if !self.line.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    /// Whether the line is longer than `max_bytes`.
    fn is_cut(&self, max_bytes: u64) -> bool {
        self.line.len() as u64 > max_bytes
    }

    /// Skips the rest of a line that was cut.
    fn skip_rest(&mut self) -> io::Result<()> {
        while self.line.last() != Some(&b'\n') {
            let read = self.file.fill_buf()?;
            let Some(last) = read.last().copied() else { break };
            let end = read.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(read.len(), |at| at + 1);
            self.line.push(if end.is_some() { b'\n' } else { last });
            self.file.consume(used);
        }
        Ok(())
    }

    fn parse(&self, endpoint: BatchEndpoint) -> Result<InputLine, InputFault> {
        let fault = |code: &str, param: Option<&str>, message: String| InputFault {
            code: code.to_owned(),
            line: Some(self.number),
            message,
            param: param.map(ToOwned::to_owned),
        };
        let read: Result<LineFields<'_>, _> = serde_json::from_slice(&self.line);
        let fields = read.map_err(|error| match error.classify() {
            Category::Data => fault("invalid_request", None, format!("the line is no request: {error}")),
            _ => fault("invalid_json_line", None, format!("the line is not valid JSON: {error}")),
        })?;
        let missing =
            |name: &str| fault("missing_required_parameter", Some(name), format!("the line has no '{name}'"));
        let custom_id = fields.custom_id.ok_or_else(|| missing("custom_id"))?;
        if !(1..=MAX_CUSTOM_ID_BYTES).contains(&custom_id.len()) {
            let message = format!("'custom_id' must have 1 to {MAX_CUSTOM_ID_BYTES} bytes");
            return Err(fault("invalid_custom_id", Some("custom_id"), message));
        }
        let method = fields.method.ok_or_else(|| missing("method"))?;
        if method != "POST" {
            return Err(fault("invalid_method", Some("method"), "'method' must be 'POST'".to_owned()));
        }
        let url = fields.url.ok_or_else(|| missing("url"))?;
        if url != endpoint.path() {
            let url: String = url.chars().take(64).collect();
            let message = format!("'url' is '{url}', and the endpoint of the batch '{}'", endpoint.path());
            return Err(fault("mismatched_url", Some("url"), message));
        }
        let body = fields.body.ok_or_else(|| missing("body"))?.get();
        if !body.starts_with('{') {
            return Err(fault("invalid_body", Some("body"), "'body' must be an object".to_owned()));
        }
        Ok(InputLine { number: self.number, custom_id, body: body.to_owned() })
    }
}

/// Length up to which a line is accepted, if a body may have `max_body_bytes`.
fn max_line_bytes(max_body_bytes: usize) -> u64 {
    max_body_bytes as u64 + MAX_ENVELOPE_BYTES
}

/// Checks a whole input file. Returns the number of its lines, or its faults.
///
/// # Errors
/// The file cannot be read.
pub(super) fn validate(
    path: &Path,
    endpoint: BatchEndpoint,
    max_body_bytes: usize,
) -> io::Result<Result<u64, Vec<InputFault>>> {
    let of_file = |code: &str, message: String| {
        Ok(Err(vec![InputFault { code: code.to_owned(), line: None, message, param: None }]))
    };
    let bytes = path.metadata()?.len();
    if bytes > MAX_INPUT_BYTES {
        let message = format!("the file has {bytes} bytes, and the limit is {MAX_INPUT_BYTES}; split it");
        return of_file("file_too_large", message);
    }
    let max_bytes = max_line_bytes(max_body_bytes);
    let (mut reader, mut seen, mut faults) = (LineReader::open(path)?, HashSet::new(), Vec::new());
    let mut lines = 0;
    while faults.len() < MAX_FAULTS && reader.advance(max_bytes)? {
        lines += 1;
        if lines > MAX_LINES {
            let message = format!("the file has more than {MAX_LINES} lines; split it");
            return of_file("too_many_requests", message);
        }
        let checked = check(&reader, endpoint, max_bytes, &mut seen);
        faults.extend(checked.err());
        if reader.is_cut(max_bytes) {
            reader.skip_rest()?;
        }
    }
    if lines == 0 {
        return of_file("empty_file", "the file has no lines".to_owned());
    }
    Ok(if faults.is_empty() { Ok(lines) } else { Err(faults) })
}

fn check(
    reader: &LineReader,
    endpoint: BatchEndpoint,
    max_bytes: u64,
    seen: &mut HashSet<CustomIdHash>,
) -> Result<(), InputFault> {
    let number = reader.number;
    if reader.is_cut(max_bytes) {
        let message = format!("the line is longer than {max_bytes} bytes (--max-body-bytes)");
        let code = "line_too_long".to_owned();
        return Err(InputFault { code, line: Some(number), message, param: None });
    }
    let line = reader.parse(endpoint)?;
    if seen.insert(hash_of(&line.custom_id)) {
        return Ok(());
    }
    let code = "duplicate_custom_id".to_owned();
    let message = format!("the custom_id '{}' is on an earlier line too", line.custom_id);
    Err(InputFault { code, line: Some(number), message, param: Some("custom_id".to_owned()) })
}

/// Reads the lines of a valid input file that have no result yet.
pub(super) struct InputReader {
    reader: LineReader,
    endpoint: BatchEndpoint,
    max_line_bytes: u64,
    done: HashSet<CustomIdHash>,
}

impl InputReader {
    pub(super) fn open(
        path: &Path,
        endpoint: BatchEndpoint,
        max_body_bytes: usize,
        done: HashSet<CustomIdHash>,
    ) -> io::Result<Self> {
        let max_line_bytes = max_line_bytes(max_body_bytes);
        Ok(Self { reader: LineReader::open(path)?, endpoint, max_line_bytes, done })
    }

    /// Returns further lines until their bodies have about `bytes` bytes; none at the end of the file.
    ///
    /// # Errors
    /// The file cannot be read, or has changed since its check.
    pub(super) fn read_ahead(&mut self, bytes: usize) -> io::Result<Vec<InputLine>> {
        let (mut lines, mut read) = (Vec::new(), 0);
        while read < bytes && self.reader.advance(self.max_line_bytes)? {
            let line = self.reader.parse(self.endpoint).map_err(|fault| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("line {}: {}", self.reader.number, fault.message),
                )
            })?;
            if !self.done.contains(&hash_of(&line.custom_id)) {
                read += line.body.len();
                lines.push(line);
            }
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: BatchEndpoint = BatchEndpoint::ChatCompletions;

    fn line(custom_id: &str, body: &str) -> String {
        format!(r#"{{"custom_id":"{custom_id}","method":"POST","url":"/v1/chat/completions","body":{body}}}"#)
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn validated(text: &str) -> Result<u64, Vec<InputFault>> {
        validate(file(text).path(), ENDPOINT, 1024).unwrap()
    }

    #[test]
    fn every_fault_of_a_file_is_named_with_its_line_and_field() {
        let long = line("long", &format!(r#"{{"a":"{}"}}"#, "x".repeat(6000)));
        let text = [
            &line("a", "{}"),
            "no json",
            "",
            &line("a", "{}"),
            &line("b", "{}").replace("chat/", ""),
            &line("c", "{}").replace("POST", "GET"),
            &line("d", "7"),
            &line("", "{}"),
            &line("e", "{}").replace("body", "boby"),
            r#"{"custom_id":"f","method":"POST","url":"/v1/chat/completions"}"#,
            &long,
            &line("g", "{}"),
        ]
        .join("\n");
        let faults = validated(&text).unwrap_err();
        let found: Vec<_> =
            faults.iter().map(|fault| (fault.line, &*fault.code, fault.param.as_deref())).collect();
        assert_eq!(
            found,
            [
                (Some(2), "invalid_json_line", None),
                (Some(4), "duplicate_custom_id", Some("custom_id")),
                (Some(5), "mismatched_url", Some("url")),
                (Some(6), "invalid_method", Some("method")),
                (Some(7), "invalid_body", Some("body")),
                (Some(8), "invalid_custom_id", Some("custom_id")),
                (Some(9), "invalid_request", None),
                (Some(10), "missing_required_parameter", Some("body")),
                (Some(11), "line_too_long", None),
            ]
        );
        let empty = validated(" \n\n").unwrap_err();
        assert_eq!((empty[0].line, &*empty[0].code), (None, "empty_file"));
    }

    #[test]
    fn a_file_has_a_bounded_number_of_lines_and_of_reported_faults() {
        let lines = |count| (0..count).map(|id| line(&id.to_string(), "{}") + "\n").collect::<String>();
        assert_eq!(validated(&lines(MAX_LINES)), Ok(MAX_LINES));
        assert_eq!(validated(&lines(MAX_LINES + 1)).unwrap_err()[0].code, "too_many_requests");
        assert_eq!(validated(&"x\n".repeat(1000)).unwrap_err().len(), MAX_FAULTS);
    }

    #[test]
    fn lines_with_a_result_are_not_read_again_and_bodies_keep_their_bytes() {
        let body = r#"{ "temperature": 0.30000000000000004, "b" : [1] }"#;
        let file = file(&[line("a", "{}"), String::new(), line("b", body), line("c", "{}")].join("\n"));
        let done = HashSet::from([hash_of("a")]);
        let mut reader = InputReader::open(file.path(), ENDPOINT, 1024, done).unwrap();
        let first = reader.read_ahead(1).unwrap();
        let expected = InputLine { number: 3, custom_id: "b".to_owned(), body: body.to_owned() };
        assert_eq!(first, [expected]);
        assert_eq!(reader.read_ahead(1).unwrap()[0].custom_id, "c");
        assert_eq!(reader.read_ahead(1).unwrap(), []);
    }
}

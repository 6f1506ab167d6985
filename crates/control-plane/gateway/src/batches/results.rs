//! Results of a batch, appended durably: a line is done once its result is synced.
//!
//! Two files in the batch's directory grow while the batch runs, and are its result files in the end:
//! `output.jsonl` has the answered lines, `errors.jsonl` the failed ones. A crash may leave a part of results
//! that were not synced. The next start removes everything from the first line that is not a complete result,
//! and computes those lines again.

use std::{
    collections::HashSet,
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    input::{CustomIdHash, hash_of},
    records::{BatchUsage, LineCounts},
};

/// Result of a line, as the result files have it.
#[derive(Debug, Serialize)]
pub(super) struct LineResult<'a> {
    pub(super) id: &'a str,
    pub(super) custom_id: &'a str,
    pub(super) response: Option<LineResponse<'a>>,
    pub(super) error: Option<LineError>,
}

#[derive(Debug, Serialize)]
pub(super) struct LineResponse<'a> {
    pub(super) status_code: u16,
    pub(super) request_id: &'a str,
    pub(super) body: &'a RawValue,
}

/// Reason why a line was not computed.
#[derive(Debug, Serialize)]
pub(super) struct LineError {
    pub(super) code: &'static str,
    pub(super) message: &'static str,
}

/// Parts of a result that counts and usage need.
#[derive(Deserialize)]
struct RecordedResult {
    custom_id: String,
    response: Option<RecordedResponse>,
}

#[derive(Deserialize)]
struct RecordedResponse {
    status_code: u16,
    body: RecordedBody,
}

#[derive(Deserialize)]
struct RecordedBody {
    usage: Option<RecordedUsage>,
}

/// Usage in the names of all routes that answer lines.
#[derive(Deserialize, Default)]
#[serde(default)]
struct RecordedUsage {
    #[serde(alias = "input_tokens")]
    prompt_tokens: u64,
    #[serde(alias = "output_tokens")]
    completion_tokens: u64,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: RecordedDetails,
    #[serde(alias = "output_tokens_details")]
    completion_tokens_details: RecordedDetails,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RecordedDetails {
    cached_tokens: u64,
    reasoning_tokens: u64,
}

impl RecordedResult {
    fn is_answered(&self) -> bool {
        self.response.as_ref().is_some_and(|response| response.status_code < 400)
    }

    fn usage(&self) -> BatchUsage {
        let usage = self.response.as_ref().and_then(|response| response.body.usage.as_ref());
        usage.map_or_else(BatchUsage::default, |usage| BatchUsage {
            input_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            output_tokens: usage.completion_tokens,
            reasoning_tokens: usage.completion_tokens_details.reasoning_tokens,
        })
    }
}

#[derive(Debug)]
struct AppendFile {
    path: PathBuf,
    file: File,
}

impl AppendFile {
    /// Opens the file, and passes each complete result to `note`. Removes the rest of the file.
    fn recover(path: PathBuf, mut note: impl FnMut(&RecordedResult)) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
        let (mut reader, mut sound, mut line) = (BufReader::new(&file), 0, Vec::new());
        while reader.read_until(b'\n', &mut line)? > 0 {
            let result = line.strip_suffix(b"\n").and_then(|text| serde_json::from_slice(text).ok());
            let Some(result) = result else { break };
            note(&result);
            sound += line.len() as u64;
            line.clear();
        }
        if file.metadata()?.len() > sound {
            tracing::warn!(path = %path.display(), "incomplete results are removed and computed again");
            file.set_len(sound)?;
            file.sync_all()?;
        }
        Ok(Self { path, file })
    }

    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.file.write_all(text)?;
        self.file.sync_data()
    }
}

/// The results of a batch so far.
#[derive(Debug)]
pub(super) struct ResultLog {
    output: AppendFile,
    errors: AppendFile,
    pub(super) done: HashSet<CustomIdHash>,
    /// Completed and failed lines.
    pub(super) counts: LineCounts,
    pub(super) usage: BatchUsage,
}

impl ResultLog {
    /// Opens the results in the directory of a batch with `total` lines.
    ///
    /// # Errors
    /// The system cannot read, cut or create the files.
    pub(super) fn open(directory: &Path, total: u64) -> io::Result<Self> {
        let (mut done, mut usage) = (HashSet::new(), BatchUsage::default());
        let mut counts = LineCounts { total, ..LineCounts::default() };
        let output = AppendFile::recover(directory.join("output.jsonl"), |result| {
            counts.completed += 1;
            usage.add(&result.usage());
            done.insert(hash_of(&result.custom_id));
        })?;
        let errors = AppendFile::recover(directory.join("errors.jsonl"), |result| {
            counts.failed += 1;
            done.insert(hash_of(&result.custom_id));
        })?;
        File::open(directory)?.sync_all()?;
        Ok(Self { output, errors, done, counts, usage })
    }

    /// Appends `results`, each a line of JSON without its end. The lines are durable when the function
    /// returns.
    ///
    /// # Errors
    /// The system cannot write. The log must be opened again then, because a part may be written.
    pub(super) fn append(&mut self, results: &[String]) -> io::Result<()> {
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let mut read = Vec::with_capacity(results.len());
        for text in results {
            let result: RecordedResult = serde_json::from_str(text)?;
            let to = if result.is_answered() { &mut output } else { &mut errors };
            to.extend_from_slice(text.as_bytes());
            to.push(b'\n');
            read.push(result);
        }
        self.output.append(&output)?;
        failpoint::pass("gateway.batch_line_written");
        self.errors.append(&errors)?;
        for result in read {
            let count =
                if result.is_answered() { &mut self.counts.completed } else { &mut self.counts.failed };
            *count += 1;
            if result.is_answered() {
                self.usage.add(&result.usage());
            }
            self.done.insert(hash_of(&result.custom_id));
        }
        Ok(())
    }

    /// Returns the paths of the files with the answers and with the failed lines; `None` for an empty file.
    pub(super) fn files(&self) -> [Option<PathBuf>; 2] {
        let nonempty = |file: &AppendFile, count| (count > 0).then(|| file.path.clone());
        [nonempty(&self.output, self.counts.completed), nonempty(&self.errors, self.counts.failed)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(custom_id: &str, status_code: u16) -> String {
        let body = r#"{"x":1.10,"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}"#;
        let body: &RawValue = serde_json::from_str(body).unwrap();
        let response = Some(LineResponse { status_code, request_id: "r", body });
        serde_json::to_string(&LineResult { id: "i", custom_id, response, error: None }).unwrap()
    }

    #[test]
    fn a_torn_result_is_removed_and_its_line_is_not_done() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("output.jsonl");
        let mut log = ResultLog::open(directory.path(), 4).unwrap();
        log.append(&[result("a", 200), result("b", 400), result("c", 200)]).unwrap();
        let sound = std::fs::read(&output).unwrap();
        drop(log);
        let torn = result("d", 200);
        // A crash may leave a part of a line, or blocks that were never written.
        for rest in [&torn.as_bytes()[..20], &[0; 600], &[torn.as_bytes(), b"\0\n"].concat(), torn.as_bytes()]
        {
            std::fs::write(&output, [&sound, rest].concat()).unwrap();
            let log = ResultLog::open(directory.path(), 4).unwrap();
            assert_eq!(std::fs::read(&output).unwrap(), sound);
            assert_eq!(log.done, ["a", "b", "c"].map(hash_of).into());
            assert_eq!(log.counts, LineCounts { total: 4, completed: 2, failed: 1 });
            let usage =
                BatchUsage { input_tokens: 10, cached_tokens: 6, output_tokens: 4, reasoning_tokens: 0 };
            assert_eq!(log.usage, usage);
        }
    }

    #[test]
    fn results_after_a_restart_continue_the_files_and_the_counts() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = ResultLog::open(directory.path(), 2).unwrap();
        log.append(&[result("a", 200)]).unwrap();
        let mut log = ResultLog::open(directory.path(), 2).unwrap();
        log.append(&[result("b", 200)]).unwrap();
        assert_eq!((log.counts.completed, log.usage.input_tokens), (2, 10));
        let [output, errors] = log.files();
        assert_eq!(std::fs::read_to_string(output.unwrap()).unwrap().lines().count(), 2);
        assert_eq!(errors, None, "an empty file is no result");
        assert!(result("a", 200).contains("1.10"), "the body keeps its bytes");
    }
}

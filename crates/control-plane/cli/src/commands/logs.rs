//! `holobiont logs`: shows the log of a deployment, in full or about one request.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;

use crate::{
    deployment::{
        paths::{LOG_FILE, OLD_LOG_FILE, log_directory},
        selection::{SelectionError, StateArguments},
    },
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal, printable, quoted},
};

/// Interval between checks of a followed log.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Longest line read as one, in bytes.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Directories of systemd units.
const UNIT_DIRECTORIES: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

/// Unit whose presence means that Holobiont runs as a service here.
const UNIT: &str = "holobiont-gateway.service";

#[derive(Debug, clap::Args)]
pub(crate) struct LogsArguments {
    /// Only lines about this request, adapter or process
    id: Option<String>,
    /// Prints new lines as they are written
    #[arg(long, short)]
    follow: bool,
    /// Number of last lines to show
    #[arg(long, short = 'n', value_name = "N", default_value_t = 100)]
    lines: usize,
    #[command(flatten)]
    state: StateArguments,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LogsError {
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error("there is no log in {directory}")]
    NoLog {
        /// Directory in which the log was expected.
        directory: PathBuf,
    },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
}

impl Explain for LogsError {
    fn exit(&self) -> Exit {
        match self {
            Self::Selection(error) => error.exit(),
            Self::NoLog { .. } => Exit::NotFound,
            Self::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Exit::Refused,
            Self::Read { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Selection(error) => error.next(),
            Self::NoLog { .. } => Some(
                "name a running deployment with --deployment NAME or --state DIR; holobiont up writes its log"
                    .into(),
            ),
            Self::Read { .. } => None,
        }
    }
}

pub(crate) fn run(arguments: &LogsArguments, terminal: Terminal) -> Result<(), LogsError> {
    let directory = log_directory(&arguments.state.directory()?);
    let path = directory.join(LOG_FILE);
    if !path.exists() {
        if UNIT_DIRECTORIES.iter().any(|units| Path::new(units).join(UNIT).exists()) {
            terminal.note("Holobiont runs as a service on this host; read its log with:");
            terminal.print(journal_command(arguments));
            return Ok(());
        }
        return Err(LogsError::NoLog { directory });
    }
    let mut last = LastLines { lines: VecDeque::new(), limit: arguments.lines };
    let id = arguments.id.as_deref().unwrap_or_default();
    let mut file = None;
    for path in [directory.join(OLD_LOG_FILE), path.clone()] {
        let failed = |source| LogsError::Read { path: path.clone(), source };
        let mut reader = match File::open(&path) {
            Ok(file) => BufReader::new(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        while let Some(line) = next_line(&mut reader).map_err(failed)? {
            last.push(line, id);
        }
        file = Some(reader);
    }
    last.lines.iter().for_each(|line| show(line, terminal));
    match (arguments.follow, file) {
        (true, Some(reader)) => {
            follow(&path, reader, id, terminal).map_err(|source| LogsError::Read { path, source })
        }
        _ => Ok(()),
    }
}

/// The last `limit` lines.
struct LastLines {
    lines: VecDeque<String>,
    limit: usize,
}

impl LastLines {
    fn push(&mut self, line: String, id: &str) {
        if !line.contains(id) {
            return;
        }
        self.lines.push_back(line);
        if self.lines.len() > self.limit {
            self.lines.pop_front();
        }
    }
}

/// Returns the next line without its line end; the last line may be incomplete.
fn next_line(reader: &mut impl io::BufRead) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
    Ok((read > 0).then(|| String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned()))
}

/// Prints a line; for JSON output, a line that is no JSON becomes a string.
fn show(line: &str, terminal: Terminal) {
    match terminal.format {
        PrintFormat::Human => terminal.print(printable(line)),
        PrintFormat::Json if serde_json::from_str::<serde_json::Value>(line).is_ok() => terminal.print(line),
        PrintFormat::Json => terminal.print(json!({"line": line})),
    }
}

/// Prints appended lines, also after log rotation, until this process is stopped.
fn follow(path: &Path, mut reader: BufReader<File>, id: &str, terminal: Terminal) -> io::Result<()> {
    loop {
        while let Some(line) = next_line(&mut reader)? {
            if line.contains(id) {
                show(&line, terminal);
            }
        }
        std::thread::sleep(LOOK_AGAIN_AFTER);
        let current = fs::metadata(path).map(|metadata| metadata.ino());
        if current.is_ok_and(|inode| reader.get_ref().metadata().is_ok_and(|open| open.ino() != inode)) {
            // The old file's last lines are read before the new file.
            while let Some(line) = next_line(&mut reader)? {
                show(&line, terminal);
            }
            reader = BufReader::new(File::open(path)?);
        }
    }
}

fn journal_command(arguments: &LogsArguments) -> String {
    let follow = if arguments.follow { " --follow" } else { "" };
    let grep = arguments.id.as_deref().map(|id| format!(" --grep={}", quoted(id))).unwrap_or_default();
    format!("journalctl --unit='holobiont-*' --lines={}{follow}{grep}", arguments.lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_about_an_id_are_kept_in_order() {
        let mut last = LastLines { lines: VecDeque::new(), limit: 2 };
        for line in ["a 1", "b 1", "a 2", "a 3", "b 2"] {
            last.push(line.into(), "a");
        }
        assert_eq!(last.lines, ["a 2", "a 3"]);
    }

    #[test]
    fn a_line_that_is_not_text_is_shown_as_far_as_it_is() {
        let mut reader = b"ok\n\xff\xfe\nlast".as_slice();
        let lines: Vec<_> = std::iter::from_fn(|| next_line(&mut reader).unwrap()).collect();
        assert_eq!((lines.len(), lines[0].as_str(), lines[2].as_str()), (3, "ok", "last"));
    }
}

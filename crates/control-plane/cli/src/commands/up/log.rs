//! The log of a deployment: lines of all processes go to stderr and to a file of bounded size.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use indicatif::ProgressBar;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use tokio::sync::oneshot;
use tracing_subscriber::fmt::MakeWriter;

use crate::deployment::paths::{LOG_FILE, OLD_LOG_FILE};

/// Maximum size of the log file; with the rotated file, twice as many bytes are kept.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Longest line read as one.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Prefix of the line in which a process gives the reason for its end.
const ERROR: &[u8] = b"error: ";

/// Capacity of a stderr pipe, which buffers a child's lines while the pipe is not read.
const PIPE_BYTES: usize = 1 << 20;

/// Shared sink for log lines of this process and its children.
#[derive(Debug, Clone)]
pub(crate) struct LogSink(Arc<Mutex<LogOutputs>>);

#[derive(Debug)]
struct LogOutputs {
    file: RotatingFile,
    echo: Echo,
}

/// Whether lines also go to stderr.
#[derive(Debug)]
enum Echo {
    /// Lines are printed above the progress bar.
    Above(ProgressBar),
    None,
}

impl LogSink {
    /// Opens the log in `directory`, creating the directory if needed.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let file = RotatingFile::open(directory, MAX_FILE_BYTES)?;
        Ok(Self(Arc::new(Mutex::new(LogOutputs { file, echo: Echo::Above(ProgressBar::hidden()) }))))
    }

    /// Prints later lines above `progress`.
    pub(crate) fn draw_above(&self, progress: ProgressBar) {
        self.outlets().echo = Echo::Above(progress);
    }

    /// Stops printing to stderr.
    pub(crate) fn leave_stderr(&self) {
        self.outlets().echo = Echo::None;
    }

    pub(crate) fn keep(&self, line: &str) {
        self.outlets().file.write(format!("{line}\n").as_bytes());
    }

    /// Creates a pipe for a child's stderr. A thread copies the child's lines into this log. At the end of
    /// the stream, the receiver gets the child's reason for its end, if it printed one.
    pub(crate) fn pipe(&self) -> io::Result<(Stdio, oneshot::Receiver<Option<String>>)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        // The child holds both ends: if this process is killed, the child's last lines fill the pipe
        // instead of failing, and it drains.
        let both =
            File::options().read(true).write(true).open(format!("/proc/self/fd/{}", write.as_raw_fd()))?;
        let (done, said_all) = oneshot::channel();
        let sink = self.clone();
        std::thread::Builder::new().name("stderr".into()).spawn(move || {
            let _ = done.send(sink.copy_lines(BufReader::new(File::from(read))));
        })?;
        Ok((both.into(), said_all))
    }

    /// Copies lines to the log. Returns the last line that gives the reason for the end without printing it
    /// on stderr, because the supervisor reports the reason once.
    fn copy_lines(&self, mut reader: impl io::BufRead) -> Option<String> {
        let (mut line, mut cause) = (Vec::new(), None);
        while let Ok(1..) = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            match line.strip_prefix(ERROR) {
                None => self.outlets().write(&line),
                Some(text) => {
                    self.outlets().file.write(&line);
                    cause = Some(String::from_utf8_lossy(text).trim().to_owned());
                }
            }
            line.clear();
        }
        cause
    }

    fn outlets(&self) -> MutexGuard<'_, LogOutputs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogOutputs {
    fn write(&mut self, bytes: &[u8]) {
        self.file.write(bytes);
        if let Echo::Above(progress) = &self.echo {
            let _ = progress.suspend(|| io::stderr().lock().write_all(bytes));
        }
    }
}

impl<'a> MakeWriter<'a> for LogSink {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl io::Write for LogSink {
    /// Writes to the log and never fails, because a broken log must not stop the deployment.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outlets().write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Log file that is rotated when full.
#[derive(Debug)]
struct RotatingFile {
    directory: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
}

impl RotatingFile {
    fn open(directory: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = append_to(&directory.join(LOG_FILE))?;
        let bytes = file.metadata()?.len();
        Ok(Self { directory: directory.to_owned(), file, bytes, max_bytes })
    }

    /// Writes a line; a full disk loses only lines.
    fn write(&mut self, line: &[u8]) {
        let length = line.len() as u64;
        if self.bytes > 0 && self.bytes.saturating_add(length) > self.max_bytes {
            let _ = self.rotate();
        }
        // If rotation fails, the old file does not grow either.
        if self.bytes.saturating_add(length) <= self.max_bytes && self.file.write_all(line).is_ok() {
            self.bytes += length;
        }
    }

    fn rotate(&mut self) -> io::Result<()> {
        let path = self.directory.join(LOG_FILE);
        fs::rename(&path, self.directory.join(OLD_LOG_FILE))?;
        self.file = append_to(&path)?;
        self.bytes = 0;
        Ok(())
    }
}

/// Opens a log file with mode 0600, because logs may hold tenant names.
fn append_to(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_never_takes_more_than_two_files() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = RotatingFile::open(directory.path(), 100).unwrap();
        for line in 0..100 {
            file.write(format!("line {line:04}\n").as_bytes());
        }
        let read = |name| fs::read_to_string(directory.path().join(name)).unwrap();
        let (new, old) = (read(LOG_FILE), read(OLD_LOG_FILE));
        assert!(new.len() <= 100 && old.len() <= 100, "{} and {}", new.len(), old.len());
        assert!(new.ends_with("line 0099\n"), "{new}");
        let kept = old + &new;
        assert!(kept.starts_with("line 00") && kept.lines().count() >= 10, "{kept}");
        file.write(&[b'x'; 101]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        assert!(read(LOG_FILE).len() <= 100, "a line longer than a file is not kept");
    }

    #[test]
    fn a_log_is_continued_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        for word in ["one\n", "two\n"] {
            RotatingFile::open(directory.path(), 100).unwrap().write(word.as_bytes());
        }
        assert_eq!(fs::read_to_string(directory.path().join(LOG_FILE)).unwrap(), "one\ntwo\n");
    }

    #[tokio::test]
    async fn what_a_child_says_is_kept_to_its_last_word() {
        let directory = tempfile::tempdir().unwrap();
        let sink = LogSink::open(directory.path()).unwrap();
        let (stderr, said_all) = sink.pipe().unwrap();
        let mut command = std::process::Command::new("sh");
        let mut child = command.args(["-c", "echo one >&2; printf two >&2"]).stderr(stderr).spawn().unwrap();
        drop(command);
        child.wait().unwrap();
        assert_eq!(said_all.await.unwrap(), None);
        assert_eq!(fs::read_to_string(directory.path().join(LOG_FILE)).unwrap(), "one\ntwo\n");
    }
}

//! What a deployment says on stderr, kept: everything goes to stderr and to a file that cannot grow without end.

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

/// Longest file; with the old one twice as much is kept.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Longest line taken as one.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// So begins the line in which a process says why it ends.
const ERROR: &[u8] = b"error: ";

/// What a process may say while nobody listens.
const PIPE_BYTES: usize = 1 << 20;

/// Takes lines from this process and its children.
#[derive(Debug, Clone)]
pub(crate) struct LogSink(Arc<Mutex<Outlets>>);

#[derive(Debug)]
struct Outlets {
    file: RotatingFile,
    echo: Echo,
}

/// Whether stderr hears it too.
#[derive(Debug)]
enum Echo {
    /// Yes, above the progress that is drawn there.
    Above(ProgressBar),
    /// No.
    None,
}

impl LogSink {
    /// Opens the log in `directory`, which is created if need be.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let file = RotatingFile::open(directory, MAX_FILE_BYTES)?;
        Ok(Self(Arc::new(Mutex::new(Outlets { file, echo: Echo::Above(ProgressBar::hidden()) }))))
    }

    /// From now on lines go above this progress.
    pub(crate) fn draw_above(&self, progress: ProgressBar) {
        self.outlets().echo = Echo::Above(progress);
    }

    /// From now on stderr is somebody else's.
    pub(crate) fn leave_stderr(&self) {
        self.outlets().echo = Echo::None;
    }

    /// Writes a line to the file alone.
    pub(crate) fn keep(&self, line: &str) {
        self.outlets().file.write(format!("{line}\n").as_bytes());
    }

    /// A pipe for a child's stderr. What comes out of it goes where our own lines go, on a thread of its own. When the
    /// child has said all, the receiver hears why it ended, if it said so.
    pub(crate) fn pipe(&self) -> io::Result<(Stdio, oneshot::Receiver<Option<String>>)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        // The child holds both ends: if we are killed, its last words fill the pipe instead of failing, and it drains.
        let both =
            File::options().read(true).write(true).open(format!("/proc/self/fd/{}", write.as_raw_fd()))?;
        let (done, said_all) = oneshot::channel();
        let sink = self.clone();
        std::thread::Builder::new().name("stderr".into()).spawn(move || {
            let _ = done.send(sink.copy_lines(BufReader::new(File::from(read))));
        })?;
        Ok((both.into(), said_all))
    }

    /// Passes lines on. The last that says why the process ended is returned, and stderr does not hear it: whoever
    /// waits for the process says it, once.
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

    fn outlets(&self) -> MutexGuard<'_, Outlets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outlets {
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
    /// Never fails: a log that cannot be written must not stop what it tells about.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outlets().write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that makes way for a new one when it is full.
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

    /// A full disk loses lines, nothing else.
    fn write(&mut self, line: &[u8]) {
        let length = line.len() as u64;
        if self.bytes > 0 && self.bytes.saturating_add(length) > self.max_bytes {
            let _ = self.rotate();
        }
        // Where a new file cannot be made, the old one does not grow either.
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

/// Logs may hold names of tenants: they are this user's alone.
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

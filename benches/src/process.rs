//! Child processes with timeouts, stopped when dropped, and their memory as the system reports it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

const POLL: Duration = Duration::from_millis(5);
/// Time a child may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
const LOG_LINES: usize = 12;

/// Child process whose output goes to a log file; dropping it stops the process.
#[derive(Debug)]
pub(crate) struct LoggedProcess {
    name: String,
    child: Child,
    log: PathBuf,
}

impl LoggedProcess {
    /// Starts `command` with standard output and error in `log`.
    ///
    /// # Errors
    /// If the log cannot be written or the program cannot be started.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let errors = output.try_clone().with_context(|| format!("cannot write {}", log.display()))?;
        Self::spawn(command.stdout(output).stderr(errors), log)
    }

    fn spawn(command: &mut Command, log: &Path) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {name}; is it built?"))?;
        Ok(Self { name, child, log: log.to_path_buf() })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails if the child has ended; the error holds the end of its log.
    ///
    /// # Errors
    /// If the child has ended.
    pub(crate) fn ensure_running(&mut self) -> Result<()> {
        match self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))? {
            None => Ok(()),
            Some(status) => {
                bail!("{} ended with {status}; its last words:\n{}", self.name, self.last_words())
            }
        }
    }

    /// Waits until the child ends.
    ///
    /// # Errors
    /// Fails if the child has not ended after `limit`; the child is then stopped.
    fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) =
                self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))?
            {
                return Ok(status);
            }
            ensure!(
                started.elapsed() < limit,
                "{} was still running after {limit:?}; it was stopped",
                self.name
            );
            thread::sleep(POLL);
        }
    }

    pub(crate) fn last_words(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

impl Drop for LoggedProcess {
    /// Sends SIGTERM first, so that a supervisor can stop its own children.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // `kill` fails only if the child has just ended, which `wait` reports.
            let _ = kill_process(pid, Signal::TERM);
        }
        if self.wait(GRACE).is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs `command` to its end and returns its standard output.
///
/// # Errors
/// Fails if the command cannot be started, takes longer than `limit`, or fails.
pub(crate) fn output_of(command: &mut Command, limit: Duration) -> Result<String> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder for a program's output")?;
    let (output, errors) = (folder.path().join("output"), folder.path().join("errors"));
    let files = File::create(&output).and_then(|out| Ok((out, File::create(&errors)?)));
    let (out, err) = files.with_context(|| format!("cannot write in {}", folder.path().display()))?;
    let mut process = LoggedProcess::spawn(command.stdout(out).stderr(err), &errors)?;
    let status = process.wait(limit)?;
    ensure!(
        status.success(),
        "{} ended with {status}; its last words:\n{}",
        process.name,
        process.last_words()
    );
    fs::read_to_string(&output).with_context(|| format!("{} wrote something that is not text", process.name))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessMemory {
    /// Peak resident memory, mapped files included.
    pub(crate) peak_bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) shared_bytes: u64,
}

/// Memory of process `id`.
///
/// # Errors
/// If there is no such process.
pub(crate) fn memory_of(id: u32) -> Result<ProcessMemory> {
    let path = format!("/proc/{id}/status");
    let status =
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}; the process has ended"))?;
    let bytes = |field: &str| -> Result<u64> {
        status_field(&status, field)
            .and_then(|value| value.strip_suffix(" kB")?.parse::<u64>().ok())
            .map(|kib| kib * 1024)
            .with_context(|| format!("{path} has no usable {field}"))
    };
    Ok(ProcessMemory {
        peak_bytes: bytes("VmHWM")?,
        resident_bytes: bytes("VmRSS")?,
        shared_bytes: bytes("RssShmem")?,
    })
}

/// Process called `name` among the children of process `parent`.
///
/// # Errors
/// If there is none.
pub(crate) fn child_called(parent: u32, name: &str) -> Result<u32> {
    children_called(parent, name)?
        .first()
        .copied()
        .with_context(|| format!("process {parent} has no child called {name}"))
}

/// Processes called `name` among the children of process `parent`.
///
/// # Errors
/// If the system does not list processes.
pub(crate) fn children_called(parent: u32, name: &str) -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("cannot list /proc")?;
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_meant = |id: &u32| {
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        status_field(&status, "Name") == Some(name)
            && status_field(&status, "PPid") == Some(parent.to_string().as_str())
    };
    Ok(ids.filter(is_meant).collect())
}

fn status_field<'a>(status: &'a str, field: &str) -> Option<&'a str> {
    status.lines().find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failed_program_is_an_error_that_repeats_its_last_words() {
        let error = output_of(&mut shell("echo too bad >&2; exit 3"), GRACE).unwrap_err().to_string();
        assert!(error.contains("too bad") && error.contains('3'), "{error}");
        assert_eq!(output_of(&mut shell("echo fine"), GRACE).unwrap(), "fine\n");
    }

    #[test]
    fn a_program_that_does_not_end_is_stopped() {
        let error =
            output_of(&mut shell("exec sleep 60"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("still running"), "{error}");
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut process = LoggedProcess::start(&mut shell("exec sleep 60"), log.path()).unwrap();
        process.ensure_running().unwrap();
        let id = process.id();
        assert!(memory_of(id).unwrap().peak_bytes > 0);
        drop(process);
        assert!(memory_of(id).is_err());
    }

    #[test]
    fn a_child_is_found_by_its_name() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let process = LoggedProcess::start(&mut shell("exec tail -f /dev/null"), log.path()).unwrap();
        let started = Instant::now();
        while child_called(std::process::id(), "tail").is_err() && started.elapsed() < GRACE {
            thread::sleep(POLL);
        }
        assert_eq!(child_called(std::process::id(), "tail").unwrap(), process.id());
        assert!(child_called(std::process::id(), "no such name").is_err());
    }
}

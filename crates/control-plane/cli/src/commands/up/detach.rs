//! `up --detach`: runs the same command again in the background.
//!
//! The foreground process starts itself a second time, passes on the child's banner or error output, and
//! ends. The background process leaves the terminal's session at once, and stdout and stderr once it
//! serves; from then on only the log file receives its lines. An interrupt of the foreground process does
//! not stop the background process; `holobiont down` does.

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read as _, Write as _},
    process::{Command, Stdio},
};

use rustix::stdio::{dup2_stderr, dup2_stdout};

use super::errors::UpError;
use crate::{exit::Exit, terminal::Terminal};

/// Variable set for the background process; its value says whether a person waits.
const MARK: &str = "HOLOBIONT_DETACHED";

/// Value of `MARK` if a person waits.
const PERSON: &str = "person";

/// Maximum number of stderr bytes kept until the background process serves, in case it fails.
const KEPT_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForegroundMode {
    /// Runs in the foreground until Ctrl-C.
    Front,
    /// Runs in the background until `holobiont down`.
    Behind,
}

/// True if this process is the background process.
pub(crate) fn is_behind() -> bool {
    std::env::var_os(MARK).is_some()
}

/// True if this process is the background process and a person waits at the foreground process.
pub(crate) fn is_for_people() -> bool {
    std::env::var_os(MARK).is_some_and(|value| value == PERSON)
}

/// Runs the foreground process: returns when the background process serves or has failed.
pub(crate) fn start(terminal: Terminal) -> Result<(), UpError> {
    let progress = terminal.spinner("starting in the background".into());
    let mut child = Command::new(std::env::current_exe().map_err(UpError::Background)?)
        .args(std::env::args_os().skip(1))
        .env(MARK, if io::stderr().is_terminal() { PERSON } else { "program" })
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(UpError::Background)?;
    let said = child.stderr.take().map(|stderr| std::thread::spawn(move || hear(stderr)));
    let mut greeting = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut greeting).map_err(UpError::Background)?;
    }
    progress.finish_and_clear();
    if greeting.is_empty() {
        // The background process ended before it served; its stderr gives the reason.
        let status = child.wait().map_err(UpError::Background)?;
        let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
        let _ = io::stderr().write_all(&said);
        return Err(UpError::FailedBehind { exit: Exit::of_code(status.code()) });
    }
    terminal.print(greeting.trim_end_matches('\n'));
    Ok(())
}

/// Reads `stderr` to its end so that the writer never blocks, and keeps the first `KEPT_BYTES`.
fn hear(mut stderr: impl io::Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let _ = stderr.by_ref().take(KEPT_BYTES).read_to_end(&mut kept);
    let _ = io::copy(&mut stderr, &mut io::sink());
    kept
}

/// Leaves the terminal's session, so that a hang-up does not stop the background process.
pub(crate) fn leave_session() {
    // The call fails only for a process that already leads its session.
    let _ = rustix::process::setsid();
}

/// Redirects stdout and stderr to `/dev/null` once the background process serves.
pub(crate) fn leave_streams() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

//! `up --detach`: the same command again, in the background.
//!
//! The process in front starts itself a second time, passes on its greeting or, if it fails, what it said, and ends.
//! The process behind leaves the terminal's session at once, and stdout and stderr once it serves: from then on the log
//! file alone hears it. If the one in front is interrupted, the one behind goes on; `holobiont down` stops it.

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read as _, Write as _},
    process::{Command, Stdio},
};

use rustix::stdio::{dup2_stderr, dup2_stdout};

use super::errors::UpError;
use crate::{exit::Exit, terminal::Terminal};

/// Set for the process behind; says whether a person waits for it.
const MARK: &str = "HOLOBIONT_DETACHED";

/// Its value where a person waits.
const PERSON: &str = "person";

/// So much of what the process behind says before it serves is kept, for the case that it never does.
const KEPT_BYTES: u64 = 1 << 20;

/// Where a deployment runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForegroundMode {
    /// Until Ctrl-C.
    Front,
    /// Until `holobiont down`.
    Behind,
}

/// Whether this process is the one behind.
pub(crate) fn is_behind() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Whether this process is the one behind, and the one in front talks to a person.
pub(crate) fn is_for_people() -> bool {
    std::env::var_os(MARK).is_some_and(|value| value == PERSON)
}

/// The part of the process in front: returns when the one behind serves, or has failed.
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
        // It ended before it served, and says why on stderr.
        let status = child.wait().map_err(UpError::Background)?;
        let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
        let _ = io::stderr().write_all(&said);
        return Err(UpError::FailedBehind { exit: Exit::of_code(status.code()) });
    }
    terminal.print(greeting.trim_end_matches('\n'));
    Ok(())
}

/// Hears all, so that nobody waits for a reader, and keeps the beginning.
fn hear(mut stderr: impl io::Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let _ = stderr.by_ref().take(KEPT_BYTES).read_to_end(&mut kept);
    let _ = io::copy(&mut stderr, &mut io::sink());
    kept
}

/// The part of the process behind, at its start: a hang-up of the terminal is not its business.
pub(crate) fn leave_session() {
    // It fails only for a process that leads its session already.
    let _ = rustix::process::setsid();
}

/// The part of the process behind, once it serves.
pub(crate) fn leave_streams() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

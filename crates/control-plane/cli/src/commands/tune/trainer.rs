//! Runs the trainer child, which reports its progress on stdout and stops in order when asked.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::PathBuf,
    process::{ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::{
    deployment::running::ProcessId,
    terminal::{
        printable,
        stop_signals::{StopSignal, StopSignals},
    },
};

pub(super) const TRAINER: &str = "holobiont-trainer";

/// Number of last bytes of the trainer's stderr that are searched for an error.
const LAST_WORDS_BYTES: u64 = 4096;

#[derive(Debug)]
pub(super) struct TrainerCommandSpec {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    /// Stdin of the trainer.
    pub(super) stdin: Stdio,
    /// File that receives the trainer's stderr.
    pub(super) log: File,
}

#[derive(Debug)]
pub(super) struct TrainerExit {
    pub(super) status: ExitStatus,
    /// True if a stop signal was passed to the trainer.
    pub(super) asked: bool,
    /// Last error line on stderr.
    pub(super) last_words: Option<String>,
}

/// Receiver of a trainer's events.
pub(super) trait TrainerListener {
    /// Called once the trainer has started.
    fn started(&mut self, process: ProcessId) -> io::Result<()>;

    /// Called for each line on stdout.
    fn line(&mut self, line: &str) -> io::Result<()>;
}

enum TrainerEvent {
    Said(Option<String>),
    Ended(ExitStatus),
    StopAsked(StopSignal),
}

/// Runs a trainer to its end. The first stop signal is passed on to the trainer; a second one kills it.
///
/// # Errors
/// Fails if the trainer cannot be started. A failed listener also fails the run and kills the trainer.
pub(super) fn run(
    recipe: TrainerCommandSpec,
    listener: &mut impl TrainerListener,
) -> io::Result<TrainerExit> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(train(recipe, listener))
}

async fn train(recipe: TrainerCommandSpec, listener: &mut impl TrainerListener) -> io::Result<TrainerExit> {
    let mut signals = StopSignals::new()?;
    let mut log = recipe.log;
    let mut child = Command::new(recipe.program)
        .args(recipe.arguments)
        .stdin(recipe.stdin)
        .stdout(Stdio::piped())
        .stderr(log.try_clone()?)
        // Ctrl-C must reach only this process, which passes it on once.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()?;
    listener.started(ProcessId::of(child.id().unwrap_or_default()))?;
    let mut lines = child.stdout.take().map(|stdout| BufReader::new(stdout).lines());
    let mut asked = false;
    let status = loop {
        let happening = match &mut lines {
            Some(lines) => tokio::select! {
                line = lines.next_line() => TrainerEvent::Said(line?),
                signal = signals.next() => TrainerEvent::StopAsked(signal),
            },
            None => tokio::select! {
                status = child.wait() => TrainerEvent::Ended(status?),
                signal = signals.next() => TrainerEvent::StopAsked(signal),
            },
        };
        match happening {
            TrainerEvent::Said(Some(line)) => listener.line(&line)?,
            TrainerEvent::Said(None) => lines = None,
            TrainerEvent::Ended(status) => break status,
            TrainerEvent::StopAsked(_) if asked => child.start_kill()?,
            TrainerEvent::StopAsked(signal) => {
                asked = true;
                hand_on(signal, &child);
            }
        }
    };
    Ok(TrainerExit { status, asked, last_words: last_words(&mut log).unwrap_or_default() })
}

/// Passes a stop signal on; a trainer that has just ended needs none.
fn hand_on(signal: StopSignal, child: &Child) {
    let signal = match signal {
        StopSignal::Interrupt => Signal::INT,
        StopSignal::Terminate => Signal::TERM,
    };
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, signal);
    }
}

/// Returns the last error line of the log.
fn last_words(log: &mut File) -> io::Result<Option<String>> {
    let end = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(end.saturating_sub(LAST_WORDS_BYTES)))?;
    let mut bytes = Vec::new();
    log.read_to_end(&mut bytes)?;
    Ok(complaint(&String::from_utf8_lossy(&bytes)).map(printable))
}

/// Returns the last line that begins with `error: `, or else the last line that is not empty.
fn complaint(text: &str) -> Option<&str> {
    let lines = || text.lines().map(str::trim);
    lines().rev().find_map(|line| line.strip_prefix("error: ")).or(lines().rfind(|line| !line.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::complaint;

    #[test]
    fn an_error_is_told_though_advice_comes_behind_it() {
        let usage = "error: unexpected argument '--x' found\n\nFor more information, try '--help'.\n";
        assert_eq!(complaint(usage), Some("unexpected argument '--x' found"));
        assert_eq!(complaint("starting\n  killed\n\n"), Some("killed"));
        assert_eq!(complaint("\n"), None);
    }
}

//! The child that trains: it says on stdout how far it is, and stops in order when it is asked.

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

/// The program.
pub(super) const TRAINER: &str = "holobiont-trainer";

/// The end of what it said on stderr that is looked at, in bytes.
const LAST_WORDS_BYTES: u64 = 4096;

/// What a trainer is started with.
#[derive(Debug)]
pub(super) struct TrainerCommandSpec {
    /// Its file.
    pub(super) program: PathBuf,
    /// Its arguments.
    pub(super) arguments: Vec<OsString>,
    /// Its stdin, of which it reads nothing.
    pub(super) stdin: Stdio,
    /// Takes its stderr.
    pub(super) log: File,
}

/// How a trainer ended.
#[derive(Debug)]
pub(super) struct TrainerExit {
    /// Its exit status.
    pub(super) status: ExitStatus,
    /// Whether somebody asked for it.
    pub(super) asked: bool,
    /// What it complained about on stderr.
    pub(super) last_words: Option<String>,
}

/// Who hears of a trainer.
pub(super) trait TrainerListener {
    /// It has started.
    fn started(&mut self, process: ProcessId) -> io::Result<()>;

    /// It has said a line.
    fn line(&mut self, line: &str) -> io::Result<()>;
}

/// What can happen while it trains.
enum TrainerEvent {
    Said(Option<String>),
    Ended(ExitStatus),
    StopAsked(StopSignal),
}

/// Runs a trainer to its end. The first stop signal is handed on to it, a second one kills it.
///
/// # Errors
/// If it cannot be started, or the listener failed: then it is killed.
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
        // Ctrl-C reaches this process alone, which hands it on: once.
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

/// One that has just ended hears nothing, and need not.
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

/// The last line that says something.
fn last_words(log: &mut File) -> io::Result<Option<String>> {
    let end = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(end.saturating_sub(LAST_WORDS_BYTES)))?;
    let mut bytes = Vec::new();
    log.read_to_end(&mut bytes)?;
    Ok(complaint(&String::from_utf8_lossy(&bytes)).map(printable))
}

/// What a program complained about last; whatever it said last, if it named nothing an error.
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

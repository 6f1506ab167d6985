//! `holobiont down`: stops the deployment of a state directory in order, within its grace period.

use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    deployment::{
        running::{LockHolder, RunningProcess},
        selection::{SelectionError, StateArguments},
    },
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal},
};

/// Time that `up` may need beyond the grace period, to print its last lines and kill what does not stop.
const BEYOND_GRACE: Duration = Duration::from_secs(10);

const STEP: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub(crate) enum DownError {
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error("no deployment runs in {state}")]
    NotRunning { state: PathBuf },
    #[error("cannot stop the deployment of {state}")]
    Stop { state: PathBuf, source: io::Error },
    #[error("process {pid} still runs {} s after it was asked to stop", waited.as_secs())]
    StillRunning { pid: u32, waited: Duration },
}

impl Explain for DownError {
    fn exit(&self) -> Exit {
        match self {
            Self::Selection(error) => error.exit(),
            Self::NotRunning { .. } => Exit::NotFound,
            Self::Stop { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Exit::Refused,
            Self::Stop { .. } => Exit::Failed,
            Self::StillRunning { .. } => Exit::Unavailable,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Selection(error) => error.next(),
            Self::NotRunning { .. } => {
                Some("name a running deployment with --deployment NAME or --state DIR".into())
            }
            Self::StillRunning { .. } => Some("holobiont logs".into()),
            Self::Stop { .. } => None,
        }
    }
}

pub(crate) fn run(arguments: &StateArguments, terminal: Terminal) -> Result<(), DownError> {
    let state = arguments.directory()?;
    let failed = |source| DownError::Stop { state: state.clone(), source };
    let not_running = || DownError::NotRunning { state: state.clone() };
    let holder = LockHolder::of(&state).map_err(failed)?.ok_or_else(not_running)?;
    let process = holder.process.open().map_err(failed)?.ok_or_else(not_running)?;

    let start = Instant::now();
    process.terminate().map_err(failed)?;
    let limit = Duration::from_millis(holder.grace_ms).saturating_add(BEYOND_GRACE);
    if !wait(&process, holder, limit, terminal).map_err(failed)? {
        return Err(DownError::StillRunning { pid: holder.process.pid, waited: limit });
    }
    let stopped_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({"stopped": holder.process.pid, "took_ms": stopped_ms})),
        PrintFormat::Human => terminal.print(format_args!("stopped after {:.1} s", stopped_ms as f64 / 1e3)),
    }
    Ok(())
}

/// Waits until the process has ended; returns false after `limit`.
fn wait(
    process: &RunningProcess,
    holder: LockHolder,
    limit: Duration,
    terminal: Terminal,
) -> io::Result<bool> {
    let grace_s = holder.grace_ms as f64 / 1e3;
    let message = format!("stopping process {}; running answers get {grace_s:.1} s", holder.process.pid);
    let progress = terminal.spinner(message);
    let start = Instant::now();
    let ended = loop {
        if process.wait(STEP)? {
            break true;
        }
        if start.elapsed() > limit {
            break false;
        }
    };
    progress.finish_and_clear();
    Ok(ended)
}

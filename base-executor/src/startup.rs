//! Setup of the executor as a process: cores, signals, and the end of standard input.

use std::{fs::File, io, time::Duration};

use anyhow::Context as _;
use rustix::{
    process::Signal,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use settings::CoreList;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use crate::config::ExecutorConfigError;

/// Checks that this process may run on all of `cores`.
///
/// # Errors
/// If the process may not run on one of them.
pub(crate) fn check_cores(cores: &CoreList) -> anyhow::Result<()> {
    let allowed = sched_getaffinity(None).context("cannot read the cores this process may run on")?;
    for core in cores.0.iter().map(|&core| core as usize) {
        anyhow::ensure!(allowed.is_set(core), ExecutorConfigError::Core(core));
    }
    Ok(())
}

/// Pins this thread, and all that it starts, to `cores`.
///
/// # Errors
/// If the process may not run on any of them.
pub(crate) fn stay_on(cores: &CoreList) -> anyhow::Result<()> {
    let mut wanted = CpuSet::new();
    cores.0.iter().for_each(|&core| wanted.set(core as usize));
    sched_setaffinity(None, &wanted).with_context(|| format!("cannot run on cores {cores}"))
}

/// Turns signals and a message of `lifeline` into shutdowns: the first with `grace`, later ones without.
///
/// # Errors
/// If signals cannot be received.
pub(crate) fn shutdown_on_signals(
    grace: Duration,
    mut lifeline: Option<mpsc::Receiver<()>>,
) -> anyhow::Result<mpsc::Receiver<Duration>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot receive SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot receive SIGINT")?;
    let (asked, shutdown) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut grace = grace;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = ended(&mut lifeline) => {}
            }
            tracing::info!(grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX), "shutting down");
            if asked.send(grace).await.is_err() {
                return;
            }
            grace = Duration::ZERO;
        }
    });
    Ok(shutdown)
}

/// Waits once for the message of [`end_of_stdin`], or forever without one.
async fn ended(lifeline: &mut Option<mpsc::Receiver<()>>) {
    match lifeline {
        Some(end) => {
            end.recv().await;
            *lifeline = None;
        }
        None => std::future::pending().await,
    }
}

/// Makes a file size limit an error of the writer, like a full disk, instead of a fatal signal.
///
/// # Errors
/// If the signal cannot be received.
pub(crate) fn survive_limits_of_files() -> anyhow::Result<()> {
    // A registered handler disables the default action permanently.
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop).context("cannot receive SIGXFSZ")
}

/// Sends a message at the end of standard input.
pub(crate) fn end_of_stdin() -> mpsc::Receiver<()> {
    let (ended, end) = mpsc::channel(1);
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        let _ = ended.blocking_send(());
    });
    end
}

/// Returns a hash of this program.
///
/// # Errors
/// Fails if the program's file cannot be read.
pub(crate) fn program_hash() -> io::Result<[u8; 32]> {
    let mut program = blake3::Hasher::new();
    program.update_reader(File::open("/proc/self/exe")?)?;
    Ok(*program.finalize().as_bytes())
}

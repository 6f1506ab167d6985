//! Operating system setup: cores, file limits, signals and log.

use std::{
    fs::File,
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::Context as _;
use rustix::{
    process::{Resource, Rlimit, Signal, getrlimit, setrlimit},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use settings::{CoreList, LogFormat};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tracing_subscriber::EnvFilter;

use crate::config::ExecutorConfigError;

/// Returns the cores this process may run on, in ascending order.
///
/// # Errors
/// If the operating system does not report them.
pub(crate) fn allowed_cores() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the cores this process may run on")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

/// Pins this thread, and all that it starts, to `cores`.
///
/// # Errors
/// If the process may not run on one of them.
pub(crate) fn stay_on(cores: &CoreList) -> anyhow::Result<()> {
    let allowed = sched_getaffinity(None).context("cannot read the cores this process may run on")?;
    let mut wanted = CpuSet::new();
    for core in cores.0.iter().map(|&core| core as usize) {
        anyhow::ensure!(allowed.is_set(core), ExecutorConfigError::Core(core));
        wanted.set(core);
    }
    sched_setaffinity(None, &wanted).with_context(|| format!("cannot run on cores {cores}"))
}

/// Raises the limit of open files to its maximum, because each adapter image needs one.
pub(crate) fn raise_limit_of_files() {
    let limit = getrlimit(Resource::Nofile);
    // On failure the limit stays, and the adapter load that exceeds it returns an error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Starts the log on stderr; `RUST_LOG` sets its level.
pub(crate) fn start_log(format: LogFormat) {
    let json = match format {
        LogFormat::Json => true,
        LogFormat::Human => false,
        LogFormat::Auto => !io::stderr().is_terminal(),
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // A second start in one process (tests) keeps the first log.
    let _ = if json { log.json().try_init() } else { log.try_init() };
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
/// If it cannot be read.
pub(crate) fn program_hash() -> io::Result<[u8; 32]> {
    let mut program = blake3::Hasher::new();
    program.update_reader(File::open("/proc/self/exe")?)?;
    Ok(*program.finalize().as_bytes())
}

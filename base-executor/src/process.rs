//! What the process asks of the operating system: cores, signals, log.

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

/// The cores this process may run on, ascending.
///
/// # Errors
/// If the operating system does not say.
pub(crate) fn allowed_cores() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the cores this process may run on")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

/// Keeps this thread, and all that it starts, on `cores`.
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

/// Lets the process open as many files as it ever may: each adapter's image keeps one open.
pub(crate) fn raise_limit_of_files() {
    let limit = getrlimit(Resource::Nofile);
    // Refused, the limit stays as it is, and the load that meets it is answered with an error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Starts the log on stderr; `RUST_LOG` chooses what is in it.
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

/// Turns SIGTERM, SIGINT and a message of `lifeline` into requests to end: the first grants running requests `grace`, later ones nothing.
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

/// Waits for the message of [`end_of_stdin`], once; for ever where there is none to come.
async fn ended(lifeline: &mut Option<mpsc::Receiver<()>>) {
    match lifeline {
        Some(end) => {
            end.recv().await;
            *lifeline = None;
        }
        None => std::future::pending().await,
    }
}

/// A file that may not grow is an error of its writer, as a full disk is, and not the end of the process.
///
/// # Errors
/// If the signal cannot be received.
pub(crate) fn survive_limits_of_files() -> anyhow::Result<()> {
    // Received once, it never again does what it would by default.
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop).context("cannot receive SIGXFSZ")
}

/// Brings a message when standard input has ended.
pub(crate) fn end_of_stdin() -> mpsc::Receiver<()> {
    let (ended, end) = mpsc::channel(1);
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        let _ = ended.blocking_send(());
    });
    end
}

/// A hash of this very program.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn program_hash() -> io::Result<[u8; 32]> {
    let mut program = blake3::Hasher::new();
    program.update_reader(File::open("/proc/self/exe")?)?;
    Ok(*program.finalize().as_bytes())
}

//! Threads for long blocking work outside requests, such as copying adapters or reading a tokenizer. Each
//! piece of work has its own thread, so that it neither waits for requests nor delays them. Callers bound the
//! number of threads.

use std::{io, thread::Builder};

use tokio::sync::oneshot;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ThreadError {
    #[error("cannot start a thread: {0}")]
    Start(#[from] io::Error),
    #[error("its thread panicked")]
    Fault,
}

/// Returns the result of `work`, which runs on a thread called `name`. If the caller is dropped, the work
/// continues.
pub(crate) async fn run<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ThreadError> {
    let (done, result) = oneshot::channel();
    // Sending fails only if the caller was dropped.
    Builder::new().name(name.to_owned()).spawn(move || drop(done.send(work())))?;
    result.await.map_err(|_| ThreadError::Fault)
}

//! Work that blocks for long and is not a request's: adapters copied, a tokenizer read. Each piece has a thread of its own,
//! so that it neither waits for requests nor keeps them waiting. Callers bound how many there are.

use std::{io, thread::Builder};

use tokio::sync::oneshot;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ThreadError {
    /// The system has no thread left.
    #[error("a thread could not be started: {0}")]
    Start(#[from] io::Error),
    /// The work panicked.
    #[error("it ended by a fault of this program")]
    Fault,
}

/// What comes of `work`, done on a thread called `name`. Once begun it goes on if nobody waits for it.
pub(crate) async fn run<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ThreadError> {
    let (done, result) = oneshot::channel();
    // Fails only when nobody waits any more.
    Builder::new().name(name.to_owned()).spawn(move || drop(done.send(work())))?;
    result.await.map_err(|_| ThreadError::Fault)
}

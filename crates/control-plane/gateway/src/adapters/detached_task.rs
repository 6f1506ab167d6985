//! Runs changes to their end, even if their callers stop waiting.
//!
//! Half a change would leak an adapter in an executor, leave files without a name, or leave a name in the
//! database that the table lacks. So every change of the registry runs here, and its callers may be aborted
//! at any `await`.

use super::errors::AdapterError;

/// Runs `change` in a task of its own, which continues if the caller is dropped.
pub(super) async fn run_detached<T: Send + 'static>(
    change: impl Future<Output = Result<T, AdapterError>> + Send + 'static,
) -> Result<T, AdapterError> {
    let done = tokio::spawn(change).await;
    done.unwrap_or_else(|panic| Err(AdapterError::Stopped(panic.to_string())))
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_change_that_nobody_waits_for_any_more_runs_to_its_end() {
        let (go, going) = oneshot::channel::<()>();
        let (ended, end) = oneshot::channel();
        let change = async move {
            let _ = going.await;
            let _ = ended.send("done");
            Ok(())
        };
        let waiting = tokio::spawn(run_detached(change));
        tokio::task::yield_now().await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        go.send(()).unwrap();
        assert_eq!(end.await.unwrap(), "done");
    }

    #[tokio::test]
    async fn a_change_that_panics_is_an_error() {
        let changed = run_detached::<()>(async { panic!("a fault") }).await;
        assert!(matches!(changed, Err(AdapterError::Stopped(_))), "{changed:?}");
    }
}

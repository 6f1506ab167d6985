//! Threads that process long bodies: they parse, apply chat templates and tokenize.
//!
//! The bodies of one tenant are processed in sequence, so that other tenants find a free thread. The threads
//! have a lower priority than those that serve connections and compute layers, so a long body hardly delays
//! other requests.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use text::tenant_queue::TenantQueue;
use tokio::sync::oneshot;
use types::TenantId;

use crate::errors::ApiError;

/// Number of bodies that are processed at once.
const THREADS: usize = 2;
/// Maximum number of waiting bodies per tenant; the tenant's memory bounds their bytes.
const MAX_WAITING: usize = 4096;
const NICENESS: i32 = 10;
/// Shorter bodies are processed inline, since handing them over would take longer than the work.
const INLINE_BYTES: usize = 4 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyOrigin {
    pub tenant: TenantId,
    pub bytes: usize,
}

/// Work on one body, which reports its result itself.
type BodyWork = Box<dyn FnOnce() + Send>;

/// The threads and their queue. Dropping the workers lets the threads end.
pub struct BodyWorkers {
    queue: Arc<TenantQueue<BodyWork>>,
}

impl fmt::Debug for BodyWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyWorkers").finish_non_exhaustive()
    }
}

impl BodyWorkers {
    /// # Errors
    /// If the system cannot start another thread.
    pub fn start() -> std::io::Result<Self> {
        let workers = Self { queue: Arc::new(TenantQueue::new(MAX_WAITING, THREADS)) };
        for _ in 0..THREADS {
            let queue = Arc::clone(&workers.queue);
            // The thread is not joined; it ends when the queue is closed.
            thread::Builder::new().name("bodies".to_owned()).spawn(move || serve(&queue))?;
        }
        Ok(workers)
    }

    /// Returns the result of `work` on a body of `origin`. If the caller is dropped, work that has begun
    /// still runs to its end, and other work is skipped.
    ///
    /// # Errors
    /// The error of `work`, or an error that says that too many bodies of the tenant wait.
    pub async fn run<T: Send + 'static>(
        &self,
        origin: BodyOrigin,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if origin.bytes <= INLINE_BYTES {
            return work();
        }
        let (reply, result) = oneshot::channel();
        let unless_given_up = move || {
            if !reply.is_closed() {
                let _ = reply.send(work());
            }
        };
        self.queue.push(origin.tenant, Box::new(unless_given_up)).map_err(|full| {
            let message =
                format!("too many long requests of this tenant at once: {full}; send fewer at once");
            ApiError::busy("body_queue_full", message)
        })?;
        result.await.unwrap_or_else(|_| {
            Err(ApiError::internal("the server failed while it read the request; see its log"))
        })
    }
}

impl Drop for BodyWorkers {
    fn drop(&mut self) {
        self.queue.close();
    }
}

fn serve(queue: &TenantQueue<BodyWork>) {
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::warn!(%error, "cannot lower the priority of the threads for long requests");
    }
    while let Some(mut taken) = queue.take() {
        let work = taken.item.take();
        // The panic hook reports a panic; the caller notices it because its channel is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| work.map(|work| work())));
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use tokio::time::timeout;

    use super::*;

    fn long(tenant: &str) -> BodyOrigin {
        BodyOrigin { tenant: TenantId::of(Some(tenant)), bytes: INLINE_BYTES + 1 }
    }

    #[tokio::test]
    async fn a_long_body_of_one_tenant_makes_no_other_tenant_wait() {
        let workers = BodyWorkers::start().unwrap();
        let (let_go, held) = mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        let hold = || {
            let held = Arc::clone(&held);
            let wait = move || {
                let _ = held.lock().unwrap().recv();
                Ok(())
            };
            workers.run(long("mal"), wait)
        };
        let attack = async { tokio::join!(hold(), hold(), hold()) };
        let others = async {
            for tenant in ["ann", "bob"] {
                let answered =
                    timeout(Duration::from_secs(20), workers.run(long(tenant), move || Ok(tenant))).await;
                assert_eq!(answered.unwrap().unwrap(), tenant);
            }
            drop(let_go);
        };
        let (attack, ()) = tokio::join!(attack, others);
        assert!(attack.0.is_ok() && attack.1.is_ok() && attack.2.is_ok());
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error_of_its_request_alone() {
        let workers = BodyWorkers::start().unwrap();
        for _ in 0..2 * THREADS {
            let failed =
                workers.run(long("ann"), || -> Result<(), ApiError> { panic!("a fault, on purpose") }).await;
            assert!(failed.unwrap_err().to_string().contains("failed while it read the request"));
        }
        assert_eq!(workers.run(long("ann"), || Ok(7)).await.unwrap(), 7);
    }
}

//! Threads that process long bodies: they parse, apply chat templates and tokenize.
//!
//! The bodies of one tenant are processed in sequence, so that other tenants find a free thread. The threads
//! have a lower priority than those that serve connections and compute layers, so a long body hardly delays
//! other requests. A tenant whose bodies take more than a sixteenth of a processor (`PAUSE`) is served by a
//! thread of the lowest priority, which uses only time that nothing else needs.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use text::tenant_queue::{Taken, TenantQueue};
use tokio::sync::oneshot;
use types::TenantId;

use crate::{errors::ApiError, text::Text};

/// Threads for tenants that are not on pause; there is another one for the others.
const THREADS: usize = 2;
/// Maximum number of waiting bodies per tenant; the tenant's memory bounds their bytes.
const MAX_WAITING: usize = 4096;
const NICENESS: i32 = 10;
const LOWEST_NICENESS: i32 = 19;
/// Pause of a tenant after a body, as a multiple of the processor time that the body took.
const PAUSE: u32 = 15;
/// Shorter bodies are processed inline, since handing them over would take longer than the work, unless it
/// blocks.
const INLINE_BYTES: usize = 4 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyOrigin {
    pub tenant: TenantId,
    pub bytes: usize,
}

/// Work on one body, which reports its result itself.
type ReportingWork = Box<dyn FnOnce() + Send>;

/// Waits for the next work of a queue.
type TakeWork = fn(&TenantQueue<ReportingWork>) -> Option<Taken<'_, ReportingWork>>;

/// Result of the work on a body, or the rest of the work.
pub enum BodyWork<T> {
    Done(T),
    /// The rest waits for a helper process, so no thread that serves connections may do it.
    Blocking(Box<dyn FnOnce() -> Result<T, ApiError> + Send>),
}

impl<T> fmt::Debug for BodyWork<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done(_) => "Done",
            Self::Blocking(_) => "Blocking",
        })
    }
}

impl<T: 'static> BodyWork<T> {
    /// Does `work` with a tokenizer and template that it may render, at once if that does not block.
    pub(crate) fn rendering(
        text: Arc<dyn Text>,
        work: impl FnOnce(&dyn Text) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Self, ApiError> {
        if text.is_sandboxed() {
            return Ok(Self::Blocking(Box::new(move || work(&*text))));
        }
        work(&*text).map(Self::Done)
    }

    /// Applies `change` to the result.
    pub fn map<U>(self, change: impl FnOnce(T) -> U + Send + 'static) -> BodyWork<U> {
        match self {
            Self::Done(value) => BodyWork::Done(change(value)),
            Self::Blocking(rest) => BodyWork::Blocking(Box::new(|| rest().map(change))),
        }
    }

    fn finish(self) -> Result<T, ApiError> {
        match self {
            Self::Done(value) => Ok(value),
            Self::Blocking(rest) => rest(),
        }
    }
}

/// The threads and their queue. Dropping the workers lets the threads end.
pub struct BodyWorkers {
    queue: Arc<TenantQueue<ReportingWork>>,
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
            workers.spawn(NICENESS, TenantQueue::take)?;
        }
        workers.spawn(LOWEST_NICENESS, TenantQueue::take_paused)?;
        Ok(workers)
    }

    /// Starts a thread, which is not joined; it ends when the queue is closed.
    fn spawn(&self, niceness: i32, take: TakeWork) -> std::io::Result<()> {
        let queue = Arc::clone(&self.queue);
        let serve = move || {
            lower_priority(niceness);
            while let Some(taken) = take(&queue) {
                process(taken);
            }
        };
        thread::Builder::new().name("bodies".to_owned()).spawn(serve).map(drop)
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
        self.run_blocking(origin, move || work().map(BodyWork::Done)).await
    }

    /// Returns the result of `work`, like [`BodyWorkers::run`], if its rest may block.
    ///
    /// # Errors
    /// The method fails as [`BodyWorkers::run`] does.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        origin: BodyOrigin,
        work: impl FnOnce() -> Result<BodyWork<T>, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if origin.bytes > INLINE_BYTES {
            return self.queued(origin.tenant, move || work()?.finish()).await;
        }
        match work()? {
            BodyWork::Done(value) => Ok(value),
            BodyWork::Blocking(rest) => self.queued(origin.tenant, rest).await,
        }
    }

    async fn queued<T: Send + 'static>(
        &self,
        tenant: TenantId,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, result) = oneshot::channel();
        let unless_given_up = move || {
            if !reply.is_closed() {
                let _ = reply.send(work());
            }
        };
        self.queue.push(tenant, Box::new(unless_given_up)).map_err(|full| {
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

fn lower_priority(niceness: i32) {
    if let Err(error) = rustix::process::nice(niceness) {
        tracing::warn!(%error, "cannot lower the priority of the threads for long requests");
    }
}

fn process(mut taken: Taken<'_, ReportingWork>) {
    let (work, begin) = (taken.item.take(), processor_time());
    // The panic hook reports a panic; the caller notices it because its channel is dropped.
    let _ = catch_unwind(AssertUnwindSafe(|| work.map(|work| work())));
    taken.pause = processor_time().saturating_sub(begin) * PAUSE;
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
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
    async fn bodies_of_a_tenant_that_took_long_run_at_the_lowest_priority() {
        let workers = BodyWorkers::start().unwrap();
        let niceness = || Ok(rustix::process::getpriority_process(None).unwrap());
        let take_long = move || {
            let begin = processor_time();
            while processor_time() - begin < Duration::from_secs(1) {}
            niceness()
        };
        assert_eq!(workers.run(long("mal"), take_long).await.unwrap(), NICENESS);
        assert_eq!(workers.run(long("mal"), niceness).await.unwrap(), LOWEST_NICENESS);
        assert_eq!(workers.run(long("ann"), niceness).await.unwrap(), NICENESS);
    }

    #[tokio::test]
    async fn the_rest_of_a_short_body_that_blocks_leaves_this_thread() {
        let workers = BodyWorkers::start().unwrap();
        let short = BodyOrigin { bytes: 1, ..long("ann") };
        let own = thread::current().id();
        let rest = || Ok(thread::current().id());
        let work = move || Ok(BodyWork::Blocking(Box::new(rest)));
        let other = workers.run_blocking(short, work).await.unwrap();
        assert_ne!(other, own);
        assert_eq!(workers.run(short, || Ok(thread::current().id())).await.unwrap(), own);
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

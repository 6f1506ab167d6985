//! A queue that is fair between tenants: workers take one item of each tenant in turn.
//!
//! Another tenant's thousand items delay a tenant's item by at most one item on each worker. A tenant may
//! also occupy only a limited number of workers, so that one is left for other tenants while its items take
//! long. A worker may put a tenant [on pause](Taken::pause): until its end, only workers of lower priority
//! take the tenant's items.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use types::TenantId;

/// The tenant has the maximum number of items waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} of them wait already")]
pub struct QueueFull {
    /// Number of the tenant's waiting items.
    pub waiting: usize,
}

/// Queue that serves tenants in turn and bounds each tenant's share of the workers.
#[derive(Debug)]
pub struct TenantQueue<T> {
    lines: Mutex<Lines<T>>,
    changed: Condvar,
    max_waiting: usize,
    max_taken: usize,
}

#[derive(Debug)]
struct Lines<T> {
    /// Tenants in order of their turns, the next first.
    lines: VecDeque<Line<T>>,
    is_closed: bool,
}

#[derive(Debug)]
struct Line<T> {
    tenant: TenantId,
    waiting: VecDeque<T>,
    /// Number of items that workers have taken and not finished.
    taken: usize,
    /// End of the tenant's pause.
    paused_until: Option<Instant>,
}

/// Whether a tenant is on pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PauseState {
    Normal,
    /// The tenant is on pause: workers of lower priority take its items.
    Paused,
}

/// An item that a worker has taken. Dropping it marks the item as finished.
#[derive(Debug)]
pub struct Taken<'a, T> {
    queue: &'a TenantQueue<T>,
    tenant: TenantId,
    /// The item, until the worker moves it out.
    pub item: Option<T>,
    /// Time after the item's end in which only [`TenantQueue::take_paused`] takes items of the tenant.
    pub pause: Duration,
}

impl<T> TenantQueue<T> {
    /// Creates a queue for at most `max_waiting` items of a tenant and for `workers` workers. With two or
    /// more workers, one is always left to other tenants.
    #[must_use]
    pub fn new(max_waiting: usize, workers: usize) -> Self {
        let lines = Lines { lines: VecDeque::new(), is_closed: false };
        let max_taken = workers.saturating_sub(1).max(1);
        Self { lines: Mutex::new(lines), changed: Condvar::new(), max_waiting, max_taken }
    }

    /// Appends `item` to the queue of `tenant`.
    ///
    /// # Errors
    /// If the tenant has the maximum number of items waiting.
    pub fn push(&self, tenant: TenantId, item: T) -> Result<(), QueueFull> {
        let mut lines = self.lock();
        let index = lines.index_of(tenant);
        let waiting = &mut lines.lines[index].waiting;
        if waiting.len() >= self.max_waiting {
            return Err(QueueFull { waiting: waiting.len() });
        }
        waiting.push_back(item);
        // Not every worker may take it.
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next item of a tenant that is not on pause; `None` once the queue is closed.
    pub fn take(&self) -> Option<Taken<'_, T>> {
        self.take_of(PauseState::Normal)
    }

    /// Waits for the next item of a tenant on pause; `None` once the queue is closed.
    pub fn take_paused(&self) -> Option<Taken<'_, T>> {
        self.take_of(PauseState::Paused)
    }

    fn take_of(&self, state: PauseState) -> Option<Taken<'_, T>> {
        let mut lines = self.lock();
        loop {
            if lines.is_closed {
                return None;
            }
            let now = Instant::now();
            if let Some((tenant, item)) = lines.take(self.max_taken, state, now) {
                return Some(Taken { queue: self, tenant, item: Some(item), pause: Duration::ZERO });
            }
            let change = lines.next_end_of_pause().filter(|_| state == PauseState::Normal);
            lines = match change {
                None => self.changed.wait(lines).unwrap_or_else(PoisonError::into_inner),
                Some(end) => {
                    let waited = self.changed.wait_timeout(lines, end.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Drops all waiting items and lets the workers end.
    pub fn close(&self) {
        let mut lines = self.lock();
        lines.is_closed = true;
        lines.lines.clear();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Lines<T>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Lines<T> {
    fn index_of(&mut self, tenant: TenantId) -> usize {
        self.lines.iter().position(|line| line.tenant == tenant).unwrap_or_else(|| {
            self.lines.push_back(Line { tenant, waiting: VecDeque::new(), taken: 0, paused_until: None });
            self.lines.len() - 1
        })
    }

    /// Takes the next item and moves its tenant behind all others.
    fn take(&mut self, max_taken: usize, state: PauseState, now: Instant) -> Option<(TenantId, T)> {
        self.lines.retain_mut(|line| {
            line.paused_until = line.paused_until.filter(|end| *end > now);
            !line.is_over()
        });
        let may_go =
            |line: &Line<T>| line.state() == state && line.taken < max_taken && !line.waiting.is_empty();
        let index = self.lines.iter().position(may_go)?;
        let mut line = self.lines.remove(index)?;
        let item = line.waiting.pop_front()?;
        line.taken += 1;
        let tenant = line.tenant;
        self.lines.push_back(line);
        Some((tenant, item))
    }

    /// Returns when the first pause of a tenant with waiting items ends.
    fn next_end_of_pause(&self) -> Option<Instant> {
        let waiting = self.lines.iter().filter(|line| !line.waiting.is_empty());
        waiting.filter_map(|line| line.paused_until).min()
    }

    fn finish(&mut self, tenant: TenantId, paused_until: Option<Instant>) {
        let Some(index) = self.lines.iter().position(|line| line.tenant == tenant) else { return };
        let line = &mut self.lines[index];
        line.taken -= 1;
        line.paused_until = line.paused_until.max(paused_until);
        if line.is_over() {
            self.lines.remove(index);
        }
    }
}

impl<T> Line<T> {
    fn state(&self) -> PauseState {
        if self.paused_until.is_some() { PauseState::Paused } else { PauseState::Normal }
    }

    fn is_over(&self) -> bool {
        self.taken == 0 && self.waiting.is_empty() && self.paused_until.is_none()
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        let paused_until = (!self.pause.is_zero()).then(|| Instant::now() + self.pause);
        self.queue.lock().finish(self.tenant, paused_until);
        // Another item of this tenant may have waited for this one to finish.
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: TenantId = TenantId([1; 32]);
    const FEW: TenantId = TenantId([2; 32]);

    fn next<'a>(queue: &'a TenantQueue<u32>) -> (u32, Taken<'a, u32>) {
        let mut taken = queue.take().unwrap();
        (taken.item.take().unwrap(), taken)
    }

    #[test]
    fn tenants_take_turns_however_many_items_one_of_them_has() {
        let queue = TenantQueue::new(8, 1);
        (0..5).for_each(|item| queue.push(MANY, item).unwrap());
        queue.push(FEW, 100).unwrap();
        queue.push(FEW, 101).unwrap();
        let order: Vec<u32> = (0..7).map(|_| next(&queue).0).collect();
        assert_eq!(order, [0, 100, 1, 101, 2, 3, 4]);
    }

    #[test]
    fn one_worker_is_left_to_others_while_the_items_of_a_tenant_take_long() {
        let queue = TenantQueue::new(8, 2);
        (0..3).for_each(|item| queue.push(MANY, item).unwrap());
        let (first, long) = next(&queue);
        queue.push(FEW, 100).unwrap();
        let (second, short) = next(&queue);
        assert_eq!((first, second), (0, 100));
        drop(short);
        assert!(
            queue.lock().take(queue.max_taken, PauseState::Normal, Instant::now()).is_none(),
            "the tenant has its worker already"
        );
        drop(long);
        assert_eq!(next(&queue).0, 1);
    }

    #[test]
    fn a_tenant_that_fills_its_line_leaves_those_of_others_open() {
        let queue = TenantQueue::new(2, 1);
        queue.push(MANY, 0).unwrap();
        queue.push(MANY, 1).unwrap();
        assert_eq!(queue.push(MANY, 2), Err(QueueFull { waiting: 2 }));
        queue.push(FEW, 100).unwrap();
    }

    #[test]
    fn nothing_of_a_tenant_is_left_once_its_items_are_finished() {
        let queue = TenantQueue::new(2, 1);
        queue.push(MANY, 0).unwrap();
        drop(next(&queue));
        assert!(queue.lock().lines.is_empty());
    }

    #[test]
    fn only_the_workers_for_them_serve_tenants_on_pause() {
        let queue = TenantQueue::new(8, 2);
        (0..3).for_each(|item| queue.push(MANY, item).unwrap());
        let (_, mut first) = next(&queue);
        first.pause = Duration::from_secs(60);
        drop(first);
        queue.push(FEW, 100).unwrap();
        assert_eq!(next(&queue).0, 100, "the other tenant goes first now");
        let (now, max) = (Instant::now(), queue.max_taken);
        assert!(queue.lock().take(max, PauseState::Normal, now).is_none());
        assert_eq!(queue.take_paused().unwrap().item, Some(1));
        let later = now + Duration::from_secs(61);
        assert!(queue.lock().take(max, PauseState::Paused, later).is_none(), "its pause is over");
        assert_eq!(queue.lock().take(max, PauseState::Normal, later), Some((MANY, 2)));
        queue.lock().finish(MANY, None);
        assert!(queue.lock().lines.is_empty(), "nothing of it is left");
    }

    #[test]
    fn a_worker_wakes_when_a_pause_ends() {
        let queue = TenantQueue::new(8, 1);
        (0..2).for_each(|item| queue.push(MANY, item).unwrap());
        let (_, mut first) = next(&queue);
        first.pause = Duration::from_millis(20);
        let begin = Instant::now();
        drop(first);
        assert_eq!(next(&queue).0, 1);
        assert!(begin.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn workers_end_when_the_queue_is_closed() {
        let queue = TenantQueue::<u32>::new(2, 1);
        queue.push(MANY, 0).unwrap();
        queue.close();
        assert!(queue.take().is_none());
    }
}

//! Copies between tiers: each direction carries one job at a time, urgent ones first.

use std::{collections::VecDeque, time::Duration};

use kv_cache::copy::CopyPriority;

/// Priority of a job; copies to lower tiers come last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkPriority {
    /// The copy priority that the cache states.
    Of(CopyPriority),
    /// A copy to a lower tier, for which no sequence waits.
    Spill,
}

impl LinkPriority {
    fn index(self) -> usize {
        match self {
            Self::Of(class) => class as usize,
            Self::Spill => CopyPriority::ALL.len(),
        }
    }
}

#[derive(Debug)]
struct LinkJob<T> {
    what: T,
    takes: Duration,
}

/// One direction of a link. A running job finishes; waiting jobs may be overtaken.
#[derive(Debug)]
pub(crate) struct TierLink<T> {
    waiting: [VecDeque<LinkJob<T>>; CopyPriority::ALL.len() + 1],
    carried: Option<(Duration, T)>,
    busy: Duration,
}

impl<T> Default for TierLink<T> {
    fn default() -> Self {
        Self { waiting: Default::default(), carried: None, busy: Duration::ZERO }
    }
}

impl<T> TierLink<T> {
    /// Queues a job at `now`; jobs that ended by then were removed before.
    pub(crate) fn submit(&mut self, now: Duration, priority: LinkPriority, what: T, takes: Duration) {
        self.waiting[priority.index()].push_back(LinkJob { what, takes });
        if self.carried.is_none() {
            self.start_next(now);
        }
    }

    /// Returns the next job that ends by `now`.
    pub(crate) fn end_next(&mut self, now: Duration) -> Option<T> {
        let (end, what) = self.carried.take_if(|(end, _)| *end <= now)?;
        self.start_next(end);
        Some(what)
    }

    /// Returns the time at which the next job ends.
    pub(crate) fn next_end(&self) -> Option<Duration> {
        self.carried.as_ref().map(|(end, _)| *end)
    }

    /// Returns the number of jobs that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum::<usize>() + usize::from(self.carried.is_some())
    }

    /// Returns the total busy time, including the running job.
    pub(crate) fn busy(&self) -> Duration {
        self.busy
    }

    /// Raises waiting jobs for which `is_meant` holds ahead of all less urgent ones.
    pub(crate) fn raise(&mut self, class: CopyPriority, is_meant: impl Fn(&T) -> bool) {
        let to = LinkPriority::Of(class).index();
        for from in to + 1..self.waiting.len() {
            if let Some(at) = self.waiting[from].iter().position(|job| is_meant(&job.what))
                && let Some(job) = self.waiting[from].remove(at)
            {
                self.waiting[to].push_back(job);
            }
        }
    }

    fn start_next(&mut self, start: Duration) {
        if let Some(LinkJob { what, takes }) = self.waiting.iter_mut().find_map(VecDeque::pop_front) {
            self.busy += takes;
            self.carried = Some((start + takes, what));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_urgent_overtake_what_waits_and_not_what_is_under_way() {
        let mut link = TierLink::default();
        link.submit(Duration::ZERO, LinkPriority::Spill, "spilled", MS);
        link.submit(Duration::ZERO, LinkPriority::Of(CopyPriority::Preload), "preloaded", MS);
        link.submit(Duration::ZERO, LinkPriority::Of(CopyPriority::SwapIn), "swapped", MS);
        link.submit(Duration::ZERO, LinkPriority::Of(CopyPriority::Demand), "demanded", MS);
        link.raise(CopyPriority::Demand, |what| *what == "preloaded");
        assert_eq!(link.end_next(Duration::ZERO), None);
        let ends: Vec<_> = std::iter::from_fn(|| link.end_next(4 * MS)).collect();
        assert_eq!(ends, ["spilled", "demanded", "preloaded", "swapped"]);
        assert_eq!((link.len(), link.next_end(), link.busy()), (0, None, 4 * MS));
    }

    #[test]
    fn one_follows_the_other_without_a_gap_whenever_anybody_looks() {
        let mut link = TierLink::default();
        (0..3).for_each(|number| link.submit(Duration::ZERO, LinkPriority::Spill, number, 2 * MS));
        assert_eq!(link.end_next(5 * MS), Some(0));
        assert_eq!(link.end_next(5 * MS), Some(1));
        assert_eq!((link.end_next(5 * MS), link.next_end()), (None, Some(6 * MS)));
    }
}

//! Order in which calls are served over streamed weights: layer chunks upwards, then downwards, and no client
//! that will soon return to a chunk is left behind.
//!
//! ```text
//! chunk 3     . A .      forward calls are served on the way up, backward calls on the way down;
//! chunk 2  -> B C .      at a chunk all waiting calls are served, in both directions
//! chunk 1     . . D      clients served there that will call for it again are awaited, for a limited time
//! ```
//!
//! The order knows layer chunks and the time it gets, but neither rows nor clients.

use std::time::{Duration, Instant};

use model::linear_sites::{SiteCall, SiteId, SiteOp};
use shmproto::layer::CallClass;

/// Minimum wait: on a busy host a client may take this long from an answer to its next call.
const LEAST_HOLD: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SweepDirection {
    Up,
    Down,
}

/// Constraint on the next move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SweepConstraint {
    Free,
    /// No move upwards, because a resident pass is about to go there and co-batches calls.
    NotUp,
}

/// Layer chunks with waiting calls, by direction.
#[derive(Debug, Default)]
pub(super) struct AwaitedChunks {
    up: Vec<u32>,
    down: Vec<u32>,
}

impl AwaitedChunks {
    pub(super) fn add(&mut self, chunk: u32, op: SiteOp) {
        match op {
            SiteOp::Backward => self.down.push(chunk),
            SiteOp::Forward | SiteOp::ForwardNoBias => self.up.push(chunk),
        }
    }

    fn has(&self, chunk: u32) -> bool {
        self.up.contains(&chunk) || self.down.contains(&chunk)
    }
}

/// Next action of the sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Serve(u32),
    /// Waits until this time for expected calls.
    Hold(Instant),
    /// No call is to be served.
    Rest,
}

/// State of the sweep.
#[derive(Debug)]
pub(super) struct SweepOrder {
    /// Layer chunk of each site.
    chunks: Vec<u32>,
    at: u32,
    way: SweepDirection,
    /// Maximum time to wait for expected calls.
    most: Duration,
    /// Time of arrival at the current chunk.
    came: Option<Instant>,
    /// Time from arrival to the first answer, about as long as reading the chunk's weights took.
    took: Duration,
    /// Time of the last answer at the current chunk.
    answered: Option<Instant>,
}

impl SweepOrder {
    /// Starts at the first chunk; `chunks` is the chunk of each site.
    pub(super) fn new(chunks: Vec<u32>, most: Duration) -> Self {
        Self {
            chunks,
            at: 0,
            way: SweepDirection::Up,
            most,
            came: None,
            took: Duration::ZERO,
            answered: None,
        }
    }

    pub(super) fn chunk(&self, site: SiteId) -> u32 {
        self.chunks.get(site.0 as usize).copied().unwrap_or(0)
    }

    /// Returns the chunk that a caller of `class` is likely to call next.
    pub(super) fn after(&self, call: SiteCall, class: CallClass) -> u32 {
        let site = call.site.0;
        match call.op {
            SiteOp::Backward => self.chunk(SiteId(site.saturating_sub(1))),
            // The backward pass begins where the forward pass ends.
            _ if class == CallClass::Training && self.is_top(self.chunk(call.site)) => self.chunk(call.site),
            // The head is followed by the next token, at the first chunk.
            SiteOp::Forward | SiteOp::ForwardNoBias => self.chunk(SiteId(site + 1)),
        }
    }

    /// Records an answer at the current chunk.
    pub(super) fn served(&mut self, now: Instant) {
        if self.answered.is_none() {
            self.took = self.came.map_or(Duration::ZERO, |came| now.saturating_duration_since(came));
        }
        self.answered = Some(now);
    }

    /// Returns the time until which expected calls are awaited here. The wait is about as long as the weights
    /// took to arrive, because calls left behind need them read again.
    fn patience(&self) -> Option<Instant> {
        let since = self.answered.or(self.came)?;
        Some(since + self.took.max(LEAST_HOLD).min(self.most))
    }

    fn holds_until(&mut self, now: Instant) -> Option<Instant> {
        self.came.get_or_insert(now);
        self.patience().filter(|until| *until > now)
    }

    /// Returns the next action for waiting calls; `is_expected` tells which chunks get more calls soon.
    pub(super) fn next(
        &mut self,
        now: Instant,
        waiting: &AwaitedChunks,
        is_expected: impl Fn(u32) -> bool,
        travel: SweepConstraint,
    ) -> Next {
        let (way, target) = if waiting.has(self.at) {
            (self.way, self.at)
        } else {
            match self.target(waiting, travel) {
                Some(target) => target,
                None => return Next::Rest,
            }
        };
        let stays = target == self.at;
        let waits = self.is_worth_a_wait(target, &is_expected);
        if let Some(until) = waits.then(|| self.holds_until(now)).flatten() {
            return Next::Hold(until);
        }
        if !stays {
            self.go(now, way, target);
            if self.is_top(target) && is_expected(target) {
                return self.patience().map_or(Next::Serve(target), Next::Hold);
            }
        }
        Next::Serve(target)
    }

    /// Whether expected calls are awaited before `target` is served: at the current chunk, or at the next one
    /// while the target is elsewhere. The many rows of the head are read only once, for all calls.
    fn is_worth_a_wait(&self, target: u32, is_expected: &impl Fn(u32) -> bool) -> bool {
        if target == self.at {
            return self.is_top(target) && is_expected(target);
        }
        let next = match self.way {
            SweepDirection::Up if self.is_top(self.at) => 0,
            SweepDirection::Up => self.at + 1,
            SweepDirection::Down => self.at.saturating_sub(1),
        };
        is_expected(self.at) || (target != next && is_expected(next))
    }

    /// Returns when waiting calls need an action; this may be in the past.
    pub(super) fn deadline(
        &self,
        now: Instant,
        waiting: &AwaitedChunks,
        is_expected: impl Fn(u32) -> bool,
    ) -> Instant {
        let target = if waiting.has(self.at) {
            Some(self.at)
        } else {
            self.target(waiting, SweepConstraint::Free).map(|to| to.1)
        };
        let holds = target.is_some_and(|target| self.is_worth_a_wait(target, &is_expected));
        self.patience().filter(|_| holds).unwrap_or(now)
    }

    /// Returns the action of a resident pass that is about to go to `chunk`: as [`next`](Self::next), for
    /// calls at its current chunk.
    pub(super) fn before_leaving(
        &mut self,
        now: Instant,
        chunk: u32,
        waiting: &AwaitedChunks,
        is_expected: impl Fn(u32) -> bool,
    ) -> Next {
        if self.at != chunk && waiting.has(self.at) {
            return Next::Serve(self.at);
        }
        let holds = is_expected(self.at) && (self.at != chunk || self.is_top(chunk));
        if let Some(until) = holds.then(|| self.holds_until(now)).flatten() {
            return Next::Hold(until);
        }
        if self.at == chunk {
            return Next::Rest;
        }
        self.go(now, SweepDirection::Up, chunk);
        match self.is_top(chunk) && is_expected(chunk) {
            true => self.patience().map_or(Next::Rest, Next::Hold),
            false => Next::Rest,
        }
    }

    fn go(&mut self, now: Instant, way: SweepDirection, chunk: u32) {
        self.way = way;
        (self.at, self.came, self.took, self.answered) = (chunk, Some(now), Duration::ZERO, None);
    }

    fn is_top(&self, chunk: u32) -> bool {
        self.chunks.last() == Some(&chunk)
    }

    /// Returns the next chunk in the current direction, else the first in the other.
    fn target(&self, waiting: &AwaitedChunks, travel: SweepConstraint) -> Option<(SweepDirection, u32)> {
        let above = waiting.up.iter().filter(|chunk| **chunk > self.at).min();
        let below = waiting.down.iter().filter(|chunk| **chunk < self.at).max();
        let (way, target) = match (self.way, travel) {
            (SweepDirection::Up, SweepConstraint::Free) if above.is_some() => (SweepDirection::Up, above),
            (SweepDirection::Down, _) if below.is_some() => (SweepDirection::Down, below),
            _ if !waiting.down.is_empty() => (SweepDirection::Down, waiting.down.iter().max()),
            (_, SweepConstraint::Free) => (SweepDirection::Up, waiting.up.iter().min()),
            (_, SweepConstraint::NotUp) => (SweepDirection::Down, None),
        };
        target.map(|&chunk| (way, chunk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(up: &[u32], down: &[u32]) -> AwaitedChunks {
        AwaitedChunks { up: up.to_vec(), down: down.to_vec() }
    }

    fn order() -> SweepOrder {
        SweepOrder::new((0..17).map(|site| site / 4).collect(), Duration::from_millis(50))
    }

    #[test]
    fn it_goes_up_past_everybody_then_down_past_everybody() {
        let (mut order, now) = (order(), Instant::now());
        let mut go =
            |up: &[u32], down: &[u32]| order.next(now, &waiting(up, down), |_| false, SweepConstraint::Free);
        assert_eq!(go(&[2, 1], &[0]), Next::Serve(0), "whoever is here, whichever way");
        assert_eq!(go(&[2, 1], &[3]), Next::Serve(1));
        assert_eq!(go(&[0, 2], &[3]), Next::Serve(2));
        assert_eq!(go(&[0], &[3, 1]), Next::Serve(3), "nobody is above: down, from the highest");
        assert_eq!(go(&[0], &[1, 2]), Next::Serve(2));
        assert_eq!(go(&[0], &[1, 3]), Next::Serve(1));
        assert_eq!(go(&[0, 2], &[]), Next::Serve(0), "up again, from the lowest");
        assert_eq!(go(&[], &[]), Next::Rest);
    }

    #[test]
    fn who_will_be_back_is_waited_for_as_long_as_weights_take_to_come() {
        let (mut order, begin) = (order(), Instant::now());
        let after = |ms| begin + Duration::from_millis(ms);
        let go = |order: &mut SweepOrder, ms, up: &[u32], expected: u32| {
            order.next(after(ms), &waiting(up, &[]), |chunk| chunk == expected, SweepConstraint::Free)
        };
        assert_eq!(go(&mut order, 0, &[1], 0), Next::Hold(after(5)), "it has just come");
        assert_eq!(go(&mut order, 4, &[1], 9), Next::Serve(1), "nobody is missing");
        order.served(after(24));
        assert_eq!(go(&mut order, 24, &[2], 1), Next::Hold(after(44)), "20 ms, as the weights took");
        order.served(after(40));
        assert_eq!(go(&mut order, 44, &[2], 1), Next::Hold(after(60)), "from the last answer on");
        assert_eq!(go(&mut order, 60, &[2], 1), Next::Serve(2), "too late");
        order.served(after(10_000));
        assert_eq!(go(&mut order, 10_000, &[3], 2), Next::Hold(after(10_050)), "however long they took");
    }

    #[test]
    fn who_is_between_two_floors_is_not_left_for_others_far_away() {
        let (mut order, now) = (order(), Instant::now());
        assert_eq!(order.next(now, &waiting(&[], &[3]), |_| false, SweepConstraint::Free), Next::Serve(3));
        let next = |order: &mut SweepOrder, expected| {
            order.next(now, &waiting(&[0], &[]), |chunk| chunk == expected, SweepConstraint::Free)
        };
        assert_eq!(next(&mut order, 2), Next::Hold(now + LEAST_HOLD), "the next on the way down");
        assert_eq!(next(&mut order, 1), Next::Serve(0));
    }

    #[test]
    fn the_head_is_swept_once_for_all_who_are_on_their_way_to_it() {
        let (mut order, begin) = (order(), Instant::now());
        let head = waiting(&[4], &[]);
        let until = begin + LEAST_HOLD;
        assert_eq!(order.next(begin, &head, |chunk| chunk == 4, SweepConstraint::Free), Next::Hold(until));
        assert_eq!(order.next(begin, &head, |_| false, SweepConstraint::Free), Next::Serve(4));
    }

    #[test]
    fn beside_requests_it_goes_down_alone_and_a_pass_takes_everybody_up() {
        let (mut order, now) = (order(), Instant::now());
        let next = order.next(now, &waiting(&[1, 2], &[]), |_| false, SweepConstraint::NotUp);
        assert_eq!(next, Next::Rest, "the pass goes there");
        let next = order.next(now, &waiting(&[1], &[3]), |_| false, SweepConstraint::NotUp);
        assert_eq!(next, Next::Serve(3));
        let leave = |order: &mut SweepOrder, chunk, up: &[u32], expected: u32| {
            order.before_leaving(now, chunk, &waiting(up, &[]), |chunk| chunk == expected)
        };
        order.served(now);
        assert_eq!(leave(&mut order, 0, &[3], 9), Next::Serve(3), "before it leaves");
        assert_eq!(leave(&mut order, 0, &[1], 3), Next::Hold(now + LEAST_HOLD));
        assert_eq!(leave(&mut order, 0, &[1], 9), Next::Rest);
        assert_eq!(order.at, 0);
        assert_eq!(leave(&mut order, 0, &[0], 0), Next::Rest, "who waits here joins the pass");
        assert_eq!(leave(&mut order, 4, &[], 4), Next::Hold(now + LEAST_HOLD));
    }

    #[test]
    fn a_caller_comes_back_one_site_further_on_its_way() {
        let order = order();
        let after = |site, op, class| {
            let path = model::linear_sites::SitePath::Fast;
            order.after(SiteCall { site: SiteId(site), part: None, op, path }, class)
        };
        let sites = [0, 2, 3, 15, 16];
        assert_eq!(sites.map(|site| after(site, SiteOp::Forward, CallClass::Decode)), [0, 0, 1, 4, 0]);
        assert_eq!(sites.map(|site| after(site, SiteOp::Forward, CallClass::Training)), [0, 0, 1, 4, 4]);
        let back = [16, 12, 8, 0].map(|site| after(site, SiteOp::Backward, CallClass::Training));
        assert_eq!(back, [3, 2, 1, 0]);
    }
}

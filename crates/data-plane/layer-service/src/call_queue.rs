//! Waiting calls for the same computation, in order.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use shmproto::layer::CallClass;

use super::ConnectionId;

/// Calls are split at multiples of this number of rows, which aligns parts to 64 bytes in any format.
pub const CUT_ROWS: usize = 32;

/// Id of a waiting call; ids ascend in order of arrival and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Consecutive rows of a call that are computed in one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallChunk {
    /// Call to which the rows belong.
    pub id: CallId,
    /// Rows of the call before this chunk.
    pub first_row: usize,
    /// Rows of the chunk, at least one.
    pub rows: usize,
    /// Whether the call has no rows after this chunk.
    pub is_last: bool,
}

/// The part of a call that is not computed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedCall {
    /// Id of the call.
    pub id: CallId,
    /// Connection of the call.
    pub connection: ConnectionId,
    /// Class of the call, which decides its urgency.
    pub class: CallClass,
    /// Rows that are computed already.
    pub first_row: usize,
    /// Rows that are left to compute.
    pub rows: usize,
    /// Arrival time of the call.
    pub arrived: Instant,
    /// Time from which the call does not wait for co-batching any more.
    pub due: Instant,
}

/// Order of calls: the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallOrder {
    class: u64,
    arrived: Instant,
}

impl CallOrder {
    /// Returns the order of a call of `class`. The call rises by one class for each `aging` of waiting time,
    /// so that it finally precedes all later calls.
    #[must_use]
    pub fn of(class: CallClass, arrived: Instant, now: Instant, aging: Duration) -> Self {
        let waited = now.saturating_duration_since(arrived).as_nanos();
        let risen = waited.checked_div(aging.as_nanos()).unwrap_or(u128::MAX);
        let class = (class as u64).saturating_sub(u64::try_from(risen).unwrap_or(u64::MAX));
        Self { class, arrived }
    }
}

/// Predicate for the classes that may be computed.
pub type AllowedClasses = fn(CallClass) -> bool;

/// Allows calls of all classes.
#[must_use]
pub fn any_class(_: CallClass) -> bool {
    true
}

/// Limits of the calls taken from a queue.
#[derive(Debug, Clone, Copy)]
pub struct BatchPortion {
    /// Maximum number of rows.
    pub rows: usize,
    /// Newest call to take; later ones stay.
    pub until: CallId,
    /// Classes to take; others stay.
    pub allowed: AllowedClasses,
    /// Handling of a call that does not fit.
    pub cut: SplitPolicy,
}

/// Handling of a call that does not fit into a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitPolicy {
    /// The first rows of the call are taken.
    Rows,
    /// The call stays, and all calls after it too.
    Nothing,
    /// As [`SplitPolicy::Rows`], but each batch has a single call.
    Alone,
}

/// Calls for the same computation, by class and in order of arrival. Never empty.
#[derive(Debug)]
pub struct CallQueue {
    classes: [VecDeque<QueuedCall>; CallClass::ALL.len()],
    batch_rows: usize,
    due: Instant,
}

impl CallQueue {
    /// Makes a queue of one call; no batch has more than `batch_rows` rows.
    #[must_use]
    pub fn of(call: QueuedCall, batch_rows: usize) -> Self {
        let mut lane = Self { classes: Default::default(), batch_rows, due: call.due };
        lane.push(call);
        lane
    }

    /// Adds a call after those of its class.
    pub fn push(&mut self, call: QueuedCall) {
        self.due = self.due.min(call.due);
        self.classes[call.class as usize].push_back(call);
    }

    /// Returns when the first call is due.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Iterates over the first call of each class.
    fn heads(&self) -> impl Iterator<Item = &QueuedCall> {
        self.classes.iter().filter_map(VecDeque::front)
    }

    /// Returns the call that arrived first.
    #[must_use]
    pub fn oldest(&self) -> Option<&QueuedCall> {
        self.heads().min_by_key(|call| call.id)
    }

    /// Returns the order of the next call.
    #[must_use]
    pub fn next_order(&self, now: Instant, aging: Duration) -> Option<CallOrder> {
        self.heads().map(|call| CallOrder::of(call.class, call.arrived, now, aging)).min()
    }

    /// Whether calls of allowed classes wait.
    #[must_use]
    pub fn has(&self, allowed: AllowedClasses) -> bool {
        self.heads().any(|call| allowed(call.class))
    }

    /// Returns the arrival time of the oldest call of a class.
    #[must_use]
    pub fn first_of(&self, class: CallClass) -> Option<Instant> {
        self.classes[class as usize].front().map(|call| call.arrived)
    }

    /// Whether no call is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads().next().is_none()
    }

    /// Iterates over all calls.
    pub fn iter(&self) -> impl Iterator<Item = &QueuedCall> {
        self.classes.iter().flatten()
    }

    /// Takes the calls that `portion` allows, in order; calls `taken` for each call with taken rows.
    pub fn take(
        &mut self,
        now: Instant,
        aging: Duration,
        portion: BatchPortion,
        mut taken: impl FnMut(QueuedCall, CallChunk),
    ) {
        let mut free_rows = portion.rows.min(self.batch_rows);
        while free_rows > 0 {
            let allowed = |call: &&QueuedCall| call.id <= portion.until && (portion.allowed)(call.class);
            let turn = |call: &&QueuedCall| CallOrder::of(call.class, call.arrived, now, aging);
            let Some(class) = self.heads().filter(allowed).min_by_key(turn).map(|call| call.class) else {
                break;
            };
            let queue = &mut self.classes[class as usize];
            let Some(call) = queue.front_mut() else { break };
            let fits = call.rows <= free_rows;
            let rows = if fits { call.rows } else { free_rows - free_rows % CUT_ROWS };
            if rows == 0 || (!fits && portion.cut == SplitPolicy::Nothing) {
                break;
            }
            let piece = CallChunk { id: call.id, first_row: call.first_row, rows, is_last: fits };
            call.first_row += rows;
            call.rows -= rows;
            let call = *call;
            if fits {
                queue.pop_front();
            }
            free_rows -= rows;
            taken(call, piece);
            if portion.cut == SplitPolicy::Alone {
                break;
            }
        }
        self.look_again();
    }

    /// Removes the calls for which `is_meant` is true, and calls `removed` for each.
    pub fn remove(&mut self, is_meant: impl Fn(&QueuedCall) -> bool, mut removed: impl FnMut(QueuedCall)) {
        for queue in &mut self.classes {
            queue.retain(|call| {
                let goes = is_meant(call);
                if goes {
                    removed(*call);
                }
                !goes
            });
        }
        self.look_again();
    }

    fn look_again(&mut self) {
        if let Some(due) = self.iter().map(|call| call.due).min() {
            self.due = due;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_call_of_any_class_goes_before_a_new_one() {
        let aging = Duration::from_millis(10);
        let (old, later) = (Instant::now(), Instant::now() + Duration::from_millis(100));
        assert!(
            CallOrder::of(CallClass::Decode, later, later, aging)
                < CallOrder::of(CallClass::Noise, later, later, aging)
        );
        assert!(
            CallOrder::of(CallClass::Noise, old, later, aging)
                < CallOrder::of(CallClass::Decode, later, later, aging)
        );
    }
}

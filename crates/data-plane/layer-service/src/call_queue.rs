//! The calls that ask for the same, in order.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use shmproto::layer::CallClass;

use super::ConnectionId;

/// A cut falls on a multiple of so many rows, so that the place of what follows is a multiple of 64 bytes in any format.
pub const CUT_ROWS: usize = 32;

/// A call that waits. Ascending in order of arrival, and never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Consecutive rows of a call, computed in one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallChunk {
    /// The call whose rows they are.
    pub id: CallId,
    /// Rows of the call before the piece.
    pub first_row: usize,
    /// Rows of the piece, at least one.
    pub rows: usize,
    /// No rows of the call are left to compute after these.
    pub is_last: bool,
}

/// What of a call is left to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedCall {
    /// The call.
    pub id: CallId,
    /// The connection it came over.
    pub connection: ConnectionId,
    /// How urgent it is.
    pub class: CallClass,
    /// Rows computed already.
    pub first_row: usize,
    /// Rows left.
    pub rows: usize,
    /// When it came.
    pub arrived: Instant,
    /// When it need not wait for company any more.
    pub due: Instant,
}

/// Whose turn it is: the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallOrder {
    class: u64,
    arrived: Instant,
}

impl CallOrder {
    /// The turn of a call of `class`: it rises by a class for every `aging` it has waited, so that in the end it is before
    /// everybody who came later.
    #[must_use]
    pub fn of(class: CallClass, arrived: Instant, now: Instant, aging: Duration) -> Self {
        let waited = now.saturating_duration_since(arrived).as_nanos();
        let risen = waited.checked_div(aging.as_nanos()).unwrap_or(u128::MAX);
        let class = (class as u64).saturating_sub(u64::try_from(risen).unwrap_or(u64::MAX));
        Self { class, arrived }
    }
}

/// Which classes may have their turn.
pub type AllowedClasses = fn(CallClass) -> bool;

/// Any may.
#[must_use]
pub fn any_class(_: CallClass) -> bool {
    true
}

/// What of a lane may be taken.
#[derive(Debug, Clone, Copy)]
pub struct BatchPortion {
    /// Rows at most.
    pub rows: usize,
    /// Calls that came later stay.
    pub until: CallId,
    /// Other classes stay.
    pub allowed: AllowedClasses,
    /// What becomes of a call that does not fit.
    pub cut: SplitPolicy,
}

/// What becomes of a call that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitPolicy {
    /// Its first rows are taken.
    Rows,
    /// It stays, and what comes after it too.
    Nothing,
    /// As [`SplitPolicy::Rows`], and nothing else is taken with it.
    Alone,
}

/// Calls that ask for the same, by class and within it in order of arrival. Never empty.
#[derive(Debug)]
pub struct CallQueue {
    classes: [VecDeque<QueuedCall>; CallClass::ALL.len()],
    /// Rows of a batch at most.
    batch_rows: usize,
    due: Instant,
}

impl CallQueue {
    /// A lane of one call, of which no batch has more than `batch_rows`.
    #[must_use]
    pub fn of(call: QueuedCall, batch_rows: usize) -> Self {
        let mut lane = Self { classes: Default::default(), batch_rows, due: call.due };
        lane.push(call);
        lane
    }

    /// Puts a call behind those of its class.
    pub fn push(&mut self, call: QueuedCall) {
        self.due = self.due.min(call.due);
        self.classes[call.class as usize].push_back(call);
    }

    /// When the first of them is due.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Those that are the first of their class.
    fn heads(&self) -> impl Iterator<Item = &QueuedCall> {
        self.classes.iter().filter_map(VecDeque::front)
    }

    /// The one that came first.
    #[must_use]
    pub fn oldest(&self) -> Option<&QueuedCall> {
        self.heads().min_by_key(|call| call.id)
    }

    /// When it is its turn.
    #[must_use]
    pub fn next_order(&self, now: Instant, aging: Duration) -> Option<CallOrder> {
        self.heads().map(|call| CallOrder::of(call.class, call.arrived, now, aging)).min()
    }

    /// Some are of these classes.
    #[must_use]
    pub fn has(&self, allowed: AllowedClasses) -> bool {
        self.heads().any(|call| allowed(call.class))
    }

    /// When the one came that came first of a class.
    #[must_use]
    pub fn first_of(&self, class: CallClass) -> Option<Instant> {
        self.classes[class as usize].front().map(|call| call.arrived)
    }

    /// Nobody is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads().next().is_none()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &QueuedCall> {
        self.classes.iter().flatten()
    }

    /// Takes what `portion` allows, those whose turn it is first; `taken` is told of each call of which rows were taken.
    pub fn take(
        &mut self,
        now: Instant,
        aging: Duration,
        portion: BatchPortion,
        mut taken: impl FnMut(QueuedCall, CallChunk),
    ) {
        let mut room = portion.rows.min(self.batch_rows);
        while room > 0 {
            let allowed = |call: &&QueuedCall| call.id <= portion.until && (portion.allowed)(call.class);
            let turn = |call: &&QueuedCall| CallOrder::of(call.class, call.arrived, now, aging);
            let Some(class) = self.heads().filter(allowed).min_by_key(turn).map(|call| call.class) else {
                break;
            };
            let queue = &mut self.classes[class as usize];
            let Some(call) = queue.front_mut() else { break };
            let fits = call.rows <= room;
            let rows = if fits { call.rows } else { room - room % CUT_ROWS };
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
            room -= rows;
            taken(call, piece);
            if portion.cut == SplitPolicy::Alone {
                break;
            }
        }
        self.look_again();
    }

    /// Takes out those that `is_meant` names.
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

//! Selection of the calls that are computed next and together. The batcher knows neither rows nor clients,
//! and gets the time as an argument.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use model::linear_sites::{SiteCall, SiteId, SiteOp, SitePath};
use shmproto::layer::CallClass;

use super::{
    ConnectionId,
    batching_policy::{self, BatchPolicy, WaitingCalls, is_background, is_urgent},
    call_queue::{
        AllowedClasses, BatchPortion, CallChunk, CallId, CallQueue, QueuedCall, SplitPolicy, any_class,
    },
    settings::{Batching, BatchingPolicy},
    sweep_order::{AwaitedChunks, Next, SweepConstraint, SweepOrder},
};

/// Idle time after which a connection counts as inactive and is not waited for.
const ACTIVE: Duration = Duration::from_secs(1);

/// Data of a call that the batcher needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewCall {
    /// Computation that the call requests.
    pub call: SiteCall,
    /// Connection of the call.
    pub connection: ConnectionId,
    /// Class of the call, which decides its urgency.
    pub class: CallClass,
    /// Number of rows, at least one.
    pub rows: usize,
    /// Elements of an input row and its output row together.
    pub row_elements: usize,
}

#[derive(Debug, Clone, Copy)]
struct Presence {
    called: Instant,
    waiting: usize,
    /// Chunk and class of the next expected call, with streamed weights.
    expected: Option<ExpectedCall>,
}

#[derive(Debug, Clone, Copy)]
struct ExpectedCall {
    chunk: u32,
    since: Instant,
    class: CallClass,
}

#[derive(Debug)]
struct PendingCalls {
    lanes: BTreeMap<SiteCall, CallQueue>,
    connections: BTreeMap<ConnectionId, Presence>,
    last: CallId,
}

impl WaitingCalls for PendingCalls {
    fn last(&self) -> CallId {
        self.last
    }

    fn oldest(&self) -> Option<&QueuedCall> {
        self.lanes.values().filter_map(CallQueue::oldest).min_by_key(|call| call.id)
    }

    fn everybody_waits(&self, now: Instant) -> bool {
        let is_expected = |presence: &Presence| {
            presence.waiting == 0 && now.saturating_duration_since(presence.called) < ACTIVE
        };
        !self.connections.values().any(is_expected)
    }
}

/// Queues of waiting calls, with the choice of the next batch.
#[derive(Debug)]
pub struct Batcher {
    batching: Batching,
    policy: Box<dyn BatchPolicy>,
    /// Order of streamed layer chunks, which replaces deadlines; `None` if weights are in memory.
    sweep_order: Option<SweepOrder>,
    calls: PendingCalls,
}

impl Batcher {
    /// Makes an empty batcher for a base with `sites` sites.
    #[must_use]
    pub fn new(batching: Batching, sites: usize) -> Self {
        let calls = PendingCalls { lanes: BTreeMap::new(), connections: BTreeMap::new(), last: CallId(0) };
        Self { batching, policy: batching_policy::of(&batching, sites), sweep_order: None, calls }
    }

    /// Sets the layer chunk of each site for streamed weights; only the opportunistic policy uses it.
    #[must_use]
    pub fn over(self, chunks: Option<Vec<u32>>) -> Self {
        let chunks = chunks.filter(|_| self.batching.policy == BatchingPolicy::Opportunistic);
        let sweep_order = chunks.map(|chunks| SweepOrder::new(chunks, self.batching.max_wait));
        Self { sweep_order, ..self }
    }

    /// Whether calls are served in the order of layer chunks.
    #[must_use]
    pub fn is_streamed(&self) -> bool {
        self.sweep_order.is_some()
    }

    /// Records that a call of `class` over `connection` was answered.
    pub fn answered(&mut self, connection: ConnectionId, call: SiteCall, class: CallClass, now: Instant) {
        let Some(sweep_order) = &mut self.sweep_order else { return };
        sweep_order.served(now);
        if let Some(presence) = self.calls.connections.get_mut(&connection) {
            presence.expected =
                Some(ExpectedCall { chunk: sweep_order.after(call, class), since: now, class });
        }
    }

    /// Adds a call, and returns its id.
    pub fn add(&mut self, new: NewCall, now: Instant) -> CallId {
        let NewCall { call, connection, class, rows, row_elements } = new;
        let calls = &mut self.calls;
        calls.last.0 += 1;
        let due = now + self.policy.wait(class, rows);
        let waiting = QueuedCall { id: calls.last, connection, class, first_row: 0, rows, arrived: now, due };
        let presence = calls.connections.entry(connection).or_insert(Presence {
            called: now,
            waiting: 0,
            expected: None,
        });
        *presence = Presence { called: now, waiting: presence.waiting + 1, expected: None };
        match calls.lanes.get_mut(&call) {
            Some(lane) => lane.push(waiting),
            None => drop(calls.lanes.insert(call, CallQueue::of(waiting, self.batching.rows(row_elements)))),
        }
        calls.last
    }

    /// Removes the call `id`, which waits in the queue of `call`.
    pub fn remove(&mut self, call: SiteCall, id: CallId) {
        let Some(lane) = self.calls.lanes.get_mut(&call) else { return };
        let connections = &mut self.calls.connections;
        lane.remove(|waiting| waiting.id == id, |waiting| remove_waiting(connections, waiting.connection));
        self.sweep(call);
    }

    /// Removes a connection and its calls.
    pub fn close(&mut self, connection: ConnectionId) {
        self.calls.connections.remove(&connection);
        for lane in self.calls.lanes.values_mut() {
            lane.remove(|waiting| waiting.connection == connection, |_| {});
        }
        self.calls.lanes.retain(|_, lane| !lane.is_empty());
    }

    /// Whether no call waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.lanes.is_empty()
    }

    /// Returns when a call will be due if no other comes; this may be in the past.
    #[must_use]
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let waited = self.calls.lanes.values().map(CallQueue::due).min()?;
        if let Some(sweep_order) = &self.sweep_order {
            return Some(
                sweep_order
                    .deadline(now, &self.chunks(any_class), |chunk| self.is_expected(chunk, any_class, now)),
            );
        }
        Some(self.policy.deadline(now, waited, &self.calls))
    }

    /// Takes the next batch into `pieces`, which is cleared first, and returns its computation. `None` if no
    /// call of the allowed classes is due.
    pub fn next(
        &mut self,
        now: Instant,
        allowed: AllowedClasses,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        if self.sweep_order.is_some() {
            return self.next_chunk(now, allowed, SweepConstraint::Free, pieces);
        }
        let portion = BatchPortion { allowed, ..self.portion(now) };
        self.pick(now, |_, lane| lane.has(allowed), portion, pieces)
    }

    /// Like [`Batcher::next`], when a resident pass is about to begin.
    pub(crate) fn next_beside(
        &mut self,
        now: Instant,
        allowed: AllowedClasses,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        match self.sweep_order {
            Some(_) => self.next_chunk(now, allowed, SweepConstraint::NotUp, pieces),
            None => self.next(now, allowed, pieces),
        }
    }

    fn next_chunk(
        &mut self,
        now: Instant,
        allowed: AllowedClasses,
        travel: SweepConstraint,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        pieces.clear();
        let (chunks, mut sweep_order) = (self.chunks(allowed), self.sweep_order.take()?);
        let next = sweep_order.next(now, &chunks, |chunk| self.is_expected(chunk, allowed, now), travel);
        self.sweep_order = Some(sweep_order);
        match next {
            Next::Serve(chunk) => self.take_from(chunk, now, allowed, pieces),
            Next::Hold(_) | Next::Rest => None,
        }
    }

    /// Returns the action of a resident pass over streamed weights before it moves to the chunk of `site`.
    pub fn before_leaving(
        &mut self,
        now: Instant,
        site: SiteId,
        allowed: AllowedClasses,
        pieces: &mut Vec<CallChunk>,
    ) -> ChunkBoundary {
        pieces.clear();
        let chunks = self.chunks(allowed);
        let Some(mut sweep_order) = self.sweep_order.take() else { return ChunkBoundary::Go };
        let chunk = sweep_order.chunk(site);
        let expects = |chunk| self.is_expected(chunk, |class| !is_background(class), now);
        let next = sweep_order.before_leaving(now, chunk, &chunks, expects);
        self.sweep_order = Some(sweep_order);
        match next {
            Next::Serve(chunk) => {
                self.take_from(chunk, now, allowed, pieces).map_or(ChunkBoundary::Go, ChunkBoundary::Serve)
            }
            Next::Hold(until) => ChunkBoundary::Hold(until),
            Next::Rest => ChunkBoundary::Go,
        }
    }

    /// Returns the layer chunks for which calls of the allowed classes wait.
    fn chunks(&self, allowed: AllowedClasses) -> AwaitedChunks {
        let mut chunks = AwaitedChunks::default();
        let Some(sweep_order) = &self.sweep_order else { return chunks };
        let lanes = self.calls.lanes.iter().filter(|(_, lane)| lane.has(allowed));
        lanes.for_each(|(call, _)| chunks.add(sweep_order.chunk(call.site), call.op));
        chunks
    }

    /// Whether a call of an allowed class is expected soon for a layer chunk.
    fn is_expected(&self, chunk: u32, allowed: AllowedClasses, now: Instant) -> bool {
        let is_meant = |expected: ExpectedCall| {
            let is_active = now.saturating_duration_since(expected.since) < ACTIVE;
            is_active && expected.chunk == chunk && allowed(expected.class)
        };
        self.calls.connections.values().filter_map(|presence| presence.expected).any(is_meant)
    }

    /// Takes the next batch among calls of one layer chunk.
    fn take_from(
        &mut self,
        chunk: u32,
        now: Instant,
        allowed: AllowedClasses,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        let sweep_order = self.sweep_order.as_ref()?;
        let is_meant = |(call, lane): &(&SiteCall, &CallQueue)| {
            sweep_order.chunk(call.site) == chunk && lane.has(allowed)
        };
        let turn = |(_, lane): &(&SiteCall, &CallQueue)| lane.next_order(now, self.batching.aging);
        let call = self.calls.lanes.iter().filter(is_meant).min_by_key(turn).map(|(&call, _)| call)?;
        let portion = BatchPortion { allowed, ..self.portion(now) };
        self.take(now, call, portion, pieces);
        (!pieces.is_empty()).then_some(call)
    }

    /// Returns the arrival time of the oldest waiting call of `class`.
    #[must_use]
    pub fn first_of(&self, class: CallClass) -> Option<Instant> {
        self.calls.lanes.values().filter_map(|lane| lane.first_of(class)).min()
    }

    /// Like [`Batcher::next`], for urgent calls, without those that the pass will co-batch at `site` anyway.
    pub fn next_urgent(
        &mut self,
        now: Instant,
        site: SiteId,
        rows: usize,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        let is_meant = |call: &SiteCall, lane: &CallQueue| *call != joinable(site) && lane.has(is_urgent);
        let portion = BatchPortion { rows, allowed: is_urgent, ..self.portion(now) };
        self.pick(now, is_meant, portion, pieces)
    }

    /// Takes calls for `call` with at most `rows` rows in total to join a resident pass, due or not.
    pub fn join(&mut self, now: Instant, call: SiteCall, rows: usize, pieces: &mut Vec<CallChunk>) {
        pieces.clear();
        if self.policy.joins_passes() {
            let portion = BatchPortion { rows, cut: SplitPolicy::Nothing, ..self.portion(now) };
            self.take(now, call, portion, pieces);
        }
    }

    /// Returns the limits of a batch that is computed now.
    fn portion(&mut self, now: Instant) -> BatchPortion {
        let (until, cut) = (self.policy.until(now, &self.calls), self.policy.cut());
        BatchPortion { rows: self.batching.chunk_rows, until, allowed: any_class, cut }
    }

    fn pick(
        &mut self,
        now: Instant,
        is_meant: impl Fn(&SiteCall, &CallQueue) -> bool,
        portion: BatchPortion,
        pieces: &mut Vec<CallChunk>,
    ) -> Option<SiteCall> {
        pieces.clear();
        let is_early = self.policy.is_early(now, &self.calls);
        let is_due = |lane: &CallQueue| {
            (is_early || lane.due() <= now) && lane.oldest().is_some_and(|call| call.id <= portion.until)
        };
        let due = self.calls.lanes.iter().filter(|(call, lane)| is_due(lane) && is_meant(call, lane));
        let turn = |(_, lane): &(&SiteCall, &CallQueue)| lane.next_order(now, self.batching.aging);
        let call = due.min_by_key(turn).map(|(&call, _)| call)?;
        self.take(now, call, portion, pieces);
        (!pieces.is_empty()).then_some(call)
    }

    fn take(&mut self, now: Instant, call: SiteCall, portion: BatchPortion, pieces: &mut Vec<CallChunk>) {
        let Some(lane) = self.calls.lanes.get_mut(&call) else { return };
        let connections = &mut self.calls.connections;
        lane.take(now, self.batching.aging, portion, |waiting, piece| {
            if piece.is_last {
                remove_waiting(connections, waiting.connection);
            }
            pieces.push(piece);
        });
        self.sweep(call);
    }

    fn sweep(&mut self, call: SiteCall) {
        if self.calls.lanes.get(&call).is_some_and(CallQueue::is_empty) {
            self.calls.lanes.remove(&call);
        }
    }
}

/// Action of a resident pass before it leaves a layer chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkBoundary {
    /// Computes this batch of calls first.
    Serve(SiteCall),
    /// Waits until this time for calls that are expected soon.
    Hold(Instant),
    /// Moves to the next layer chunk.
    Go,
}

/// Returns the computation of a resident pass at a site, which calls can join.
#[must_use]
pub fn joinable(site: SiteId) -> SiteCall {
    SiteCall { site, part: None, op: SiteOp::Forward, path: SitePath::Fast }
}

fn remove_waiting(connections: &mut BTreeMap<ConnectionId, Presence>, connection: ConnectionId) {
    if let Some(presence) = connections.get_mut(&connection) {
        presence.waiting = presence.waiting.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests;

//! Which calls are computed next, and together. It knows neither rows nor clients, and the time is what it is told.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use model::sites::{SiteCall, SiteId, SiteOp, SitePath};
use shmproto::layer::Class;

use super::{
    SessionId,
    lane::{CallId, Cut, Lane, Piece, Portion, Waiting},
    policy::{is_urgent, wait},
    settings::{Batching, Policy},
};

/// A session that has not called for so long is not waited for.
const ACTIVE: Duration = Duration::from_secs(1);

/// Longest wait of [`Policy::Lockstep`].
const LOCKSTEP: Duration = Duration::from_secs(1);

/// A call as the batcher needs to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewCall {
    /// What it asks for.
    pub call: SiteCall,
    /// Whose it is.
    pub session: SessionId,
    /// What for.
    pub class: Class,
    /// Rows, at least one.
    pub rows: usize,
}

/// A session as the batcher sees it.
#[derive(Debug, Clone, Copy)]
struct Presence {
    called: Instant,
    waiting: usize,
}

/// The calls that wait.
#[derive(Debug)]
pub struct Batcher {
    batching: Batching,
    sites: usize,
    lanes: BTreeMap<SiteCall, Lane>,
    sessions: BTreeMap<SessionId, Presence>,
    /// The last call that came.
    last: CallId,
    /// The last call of the round that is computed, in lockstep.
    round: CallId,
}

impl Batcher {
    /// Without calls, for a base of so many sites.
    #[must_use]
    pub fn new(batching: Batching, sites: usize) -> Self {
        let (last, round) = (CallId(0), CallId(0));
        Self { batching, sites, lanes: BTreeMap::new(), sessions: BTreeMap::new(), last, round }
    }

    /// Adds a call.
    pub fn add(&mut self, new: NewCall, now: Instant) -> CallId {
        let NewCall { call, session, class, rows } = new;
        self.last.0 += 1;
        let due = match self.batching.policy {
            Policy::Opportunistic => now + wait(&self.batching, class, rows, self.sites),
            Policy::None | Policy::Lockstep => now,
        };
        let waiting = Waiting { id: self.last, session, class, first_row: 0, rows, arrived: now, due };
        let presence = self.sessions.entry(session).or_insert(Presence { called: now, waiting: 0 });
        *presence = Presence { called: now, waiting: presence.waiting + 1 };
        match self.lanes.get_mut(&call) {
            Some(lane) => lane.push(waiting),
            None => drop(self.lanes.insert(call, Lane::of(waiting))),
        }
        self.last
    }

    /// Forgets a call that asks for `call`.
    pub fn remove(&mut self, call: SiteCall, id: CallId) {
        let Some(lane) = self.lanes.get_mut(&call) else { return };
        let sessions = &mut self.sessions;
        lane.remove(|waiting| waiting.id == id, |waiting| leave(sessions, waiting.session));
        self.sweep(call);
    }

    /// Forgets a session and its calls.
    pub fn close(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        for lane in self.lanes.values_mut() {
            lane.remove(|waiting| waiting.session == session, |_| {});
        }
        self.lanes.retain(|_, lane| !lane.is_empty());
    }

    /// No call waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// When something will be due, if nothing comes meanwhile; it may be past.
    #[must_use]
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let due = self.lanes.values().map(Lane::due).min()?;
        Some(match self.batching.policy {
            Policy::None => due,
            Policy::Opportunistic if self.everybody_waits(now) => due.min(now),
            Policy::Opportunistic => due,
            Policy::Lockstep if self.everybody_waits(now) || self.has_round() => now,
            Policy::Lockstep => self.oldest()?.arrived + LOCKSTEP,
        })
    }

    /// Takes the batch whose turn it is into `pieces`, which is emptied before, and says what to compute. `None` if nothing
    /// is due.
    pub fn next(&mut self, now: Instant, pieces: &mut Vec<Piece>) -> Option<SiteCall> {
        let rows = self.batching.chunk_rows;
        self.pick(now, |_, _| true, Portion { rows, ..self.whole() }, pieces)
    }

    /// As [`Batcher::next`], for calls that somebody waits for most, of all sites but those that a pass is about to serve
    /// anyway at `site`.
    pub fn next_urgent(
        &mut self,
        now: Instant,
        site: SiteId,
        rows: usize,
        pieces: &mut Vec<Piece>,
    ) -> Option<SiteCall> {
        let is_meant =
            |call: &SiteCall, lane: &Lane| *call != joinable(site) && lane.class().is_some_and(is_urgent);
        let portion = Portion { rows, class: Class::Verify, ..self.whole() };
        self.pick(now, is_meant, portion, pieces)
    }

    /// Takes calls that ask for `call` and fit into so many rows, due or not: they join a pass.
    pub fn join(&mut self, now: Instant, call: SiteCall, rows: usize, pieces: &mut Vec<Piece>) {
        pieces.clear();
        if self.batching.policy == Policy::None {
            return;
        }
        self.begin_round(now);
        self.take(now, call, Portion { rows, cut: Cut::Nothing, ..self.whole() }, pieces);
    }

    fn whole(&self) -> Portion {
        let (until, cut) = match self.batching.policy {
            Policy::Opportunistic => (self.last, Cut::Rows),
            Policy::None => (self.last, Cut::Alone),
            Policy::Lockstep => (self.round, Cut::Rows),
        };
        Portion { rows: self.batching.chunk_rows, until, class: Class::Noise, cut }
    }

    fn pick(
        &mut self,
        now: Instant,
        is_meant: impl Fn(&SiteCall, &Lane) -> bool,
        portion: Portion,
        pieces: &mut Vec<Piece>,
    ) -> Option<SiteCall> {
        pieces.clear();
        self.begin_round(now);
        let until = if self.batching.policy == Policy::Lockstep { self.round } else { portion.until };
        let early = self.batching.policy == Policy::Opportunistic && self.everybody_waits(now);
        let is_due =
            |lane: &Lane| (early || lane.due() <= now) && lane.oldest().is_some_and(|call| call.id <= until);
        let due = self.lanes.iter().filter(|(call, lane)| is_due(lane) && is_meant(call, lane));
        let turn = |(_, lane): &(&SiteCall, &Lane)| lane.turn(now, self.batching.aging);
        let call = due.min_by_key(turn).map(|(&call, _)| call)?;
        self.take(now, call, Portion { until, ..portion }, pieces);
        (!pieces.is_empty()).then_some(call)
    }

    fn take(&mut self, now: Instant, call: SiteCall, portion: Portion, pieces: &mut Vec<Piece>) {
        let Some(lane) = self.lanes.get_mut(&call) else { return };
        let sessions = &mut self.sessions;
        lane.take(now, self.batching.aging, portion, |waiting, piece| {
            if piece.is_last {
                leave(sessions, waiting.session);
            }
            pieces.push(piece);
        });
        self.sweep(call);
    }

    fn sweep(&mut self, call: SiteCall) {
        if self.lanes.get(&call).is_some_and(Lane::is_empty) {
            self.lanes.remove(&call);
        }
    }

    /// Nobody would come before somebody is answered.
    fn everybody_waits(&self, now: Instant) -> bool {
        let is_expected = |presence: &Presence| {
            presence.waiting == 0 && now.saturating_duration_since(presence.called) < ACTIVE
        };
        !self.sessions.values().any(is_expected)
    }

    fn oldest(&self) -> Option<&Waiting> {
        self.lanes.values().filter_map(Lane::oldest).min_by_key(|call| call.id)
    }

    /// Calls of the round are left.
    fn has_round(&self) -> bool {
        self.oldest().is_some_and(|call| call.id <= self.round)
    }

    /// In lockstep: everything that waits is computed once everybody waits, or somebody has waited for long.
    fn begin_round(&mut self, now: Instant) {
        if self.batching.policy != Policy::Lockstep || self.has_round() {
            return;
        }
        let is_late = |call: &Waiting| now.saturating_duration_since(call.arrived) >= LOCKSTEP;
        if self.everybody_waits(now) || self.oldest().is_some_and(is_late) {
            self.round = self.last;
        }
    }
}

/// What a resident pass evaluates at a site.
#[must_use]
pub fn joinable(site: SiteId) -> SiteCall {
    SiteCall { site, part: None, op: SiteOp::Forward, path: SitePath::Fast }
}

fn leave(sessions: &mut BTreeMap<SessionId, Presence>, session: SessionId) {
    if let Some(presence) = sessions.get_mut(&session) {
        presence.waiting = presence.waiting.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests;

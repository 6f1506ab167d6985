//! Which executor a request goes to (`CaraServe` section 5), and which takes over what another has lost.
//!
//! There is one choice, [`Route::choose`]. Candidates are executors that are in use, have room, are not drained, and have not
//! failed this request; `policy::routing` says which of them. A single executor is not chosen but taken. [`Route::forecast`] says
//! before what a request should see.

use std::collections::BTreeMap;

use policy::{
    perf::{
        line::Line,
        plane::Plane,
        serving::{ColdStart, Load, LoraForm, ServingModel},
    },
    routing::{self, Asked, Availability, Candidate, Forecast, Policy, Residency, Slo},
};
use shmproto::message::Generate;

use crate::{
    adapters::{Entry, Registry},
    executors::{Executors, books::Seen, member::Ready, prefixes::Blocks},
    lifecycle::Serving,
    random::random_u64,
};

/// What an executor is taken to need as long as one of them has not been seen to work: milliseconds for a step and each of
/// its sequences, and for a prompt's tokens; a store of 1 GB/s. Alike for all, so only their proportions matter.
const UNSEEN: ServingModel = ServingModel {
    form: LoraForm::TrueRank,
    decode: Plane { seconds_each: [5e-3, 1e-3, 1e-6, 1e-6] },
    prefill: Plane { seconds_each: [5e-3, 1e-3, 1e-6] },
    link: Line { alpha: 0.0, beta: 0.0 },
    store: Line { alpha: 1e-9, beta: 5e-3 },
    cold: ColdStart::Assisted,
};

/// What is chosen for.
#[derive(Debug)]
pub struct Route {
    executors: Executors,
    policy: Policy,
    asked: Asked,
    /// The prompt's blocks; none where there is nothing to choose from.
    blocks: Option<Blocks>,
    /// The adapter, and its bytes.
    adapter: Option<(ids::AdapterId, u64)>,
    /// The connection of each executor over which this request was lost or refused: no earlier one is used again.
    failed: BTreeMap<usize, u64>,
}

impl Route {
    /// For `sequences` of `adapter`, which have one beginning as a rule and were promised `slo`.
    #[must_use]
    pub fn of(
        executors: &Executors,
        policy: Policy,
        serving: &Serving,
        (adapter, sequences): (Option<&Entry>, &[Generate]),
        slo: Slo,
    ) -> Self {
        let first = sequences.first();
        let blocks = first.filter(|_| executors.are_several()).map(|first| {
            executors.prefixes().blocks(&first.namespace, &first.prompt, serving.welcome.block_tokens)
        });
        let asked = Asked {
            prompt_tokens: first.map_or(0, |first| first.prompt.len() as u64),
            rank: adapter.map_or(0, |adapter| adapter.record.rank.into()),
            slo,
            answer_tokens: executors.answer_tokens(),
        };
        let adapter = adapter.map(|adapter| (adapter.id(), adapter.record.bytes));
        Self { executors: executors.clone(), policy, asked, blocks, adapter, failed: BTreeMap::new() }
    }

    /// The rank of its adapter; 0 for the base.
    #[must_use]
    pub fn rank(&self) -> u64 {
        self.asked.rank
    }

    /// What it was promised for each token, in microseconds.
    #[must_use]
    pub fn promised_tpot_us(&self) -> Option<u64> {
        self.asked.slo.tpot_us
    }

    /// What it should see on the executor of `ready` that promises most, beside what that has to do. `None` if that is nothing,
    /// or if one of them has not been seen to work.
    #[must_use]
    pub fn forecast(&self, ready: &[Ready], registry: &Registry) -> Option<Forecast> {
        let candidates = ready.iter().map(|one| {
            let seen = self.executors.member(one.index).books().seen()?;
            Some(self.candidate(one, seen.model, registry))
        });
        let candidates = candidates.collect::<Option<Vec<_>>>()?;
        let chosen = routing::choose(Policy::RankAware, &self.asked, &candidates, 0)?;
        let busy = candidates.iter().find(|one| one.executor == chosen.executor && one.requests() > 0);
        busy.map(|_| chosen.forecast)
    }

    /// Connection `epoch` of the executor at `index` has failed this request.
    pub fn avoid(&mut self, index: usize, epoch: u64) {
        let failed = self.failed.entry(index).or_default();
        *failed = epoch.max(*failed);
    }

    /// The executor of `ready` that costs least, for a request that is new or, with `home`, was lost by the executor there:
    /// that one is taken again, also if it is drained, when no other can.
    #[must_use]
    pub fn choose<'a>(
        &self,
        ready: &'a [Ready],
        home: Option<usize>,
        registry: &Registry,
    ) -> Option<&'a Ready> {
        let can = |one: &&Ready| self.failed.get(&one.index).is_none_or(|failed| one.epoch > *failed);
        let mut can: Vec<_> = ready.iter().filter(can).collect();
        if !self.executors.are_several() {
            return can.pop();
        }
        let seen = can.iter().map(|one| self.executors.member(one.index).books().seen());
        let seen: Option<Vec<_>> = seen.collect();
        let models = seen.map_or(vec![UNSEEN; can.len()], |seen| judged(&self.asked, &seen));
        let candidates = can.iter().zip(models).map(|(one, model)| self.candidate(one, model, registry));
        let mut candidates: Vec<_> = candidates.collect();
        let has_room = |one: &Candidate| {
            one.availability == Availability::Open
                && self.executors.member(one.executor).executor().load().room() > 0
        };
        // What has begun may wait in an executor; what has not goes where it is wanted.
        if home.is_none() && candidates.iter().any(has_room) {
            candidates.retain(has_room);
        }
        let chosen = routing::choose(self.policy, &self.asked, &candidates, random_u64());
        let chosen = chosen.map(|choice| choice.executor).or(home)?;
        can.into_iter().find(|one| one.index == chosen)
    }

    /// The request was sent to the executor at `index`.
    pub fn note(&self, index: usize) {
        if let Some(blocks) = &self.blocks {
            self.executors.prefixes().note(blocks, index);
        }
    }

    fn candidate(&self, one: &Ready, model: ServingModel, registry: &Registry) -> Candidate {
        let member = self.executors.member(one.index);
        let (books, load) = (member.books().loads(), member.executor().load());
        let blocks = self.blocks.as_ref();
        let cached = blocks.map_or(0, |blocks| self.executors.prefixes().known_tokens(blocks, one.index));
        let is_open = !member.is_drained() && load.held < load.limit;
        Candidate {
            executor: one.index,
            model,
            running: books.running,
            waiting: books.waiting,
            places: load.places as u64,
            adapter: match self.adapter {
                Some((id, bytes)) if !registry.is_at(id, one.index) => Residency::Absent { bytes },
                _ => Residency::Device,
            },
            cached_tokens: cached as u64,
            promised_tpot_us: books.promised_tpot_us,
            availability: if is_open { Availability::Open } else { Availability::Closed },
        }
    }
}

/// What each executor is taken to need. One whose timings are old counts as the fastest of the others until it is timed again:
/// who was slow once would otherwise never be asked again, and so never be seen to be fast.
fn judged(asked: &Asked, seen: &[Seen]) -> Vec<ServingModel> {
    let load = Load::of(asked.rank, asked.prompt_tokens);
    let takes = |model: &ServingModel| model.prefill_s(load) + asked.answer_tokens * model.step_s(load);
    let faster = |a: ServingModel, b: ServingModel| if takes(&b) < takes(&a) { b } else { a };
    let fastest = seen.iter().filter(|one| !one.is_stale).map(|one| one.model).reduce(faster);
    let judged = |one: &Seen| match fastest {
        Some(fastest) if one.is_stale => faster(one.model, fastest),
        _ => one.model,
    };
    seen.iter().map(judged).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_slow_long_ago_is_tried_again() {
        let asked = Asked { prompt_tokens: 10, rank: 8, slo: Slo::default(), answer_tokens: 20.0 };
        let slow = ServingModel { decode: Plane { seconds_each: [5.0; 4] }, ..UNSEEN };
        let seen = |model, is_stale| Seen { model, is_stale };
        let judged = |seen: &[Seen]| judged(&asked, seen);
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, false)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, false)]), [UNSEEN, UNSEEN]);
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, true)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, true)]), [slow, UNSEEN]);
    }
}

//! What executors are taken to need, from what was seen of them.

use super::Asked;
use crate::perf::{
    line::Line,
    plane::Plane,
    serving::{ColdStart, Load, LoraForm, ServingModel},
};

/// What an executor is taken to need as long as one of them has not been seen to work: milliseconds for a step and each of
/// its sequences, and for a prompt's tokens; a store of 1 GB/s. Alike for all, so only their proportions matter.
pub const UNSEEN: ServingModel = ServingModel {
    form: LoraForm::TrueRank,
    decode: Plane { seconds_each: [5e-3, 1e-3, 1e-6, 1e-6] },
    prefill: Plane { seconds_each: [5e-3, 1e-3, 1e-6] },
    link: Line { alpha: 0.0, beta: 0.0 },
    store: Line { alpha: 1e-9, beta: 5e-3 },
    cold: ColdStart::Assisted,
};

/// What an executor takes, as far as it was seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// What its timings say.
    pub model: ServingModel,
    /// Whether it has nothing to do, and they are old: it may have become faster, and nobody would notice.
    pub is_stale: bool,
}

/// What each executor is taken to need: [`UNSEEN`] for all, unless all of them were seen to work. One whose timings are old
/// counts as the fastest of the others until it is timed again: who was slow once would otherwise never be asked again, and
/// so never be seen to be fast.
#[must_use]
pub fn judged(asked: &Asked, seen: &[Option<Seen>]) -> Vec<ServingModel> {
    let Some(seen) = seen.iter().copied().collect::<Option<Vec<Seen>>>() else {
        return vec![UNSEEN; seen.len()];
    };
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
    use crate::routing::Slo;

    #[test]
    fn who_was_slow_long_ago_is_tried_again() {
        let asked = Asked { prompt_tokens: 10, rank: 8, slo: Slo::default(), answer_tokens: 20.0 };
        let slow = ServingModel { decode: Plane { seconds_each: [5.0; 4] }, ..UNSEEN };
        let seen = |model, is_stale| Some(Seen { model, is_stale });
        let judged = |seen: &[Option<Seen>]| judged(&asked, seen);
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, false)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, false)]), [UNSEEN, UNSEEN]);
        assert_eq!(judged(&[seen(slow, false), seen(UNSEEN, true)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, true), seen(UNSEEN, true)]), [slow, UNSEEN]);
        assert_eq!(judged(&[seen(slow, false), None]), [UNSEEN, UNSEEN], "they are not compared");
    }
}

//! The compute-load pipeline (EdgeLLM §III-D, L-10, L-11): what may be done while a target that does not fit into memory is
//! loaded to verify a tree.
//!
//! ```text
//!   draft     |step|step|step|          |step|step|step|    (provisional)        |step|
//!   load                     fallback --| layer 3 | layer 4 | layer 5 |
//!   compute                                                 | 0 ... 5 |  verdict
//! ```
//!
//! The draft goes on while the target's layers come, since nothing else uses the processor then: *provisional* steps, kept if
//! what they build on came true. They stop while memory is at its bound, and the two models never compute at once, which
//! would cost the target twice its time. Whoever drafts, loads and computes asks here first and says when it is done; what
//! was done is in the log (L-27).

use std::{collections::VecDeque, time::Instant};

/// Most entries that the log holds; the oldest go first.
pub const MAX_LOG: usize = 1 << 14;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// The draft guessed a token.
    DraftStep,
    /// The tree is to be verified: its confidence T_c fell below alpha.
    Fallback {
        /// T_c.
        confidence: f64,
        /// Alpha.
        alpha: f64,
    },
    /// A layer of the target came into memory.
    Load {
        /// Its number.
        layer: usize,
        /// Bytes.
        bytes: u64,
    },
    /// A layer of the target was computed.
    Compute {
        /// Its number.
        layer: usize,
    },
    /// The draft guessed a token while the target was loaded.
    ProvisionalStep,
    /// The target's word on the tree.
    Verdict {
        /// N_correct.
        correct: usize,
        /// N_all.
        all: usize,
    },
    /// So many provisional tokens stand behind the target's own.
    Keep(usize),
    /// So many do not.
    Discard(usize),
}

/// An entry of the log.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logged {
    /// What was done.
    pub event: Event,
    /// When it began.
    pub begun: Instant,
    /// When it was done; the same for what takes no time.
    pub ended: Instant,
}

/// What is refused now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// One of the models computes, and the two never do at once.
    Computing,
    /// The draft may go on only while the target is loaded.
    NotLoading,
    /// Memory is at its bound.
    Memory,
    /// There is no tree to be verified, or another one is being verified already.
    Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Drafting,
    Verifying,
}

/// See the module. One draft, one target, one tree at a time.
#[derive(Debug, Clone)]
pub struct Pipeline {
    phase: Phase,
    /// What computes, and since when.
    computing: Option<(Event, Instant)>,
    /// What is loaded, and since when.
    loading: Option<(Event, Instant)>,
    held_bytes: u64,
    bound_bytes: u64,
    provisional: usize,
    log: VecDeque<Logged>,
}

impl Pipeline {
    /// Of a target that, with the draft, may hold `bound_bytes` and holds `held_bytes`.
    #[must_use]
    pub fn new(held_bytes: u64, bound_bytes: u64) -> Self {
        let (computing, loading) = (None, None);
        Self {
            phase: Phase::Drafting,
            computing,
            loading,
            held_bytes,
            bound_bytes,
            provisional: 0,
            log: VecDeque::new(),
        }
    }

    /// What was done, the oldest first.
    pub fn log(&self) -> impl Iterator<Item = &Logged> {
        self.log.iter()
    }

    /// The draft would guess a token: a step of its own while nothing is verified, else a provisional one.
    ///
    /// # Errors
    /// It may not, now.
    pub fn begin_draft(&mut self, now: Instant) -> Result<(), Refused> {
        let event = match self.phase {
            _ if self.computing.is_some() => return Err(Refused::Computing),
            Phase::Drafting => Event::DraftStep,
            Phase::Verifying if self.loading.is_none() => return Err(Refused::NotLoading),
            Phase::Verifying if self.held_bytes >= self.bound_bytes => return Err(Refused::Memory),
            Phase::Verifying => Event::ProvisionalStep,
        };
        self.computing = Some((event, now));
        Ok(())
    }

    /// The tree is handed to the target.
    ///
    /// # Errors
    /// Another one is being verified.
    pub fn fall_back(&mut self, now: Instant, confidence: f64, alpha: f64) -> Result<(), Refused> {
        match (self.phase, self.computing) {
            (Phase::Verifying, _) => Err(Refused::Phase),
            (_, Some(_)) => Err(Refused::Computing),
            (Phase::Drafting, None) => {
                self.phase = Phase::Verifying;
                self.note(Event::Fallback { confidence, alpha }, now, now);
                Ok(())
            }
        }
    }

    /// A layer of the target is loaded: ahead of time while the draft works ("yellow"), or because it is needed ("orange").
    ///
    /// # Errors
    /// Its bytes would go beyond the bound, or another layer is on its way.
    pub fn begin_load(&mut self, now: Instant, layer: usize, bytes: u64) -> Result<(), Refused> {
        if self.loading.is_some() {
            return Err(Refused::Phase);
        }
        let held = self.held_bytes.saturating_add(bytes);
        if held > self.bound_bytes {
            return Err(Refused::Memory);
        }
        self.held_bytes = held;
        self.loading = Some((Event::Load { layer, bytes }, now));
        Ok(())
    }

    /// The layer is here.
    pub fn end_load(&mut self, now: Instant) {
        if let Some((event, begun)) = self.loading.take() {
            self.note(event, begun, now);
        }
    }

    /// A layer's bytes were given back.
    pub fn release(&mut self, bytes: u64) {
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }

    /// The target would compute a layer.
    ///
    /// # Errors
    /// There is nothing to verify, or the draft is at a token.
    pub fn begin_compute(&mut self, now: Instant, layer: usize) -> Result<(), Refused> {
        match (self.phase, self.computing) {
            (Phase::Drafting, _) => Err(Refused::Phase),
            (_, Some(_)) => Err(Refused::Computing),
            (Phase::Verifying, None) => {
                self.computing = Some((Event::Compute { layer }, now));
                Ok(())
            }
        }
    }

    /// Whoever computes, the draft or the target, is done.
    pub fn end_compute(&mut self, now: Instant) {
        if let Some((event, begun)) = self.computing.take() {
            self.provisional += usize::from(event == Event::ProvisionalStep);
            self.note(event, begun, now);
        }
    }

    /// The target's word: `correct` of `all` tokens were right. `kept` provisional tokens stand behind what it said itself
    /// (L-13), at most as many as there are; the others are discarded, and drafting begins anew.
    ///
    /// # Errors
    /// There is no tree it could be about, or a model is still computing.
    pub fn judge(
        &mut self,
        now: Instant,
        (correct, all): (usize, usize),
        kept: usize,
    ) -> Result<(), Refused> {
        match (self.phase, self.computing) {
            (Phase::Drafting, _) => Err(Refused::Phase),
            (_, Some(_)) => Err(Refused::Computing),
            (Phase::Verifying, None) => {
                let provisional = std::mem::take(&mut self.provisional);
                let kept = kept.min(provisional);
                self.phase = Phase::Drafting;
                for event in
                    [Event::Verdict { correct, all }, Event::Keep(kept), Event::Discard(provisional - kept)]
                {
                    self.note(event, now, now);
                }
                Ok(())
            }
        }
    }

    fn note(&mut self, event: Event, begun: Instant, ended: Instant) {
        if self.log.len() == MAX_LOG {
            self.log.pop_front();
        }
        self.log.push_back(Logged { event, begun, ended });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const LAYER_BYTES: u64 = 10;

    proptest! {
        /// L-11 over the log: whatever is tried in whatever order, the models never compute at once, the draft goes on during
        /// a verification only while a layer comes, and memory stays within its bound.
        #[test]
        fn the_two_models_never_compute_at_once(tried in prop::collection::vec(0_u8..8, 0..400), bound in 20_u64..80) {
            let start = Instant::now();
            let mut pipeline = Pipeline::new(20, bound);
            for (step, what) in tried.iter().enumerate() {
                let now = start + Duration::from_millis(step as u64);
                // Each may be refused: that is what is tried.
                let _ = match what {
                    0 => pipeline.begin_draft(now),
                    1 => pipeline.begin_load(now, step, LAYER_BYTES),
                    2 => pipeline.begin_compute(now, step),
                    3 => pipeline.fall_back(now, 0.1, 0.2),
                    4 => pipeline.judge(now, (2, 3), 1),
                    5 => { pipeline.end_load(now); Ok(()) }
                    6 => { pipeline.release(LAYER_BYTES); Ok(()) }
                    _ => { pipeline.end_compute(now); Ok(()) }
                };
                prop_assert!(pipeline.held_bytes <= bound);
            }
            let log: Vec<Logged> = pipeline.log().copied().collect();
            let computes = |event: Event| matches!(event, Event::DraftStep | Event::ProvisionalStep | Event::Compute { .. });
            let mut busy: Vec<&Logged> = log.iter().filter(|one| computes(one.event)).collect();
            busy.sort_by_key(|one| one.begun);
            for pair in busy.windows(2) {
                prop_assert!(pair[0].ended <= pair[1].begun, "{:?} and {:?}", pair[0], pair[1]);
            }
            let loads: Vec<(Instant, Option<Instant>)> = log
                .iter()
                .filter(|one| matches!(one.event, Event::Load { .. }))
                .map(|one| (one.begun, Some(one.ended)))
                .chain(pipeline.loading.map(|(_, begun)| (begun, None)))
                .collect();
            for step in log.iter().filter(|one| one.event == Event::ProvisionalStep) {
                let meets = |load: &(Instant, Option<Instant>)| load.0 <= step.begun && load.1.is_none_or(|end| end >= step.begun);
                prop_assert!(loads.iter().any(meets), "{step:?}");
            }
        }
    }

    #[test]
    fn a_verification_as_the_paper_draws_it_and_its_log() {
        let now = Instant::now();
        let mut pipeline = Pipeline::new(30, 50);
        pipeline.begin_draft(now).unwrap();
        assert_eq!(pipeline.fall_back(now, 0.1, 0.2), Err(Refused::Computing));
        pipeline.end_compute(now);
        pipeline.fall_back(now, 0.1, 0.2).unwrap();
        assert_eq!(pipeline.begin_draft(now), Err(Refused::NotLoading));
        pipeline.begin_load(now, 3, 10).unwrap();
        pipeline.begin_draft(now).unwrap();
        assert_eq!(pipeline.begin_compute(now, 0), Err(Refused::Computing));
        pipeline.end_compute(now);
        pipeline.end_load(now);
        pipeline.begin_load(now, 4, 10).unwrap();
        assert_eq!(pipeline.begin_draft(now), Err(Refused::Memory));
        assert_eq!(pipeline.begin_load(now, 5, 10), Err(Refused::Phase));
        pipeline.end_load(now);
        assert_eq!(pipeline.begin_load(now, 5, 10), Err(Refused::Memory));
        pipeline.begin_compute(now, 0).unwrap();
        assert_eq!(pipeline.judge(now, (1, 1), 1), Err(Refused::Computing));
        pipeline.end_compute(now);
        pipeline.judge(now, (1, 1), 5).unwrap();
        let events: Vec<Event> = pipeline.log().map(|one| one.event).collect();
        assert_eq!(
            events,
            [
                Event::DraftStep,
                Event::Fallback { confidence: 0.1, alpha: 0.2 },
                Event::ProvisionalStep,
                Event::Load { layer: 3, bytes: 10 },
                Event::Load { layer: 4, bytes: 10 },
                Event::Compute { layer: 0 },
                Event::Verdict { correct: 1, all: 1 },
                Event::Keep(1),
                Event::Discard(0),
            ]
        );
    }
}

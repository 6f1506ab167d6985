//! Ordered sums of gradients over concurrent batches, site by site.
//!
//! Sums follow the order of batches, so their bits do not depend on timing. A batch need not wait for its
//! predecessor to finish. All batches visit the same sites in the same order, and a batch may add to a site
//! as soon as its predecessor has moved on. A [`ReductionTurn`] holds the sums of its current site; no other
//! access exists. A batch that fails drops its sums, and later batches get [`UpstreamFailed`].

use std::{
    cmp::Reverse,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
};

use super::{gradients::Gradients, trainable_site::TrainableSite};
use crate::{
    adapter::{LoraModule, MethodWeights, ScaleVector},
    shape::source::Target,
};

/// Error of a batch whose predecessor failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpstreamFailed;

#[derive(Debug)]
pub(super) enum GradientSlice<'g> {
    LowRank(&'g mut [LoraModule]),
    Scales(&'g mut [ScaleVector]),
    /// Sums for keys and values of each virtual token, `[2, width]`.
    Prefix(Vec<&'g mut [f32]>),
}

impl<'g> GradientSlice<'g> {
    pub(super) fn module(&mut self, target: Target) -> &mut LoraModule {
        let Self::LowRank(modules) = self else { unreachable!("gradients are of the adapter's kind") };
        modules.iter_mut().find(|module| module.target == target).expect("a sum for each module")
    }

    pub(super) fn vector(&mut self, target: Target) -> &mut [f32] {
        let Self::Scales(vectors) = self else { unreachable!("gradients are of the adapter's kind") };
        let vector = vectors.iter_mut().find(|vector| vector.target == target);
        &mut vector.expect("a sum for each vector").values
    }

    pub(super) fn tokens(&mut self) -> &mut [&'g mut [f32]] {
        let Self::Prefix(tokens) = self else { unreachable!("gradients are of the adapter's kind") };
        tokens
    }
}

impl Gradients {
    /// Returns an endless queue of turns, one for each batch in order.
    pub fn turns(&mut self) -> ReductionQueue<'_> {
        let (to_first, next) = channel();
        for sums in self.by_place() {
            // The receiver still exists, so the send succeeds.
            let _ = to_first.send(sums);
        }
        ReductionQueue { next }
    }

    /// Returns the turn of a batch that runs alone.
    ///
    /// # Panics
    /// Never, because the queue is endless.
    pub fn single_turn(&mut self) -> ReductionTurn<'_> {
        self.turns().next().expect("there are always more")
    }

    /// Returns all sums in the order of the reverse pass.
    fn by_place(&mut self) -> Vec<(TrainableSite, GradientSlice<'_>)> {
        let mut sums: Vec<_> = match &mut self.0 {
            MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => {
                let place = |module: &LoraModule| TrainableSite::of_target(module.layer, module.target);
                let places = modules.chunk_by_mut(|a, b| place(a) == place(b));
                places.map(|modules| (place(&modules[0]), GradientSlice::LowRank(modules))).collect()
            }
            MethodWeights::Ia3(scales) => {
                let place = |vector: &ScaleVector| TrainableSite::of_target(vector.layer, vector.target);
                let places = Arc::make_mut(scales).vectors_mut().chunk_by_mut(|a, b| place(a) == place(b));
                places.map(|vectors| (place(&vectors[0]), GradientSlice::Scales(vectors))).collect()
            }
            MethodWeights::Prefix(prefix) => {
                let layers = Arc::make_mut(prefix).by_layer_mut().into_iter().enumerate();
                layers
                    .map(|(layer, tokens)| {
                        (TrainableSite::keys_and_values(layer), GradientSlice::Prefix(tokens))
                    })
                    .collect()
            }
            MethodWeights::Prompt(_) => Vec::new(),
        };
        sums.sort_by_key(|(place, _)| Reverse(*place));
        sums
    }
}

/// Queue of batch turns in order; see [`Gradients::turns`].
#[derive(Debug)]
pub struct ReductionQueue<'g> {
    next: Receiver<(TrainableSite, GradientSlice<'g>)>,
}

impl<'g> Iterator for ReductionQueue<'g> {
    type Item = ReductionTurn<'g>;

    fn next(&mut self) -> Option<ReductionTurn<'g>> {
        let (to, next) = channel();
        let from = std::mem::replace(&mut self.next, next);
        Some(ReductionTurn { from, to, held: None })
    }
}

/// One batch's turn at all sums, one site after the other.
#[derive(Debug)]
pub struct ReductionTurn<'g> {
    /// Receives gradient sums from the preceding batch.
    from: Receiver<(TrainableSite, GradientSlice<'g>)>,
    /// Sends gradient sums to the following batch, if there is one.
    to: Sender<(TrainableSite, GradientSlice<'g>)>,
    held: Option<(TrainableSite, GradientSlice<'g>)>,
}

impl<'g> ReductionTurn<'g> {
    /// Waits for the preceding batch and returns the sums at `place`, where a part of the adapter learns.
    /// Sites must be requested in the order of the reverse pass; skipped sums are passed on unchanged.
    pub(super) fn at(&mut self, place: TrainableSite) -> Result<&mut GradientSlice<'g>, UpstreamFailed> {
        while self.held.as_ref().is_none_or(|(held, _)| *held > place) {
            self.pass_on();
            self.held = Some(self.from.recv().map_err(|_| UpstreamFailed)?);
        }
        let (held, sums) = self.held.as_mut().expect("it was just taken");
        assert!(*held == place, "the way back goes one way, and sums are where something learns");
        Ok(sums)
    }

    /// Passes the held sums to the following batch.
    pub(super) fn pass_on(&mut self) {
        if let Some(sums) = self.held.take() {
            // The last batch has no successor.
            let _ = self.to.send(sums);
        }
    }

    /// Passes all remaining sums on, after the batch has added its gradients.
    pub(super) fn end(mut self) {
        self.pass_on();
        while let Ok(sums) = self.from.recv() {
            let _ = self.to.send(sums);
        }
    }
}

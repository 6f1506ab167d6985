//! Sums that go from batch to batch, place by place.
//!
//! A sum is added up in the order of batches, so that its bits do not depend on who computes them when. Yet a batch need not wait
//! until the one before it is done: all go back through the same places in the same order, and at each of them a batch has its
//! turn as soon as the one before has gone on. What has its turn at a place holds its sums; there is no other way to them. A
//! batch that fails drops what it holds, and those behind it learn that nothing more will come.

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

/// A batch before this one failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpstreamFailed;

/// The sums of what learns at a place.
#[derive(Debug)]
pub(super) enum GradientSlice<'g> {
    /// For low-rank layers.
    LowRank(&'g mut [LoraModule]),
    /// For vectors that scale.
    Scales(&'g mut [ScaleVector]),
    /// For the keys and values of each virtual token, `[2, width]`.
    Prefix(Vec<&'g mut [f32]>),
}

impl<'g> GradientSlice<'g> {
    /// Those for the factors of a low-rank layer.
    pub(super) fn module(&mut self, target: Target) -> &mut LoraModule {
        let Self::LowRank(modules) = self else { unreachable!("gradients are of the adapter's kind") };
        modules.iter_mut().find(|module| module.target == target).expect("a sum for each module")
    }

    /// Those for a vector.
    pub(super) fn vector(&mut self, target: Target) -> &mut [f32] {
        let Self::Scales(vectors) = self else { unreachable!("gradients are of the adapter's kind") };
        let vector = vectors.iter_mut().find(|vector| vector.target == target);
        &mut vector.expect("a sum for each vector").values
    }

    /// Those for the keys and values of each virtual token.
    pub(super) fn tokens(&mut self) -> &mut [&'g mut [f32]] {
        let Self::Prefix(tokens) = self else { unreachable!("gradients are of the adapter's kind") };
        tokens
    }
}

impl Gradients {
    /// The turns of batches that add to these sums, in their order, as many as are asked for.
    pub fn turns(&mut self) -> ReductionQueue<'_> {
        let (to_first, next) = channel();
        for sums in self.by_place() {
            // The receiver is at hand.
            let _ = to_first.send(sums);
        }
        ReductionQueue { next }
    }

    /// The turn of a batch that is alone.
    ///
    /// # Panics
    /// Never: there are always more turns.
    pub fn single_turn(&mut self) -> ReductionTurn<'_> {
        self.turns().next().expect("there are always more")
    }

    /// All sums, in the order of the way back.
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
        };
        sums.sort_by_key(|(place, _)| Reverse(*place));
        sums
    }
}

/// The turns of batches, in their order; see [`Gradients::turns`].
#[derive(Debug)]
pub struct ReductionQueue<'g> {
    /// Where the next batch gets its sums.
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

/// A batch's turn at all sums, one place after the other.
#[derive(Debug)]
pub struct ReductionTurn<'g> {
    /// The batch before.
    from: Receiver<(TrainableSite, GradientSlice<'g>)>,
    /// The batch behind, which there need not be.
    to: Sender<(TrainableSite, GradientSlice<'g>)>,
    held: Option<(TrainableSite, GradientSlice<'g>)>,
}

impl<'g> ReductionTurn<'g> {
    /// The sums at `place`, where something learns, as soon as the batch before has added to them. Places are asked for in the
    /// order of the way back; of those that are left out the sums go on as they are.
    pub(super) fn at(&mut self, place: TrainableSite) -> Result<&mut GradientSlice<'g>, UpstreamFailed> {
        while self.held.as_ref().is_none_or(|(held, _)| *held > place) {
            self.pass_on();
            self.held = Some(self.from.recv().map_err(|_| UpstreamFailed)?);
        }
        let (held, sums) = self.held.as_mut().expect("it was just taken");
        assert!(*held == place, "the way back goes one way, and sums are where something learns");
        Ok(sums)
    }

    /// Hands on what is held: nothing more is added there.
    pub(super) fn pass_on(&mut self) {
        if let Some(sums) = self.held.take() {
            // Nobody may be behind.
            let _ = self.to.send(sums);
        }
    }

    /// Hands on what is left: the batch has added all that it had to.
    pub(super) fn end(mut self) {
        self.pass_on();
        while let Ok(sums) = self.from.recv() {
            let _ = self.to.send(sums);
        }
    }
}

//! Two comparisons with the peer: on the same file, and on its own fastest format.

use anyhow::Result;

use super::setup::Setup;
use crate::{
    measure::{Samples, alternate},
    peer::PeerWeights,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct PeerComparison {
    pub(super) bench: &'static str,
    pub(super) case: String,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    pub(super) rival: &'static str,
    /// Targets on the same file and against the fastest format.
    pub(super) targets: [Option<BenchTarget>; 2],
}

/// Results of the three contestants, in the order of the rounds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ContestantResults<T> {
    pub(super) ours: Vec<T>,
    pub(super) same_file: Vec<T>,
    pub(super) fastest: Vec<T>,
}

impl<T> ContestantResults<T> {
    /// Measures all three in alternation; both closures get the round.
    ///
    /// # Errors
    /// The first failed measurement's.
    pub(super) fn measure<'a>(
        setup: &'a Setup,
        ours: impl FnMut(usize) -> Result<T> + 'a,
        peer: impl Fn(&PeerWeights, usize) -> Result<T> + 'a,
    ) -> Result<Self> {
        let peer = &peer;
        let [ours, same_file, fastest] = alternate(
            setup.config.runs,
            [
                Box::new(ours),
                Box::new(|round| peer(&setup.peer.shipped, round)),
                Box::new(|round| peer(&setup.peer.q4_0, round)),
            ],
        )?;
        Ok(Self { ours, same_file, fastest })
    }

    /// Compares one value of each entry: one row per format of the peer.
    ///
    /// # Errors
    /// If a value is NaN.
    pub(super) fn compare(
        &self,
        setup: &Setup,
        contest: &PeerComparison,
        figure: impl Fn(&T) -> f64,
    ) -> Result<Vec<Comparison>> {
        let ours = Samples::of(&self.ours, &figure)?;
        let rivals = [(&setup.peer.shipped, &self.same_file), (&setup.peer.q4_0, &self.fastest)];
        rivals
            .into_iter()
            .zip(contest.targets)
            .map(|((weights, entries), target)| {
                let samples = Samples::of(entries, &figure)?;
                let rival =
                    PeerSamples { name: contest.rival.to_owned(), format: weights.format.clone(), samples };
                Ok(Comparison {
                    bench: contest.bench,
                    case: contest.case.clone(),
                    unit: contest.unit,
                    better: contest.better,
                    ours: ours.clone(),
                    rival,
                    target,
                })
            })
            .collect()
    }
}

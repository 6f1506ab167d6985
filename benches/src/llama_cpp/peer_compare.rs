//! Ours beside the peer twice: on the same file, and on its own fastest format.

use anyhow::Result;

use super::setup::Setup;
use crate::{
    measure::{Samples, alternate},
    peer::PeerWeights,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// A figure that both sides have.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PeerComparison {
    /// Name of the benchmark.
    pub(super) bench: &'static str,
    /// What exactly is measured.
    pub(super) case: String,
    /// Unit of the figure.
    pub(super) unit: &'static str,
    /// Which side wins.
    pub(super) better: Better,
    /// The peer's program.
    pub(super) rival: &'static str,
    /// What to reach on the same file and against the fastest format.
    pub(super) targets: [Option<BenchTarget>; 2],
}

/// What the three contestants gave, round after round.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ContestantResults<T> {
    /// Ours.
    pub(super) ours: Vec<T>,
    /// The peer on the same file.
    pub(super) same_file: Vec<T>,
    /// The peer on its fastest format.
    pub(super) fastest: Vec<T>,
}

impl<T> ContestantResults<T> {
    /// Measures all three in alternation; both arguments are told the round.
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

    /// One figure of each entry, as `contest` compares it: a row for each of the peer's formats.
    ///
    /// # Errors
    /// If a figure is not a number.
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

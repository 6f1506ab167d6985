//! CaraServe's two models of a batch of adapters (C-12): what a kernel's time is linear in.
//!
//! A kernel that pads every adapter to the batch's largest rank (BGMV) takes `alpha · |S| · max rank + beta`; one that
//! does not (MBGMV) takes `alpha · sum of ranks + beta`. Our kernels never pad, so theirs is the sum.

use super::line::{Line, Sample};

/// What the time is taken to be linear in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankForm {
    /// The number of requests times the largest of their ranks: a padding kernel.
    Max,
    /// The sum of their ranks: a kernel that does not pad.
    Sum,
}

/// A batch: the rank of each request's adapter, and how long the batch took.
#[derive(Debug, Clone, PartialEq)]
pub struct RankBatch {
    /// Ranks, one for each request.
    pub ranks: Vec<u32>,
    /// How long it took.
    pub seconds: f64,
}

impl RankForm {
    /// The work of a batch in this form.
    #[must_use]
    pub fn work(self, ranks: &[u32]) -> f64 {
        match self {
            Self::Max => ranks.len() as f64 * f64::from(ranks.iter().copied().max().unwrap_or(0)),
            Self::Sum => ranks.iter().map(|&rank| f64::from(rank)).sum(),
        }
    }

    /// Fits this form to batches; `None` if there are none.
    #[must_use]
    pub fn fit(self, batches: &[RankBatch]) -> Option<Line> {
        Line::least_squares(&self.samples(batches))
    }

    /// How well `line`, fitted to other batches, explains these: 0 to 1.
    #[must_use]
    pub fn r_squared(self, line: Line, batches: &[RankBatch]) -> f64 {
        line.r_squared(&self.samples(batches))
    }

    fn samples(self, batches: &[RankBatch]) -> Vec<Sample> {
        batches.iter().map(|batch| Sample::new(self.work(&batch.ranks), batch.seconds)).collect()
    }
}

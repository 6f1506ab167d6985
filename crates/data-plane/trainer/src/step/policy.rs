//! Steps on the adapter's own answers.

use super::{
    Direction, SequenceSample, StepResult, TrainState, TrainStepError, microbatch_pool::BorrowedBase,
};
use crate::{
    loss::{Loss, PolicyLoss},
    optimizer::Hyperparameters,
};

impl<B: BorrowedBase> TrainState<B> {
    /// Makes a step on sampled answers, whose weights are advantages. Also returns the sum over tokens of the
    /// sampler's log-probability minus that of the trainer, which is 0 if both compute with the same bits.
    ///
    /// # Errors
    /// Fails as [`learn`](Self::learn) does.
    pub fn reinforce(
        &mut self,
        answers: &[SequenceSample],
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<(StepResult, f64), TrainStepError<B::Error>> {
        self.forget();
        let gathered =
            self.gather(answers, Loss::Policy(PolicyLoss::ImportanceSampling), Direction::Backward)?;
        let grad_norm = self.step_gathered(hyper, Some(max_norm))?;
        let metric = |name| gathered.metrics.get(name).copied().unwrap_or_default();
        let step = StepResult { loss: metric("loss:sum"), grad_norm, rows: gathered.logprobs.len() };
        Ok((step, metric("sampling_minus_learned:sum")))
    }
}

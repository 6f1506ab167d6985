//! The learning-rate finder (Smith 2017, section 3.3): the loss while the learning rate rises exponentially.

use control_protocol::training::{LearningRateCurve, LearningRatePoint, StepReport, TrainingEvent};

use super::{JobError, JobListener, JobThroughput, TrainingJob};
use crate::{
    batch_sampler::Batches,
    step::{TrainState, TrainStepError, microbatch_pool::BorrowedBase},
};

/// First and last learning rate.
const RATES: (f64, f64) = (1e-6, 1e-1);

/// Number of rates, if the job has no maximum of steps.
const USUAL_RATES: u64 = 60;

/// Share of the earlier losses in the smoothed loss of a step.
const SMOOTHING: f64 = 0.9;

/// The sweep ends when the smoothed loss exceeds the lowest by this multiple of the lowest.
const DIVERGED: f64 = 3.0;

/// Divisor of the number of points that gives the number of those skipped, which average few losses.
const SKIPPED_SHARE: usize = 10;

impl TrainingJob {
    /// Makes a step for each of a series of rising rates, until the loss diverges. The adapter of `learning`
    /// is of no use afterwards. Returns `None` if the listener stopped the sweep.
    ///
    /// # Errors
    /// Fails if the executor is gone, or not a single loss is a number.
    pub fn find_learning_rate<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        listener: &mut dyn JobListener,
    ) -> Result<Option<LearningRateCurve>, JobError<B::Error>> {
        let steps = self.plan.max_steps.unwrap_or(USUAL_RATES);
        let batches = Batches::new(self.course.learned.len(), self.plan.batch_size, u64::MAX, self.plan.seed);
        let (mut throughput, mut sweep) = (JobThroughput::at(0), Sweep::default());
        for (number, batch) in (0..steps).zip(batches) {
            if listener.wants_stop() {
                return Ok(None);
            }
            let learning_rate = rate(number, steps);
            let outcome = match self.step(learning, &batch, learning_rate) {
                // The rate before was too high.
                Err(TrainStepError::NotANumber { .. }) if number > 0 => break,
                outcome => outcome?,
            };
            sweep.add(learning_rate, outcome.loss);
            listener.hear(&TrainingEvent::Step(StepReport {
                learning_rate,
                lines: self.course.learned.lines(&batch),
                ..throughput.report(number + 1, steps, outcome)
            }))?;
            if sweep.has_diverged() {
                break;
            }
        }
        Ok(Some(sweep.curve()))
    }
}

/// Returns rate `number` of `count`, each of which is the same multiple of the one before.
fn rate(number: u64, count: u64) -> f64 {
    let (first, last) = RATES;
    first * (last / first).powf(number as f64 / (count.max(2) - 1) as f64)
}

/// Losses by learning rate.
#[derive(Debug, Default)]
struct Sweep {
    points: Vec<LearningRatePoint>,
    /// Exponential average of the losses, which begins at 0.
    average: f64,
    /// Weight of all losses in the average.
    weight: f64,
}

impl Sweep {
    fn add(&mut self, learning_rate: f64, loss: f64) {
        self.average = SMOOTHING * self.average + (1.0 - SMOOTHING) * loss;
        self.weight = SMOOTHING * self.weight + (1.0 - SMOOTHING);
        let smoothed_loss = self.average / self.weight;
        self.points.push(LearningRatePoint { learning_rate, loss, smoothed_loss });
    }

    /// Returns the point with the lowest smoothed loss.
    fn lowest(&self) -> Option<&LearningRatePoint> {
        self.points.iter().min_by(|one, other| one.smoothed_loss.total_cmp(&other.smoothed_loss))
    }

    fn has_diverged(&self) -> bool {
        let (last, lowest) = (self.points.last(), self.lowest());
        last.zip(lowest).is_some_and(|(last, lowest)| {
            last.smoothed_loss > lowest.smoothed_loss + DIVERGED * lowest.smoothed_loss.abs()
        })
    }

    /// Returns the rate at which the smoothed loss falls fastest, if it falls.
    fn steepest(&self) -> Option<f64> {
        let falls = self.points.windows(3).skip(self.points.len() / SKIPPED_SHARE);
        let falls =
            falls.map(|around| (around[2].smoothed_loss - around[0].smoothed_loss, around[1].learning_rate));
        let steepest = falls.min_by(|one, other| one.0.total_cmp(&other.0));
        steepest.filter(|(change, _)| *change < 0.0).map(|(_, rate)| rate)
    }

    fn curve(self) -> LearningRateCurve {
        let steepest = self.steepest();
        let tenth_of_lowest = steepest.and_then(|_| self.lowest()).map(|point| point.learning_rate / 10.0);
        LearningRateCurve { steepest, tenth_of_lowest, points: self.points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(losses: impl ExactSizeIterator<Item = f64>) -> Sweep {
        let (mut sweep, count) = (Sweep::default(), losses.len() as u64);
        for (number, loss) in (0..).zip(losses) {
            sweep.add(rate(number, count), loss);
        }
        sweep
    }

    #[test]
    fn rates_rise_from_the_first_to_the_last_by_one_factor() {
        let rates: Vec<f64> = (0..6).map(|number| rate(number, 6)).collect();
        for (rate, expected) in rates.iter().zip([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]) {
            assert!((rate / expected - 1.0).abs() < 1e-12, "{rates:?}");
        }
        assert_eq!(rate(0, 1), 1e-6);
    }

    #[test]
    fn the_rate_of_the_steepest_descent_lies_before_that_of_the_lowest_loss() {
        // Flat, then a slope whose middle is steepest at number 30, then up.
        let loss = |number: i32| match number {
            45.. => 1.0 + f64::from(number - 45),
            _ => 2.0 - 1.0 / (1.0 + f64::from(30 - number).exp()),
        };
        let sweep = sweep((0..60).map(loss));
        let curve = sweep.curve();
        let steepest = curve.steepest.unwrap();
        assert!((rate(29, 60)..=rate(33, 60)).contains(&steepest), "{curve:?}");
        let lowest = 10.0 * curve.tenth_of_lowest.unwrap();
        assert!((rate(42, 60)..=rate(48, 60)).contains(&lowest), "{curve:?}");
    }

    #[test]
    fn a_loss_that_only_rises_suggests_nothing_and_one_that_explodes_ends_the_sweep() {
        let rising = sweep((0..20).map(f64::from));
        assert!(rising.has_diverged());
        let curve = rising.curve();
        assert_eq!((curve.steepest, curve.tenth_of_lowest), (None, None));
        assert!(!sweep([2.0, 1.0, 2.5].into_iter()).has_diverged());
        // A negative loss, which negative weights give, diverges upwards too.
        assert!(!sweep([-2.0, -2.1].into_iter()).has_diverged());
        assert_eq!(sweep([1.0].into_iter()).curve().steepest, None);
    }

    #[test]
    fn the_first_smoothed_loss_is_the_first_loss() {
        let sweep = sweep([3.0, 1.0].into_iter());
        assert_eq!(sweep.points[0].smoothed_loss, 3.0);
        // (0.9 * 3 + 1) / 1.9
        assert!((sweep.points[1].smoothed_loss - 3.7 / 1.9).abs() < 1e-12, "{sweep:?}");
    }
}

//! Statistics and alternation.
//!
//! A shared machine's speed drifts by a third within an hour, so no single value means anything. Contestants
//! alternate within each round, in reverse order every second round: a drift that is linear over two rounds
//! cancels from their ratio.

use anyhow::{Result, ensure};

/// Measurements of one quantity: at least one, all finite.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Takes measurements in any order.
    ///
    /// # Errors
    /// If there are none, or one is not finite.
    pub(crate) fn new(mut values: Vec<f64>) -> Result<Self> {
        ensure!(!values.is_empty(), "nothing was measured; ask for at least one run");
        ensure!(
            values.iter().all(|v| v.is_finite()),
            "a measurement is not a number: {values:?}; measure again"
        );
        values.sort_by(f64::total_cmp);
        Ok(Self(values))
    }

    /// Takes one value from each of `items`.
    ///
    /// # Errors
    /// As [`Samples::new`].
    pub(crate) fn of<T>(items: &[T], figure: impl Fn(&T) -> f64) -> Result<Self> {
        Self::new(items.iter().map(figure).collect())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The middle value, or the mean of the middle two.
    pub(crate) fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        if self.0.len().is_multiple_of(2) {
            f64::midpoint(self.0[middle - 1], self.0[middle])
        } else {
            self.0[middle]
        }
    }

    /// Returns the smallest value that a `share` of all values (0 to 1) does not exceed.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let rank = (self.0.len() as f64 * share).ceil() as usize;
        self.0[rank.clamp(1, self.0.len()) - 1]
    }

    pub(crate) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    pub(crate) fn values(&self) -> &[f64] {
        &self.0
    }

    pub(crate) fn range(&self) -> [f64; 2] {
        [self.0[0], self.0[self.0.len() - 1]]
    }

    /// Width of the range as a share of the median; 0 if the median is 0.
    pub(crate) fn spread(&self) -> f64 {
        let [least, greatest] = self.range();
        if self.median() == 0.0 { 0.0 } else { (greatest - least) / self.median() }
    }
}

/// Repeatable measurement; its argument is the round, from 0.
pub(crate) type Contestant<'a, T> = Box<dyn FnMut(usize) -> Result<T> + 'a>;

/// Measures every contestant `runs` times in alternation and returns their results in the order of the
/// rounds.
///
/// # Errors
/// The first failed measurement's.
pub(crate) fn alternate<T, const N: usize>(
    runs: usize,
    mut contestants: [Contestant<'_, T>; N],
) -> Result<[Vec<T>; N]> {
    let mut results = std::array::from_fn(|_| Vec::with_capacity(runs));
    for round in 0..runs {
        for turn in 0..N {
            let who = if round.is_multiple_of(2) { turn } else { N - 1 - turn };
            results[who].push(contestants[who](round)?);
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(Samples::new(vec![9.0, 1.0, 4.0]).unwrap().median(), 4.0);
        assert_eq!(Samples::new(vec![9.0, 1.0, 4.0, 6.0]).unwrap().median(), 5.0);
    }

    #[test]
    fn the_spread_is_the_range_over_the_median() {
        let samples = Samples::new(vec![11.0, 9.0, 10.0]).unwrap();
        assert_eq!(samples.range(), [9.0, 11.0]);
        assert_eq!(samples.spread(), 0.2);
        assert_eq!(Samples::new(vec![0.0]).unwrap().spread(), 0.0);
    }

    #[test]
    fn a_quantile_leaves_its_share_below() {
        let samples = Samples::new((1..=200).map(f64::from).collect()).unwrap();
        assert_eq!(
            (samples.quantile(0.99), samples.quantile(1.0), samples.quantile(0.0)),
            (198.0, 200.0, 1.0)
        );
        assert_eq!(samples.mean(), 100.5);
    }

    #[test]
    fn no_measurement_and_no_number_are_refused() {
        assert!(Samples::new(vec![]).is_err());
        assert!(Samples::new(vec![1.0, f64::NAN]).is_err());
    }

    #[test]
    fn contestants_take_turns_and_change_the_order_each_round() {
        let order = RefCell::new(String::new());
        let contestant = |name: char| -> Contestant<'_, char> {
            let order = &order;
            Box::new(move |_| {
                order.borrow_mut().push(name);
                Ok(name)
            })
        };
        let results = alternate(3, [contestant('a'), contestant('b'), contestant('c')]).unwrap();
        assert_eq!(results, [vec!['a'; 3], vec!['b'; 3], vec!['c'; 3]]);
        assert_eq!(order.into_inner(), "abccbaabc");
    }
}

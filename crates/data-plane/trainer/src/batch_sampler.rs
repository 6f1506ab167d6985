//! Selection of the examples of each step and of the held-out ones, by shuffles that a seed determines.
//!
//! Every epoch has its own permutation, drawn with the key (seed, epoch). No state passes from step to step,
//! so a run resumes at any step as if it had never stopped.

use scheduling::random::Rng;

/// Key of the permutation whose end is held out; no run has so many epochs.
const HELD_OUT: u64 = u64::MAX;

/// Returns the permutation of 0 to `len - 1` for `epoch` of `seed` (Fisher, Yates 1938; Durstenfeld 1964).
#[must_use]
pub fn permutation(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let rng = Rng::keyed(Rng::seeded(seed).bits(epoch));
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, below(last + 1, rng.bits(last as u64)));
    }
    order
}

/// Returns a number below `bound`: the upper half of a product. Of 2^64 draws some get one more.
#[expect(clippy::cast_possible_truncation, reason = "the upper half is below the bound")]
fn below(bound: usize, bits: u64) -> usize {
    ((bound as u128 * u128::from(bits)) >> 64) as usize
}

/// Splits 0 to `len - 1` into sorted training and held-out numbers; `percent` are held out, rounded down.
///
/// # Panics
/// Panics if `percent` is above 100.
#[must_use]
pub fn split(len: usize, percent: usize, seed: u64) -> (Vec<usize>, Vec<usize>) {
    assert!(percent <= 100, "at most all of them");
    let mut learned = permutation(len, seed, HELD_OUT);
    let mut held_out = learned.split_off(len - len * percent / 100);
    learned.sort_unstable();
    held_out.sort_unstable();
    (learned, held_out)
}

/// Iterator over the batches of a run.
#[derive(Debug, Clone)]
pub struct Batches {
    len: usize,
    batch: usize,
    epochs: u64,
    seed: u64,
    /// Next step, from 0.
    step: u64,
    /// Permutation of the current epoch.
    order: Option<(u64, Vec<usize>)>,
}

impl Batches {
    /// Makes batches of `batch` examples out of `len`, `epochs` times; an epoch's last batch may be smaller.
    ///
    /// # Panics
    /// Panics if `batch` is 0.
    #[must_use]
    pub fn new(len: usize, batch: usize, epochs: u64, seed: u64) -> Self {
        assert!(batch > 0, "a batch has an example");
        Self { len, batch, epochs, seed, step: 0, order: None }
    }

    /// Skips the steps before `step`.
    #[must_use]
    pub fn starting_at(self, step: u64) -> Self {
        Self { step, ..self }
    }

    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.len.div_ceil(self.batch) as u64
    }

    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps_per_epoch().saturating_mul(self.epochs)
    }

    /// Returns the number of the next step, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }
}

impl Iterator for Batches {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        if self.step >= self.steps() {
            return None;
        }
        let (epoch, at) = (self.step / self.steps_per_epoch(), self.step % self.steps_per_epoch());
        self.step += 1;
        let (len, seed) = (self.len, self.seed);
        let known = self.order.take().filter(|(known, _)| *known == epoch);
        let (_, order) = self.order.insert(known.unwrap_or_else(|| (epoch, permutation(len, seed, epoch))));
        order.chunks(self.batch).nth(usize::try_from(at).ok()?).map(<[usize]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_permutation_has_every_number_once(len in 0usize..500, seed: u64, epoch: u64) {
            let mut order = permutation(len, seed, epoch);
            order.sort_unstable();
            prop_assert!(order.into_iter().eq(0..len));
        }

        #[test]
        fn every_example_is_learned_or_held_out(len in 0usize..500, percent in 0usize..=100, seed: u64) {
            let (learned, held_out) = split(len, percent, seed);
            prop_assert_eq!(held_out.len(), len * percent / 100);
            let mut all = [learned, held_out].concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..len));
        }

        #[test]
        fn a_training_goes_on_at_any_step(len in 0usize..40, batch in 1usize..9, epochs in 0u64..4, seed: u64, step in 0u64..50) {
            let batches = Batches::new(len, batch, epochs, seed);
            let all: Vec<Vec<usize>> = batches.clone().collect();
            prop_assert_eq!(all.len() as u64, batches.steps());
            let skipped = usize::try_from(step).unwrap().min(all.len());
            prop_assert_eq!(&batches.starting_at(step).collect::<Vec<_>>(), &all[skipped..]);
            for epoch in all.chunks(len.div_ceil(batch).max(1)) {
                let mut seen = epoch.concat();
                seen.sort_unstable();
                prop_assert!(seen.into_iter().eq(0..len));
            }
        }
    }

    #[test]
    fn seeds_and_epochs_shuffle_each_in_its_own_way_and_always_the_same() {
        assert_eq!(permutation(8, 7, 0), permutation(8, 7, 0));
        let orders: std::collections::BTreeSet<Vec<usize>> =
            (0..10).flat_map(|seed| (0..10).map(move |epoch| permutation(20, seed, epoch))).collect();
        assert_eq!(orders.len(), 100);
        // Computed independently from the published generator: the order is part of the result.
        assert_eq!(permutation(8, 7, 0), [2, 0, 4, 6, 7, 1, 3, 5]);
    }

    #[test]
    fn every_place_gets_every_number_equally_often() {
        let mut counts = [[0u32; 6]; 6];
        for seed in 0..6000 {
            for (place, number) in permutation(6, seed, 3).into_iter().enumerate() {
                counts[place][number] += 1;
            }
        }
        // A thousand each, plus or minus six standard deviations.
        assert!(counts.iter().flatten().all(|count| (800..1200).contains(count)), "{counts:?}");
    }
}

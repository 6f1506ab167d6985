//! Random number streams, one for each purpose, so that a change of one does not shift the numbers of
//! another.

use scheduling::random::Rng;

/// Random numbers of one purpose, in order.
#[derive(Debug, Clone)]
pub struct RandomStream {
    rng: Rng,
    drawn: u64,
}

impl RandomStream {
    /// Returns the stream of a purpose and of one index (an adapter, a conversation).
    #[must_use]
    pub fn new(seed: u64, purpose: &str, number: u64) -> Self {
        let named = purpose.bytes().fold(seed, |key, byte| Rng::seeded(key).bits(u64::from(byte)));
        Self { rng: Rng::seeded(Rng::seeded(named).bits(number)), drawn: 0 }
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        self.rng.bits(self.drawn)
    }

    /// Returns a uniform number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        self.rng.uniform(self.drawn)
    }

    /// Returns an integer in `0..end`; `end` is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.uniform() * end as f64) as usize).min(end - 1)
    }

    /// Returns a normal number with mean 0 and deviation 1 (Box and Muller; the second number is dropped
    /// for simplicity).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Returns a number whose logarithm has this mean and deviation.
    pub fn lognormal(&mut self, mu: f64, sigma: f64) -> f64 {
        (mu + sigma * self.normal()).exp()
    }

    /// Returns an exponential number with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    /// Returns a gamma number with mean 1 and this coefficient of variation.
    pub fn gamma(&mut self, cv: f64) -> f64 {
        let shape = 1.0 / (cv * cv);
        self.gamma_of(shape) / shape
    }

    /// Returns a size-biased gamma number: the length of the gap that a random time falls into.
    pub fn long_gamma(&mut self, cv: f64) -> f64 {
        let shape = 1.0 / (cv * cv);
        self.gamma_of(shape + 1.0) / shape
    }

    /// Returns a gamma number of this shape and scale 1 (Marsaglia and Tsang 2000).
    fn gamma_of(&mut self, shape: f64) -> f64 {
        // A shape below 1 is derived from the shape above it.
        let boost = if shape < 1.0 { (1.0 - self.uniform()).powf(1.0 / shape) } else { 1.0 };
        let d = if shape < 1.0 { shape + 1.0 } else { shape } - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            let u = 1.0 - self.uniform();
            if v > 0.0 && u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return boost * d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(mut draw: impl FnMut() -> f64) -> (f64, f64) {
        let all: Vec<f64> = (0..200_000).map(|_| draw()).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn draws_have_the_moments_of_their_laws() {
        let mut stream = RandomStream::new(1, "moments", 0);
        for cv in [0.3, 1.0, 2.0, 4.0] {
            let (mean, found) = moments(|| stream.gamma(cv));
            assert!((mean - 1.0).abs() < 0.05 && (found / cv - 1.0).abs() < 0.05, "{cv}: {mean} {found}");
        }
        // The expected value is the mean of x², divided by that of x.
        for cv in [0.3, 1.0, 4.0] {
            let (mean, _) = moments(|| stream.long_gamma(cv));
            assert!((mean / (1.0 + cv * cv) - 1.0).abs() < 0.05, "{cv}: {mean}");
        }
        let (mean, cv) = moments(|| stream.exponential());
        assert!((mean - 1.0).abs() < 0.01 && (cv - 1.0).abs() < 0.01);
        let (mean, _) = moments(|| stream.lognormal(1.0, 0.5));
        assert!((mean / 1.125_f64.exp() - 1.0).abs() < 0.01);
    }

    #[test]
    fn streams_differ_by_seed_purpose_and_number() {
        let first = |seed, purpose, number| RandomStream::new(seed, purpose, number).bits();
        let all = [first(1, "a", 0), first(2, "a", 0), first(1, "b", 0), first(1, "a", 1)];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
        assert_eq!(first(1, "a", 0), all[0]);
    }
}

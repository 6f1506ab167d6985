//! Streams of random numbers, one for each purpose: what one workload adds changes nothing in another's numbers.

use scheduling::random::Rng;

/// Numbers of one purpose, in order.
#[derive(Debug, Clone)]
pub struct RandomStream {
    rng: Rng,
    drawn: u64,
}

impl RandomStream {
    /// The stream of a purpose, and of one of its kind (an adapter, a conversation).
    #[must_use]
    pub fn new(seed: u64, purpose: &str, number: u64) -> Self {
        let named = purpose.bytes().fold(seed, |key, byte| Rng::seeded(key).bits(u64::from(byte)));
        Self { rng: Rng::seeded(Rng::seeded(named).bits(number)), drawn: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        self.rng.bits(self.drawn)
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        self.rng.uniform(self.drawn)
    }

    /// A whole number in `0..end`; `end` is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.uniform() * end as f64) as usize).min(end - 1)
    }

    /// Of mean 0 and deviation 1 (Box and Muller; the second number is not kept, so that streams stay simple).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Whose logarithm has this mean and deviation.
    pub fn lognormal(&mut self, mu: f64, sigma: f64) -> f64 {
        (mu + sigma * self.normal()).exp()
    }

    /// Of mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    /// Of mean 1 and this coefficient of variation.
    pub fn gamma(&mut self, cv: f64) -> f64 {
        let shape = 1.0 / (cv * cv);
        self.gamma_of(shape) / shape
    }

    /// The same law where each value is drawn as much more often as it is larger: of gaps, the one that a moment falls into.
    pub fn long_gamma(&mut self, cv: f64) -> f64 {
        let shape = 1.0 / (cv * cv);
        self.gamma_of(shape + 1.0) / shape
    }

    /// Of this shape, and scale 1 (Marsaglia and Tsang 2000).
    fn gamma_of(&mut self, shape: f64) -> f64 {
        // Below 1 by way of the shape above it.
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
        // The mean of x², over that of x.
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

//! Exponentials of a row of logits: weights for drawing, and the log-softmax.
//!
//! A vocabulary has 50,000 to 250,000 tokens, and every drawn token needs an exponential of each. The C
//! library's `expf` is a call per element. The polynomial below is straight-line arithmetic that the compiler
//! vectorizes, with the same bits on every machine.

/// Log-probability reported for tokens that cannot be chosen (JSON has no minus infinity; OpenAI's value).
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// Number of weights per partial sum; partial sums make drawing cheap.
const BLOCK: usize = 1024;
/// Independent sums and maxima, for vector instructions. The number is part of the definition of a sum.
const LANES: usize = 16;

/// Returns `e^x` for `x <= 0`, relative error below 3e-7; 0 below -87, where results would be subnormal.
#[inline]
fn exp_of_negative(x: f32) -> f32 {
    /// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// ln 2 in two parts, so that `x - n ln 2` is exact to the last bit (Cody and Waite).
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.max(-87.0);
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor series to degree 6 by Horner's rule: |r| <= ln(2)/2, the next term is below 1.3e-7.
    let mut p = 1.0 / 720.0;
    for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    // The low bits of `shifted` hold n in two's complement; moved into the exponent they scale by 2^n.
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.0 { 0.0 } else { scaled }
}

/// Replaces NaN by minus infinity, and infinity by the largest finite value.
#[inline]
pub(super) fn clean(logit: f32) -> f32 {
    if logit.is_nan() {
        f32::NEG_INFINITY
    } else if logit > f32::MAX {
        f32::MAX
    } else {
        logit
    }
}

/// Returns the largest of the cleaned `logits`, or minus infinity for none.
fn largest(logits: &[f32]) -> f32 {
    // `f32::max` orders its arguments as no vector instruction does; a plain comparison is one instruction.
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(clean(logit), *lane);
        }
    }
    let rest = chunks.remainder().iter().map(|&logit| clean(logit));
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, larger)
}

/// Cleans `logits` and returns the index of the largest one, the lowest index on ties.
pub(super) fn clean_and_find_best(logits: &mut [f32]) -> u32 {
    let max = largest(logits);
    for logit in logits.iter_mut() {
        *logit = clean(*logit);
    }
    let best = logits.iter().position(|&logit| logit == max).unwrap_or(0);
    u32::try_from(best).unwrap_or(u32::MAX)
}

/// Returns the sum of `weight` over `values`, by lanes first, as a vector sum of fixed order.
fn block_sum(values: &[f32], weight: impl Fn(f32) -> f32) -> f64 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += weight(value);
        }
    }
    let rest: f64 = chunks.remainder().iter().map(|&value| f64::from(weight(value))).sum();
    lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>() + rest
}

/// Maps logits to unnormalized probabilities and back: `exp((logit - max) / temperature)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    max: f32,
    temperature: f32,
}

impl Scale {
    /// Returns the scale of clean `logits`, the largest of which is at `best`.
    pub(super) fn new(logits: &[f32], best: u32, temperature: f32) -> Self {
        // If all logits are minus infinity, every weight is 0 and `best` is chosen.
        let max = logits.get(best as usize).copied().filter(|max| max.is_finite());
        Self { max: max.unwrap_or(0.0), temperature }
    }

    /// Returns the weight of a logit, 1 for the largest.
    #[inline]
    pub(super) fn weight(self, logit: f32) -> f32 {
        exp_of_negative((logit - self.max) / self.temperature)
    }

    /// Returns the smallest logit with at least this weight, up to rounding.
    pub(super) fn logit_of(self, weight: f32) -> f32 {
        self.max + weight.ln() * self.temperature
    }
}

#[derive(Debug)]
pub(super) struct TokenWeights(Vec<f32>);

impl TokenWeights {
    pub(super) fn new(logits: &[f32], scale: Scale) -> Self {
        Self(logits.iter().map(|&logit| scale.weight(logit)).collect())
    }

    pub(super) fn total(&self) -> f64 {
        self.total_at_least(0.0)
    }

    /// Returns the sum of the weights that are at least `bar`.
    pub(super) fn total_at_least(&self, bar: f32) -> f64 {
        let counted = |weight| if weight >= bar { weight } else { 0.0 };
        self.0.chunks(BLOCK).map(|block| block_sum(block, counted)).sum()
    }

    /// Returns the token at `draw` (in [0, 1)) of the distribution, or `None` if all weights are zero.
    pub(super) fn pick(&self, draw: f64) -> Option<u32> {
        let sums: Vec<f64> = self.0.chunks(BLOCK).map(|block| block_sum(block, |weight| weight)).collect();
        let mut rest = draw * sums.iter().sum::<f64>();
        // Rounding may leave `rest` just beyond the end; then the last block with weight is chosen.
        let last = sums.iter().rposition(|&sum| sum > 0.0)?;
        let mut block = 0;
        while block < last && rest >= sums[block] {
            rest -= sums[block];
            block += 1;
        }
        let start = block * BLOCK;
        let mut chosen = None;
        for (offset, &weight) in self.0[start..].iter().take(BLOCK).enumerate() {
            let weight = f64::from(weight);
            if weight > 0.0 {
                chosen = u32::try_from(start + offset).ok();
                if rest < weight {
                    break;
                }
                rest -= weight;
            }
        }
        chosen
    }
}

/// Log-softmax of a row of logits, clean or not.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogSoftmax {
    max: f32,
    log_sum: f64,
}

impl LogSoftmax {
    pub(super) fn new(logits: &[f32]) -> Self {
        let max = largest(logits);
        let weight = |logit| exp_of_negative(clean(logit) - max);
        let sum: f64 = logits.chunks(BLOCK).map(|block| block_sum(block, weight)).sum();
        Self { max, log_sum: sum.ln() }
    }

    #[expect(clippy::cast_possible_truncation, reason = "it is taken from logits of single precision")]
    pub(super) fn log_sum(&self) -> f32 {
        (f64::from(self.max) + self.log_sum) as f32
    }

    /// Returns the natural logarithm of the probability, at least [`LOGPROB_FLOOR`].
    #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is what is asked")]
    pub(super) fn of(&self, logit: f32) -> f32 {
        let value = (f64::from(clean(logit)) - f64::from(self.max) - self.log_sum) as f32;
        // `max` also replaces the NaN of a row without finite logits by the floor.
        value.max(LOGPROB_FLOOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_agrees_with_the_librarys() {
        for step in 0..=87_000 {
            #[expect(clippy::cast_precision_loss, reason = "small integers")]
            let x = -(step as f32) / 1000.0;
            let (got, want) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 3e-7 * want, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(-87.5), 0.0);
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn the_last_token_with_weight_is_picked_at_the_end_of_the_distribution() {
        let mut weights = TokenWeights(vec![0.0; 3 * BLOCK]);
        assert_eq!(weights.pick(0.5), None);
        weights.0[5] = 1.0;
        weights.0[BLOCK + 7] = 1.0;
        assert_eq!(weights.pick(0.0), Some(5));
        assert_eq!(weights.pick(0.49), Some(5));
        assert_eq!(weights.pick(0.51), Some(1031));
        assert_eq!(weights.pick(1.0 - f64::EPSILON / 2.0), Some(1031));
    }

    #[test]
    fn the_largest_is_found_wherever_it_is() {
        for length in 1..70 {
            for at in 0..length {
                let mut logits = vec![-1.0; length];
                logits[at] = 2.0;
                if length > 1 {
                    logits[(at + 1) % length] = f32::NAN;
                }
                assert_eq!(clean_and_find_best(&mut logits) as usize, at);
            }
        }
    }
}

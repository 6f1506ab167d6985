//! Frequencies of the rotary embedding, and the angles of a batch's positions.

use std::{f32::consts::TAU, f64, ops::Range};

use crate::shape::config::{AttentionReach, ModelConfig, Rope, RopeScaling};

/// Rotary frequencies of a model in radians per position, one for each pair of rotated features.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    global: Vec<f32>,
    /// Frequencies of layers with a window, if they have their own.
    local: Option<Vec<f32>>,
    /// Factor of cosines and sines.
    magnitude: f32,
}

impl RopeTable {
    /// Computes the frequencies `theta^(-2i / rotary_dim)`, scaled as the model requires.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let of = |rope| frequencies(rope, config.rotary_dim());
        let magnitude = config.traits.rotary_magnitude.unwrap_or(1.0);
        Self { global: of(&config.rope), local: config.traits.local_rope.as_ref().map(of), magnitude }
    }

    /// Returns the factor that multiplies cosines and sines (transformers' `attention_factor`), 1 by default.
    #[must_use]
    pub fn magnitude(&self) -> f32 {
        self.magnitude
    }

    /// Returns the origin of a layer's keys with this `bias`, `[kv_heads, head_dim]`: the bias in columns
    /// that rotation hardly moves within the model's context, zero in all others.
    #[must_use]
    pub fn key_origin(&self, config: &ModelConfig, layer: usize, mut bias: Vec<f32>) -> Vec<f32> {
        let frequencies = self.frequencies(config.reach(layer));
        for head in bias.chunks_exact_mut(config.head_dim) {
            for (column, x) in head.iter_mut().enumerate().take(2 * frequencies.len()) {
                let turned = frequencies[column % frequencies.len()] * config.context_length as f32;
                // Beyond a radian, a rotated bias is no nearer to its origin than to zero.
                *x *= if turned < 1.0 { self.magnitude } else { 0.0 };
            }
        }
        bias
    }

    /// Returns radians per position for layers of this reach, `[rotary_dim / 2]`.
    #[must_use]
    pub fn frequencies(&self, reach: AttentionReach) -> &[f32] {
        self.local.as_ref().filter(|_| reach == AttentionReach::Local).unwrap_or(&self.global)
    }
}

fn frequencies(rope: &Rope, rotary_dim: usize) -> Vec<f32> {
    let base = |i: usize| 1.0 / rope.theta.powf(2.0 * i as f32 / rotary_dim as f32);
    (0..rotary_dim / 2).map(|i| scaled(base(i), i, rope, rotary_dim)).collect()
}

fn scaled(frequency: f32, index: usize, rope: &Rope, rotary_dim: usize) -> f32 {
    match &rope.scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Factors(divisors) => frequency / divisors.get(index).copied().unwrap_or(1.0),
        RopeScaling::Yarn { factor, .. } => {
            let divided = yarn_ramp(rope, rotary_dim, index);
            frequency / factor * divided + frequency * (1.0 - divided)
        }
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let turns = original_context * frequency / TAU;
            if turns < low_freq_factor {
                frequency / factor
            } else if turns > high_freq_factor {
                frequency
            } else {
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

/// Returns the share of the divided frequency of feature pair `index`, 0 to 1 (YaRN, section 3.2).
fn yarn_ramp(rope: &Rope, rotary_dim: usize, index: usize) -> f32 {
    let RopeScaling::Yarn { beta_fast, beta_slow, original_context, truncate, .. } = rope.scaling else {
        return 0.0;
    };
    let dim = rotary_dim as f64;
    // The feature pair that turns this often within the original context.
    let pair = |turns: f32| {
        let wavelength = f64::from(original_context) / (f64::from(turns) * f64::consts::TAU);
        dim * wavelength.ln() / (2.0 * f64::from(rope.theta).ln())
    };
    let (mut first, mut last) = (pair(beta_fast), pair(beta_slow));
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    (first, last) = (first.max(0.0), last.min(dim - 1.0));
    if first == last {
        // A ramp of one step, as in transformers.
        last += 0.001;
    }
    (((index as f64 - first) / (last - first)) as f32).clamp(0.0, 1.0)
}

/// Returns YaRN's factor of rotated features for files that do not state it (section 3.4; transformers'
/// `attention_factor`).
#[must_use]
pub fn yarn_magnitude(factor: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
}

/// Cosines and sines for the rows of a batch.
#[derive(Debug, Default)]
pub struct Angles {
    global: RotaryAngles,
    /// Angles of layers with a window; empty if all layers share the global ones.
    local: RotaryAngles,
}

/// Cosines and sines, `[rows, rotary_dim / 2]`.
#[derive(Debug, Default)]
struct RotaryAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryAngles {
    fn clear(&mut self) {
        self.cos.clear();
        self.sin.clear();
    }

    fn extend(&mut self, frequencies: &[f32], magnitude: f32, positions: Range<usize>) {
        for position in positions {
            // Positions are far below 2^24, up to which f32 is exact.
            let position = position as f32;
            for frequency in frequencies {
                let (sin, cos) = (position * frequency).sin_cos();
                self.cos.push(cos * magnitude);
                self.sin.push(sin * magnitude);
            }
        }
    }
}

impl Angles {
    /// Removes all rows, keeping the memory.
    pub fn clear(&mut self) {
        self.global.clear();
        self.local.clear();
    }

    /// Adds a row for each position.
    pub fn extend(&mut self, table: &RopeTable, positions: Range<usize>) {
        if let Some(frequencies) = &table.local {
            self.local.extend(frequencies, table.magnitude, positions.clone());
        }
        self.global.extend(&table.global, table.magnitude, positions);
    }

    /// Returns cosines and sines for layers of this reach.
    #[must_use]
    pub fn tables(&self, reach: AttentionReach) -> (&[f32], &[f32]) {
        let has_own = reach == AttentionReach::Local && !self.local.cos.is_empty();
        let turns = if has_own { &self.local } else { &self.global };
        (&turns.cos, &turns.sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frequencies that transformers computes for heads of 32 features, base 10,000 and factor 4.
    #[test]
    fn yarn_divides_low_frequencies_with_a_ramp_as_transformers_does() {
        let kept = [1.0, 0.502_090_4, 0.248_464_7, 0.120_669, 0.057_142_85, 0.026_108_7];
        let ramp_of_parts = [1.0, 0.521_685_9, 0.253_972_3, 0.120_666_7, 0.055_398_6, 0.024_147_73];
        for (truncate, expected) in [(true, kept), (false, ramp_of_parts)] {
            let scaling = RopeScaling::Yarn {
                factor: 4.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_context: 256.0,
                truncate,
            };
            let found = frequencies(&Rope { theta: 10_000.0, scaling }, 32);
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 2e-6 * expected, "{truncate}: {found}, not {expected}");
            }
            assert!((found[7] - 0.004_445_699).abs() < 1e-8, "divided by the factor");
        }
        assert!((yarn_magnitude(4.0) - 1.138_629_4).abs() < 1e-6);
        assert_eq!(yarn_magnitude(1.0), 1.0);
    }
}

//! Frequencies of the rotary embedding and the angles of a batch's positions.

use std::{f32::consts::TAU, ops::Range};

use crate::shape::config::{ModelConfig, RopeScaling};

/// The `head_dim / 2` frequencies of a model, in radians a position.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    frequencies: Vec<f32>,
}

impl RopeTable {
    /// The frequencies `theta^(-2i / head_dim)`, scaled as the model says.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let half = config.head_dim / 2;
        let base = |i: usize| 1.0 / config.rope.theta.powf(2.0 * i as f32 / config.head_dim as f32);
        let frequencies = (0..half).map(|i| scaled(base(i), i, &config.rope.scaling)).collect();
        Self { frequencies }
    }

    /// Radians a position, `[head_dim / 2]`.
    #[must_use]
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }
}

fn scaled(frequency: f32, index: usize, scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Factors(divisors) => frequency / divisors.get(index).copied().unwrap_or(1.0),
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

/// Cosines and sines of the rows of a batch, `[rows, head_dim / 2]`.
#[derive(Debug, Default)]
pub struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.cos.clear();
        self.sin.clear();
    }

    /// Adds a row for each position.
    pub fn extend(&mut self, table: &RopeTable, positions: Range<usize>) {
        for position in positions {
            // Positions are far below 2^24, where singles stop being exact.
            let position = position as f32;
            for frequency in &table.frequencies {
                let (sin, cos) = (position * frequency).sin_cos();
                self.cos.push(cos);
                self.sin.push(sin);
            }
        }
    }

    /// Cosines and sines.
    #[must_use]
    pub fn tables(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }
}

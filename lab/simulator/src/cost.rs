//! Times of steps and copies: a linear model, read from a file, one of two presets, or fitted to
//! measurements.

pub mod fit;

use std::{fs, io, path::Path, time::Duration};

use scheduling::perf::linear_fit::LinearFit;
use serde::{Deserialize, Serialize};

/// Costs of one model on one machine. Times are in seconds, sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Time of a request outside the executor, on its way in and out; it delays no other request.
    #[serde(default)]
    pub request_s: f64,
    /// Fixed time of any step.
    pub step_s: f64,
    /// Additional fixed time of a step with more than one token, which uses other kernels.
    #[serde(default)]
    pub batch_s: f64,
    /// Time per prompt token of a step.
    pub prefill_token_s: f64,
    /// Number of tokens per step without a further cost, decoding ones included, while the weights are read.
    #[serde(default)]
    pub free_tokens: usize,
    /// Time per pair of a prompt token and an earlier token that it attends to.
    #[serde(default)]
    pub prefill_pair_s: f64,
    /// Time per decoding sequence of a step.
    pub decode_sequence_s: f64,
    /// Time per context token of the step's sequences.
    pub context_token_s: f64,
    /// Time per adapter rank, for each row of the step.
    #[serde(default)]
    pub rank_row_s: f64,
    /// Number of tokens per block.
    pub block_tokens: usize,
    /// Bytes per KV block.
    pub block_bytes: u64,
    /// Bytes per rank of an adapter.
    pub rank_bytes: u64,
    /// Time per block copied to or from the device by the computing thread, which delays the step.
    #[serde(default)]
    pub block_copy_s: f64,
    /// Bandwidth between host and device in each direction; the directions are independent.
    pub link_bytes_per_s: f64,
    /// Bandwidth of the disk, both directions together.
    pub disk_bytes_per_s: f64,
    /// Fixed time of loading an adapter from the store, plus `load_byte_s` per byte.
    #[serde(default)]
    pub load_s: f64,
    /// Time per byte of loading an adapter from the store.
    #[serde(default)]
    pub load_byte_s: f64,
}

/// Amount of work of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ComputedWork {
    /// Number of prompt tokens in the step.
    pub prefill_tokens: usize,
    /// Number of pairs of a prompt token and an earlier token.
    pub prefill_pairs: usize,
    /// Number of decoding sequences in the step.
    pub decode_sequences: usize,
    /// Number of context tokens of all sequences.
    pub context_tokens: usize,
    /// Sum of the adapter ranks of all rows.
    pub rank_rows: usize,
}

/// Number of terms in the time of a step.
const TERMS: usize = 7;

impl ComputedWork {
    /// Returns the amount of each term.
    fn terms(&self, free_tokens: usize) -> [f64; TERMS] {
        let free = free_tokens.saturating_sub(self.decode_sequences);
        [
            1.0,
            if self.prefill_tokens + self.decode_sequences > 1 { 1.0 } else { 0.0 },
            self.prefill_tokens.saturating_sub(free) as f64,
            self.prefill_pairs as f64,
            self.decode_sequences as f64,
            self.context_tokens as f64,
            self.rank_rows as f64,
        ]
    }
}

/// Why a cost file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    /// The file cannot be read.
    #[error("cannot read the cost model {0}; give a path to a JSON file, or a --preset")]
    Read(String, #[source] io::Error),
    /// The file is not a cost model in JSON.
    #[error("{0} is not a cost model; `holobiont-simulator costs` prints an example")]
    Parse(String, #[source] serde_json::Error),
    /// A value is negative, not finite, or 0 where it must be positive.
    #[error("{0} of the cost model must be a positive number")]
    Value(&'static str),
}

impl CostModel {
    /// Costs of SmolLM2-135M on two CPU cores.
    pub const CPU: Self = Self {
        request_s: 0.0,
        step_s: 5e-3,
        batch_s: 0.0,
        prefill_token_s: 1.0 / 1350.0,
        free_tokens: 0,
        prefill_pair_s: 0.0,
        decode_sequence_s: 1.2e-3,
        context_token_s: 0.0,
        rank_row_s: 0.0,
        block_tokens: 16,
        block_bytes: 368_640,
        rank_bytes: 312_500,
        block_copy_s: 0.0,
        link_bytes_per_s: 10e9,
        disk_bytes_per_s: 1e9,
        load_s: 0.0,
        load_byte_s: 0.0,
    };

    /// Costs of a model of 7 billion weights on a GPU.
    pub const GPU: Self = Self {
        request_s: 0.0,
        step_s: 20e-3,
        batch_s: 0.0,
        prefill_token_s: 1.0 / 5000.0,
        free_tokens: 0,
        prefill_pair_s: 0.0,
        decode_sequence_s: 0.3e-3,
        context_token_s: 0.0,
        rank_row_s: 0.0,
        block_tokens: 32,
        block_bytes: 16 << 20,
        rank_bytes: 3_125_000,
        block_copy_s: 0.0,
        link_bytes_per_s: 25e9,
        disk_bytes_per_s: 3e9,
        load_s: 0.0,
        load_byte_s: 0.0,
    };

    /// Reads a cost model from a JSON file.
    ///
    /// # Errors
    /// If the file is missing, is not a cost model, or holds an invalid value.
    pub fn read(path: &Path) -> Result<Self, CostError> {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| CostError::Read(name.clone(), error))?;
        let model: Self = serde_json::from_str(&text).map_err(|error| CostError::Parse(name, error))?;
        model.validate()?;
        Ok(model)
    }

    fn validate(&self) -> Result<(), CostError> {
        let at_least_0 = [
            ("request_s", self.request_s),
            ("batch_s", self.batch_s),
            ("prefill_token_s", self.prefill_token_s),
            ("prefill_pair_s", self.prefill_pair_s),
            ("decode_sequence_s", self.decode_sequence_s),
            ("context_token_s", self.context_token_s),
            ("rank_row_s", self.rank_row_s),
            ("block_copy_s", self.block_copy_s),
            ("load_s", self.load_s),
            ("load_byte_s", self.load_byte_s),
        ];
        let positive = [
            ("step_s", self.step_s),
            ("link_bytes_per_s", self.link_bytes_per_s),
            ("disk_bytes_per_s", self.disk_bytes_per_s),
            ("block_tokens", self.block_tokens as f64),
            ("block_bytes", self.block_bytes as f64),
            ("rank_bytes", self.rank_bytes as f64),
        ];
        let bad = at_least_0.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0);
        let bad = bad.or_else(|| positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0));
        bad.map_or(Ok(()), |(name, _)| Err(CostError::Value(name)))
    }

    /// Returns the time of a step with this work.
    #[must_use]
    pub fn step(&self, work: ComputedWork) -> Duration {
        Duration::from_secs_f64(self.step_seconds(work))
    }

    fn step_seconds(&self, work: ComputedWork) -> f64 {
        work.terms(self.free_tokens).iter().zip(self.times()).map(|(term, time)| term * time).sum()
    }

    /// Returns the cost of each term, in the order of [`ComputedWork::terms`].
    fn times(&self) -> [f64; TERMS] {
        [
            self.step_s,
            self.batch_s,
            self.prefill_token_s,
            self.prefill_pair_s,
            self.decode_sequence_s,
            self.context_token_s,
            self.rank_row_s,
        ]
    }

    /// Returns the time that copying blocks delays a step.
    #[must_use]
    pub fn copies(&self, blocks: usize) -> Duration {
        Duration::from_secs_f64(blocks as f64 * self.block_copy_s)
    }

    /// Returns a request's time outside the executor.
    #[must_use]
    pub fn request(&self) -> Duration {
        Duration::from_secs_f64(self.request_s)
    }

    /// Returns the bytes of an adapter.
    #[must_use]
    pub fn adapter_bytes(&self, rank: u32) -> u64 {
        self.rank_bytes * u64::from(rank)
    }

    /// Returns the time of loading an adapter's bytes from the store.
    #[must_use]
    pub fn store(&self) -> LinearFit {
        LinearFit { alpha: self.load_byte_s, beta: self.load_s }
    }

    /// Returns the number of blocks of an adapter.
    #[must_use]
    pub fn adapter_blocks(&self, rank: u32) -> u32 {
        u32::try_from(self.adapter_bytes(rank).div_ceil(self.block_bytes)).unwrap_or(u32::MAX)
    }

    /// Returns the time of a transfer between host and device.
    #[must_use]
    pub fn over_link(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.link_bytes_per_s)
    }

    /// Returns the time of a disk transfer.
    #[must_use]
    pub fn over_disk(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.disk_bytes_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let work = ComputedWork {
            prefill_tokens: 100,
            prefill_pairs: 7000,
            decode_sequences: 10,
            context_tokens: 5000,
            rank_rows: 110 * 16,
        };
        let model =
            CostModel { batch_s: 1e-3, prefill_pair_s: 1e-6, context_token_s: 1e-6, ..CostModel::GPU };
        assert_eq!(model.step(work), Duration::from_millis(20 + 1 + 20 + 7 + 3 + 5));
        let ranks = CostModel { rank_row_s: 1e-5, ..model };
        assert_eq!(ranks.step(work) - model.step(work), Duration::from_micros(17_600));
        assert_eq!(CostModel::GPU.adapter_blocks(32), 6);
        assert_eq!(CostModel::CPU.adapter_blocks(16), 14);
        let beside = CostModel { free_tokens: 15, ..model };
        assert_eq!(beside.step(work), Duration::from_millis(20 + 1 + 19 + 7 + 3 + 5), "ten of them decode");
    }

    #[test]
    fn what_is_written_can_be_read_and_nonsense_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, serde_json::to_string(&CostModel::CPU).unwrap()).unwrap();
        assert_eq!(CostModel::read(file.path()).unwrap(), CostModel::CPU);
        let broken = CostModel { link_bytes_per_s: 0.0, ..CostModel::CPU };
        fs::write(&file, serde_json::to_string(&broken).unwrap()).unwrap();
        let error = CostModel::read(file.path()).unwrap_err();
        assert!(error.to_string().starts_with("link_bytes_per_s"), "{error}");
        assert!(matches!(CostModel::read(Path::new("/nowhere")), Err(CostError::Read(..))));
    }
}

//! What a step and a copy take: a linear model, read from a file, one of two presets, or fitted to what was measured.

pub mod fit;

use std::{fs, io, path::Path, time::Duration};

use scheduling::perf::linear_fit::LinearFit;
use serde::{Deserialize, Serialize};

/// Costs of one model on one machine. Times are in seconds, sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// What a request takes outside the executor, on its way in and out; nobody else waits for it.
    #[serde(default)]
    pub request_s: f64,
    /// Any step.
    pub step_s: f64,
    /// A step of more than one token, beside that: kernels for several rows are others.
    #[serde(default)]
    pub batch_s: f64,
    /// Every token of a prompt in a step.
    pub prefill_token_s: f64,
    /// So many tokens of a step take nothing beyond it, those that decode among them: the weights are read meanwhile.
    #[serde(default)]
    pub free_tokens: usize,
    /// Every pair of a token of a prompt and one that it looks back at.
    #[serde(default)]
    pub prefill_pair_s: f64,
    /// Every sequence that decodes in a step.
    pub decode_sequence_s: f64,
    /// Every token that a sequence of the step has before it.
    pub context_token_s: f64,
    /// Every rank of an adapter, for each row of the step that has it.
    #[serde(default)]
    pub rank_row_s: f64,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes that one rank of an adapter takes.
    pub rank_bytes: u64,
    /// A block that comes to the device or is taken off it, where the thread that computes copies it: a step waits for that.
    #[serde(default)]
    pub block_copy_s: f64,
    /// Between host and device, in either direction; the directions do not disturb each other.
    pub link_bytes_per_s: f64,
    /// From and to the disk, both directions together.
    pub disk_bytes_per_s: f64,
    /// An adapter that an executor does not have comes from the store: whichever it is, and every byte of it.
    #[serde(default)]
    pub load_s: f64,
    /// See `load_s`.
    #[serde(default)]
    pub load_byte_s: f64,
}

/// What a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ComputedWork {
    /// Tokens of prompts.
    pub prefill_tokens: usize,
    /// Pairs of one of them and a token that it looks back at.
    pub prefill_pairs: usize,
    /// Sequences that decode.
    pub decode_sequences: usize,
    /// Tokens that all sequences of the step have before it.
    pub context_tokens: usize,
    /// Ranks of the adapters of all rows, each row's own.
    pub rank_rows: usize,
}

/// What a step's time is a sum of.
const TERMS: usize = 7;

impl ComputedWork {
    /// How much there is of what takes time each.
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

/// A file of costs that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    /// It cannot be read.
    #[error("cannot read the cost model {0}; give a path to a JSON file, or a --preset")]
    Read(String, #[source] io::Error),
    /// It is no cost model.
    #[error("{0} is no cost model; `holobiont-simulator costs` prints one to begin with")]
    Parse(String, #[source] serde_json::Error),
    /// A number is negative, not finite, or 0 where there must be something.
    #[error("{0} of the cost model must be a positive number")]
    Value(&'static str),
}

impl CostModel {
    /// SmolLM2-135M on two cores of a CPU.
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

    /// A model of 7 billion weights on a GPU.
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

    /// Reads a file in JSON.
    ///
    /// # Errors
    /// It is not there, is no cost model, or one that nothing can be computed with.
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

    /// How long a step takes.
    #[must_use]
    pub fn step(&self, work: ComputedWork) -> Duration {
        Duration::from_secs_f64(self.step_seconds(work))
    }

    fn step_seconds(&self, work: ComputedWork) -> f64 {
        work.terms(self.free_tokens).iter().zip(self.times()).map(|(term, time)| term * time).sum()
    }

    /// Those of a step, in the order of [`ComputedWork::terms`].
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

    /// How long so many blocks hold up a step.
    #[must_use]
    pub fn copies(&self, blocks: usize) -> Duration {
        Duration::from_secs_f64(blocks as f64 * self.block_copy_s)
    }

    /// What a request takes outside the executor.
    #[must_use]
    pub fn request(&self) -> Duration {
        Duration::from_secs_f64(self.request_s)
    }

    /// Bytes of an adapter.
    #[must_use]
    pub fn adapter_bytes(&self, rank: u32) -> u64 {
        self.rank_bytes * u64::from(rank)
    }

    /// An adapter's bytes to seconds from the store.
    #[must_use]
    pub fn store(&self) -> LinearFit {
        LinearFit { alpha: self.load_byte_s, beta: self.load_s }
    }

    /// Blocks that an adapter takes.
    #[must_use]
    pub fn adapter_blocks(&self, rank: u32) -> u32 {
        u32::try_from(self.adapter_bytes(rank).div_ceil(self.block_bytes)).unwrap_or(u32::MAX)
    }

    /// How long bytes take over the link between host and device.
    #[must_use]
    pub fn over_link(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.link_bytes_per_s)
    }

    /// How long bytes take from or to the disk.
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

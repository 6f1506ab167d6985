//! The serving model in this process, with adapters in blocks of its pool.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use kernels::lora::LoraPrecision;
use model::{
    deltas::{
        cpu_copy::CpuMemory,
        device_copy::{DeviceCopy, DeviceMemory as _},
        matrices::ImageNumber,
        prepared::PreparedAdapter,
    },
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::source::Target,
    sources::open::open,
};
use scheduling::perf::serving::{LoraForm, RequestLoad};
use types::BlockId;

use super::{RankMix, Timing};
use crate::{
    adapters::{PaddedRank, encoded, in_image},
    machine::Cores,
    measure::Samples,
};

const TARGETS: [Target; 3] = [Target::Q, Target::K, Target::V];
/// Number of an image that no worker knows.
const UNKNOWN: ImageNumber = ImageNumber::NONE;

pub(super) struct PerfModelRig {
    model: ResidentModel,
    memory: CpuMemory,
    precision: LoraPrecision,
    sequences: Vec<Vec<BlockId>>,
    logits: Vec<f32>,
}

/// Adapter on the device until it is dropped.
struct DevicePlacedAdapter(Arc<PreparedAdapter>, Arc<DeviceCopy>);

impl Drop for DevicePlacedAdapter {
    fn drop(&mut self) {
        self.0.set_device(None);
        self.1.revoke();
    }
}

impl PerfModelRig {
    /// Opens the model with memory for `sequences` sequences of this length, each with an adapter of at most
    /// `rank`.
    ///
    /// # Errors
    /// If the model cannot be read, or there is no memory.
    pub(super) fn open(
        path: &Path,
        cores: &Cores,
        sequences: usize,
        tokens: usize,
        rank: usize,
    ) -> Result<Self> {
        let weights = LoadedWeights::load(&*open(path)?, cores.numbers().len())?;
        let (precision, shape) = (weights.adapter_precision(), weights.kv_shape(None));
        let largest = in_image(
            weights.config(),
            encoded(weights.config(), PaddedRank::true_rank(rank), &TARGETS, precision),
            UNKNOWN,
        )?;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        // The tail of an adapter's last block is unused, hence the factor of 2.
        let of_adapter = 2 * largest.device_bytes().div_ceil(shape.block_bytes());
        let kv_bytes = sequences * (blocks + of_adapter) * shape.block_bytes();
        let options = ResidentOptions { cores: cores.numbers().to_vec(), kv_bytes, kv_dtype: None };
        let model = ResidentModel::new(weights, &options)?;
        let mut ids = (0..).map(BlockId);
        let sequences = (0..sequences).map(|_| ids.by_ref().take(blocks).collect()).collect();
        Ok(Self { memory: model.adapter_memory(), model, precision, sequences, logits: Vec::new() })
    }

    /// Times a mix with a kernel and without adapters: medians of `runs` in alternation, after one warm-up.
    ///
    /// # Errors
    /// If adapters do not fit.
    pub(super) fn time(&mut self, mix: &RankMix, kernel: LoraForm, runs: usize) -> Result<Timing> {
        let largest = mix.iter().map(|&(rank, ..)| rank).max().context("a mix is not empty")?;
        let mut next = self.sequences.iter().map(Vec::len).sum::<usize>() as u32;
        let mut placed = Vec::new();
        for &(rank, ..) in mix {
            let stored = if kernel == LoraForm::Padded { largest } else { rank };
            placed.push(self.place(PaddedRank { own: rank, stored }, &mut next)?);
        }
        let (mut with, mut added) = (Vec::new(), Vec::new());
        for run in 0..=runs {
            let alone = self.pass(mix, &[])?;
            let adapted = self.pass(mix, &placed)?;
            if run > 0 {
                with.push(adapted);
                added.push(adapted - alone);
            }
        }
        let took = Duration::from_secs_f64(Samples::new(with)?.median());
        Ok(Timing { load: load(mix), took, added_s: Samples::new(added)?.median() })
    }

    fn place(&self, rank: PaddedRank, next: &mut u32) -> Result<DevicePlacedAdapter> {
        let config = self.model.config();
        let adapter = in_image(config, encoded(config, rank, &TARGETS, self.precision), UNKNOWN)?;
        let count = self.memory.blocks_for(adapter.host()).context("blocks hold no piece of an adapter")?;
        ensure!((*next + count) as usize <= self.model.kv_blocks(), "the pool has no room for an adapter");
        let blocks: Vec<BlockId> = (*next..*next + count).map(BlockId).collect();
        *next += count;
        let copy = Arc::new(self.memory.copy_of(adapter.host(), &blocks));
        while copy.next_bytes().is_some() {
            copy.copy_next(adapter.host());
        }
        adapter.set_device(Some(Arc::clone(&copy)));
        Ok(DevicePlacedAdapter(Arc::new(adapter), copy))
    }

    /// Seconds of a pass; sequences of `mix` without a placed adapter use the base.
    fn pass(&mut self, mix: &RankMix, placed: &[DevicePlacedAdapter]) -> Result<f64> {
        let longest = mix.iter().map(|&(.., tokens)| tokens).max().unwrap_or(0);
        let tokens: Vec<u32> = (1000..).take(longest).collect();
        let sequences = mix.iter().zip(&self.sequences).enumerate();
        let slices: Vec<_> = sequences
            .map(|(index, (&(_, start, count), blocks))| SequenceSlice {
                trunk: &[],
                tokens: &tokens[..count],
                start,
                blocks,
                adapter: placed.get(index).map(|DevicePlacedAdapter(adapter, _)| adapter),
                logits: LogitRows::Last,
            })
            .collect();
        let began = Instant::now();
        self.model.forward(&slices, &mut self.logits)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

/// Load of a mix for the performance model: context tokens of a decode, or prompt tokens of a prefill.
pub(super) fn load(mix: &RankMix) -> RequestLoad {
    let of = |&(rank, start, count): &(usize, usize, usize)| {
        RequestLoad::of(rank as u64, if start == 0 { count } else { start } as u64)
    };
    mix.iter().map(of).fold(RequestLoad::default(), RequestLoad::plus)
}

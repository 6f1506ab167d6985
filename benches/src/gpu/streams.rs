//! A model on the device, in this process: prompts and decode steps, timed on the host around passes that end
//! with a synchronization.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use kernels::cuda::{attention::KvPool, lora::UploadQueue};
use model::{
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    sampling::{Probability, TokenDraw},
};
use types::BlockId;

use super::lab::GpuBenchContext;
use crate::workload;

const GREEDY: TokenDraw = TokenDraw {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    uniform: 0.0,
    probability: Probability::Unwanted,
};

pub(super) type StreamAdapters = [Option<Arc<PreparedAdapter>>];

pub(super) struct Streams {
    model: CudaModel,
    blocks: Vec<BlockId>,
    /// Blocks per decoding stream.
    blocks_each: usize,
    last: Vec<u32>,
    logits: Vec<f32>,
}

impl Streams {
    /// Generates the weights and copies them to the device.
    ///
    /// # Errors
    /// If the device lacks memory.
    pub(super) fn load(lab: &GpuBenchContext, graphs: Graphs) -> Result<Self> {
        let sizes = &lab.sizes;
        let began = Instant::now();
        let weights = CudaWeights::load(&lab.source, &lab.cuda, lab.cores.numbers().len(), &|_| {})?;
        let gb = weights.bytes() as f64 / 1e9;
        eprintln!("holobiont-bench: {gb:.2} GB of weights made in {:.1} s", began.elapsed().as_secs_f64());
        let blocks_each = (sizes.context + sizes.warm_up + sizes.decoded).div_ceil(BLOCK_TOKENS);
        let blocks = (blocks_each * sizes.adapters.max(8)).max(sizes.prompt.div_ceil(BLOCK_TOKENS));
        let kv_bytes = KvPool::block_bytes(weights.kv_shape(None)) * blocks;
        let options = CudaOptions { kv_bytes, kv_dtype: None, graphs };
        let model = CudaModel::new(weights, &options)?;
        let blocks = (0..u32::try_from(blocks)?).map(BlockId).collect();
        Ok(Self { model, blocks, blocks_each, last: Vec::new(), logits: Vec::new() })
    }

    pub(super) fn copy_lane(&self) -> Arc<UploadQueue> {
        self.model.adapter_memory().lane
    }

    /// Computes a prompt of `tokens` in passes of `chunk` and returns the time.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn prefill(&mut self, tokens: usize, chunk: usize) -> Result<Duration> {
        let prompt = workload::prompt(tokens as u64, tokens);
        let began = Instant::now();
        self.prompt(&prompt, chunk, 0..self.blocks.len())?;
        Ok(began.elapsed())
    }

    /// Gives each of `streams` streams a context of `context` tokens.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn fill(&mut self, streams: usize, context: usize) -> Result<()> {
        self.last.clear();
        for stream in 0..streams {
            let prompt = workload::prompt(1000 + stream as u64, context);
            let first = stream * self.blocks_each;
            self.prompt(&prompt, context, first..first + self.blocks_each)?;
            self.last.push(self.drawn(0)?);
        }
        Ok(())
    }

    fn prompt(&mut self, prompt: &[u32], chunk: usize, blocks: std::ops::Range<usize>) -> Result<()> {
        for (index, tokens) in prompt.chunks(chunk).enumerate() {
            let start = index * chunk;
            let is_last = start + tokens.len() == prompt.len();
            let logits = if is_last { LogitRows::Draw(GREEDY) } else { LogitRows::None };
            let blocks = &self.blocks[blocks.clone()];
            let slice = SequenceSlice { trunk: &[], tokens, start, blocks, adapter: None, logits };
            self.model.forward(&[slice], &mut self.logits)?;
        }
        Ok(())
    }

    /// Decodes `count` tokens in every stream of `who`, from position `start` on, and returns the time.
    ///
    /// # Errors
    /// If the device fails, or a logit is NaN.
    pub(super) fn decode(&mut self, who: &StreamAdapters, start: usize, count: usize) -> Result<Duration> {
        let began = Instant::now();
        for step in 0..count {
            let mut batch = Vec::with_capacity(who.len());
            for (stream, adapter) in who.iter().enumerate() {
                let tokens = &self.last[stream..=stream];
                let blocks = &self.blocks[stream * self.blocks_each..][..self.blocks_each];
                let (start, logits) = (start + step, LogitRows::Draw(GREEDY));
                batch.push(SequenceSlice {
                    trunk: &[],
                    tokens,
                    start,
                    blocks,
                    adapter: adapter.as_ref(),
                    logits,
                });
            }
            self.model.forward(&batch, &mut self.logits)?;
            for stream in 0..who.len() {
                self.last[stream] = self.drawn(stream)?;
            }
        }
        Ok(began.elapsed())
    }

    fn drawn(&self, index: usize) -> Result<u32> {
        let drawn = self.model.drawn().get(index).copied().flatten();
        Ok(drawn.context("no logit is a number: the model's answer is broken")?.token)
    }

    /// Seconds of a step over `who` at the benchmarks' context: the time of [`Self::decode`] over its steps.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(super) fn step_s(&mut self, lab: &GpuBenchContext, who: &StreamAdapters) -> Result<f64> {
        let sizes = &lab.sizes;
        if self.last.len() < who.len() {
            self.fill(who.len(), sizes.context)?;
        }
        self.decode(who, sizes.context, sizes.warm_up)?;
        let took = self.decode(who, sizes.context + sizes.warm_up, sizes.decoded)?;
        Ok(took.as_secs_f64() / sizes.decoded as f64)
    }
}

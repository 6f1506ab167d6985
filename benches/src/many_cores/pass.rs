//! The serving pass in this process: chunk by chunk as for many threads, and timed on one and two.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use kernels::{ThreadPool, pool::ParallelRegion};
use model::{
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sources::open::open,
};
use types::BlockId;

use crate::measure::{Samples, alternate};

const CONTEXT: usize = 128;
const MAX_STREAMS: usize = 16;
const MAX_TOKENS: usize = 512;

#[derive(Debug, Clone, Copy)]
pub(super) struct PassLoad {
    pub(super) name: &'static str,
    pub(super) streams: usize,
    /// Tokens per stream: one is decode, more are a prompt.
    pub(super) tokens: usize,
}

pub(super) struct Pass {
    model: ResidentModel,
    cores: Vec<usize>,
    streams: Vec<Vec<BlockId>>,
    logits: Vec<f32>,
}

impl Pass {
    /// # Errors
    /// If the model cannot be read, or there is no memory.
    pub(super) fn open(path: &Path, cores: &[usize]) -> Result<Self> {
        let weights = LoadedWeights::load(&*open(path)?, cores.len())?;
        let block_bytes = weights.kv_shape(None).block_bytes();
        let blocks = MAX_TOKENS.div_ceil(BLOCK_TOKENS);
        let kv_bytes = MAX_STREAMS * blocks * block_bytes;
        let options = ResidentOptions { cores: cores[..1].to_vec(), kv_bytes, kv_dtype: None };
        let model = ResidentModel::new(weights, &options)?;
        let mut ids = (0..).map(BlockId);
        let streams = (0..MAX_STREAMS).map(|_| ids.by_ref().take(blocks).collect()).collect();
        Ok(Self { model, cores: cores.to_vec(), streams, logits: Vec::new() })
    }

    /// Times every chunk of the pass as divided for `threads`; each time is the median of `runs`.
    ///
    /// # Errors
    /// If the pass fails.
    pub(super) fn rehearse(
        &mut self,
        load: &PassLoad,
        threads: usize,
        runs: usize,
    ) -> Result<Vec<ParallelRegion>> {
        *self.model.pool_mut() = ThreadPool::rehearsal(threads);
        self.pass(load)?;
        self.model.pool_mut().take_regions();
        let mut rehearsals = Vec::with_capacity(runs);
        for _ in 0..runs {
            self.pass(load)?;
            rehearsals.push(self.model.pool_mut().take_regions());
        }
        let first = rehearsals.first().context("nothing was rehearsed; ask for at least one run")?;
        let median = |time: &dyn Fn(&[ParallelRegion]) -> Duration| {
            let mut times: Vec<Duration> = rehearsals.iter().map(|regions| time(regions)).collect();
            times.sort();
            times[times.len() / 2]
        };
        let region = |(at, region): (usize, &ParallelRegion)| ParallelRegion {
            before: median(&|regions| regions[at].before),
            chunks: (0..region.chunks.len()).map(|i| median(&|regions| regions[at].chunks[i])).collect(),
        };
        Ok(first.iter().enumerate().map(region).collect())
    }

    /// Seconds on one thread and on two, in alternation.
    ///
    /// # Errors
    /// If threads cannot be started, or the pass fails.
    pub(super) fn time(&mut self, load: &PassLoad, runs: usize) -> Result<[Samples; 2]> {
        let pass = std::cell::RefCell::new(self);
        let on = |threads: usize| {
            let pass = &pass;
            move |_| {
                let pass = &mut *pass.borrow_mut();
                *pass.model.pool_mut() = ThreadPool::new(&pass.cores[..threads])?;
                pass.pass(load)?;
                pass.pass(load)
            }
        };
        let [one, two] = alternate(runs, [Box::new(on(1)), Box::new(on(2))])?;
        Ok([Samples::new(one)?, Samples::new(two)?])
    }

    fn pass(&mut self, load: &PassLoad) -> Result<f64> {
        let tokens: Vec<u32> = (1000..).take(load.tokens).collect();
        let start = if load.tokens == 1 { CONTEXT } else { 0 };
        let streams = self.streams[..load.streams].iter();
        let slices: Vec<_> = streams
            .map(|blocks| SequenceSlice {
                trunk: &[],
                tokens: &tokens,
                start,
                blocks,
                adapter: None,
                logits: LogitRows::Last,
            })
            .collect();
        let began = Instant::now();
        self.model.forward(&slices, &mut self.logits)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

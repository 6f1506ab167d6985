//! A job in the process that owns the weights: a trainer that does not share its base.

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, anyhow};
use kernels::ThreadPool;
use model::{
    backward::{SavedScope, Trainer},
    client_weights::client_base::ClientBase,
    resident::kv_shape,
    shape::source::Target,
    sources::open::open,
    weights::ResidentLayers,
};
use trainer::{
    adapter::{AdapterSpec, TargetModule},
    data::Example,
    optimizer::Hyperparameters,
    step::TrainState,
};

use super::{BATCH, RANK, STEPS, TOKENS, WARM_UP_STEPS};
use crate::{config::BasePrecision, machine::Cores};

pub(super) struct InProcessJob {
    learning: TrainState<ResidentLayers>,
    examples: Vec<Example>,
}

impl InProcessJob {
    pub(super) fn new(model: &Path, precision: BasePrecision, cores: &Cores) -> Result<Self> {
        let mut layers = ResidentLayers::load(&*open(model)?, cores.numbers().len(), &|_| {})?;
        layers.set_precision(precision.of_model());
        let frame = ClientBase::open(model)?.frame;
        let numerics = layers.sites().numerics();
        let (precision, kv) = (numerics.adapters(), numerics.kv(None));
        let shape = kv_shape(&frame.config, kv);
        let targets = [Target::Q, Target::V].map(TargetModule).into();
        let lora = AdapterSpec::Lora { rank: RANK, alpha: 2.0 * RANK as f64, rslora: false, targets };
        let (start, vocabulary) = (lora.start(&frame.config, 0), frame.config.vocab_size);
        let pool = ThreadPool::new(cores.numbers()).context("no threads on the cores")?;
        let trainer =
            Trainer::new(frame.into(), layers, shape, pool, SavedScope::All).context("no trainer")?;
        let example = |number: usize| {
            let token =
                |place: usize| u32::try_from((number * 7 + place * 31) % vocabulary).unwrap_or_default();
            Example {
                tokens: (0..=TOKENS).map(token).collect(),
                weights: vec![1.0; TOKENS],
                line: number + 1,
            }
        };
        Ok(Self {
            learning: TrainState::new(trainer.into(), precision, start)
                .map_err(|error| anyhow!("{error}"))?,
            examples: (0..BATCH).map(example).collect(),
        })
    }

    pub(super) fn tokens_per_s(&mut self) -> Result<f64> {
        let hyper = Hyperparameters { learning_rate: 1e-4, ..Hyperparameters::default() };
        let examples: Vec<&Example> = self.examples.iter().collect();
        let mut begun = Instant::now();
        for step in 0..WARM_UP_STEPS + STEPS {
            if step == WARM_UP_STEPS {
                begun = Instant::now();
            }
            self.learning.learn(&examples, &hyper, 1.0).map_err(|error| anyhow!("{error}"))?;
        }
        Ok((STEPS * BATCH * TOKENS) as f64 / begun.elapsed().as_secs_f64())
    }
}

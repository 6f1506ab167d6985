//! Lanes (microbatch workers) over sessions of the layer service.

use std::sync::Arc;

use client::{
    cli::remote_base::ConnectedBase,
    error::CallError,
    masking::Masking,
    remote_layers::RemoteLayers,
    session::Session,
    split_model::{adapter_precision, kv_precision},
};
use kernels::{
    ThreadPool,
    attention::{KvPrecision, KvShape},
    lora::LoraPrecision,
};
use model::{
    backward::{SavedScope, TrainError, Trainer},
    forward::ModelContext,
    resident::kv_shape,
    shape::config::ModelConfig,
    weights::embedding::Embedding,
};
use settings::CoreList;
use shmproto::layer::CallClass;

use super::error::TunerError;
use crate::{
    plan::JobPrecision,
    step::{
        TrainStepError,
        microbatch_pool::{MicrobatchPool, MicrobatchWorker},
    },
};

#[derive(Debug, clap::Args)]
pub(super) struct ComputeArguments {
    /// Cores to compute on, as 0-3,8, which all microbatches share; without the option each microbatch has
    /// one unpinned thread
    #[arg(long, value_name = "LIST")]
    cores: Option<CoreList>,
    /// Maximum number of concurrent microbatches of a step: one computes while another waits for the executor
    /// [default: 2 on two cores or more, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    lanes: Option<u8>,
}

impl ComputeArguments {
    fn cores(&self) -> Vec<usize> {
        self.cores.iter().flat_map(|list| &list.0).map(|&core| core as usize).collect()
    }

    /// Returns the number of lanes. A job with less than two cores runs beside other jobs, which compute
    /// while it waits, so a second lane would only take memory.
    fn lanes(&self) -> usize {
        self.lanes.map_or(self.cores().len().clamp(1, 2), usize::from)
    }
}

/// Data that all lanes share.
struct MicrobatchSetup {
    /// Configuration of the whole base, whose linear layers are called.
    base: ModelConfig,
    /// The trained model: the whole base, or its first blocks.
    frame: Arc<ModelContext>,
    embedding: Embedding,
    shape: KvShape,
    masking: Masking,
}

/// Creates as many lanes as the arguments ask for, or fewer if the executor grants fewer sessions. The lanes
/// train the first `layers` blocks of the base. Also returns the precision of the adapter.
pub(super) fn lanes(
    precision: JobPrecision,
    arguments: &ComputeArguments,
    rented: ConnectedBase,
    masking: Masking,
    layers: usize,
) -> Result<(MicrobatchPool<RemoteLayers>, LoraPrecision), TunerError> {
    let ConnectedBase { session, base, .. } = rented;
    let (kv, precision) = match precision {
        JobPrecision::Serving => {
            (kv_precision(session.catalog(), None), adapter_precision(session.catalog()))
        }
        JobPrecision::Exact => (KvPrecision::F32, LoraPrecision::Exact),
    };
    let mut others = Vec::new();
    while others.len() + 1 < arguments.lanes() {
        let Some(another) = session.another().map_err(call)? else { break };
        others.push(another);
    }
    let cores = arguments.cores();
    let count = 1 + others.len();
    let (config, frame) = (base.config().clone(), base.frame.first_layers(layers));
    let shape = kv_shape(&frame.config, kv);
    let common =
        MicrobatchSetup { base: config, frame: Arc::new(frame), embedding: base.embedding, shape, masking };
    let first = common.lane(session, &divided(&cores, count, 0))?;
    let others = others.into_iter().zip(1..);
    let others = others.map(|(session, number)| common.lane(session, &divided(&cores, count, number)));
    Ok((MicrobatchPool::new(first, others.collect::<Result<_, _>>()?), precision))
}

fn call(error: CallError) -> TunerError {
    TrainStepError::Train(TrainError::Base(error)).into()
}

impl MicrobatchSetup {
    fn lane(
        &self,
        mut session: Session,
        cores: &[usize],
    ) -> Result<MicrobatchWorker<RemoteLayers>, TunerError> {
        let mask = self.masking.clone().prepare(&mut session, &mut |_, _| {}).map_err(call)?;
        let layers = RemoteLayers::new(session, mask, &self.base, self.embedding.clone());
        let mut layers = layers.map_err(call)?;
        layers.set_class(CallClass::Training);
        let system = |what| move |source| TunerError::System { what, source };
        let pool = ThreadPool::new(cores).map_err(system("cannot start threads on these --cores"))?;
        let trainer = Trainer::new(Arc::clone(&self.frame), layers, self.shape, pool, SavedScope::All)
            .map_err(system("not enough memory for the KV cache"))?;
        Ok(MicrobatchWorker { trainer, core: cores.first().copied() })
    }
}

/// Returns the cores of lane `number` of `count`. Lanes share cores if there are fewer cores than lanes.
fn divided(cores: &[usize], count: usize, number: usize) -> Vec<usize> {
    let cores: Vec<_> = cores.iter().cycle().take(cores.len().max(count)).collect();
    cores.into_iter().skip(number).step_by(count).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::ComputeArguments;

    #[test]
    fn a_job_has_two_lanes_on_two_cores_or_more_and_else_one() {
        let lanes = |cores: Option<&str>, lanes| {
            let cores = cores.map(|list| list.parse().expect("a list"));
            ComputeArguments { cores, lanes }.lanes()
        };
        assert_eq!((lanes(None, None), lanes(Some("3"), None), lanes(Some("0-3"), None)), (1, 1, 2));
        assert_eq!((lanes(None, Some(2)), lanes(Some("0-3"), Some(1))), (2, 1));
    }

    #[test]
    fn cores_are_divided_and_no_lane_is_left_without_one() {
        let divided = |cores: &[usize], count| -> Vec<_> {
            (0..count).map(|number| super::divided(cores, count, number)).collect()
        };
        assert_eq!(divided(&[0, 1, 2, 3], 2), [[0, 2], [1, 3]]);
        assert_eq!(divided(&[4], 2), [[4], [4]]);
        assert_eq!(divided(&[4, 5, 6], 2), [vec![4, 6], vec![5]]);
        assert_eq!(divided(&[], 2), [[0; 0]; 2]);
    }
}

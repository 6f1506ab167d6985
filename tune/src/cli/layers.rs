//! A trainer over the layers that an executor lends.

use client::{
    cli::rent::Rented,
    masking::Masking,
    remote_layers::RemoteLayers,
    split_model::{adapter_precision, kv_precision},
};
use kernels::{Pool, attention::KvPrecision, lora::LoraPrecision};
use model::{
    backward::{Keep, Trainer},
    resident::{KvDtype, kv_shape},
};
use settings::CoreList;
use shmproto::layer::Class;

use super::error::TunerError;
use crate::{learn::LearnError, plan::Precision};

/// A trainer that computes on `cores`, and how precise its adapter is.
pub(super) fn trainer(
    precision: Precision,
    cores: Option<&CoreList>,
    rented: Rented,
    masking: Masking,
) -> Result<(Trainer<RemoteLayers>, LoraPrecision), TunerError> {
    let Rented { mut session, base, .. } = rented;
    let (kv, precision) = match precision {
        Precision::Serving => {
            (kv_precision(session.catalog(), KvDtype::Auto), adapter_precision(session.catalog()))
        }
        Precision::Exact => (KvPrecision::F32, LoraPrecision::Exact),
    };
    let call = |error| LearnError::Train(model::backward::TrainError::Base(error));
    let mask = masking.prepare(&mut session, &mut |_, _| {}).map_err(call)?;
    let shape = kv_shape(base.config(), kv);
    let (frame, embedding) = (base.frame, base.embedding);
    let mut layers = RemoteLayers::new(session, mask, &frame.config, embedding).map_err(call)?;
    layers.set_class(Class::Training);
    let system = |what| move |source| TunerError::System { what, source };
    let cores: Vec<usize> = cores.iter().flat_map(|list| &list.0).map(|&core| core as usize).collect();
    let pool = Pool::new(&cores).map_err(system("threads cannot be started on these --cores"))?;
    let trainer = Trainer::new(frame, layers, shape, pool, Keep::All)
        .map_err(system("there is no memory for keys and values"))?;
    Ok((trainer, precision))
}

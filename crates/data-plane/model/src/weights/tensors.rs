//! Reads single tensors of a model and compares them with the configuration.

use std::sync::Arc;

use kernels::{Arena, PackError, PackedMatrix, TensorType, quant::dequantize_row};

use crate::{
    forward::{AttentionConstants, ModelContext, Norms, Router},
    shape::{
        layout::{router, router_bias, sinks, tensor_shape},
        rope::RopeTable,
        source::{Target, Tensor, TensorId, WeightSource},
    },
};

/// Reasons why weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The files lack a tensor of the architecture.
    #[error("the model's files have no {0:?}; the file is incomplete or of another architecture")]
    Missing(TensorId),
    /// A tensor has another shape than the configuration implies.
    #[error("{id:?} is {found:?} but the configuration implies {expected:?} (rows, columns)")]
    Shape {
        /// Id of the tensor.
        id: TensorId,
        /// Shape that the configuration implies.
        expected: (usize, usize),
        /// Shape in the file.
        found: (usize, usize),
    },
    /// A tensor cannot be packed.
    #[error("cannot pack {id:?}")]
    Pack {
        /// Id of the tensor.
        id: TensorId,
        /// Error of the packing function.
        source: PackError,
    },
}

pub(crate) fn pack_tensor(
    source: &dyn WeightSource,
    arena: &Arena,
    id: TensorId,
) -> Result<PackedMatrix, WeightsError> {
    let tensor = read_matrix(source, id)?;
    let matrix = PackedMatrix::pack_in(arena, tensor.kind, &tensor.data, tensor.rows, tensor.cols)
        .map_err(|source| WeightsError::Pack { id, source })?;
    drop(tensor);
    source.release(id);
    Ok(matrix)
}

/// Reads one matrix without packing.
pub(crate) fn read_matrix(source: &dyn WeightSource, id: TensorId) -> Result<Tensor<'_>, WeightsError> {
    let tensor = source.tensor(id).ok_or(WeightsError::Missing(id))?;
    expect_shape(id, tensor_shape(source.config(), id).into(), (tensor.rows, tensor.cols))?;
    Ok(tensor)
}

fn expect_shape(id: TensorId, expected: (usize, usize), found: (usize, usize)) -> Result<(), WeightsError> {
    if expected == found { Ok(()) } else { Err(WeightsError::Shape { id, expected, found }) }
}

/// Reads a vector as floats, or returns `None` if the files have none.
pub(crate) fn read_vector(
    source: &dyn WeightSource,
    id: TensorId,
    length: usize,
) -> Result<Option<Vec<f32>>, WeightsError> {
    let Some(tensor) = source.tensor(id) else {
        return Ok(None);
    };
    expect_shape(id, (1, length), (tensor.rows, tensor.cols))?;
    let mut values = vec![0.0; length];
    dequantize_row(tensor.kind, &tensor.data, &mut values);
    Ok(Some(values))
}

/// Reads the bias of the layer with the weights `id`, if it has one.
pub(crate) fn read_bias(
    source: &dyn WeightSource,
    id: TensorId,
    length: usize,
) -> Result<Option<Vec<f32>>, WeightsError> {
    match id {
        TensorId::Weight(layer, target) => read_vector(source, TensorId::Bias(layer, target), length),
        TensorId::Expert(layer, expert, part) if source.config().traits.expert_biases => {
            read_vector(source, TensorId::ExpertBias(layer, expert, part), length)
        }
        _ => Ok(None),
    }
}

/// Reads everything that a pass needs of a model besides its linear layers.
///
/// # Errors
///
/// A tensor is missing or has another shape than the configuration implies.
pub(crate) fn load_frame(source: &dyn WeightSource) -> Result<ModelContext, WeightsError> {
    let config = source.config().clone();
    let routers = (0..config.layers).map(|layer| load_router(source, layer)).collect::<Result<_, _>>()?;
    let attention = AttentionConstants { key_origins: load_key_origins(source)?, sinks: load_sinks(source)? };
    Ok(ModelContext::new(config, load_norms(source)?, routers, attention))
}

/// Reads the sinks of each layer; none in models without.
fn load_sinks(source: &dyn WeightSource) -> Result<Vec<Vec<f32>>, WeightsError> {
    let config = source.config();
    let ids = (0..config.layers).filter_map(|layer| sinks(config, layer));
    let of = |id| read_vector(source, id, config.heads)?.ok_or(WeightsError::Missing(id));
    ids.map(of).collect()
}

/// Reads the [origins](AttentionConstants::key_origins) of keys; none if keys are normed after their bias, if
/// a cap bends scores, or if heads have sinks.
fn load_key_origins(source: &dyn WeightSource) -> Result<Vec<Vec<f32>>, WeightsError> {
    let config = source.config();
    if config.qk_norm || config.traits.score_cap.is_some() || config.traits.sinks {
        return Ok(Vec::new());
    }
    let rope = RopeTable::new(config);
    let of = |layer| {
        let id = TensorId::Weight(layer, Target::K);
        let bias = read_bias(source, id, config.kv_heads * config.head_dim)?;
        Ok(bias.map(|bias| rope.key_origin(config, layer, bias)).unwrap_or_default())
    };
    (0..config.layers).map(of).collect()
}

/// Reads and packs the router of a block with experts; the router is kept in 32 bits for every stored type.
fn load_router(source: &dyn WeightSource, layer: usize) -> Result<Option<Router>, WeightsError> {
    let Some(id) = router(source.config(), layer) else { return Ok(None) };
    let Tensor { kind, rows, cols, data } = read_matrix(source, id)?;
    let mut values = vec![0.0; rows * cols];
    dequantize_row(kind, &data, &mut values);
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
    let matrix = PackedMatrix::pack(TensorType::F32, &bytes, rows, cols);
    let matrix = matrix.map_err(|source| WeightsError::Pack { id, source })?;
    let bias = router_bias(source.config(), layer)
        .map(|id| read_vector(source, id, rows)?.ok_or(WeightsError::Missing(id)));
    Ok(Some(Router { matrix: Arc::new(matrix), bias: bias.transpose()? }))
}

/// Reads the norms of a model.
///
/// # Errors
///
/// A norm is missing or has another length than the configuration implies.
pub fn load_norms(source: &dyn WeightSource) -> Result<Norms, WeightsError> {
    let config = source.config();
    let vector = |id| {
        let [_, length] = tensor_shape(config, id);
        read_vector(source, id, length)?.ok_or(WeightsError::Missing(id))
    };
    let of_layers = |id: fn(usize) -> TensorId, there: bool| {
        let layers = if there { config.layers } else { 0 };
        (0..layers).map(|layer| vector(id(layer))).collect::<Result<Vec<_>, _>>()
    };
    let (inputs, updates) = (config.norms_inputs(), config.norms_updates());
    Ok(Norms {
        attention: of_layers(TensorId::AttentionNorm, inputs)?,
        feed_forward: of_layers(TensorId::FeedForwardNorm, inputs)?,
        attention_update: of_layers(TensorId::AttentionUpdateNorm, updates)?,
        feed_forward_update: of_layers(TensorId::FeedForwardUpdateNorm, updates)?,
        query: of_layers(TensorId::QueryNorm, config.qk_norm)?,
        key: of_layers(TensorId::KeyNorm, config.qk_norm)?,
        output: vector(TensorId::OutputNorm)?,
    })
}

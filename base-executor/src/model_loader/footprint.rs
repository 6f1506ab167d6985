//! The memory that a base and adapters of common sizes take, from the header of the model's files and the
//! settings. No weight is read.

use std::sync::Arc;

use kernels::{
    PackedLayout,
    attention::KvPrecision,
    cuda::lora::StagedAdapter,
    lora::{
        ElementKind, FactorLayout, LayoutError, LoraMatrix, LoraPrecision, MatrixLayout, Packing, PieceTable,
        SharedBytes,
    },
};
use model::{
    forward::BLOCK_TOKENS,
    precision::{BaseNumerics, Precision},
    resident::kv_shape,
    shape::{
        config::ModelConfig,
        layout::{block_weights, layer_targets, linear_shape, tensor_shape},
        source::{Target, TensorId, WeightSource},
    },
    weights::packed_bytes,
};
use settings::DeviceChoice;

use super::{adapter_precision, base::PendingBase, cuda, kv_precision, precision_of};
use crate::{config::ExecutorConfig, device_memory_split::DeviceBytes};

/// Sets of linear layers that adapters usually change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetSet {
    /// Queries and values of the attention.
    QueryValue,
    /// All linear layers of a block that adapters can change.
    AllLinear,
}

impl TargetSet {
    pub(crate) const ALL: [Self; 2] = [Self::QueryValue, Self::AllLinear];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::QueryValue => "q, v",
            Self::AllLinear => "all-linear",
        }
    }

    fn of_layer(self, shape: &ModelConfig, layer: usize) -> &'static [Target] {
        match self {
            Self::QueryValue => &[Target::Q, Target::V],
            Self::AllLinear => layer_targets(shape, layer),
        }
    }
}

/// Bytes that a base takes with the settings `config`.
#[derive(Debug, Clone)]
pub(crate) struct BaseFootprint<'a> {
    config: &'a ExecutorConfig,
    pub(crate) shape: ModelConfig,
    pub(crate) weights: u64,
    /// Scratch memory of a pass on a GPU; 0 on a CPU, where it is small and not planned.
    pub(crate) scratch: u64,
    /// Block pool for KV cache and adapters.
    pub(crate) pool: u64,
    pub(crate) block_bytes: usize,
    pub(crate) kv: KvPrecision,
    pub(crate) adapters: LoraPrecision,
}

/// Bytes of one adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AdapterFootprint {
    /// Bytes of the budget of the host tier.
    pub(crate) bytes: u64,
    /// Blocks of the device's pool; `None` if a block is too small for a piece of the adapter.
    pub(crate) blocks: Option<u32>,
}

impl<'a> BaseFootprint<'a> {
    /// Opens the header of the model of `config`. On a GPU, `gpu` is its free and its total memory in bytes.
    ///
    /// # Errors
    /// If there is no such model, the executor cannot run it, or the GPU's memory is too small for it.
    pub(crate) fn open(config: &'a ExecutorConfig, gpu: Option<(u64, u64)>) -> anyhow::Result<Self> {
        let base = PendingBase::open(config)?;
        Ok(match gpu {
            None => Self::on_a_cpu(config, &base),
            Some(memory) => Self::on_a_gpu(config, &base, memory)?,
        })
    }

    fn on_a_cpu(config: &'a ExecutorConfig, base: &PendingBase) -> Self {
        let shape = base.source.config();
        let numerics = numerics_on_cpu(&*base.source, precision_of(config.precision));
        let (kv, packed) = (kv_precision(config, numerics), packed_bytes(&*base.source));
        Self {
            config,
            shape: shape.clone(),
            weights: config.weights.bytes.map_or(packed, |bound| packed.min(bound.0)),
            scratch: 0,
            pool: DeviceBytes::of(config).on_a_cpu(),
            block_bytes: kv_shape(shape, kv).block_bytes(),
            kv,
            adapters: adapter_precision(config, numerics),
        }
    }

    fn on_a_gpu(
        config: &'a ExecutorConfig,
        base: &PendingBase,
        (free, total): (u64, u64),
    ) -> anyhow::Result<Self> {
        let numerics = base.numerics_on_gpu();
        let (plan, block_bytes) = cuda::memory_plan(config, base);
        plan.check(config.device, free, total)?;
        Ok(Self {
            config,
            shape: base.source.config().clone(),
            weights: plan.weights,
            scratch: plan.scratch,
            pool: plan.pool_bytes(free - plan.weights),
            block_bytes,
            kv: kv_precision(config, numerics),
            adapters: adapter_precision(config, numerics),
        })
    }

    /// Returns the maximum length of a sequence in tokens.
    pub(crate) fn context_length(&self) -> usize {
        self.config.context_length.unwrap_or(usize::MAX).min(self.shape.context_length)
    }

    /// Returns the number of blocks of the pool, and the maximum numbers for the KV cache and for adapters.
    pub(crate) fn blocks(&self) -> [u32; 3] {
        let blocks = u32::try_from(self.pool / (self.block_bytes as u64).max(1)).unwrap_or(u32::MAX);
        if blocks == 0 {
            return [0; 3];
        }
        let context = u32::try_from(self.context_length().div_ceil(BLOCK_TOKENS)).unwrap_or(u32::MAX);
        let cache = DeviceBytes::of(self.config).divide(blocks, context, self.block_bytes);
        [blocks, cache.max_kv_blocks, cache.max_adapter_blocks]
    }

    /// Returns the size of a LoRA adapter of `rank` for `targets`. Exact adapters have 32 bits here, although
    /// factors whose values fit 16 bits take half of that.
    ///
    /// # Errors
    /// If the kernels do not support the shape of a matrix.
    pub(crate) fn adapter(&self, targets: TargetSet, rank: usize) -> Result<AdapterFootprint, LayoutError> {
        let matrices = self.matrices(targets, rank)?;
        let blocks = match self.config.device {
            DeviceChoice::Cuda { .. } => StagedAdapter::blocks_for(&matrices, self.block_bytes),
            DeviceChoice::Cpu => {
                let mut packing = Packing::new(self.block_bytes);
                let mut tables =
                    matrices.iter().map(|matrix| PieceTable::pack(matrix.layout(), &mut packing));
                tables.all(|table| table.is_some()).then(|| packing.blocks())
            }
        };
        Ok(AdapterFootprint { bytes: matrices.iter().map(|matrix| matrix.bytes() as u64).sum(), blocks })
    }

    /// Returns the matrices of an adapter, whose elements share the same memory.
    fn matrices(&self, targets: TargetSet, rank: usize) -> Result<Vec<LoraMatrix>, LayoutError> {
        let kind = match self.adapters {
            LoraPrecision::Exact => ElementKind::F32,
            LoraPrecision::Compact => ElementKind::F16,
            LoraPrecision::Bf16 => ElementKind::Bf16,
        };
        let factor = FactorLayout { kind, offset: 0 };
        let layouts =
            (0..self.shape.layers).flat_map(|layer| targets.of_layer(&self.shape, layer)).map(|&target| {
                let [rows, columns] = linear_shape(&self.shape, target);
                MatrixLayout { rank, columns, rows, scale: 1.0, a: factor, b: factor }
            });
        let layouts: Vec<MatrixLayout> = layouts.collect();
        let widest = layouts.iter().map(|layout| layout.columns.max(layout.rows)).max().unwrap_or(0);
        let stored = widest.next_multiple_of(2) * rank.next_multiple_of(2) * ElementKind::F32.bytes();
        let bytes: SharedBytes = Arc::new(vec![0; stored]);
        layouts.into_iter().map(|layout| LoraMatrix::over(&bytes, layout)).collect()
    }
}

/// Returns the rounding of the layers on a CPU in `precision`. `None` is `auto`, whose choices all lead to
/// types of equal width.
fn numerics_on_cpu(source: &dyn WeightSource, precision: Option<Precision>) -> BaseNumerics {
    let config = source.config();
    let is_exact = |id| {
        let [rows, columns] = tensor_shape(config, id);
        let layout = source.kind(id).and_then(|kind| PackedLayout::known(kind, rows, columns, 1.0));
        layout.is_none_or(|layout| layout.is_exact())
    };
    let head = if config.tied_head { TensorId::TokenEmbedding } else { TensorId::Weight(0, Target::LmHead) };
    let mut weights = (0..config.layers).flat_map(|layer| block_weights(config, layer)).chain([head]);
    match precision {
        Some(Precision::Exact) => BaseNumerics::Exact,
        Some(Precision::Bf16) => BaseNumerics::Bf16,
        _ if weights.all(is_exact) => BaseNumerics::Exact,
        _ => BaseNumerics::Rounded,
    }
}

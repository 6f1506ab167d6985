//! An adapter in the kernels' format, in the host tier.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use kernels::lora::{LayoutError, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes};
use types::AdapterVersion;

use crate::{
    adapter::{
        Adapter, Invocation, LoraModule, MethodWeights, Prefix, PromptEmbeddings, Scales, VocabularyChanges,
    },
    deltas::{
        device_copy::{DeviceCopy, DeviceMemory},
        expert_matrices::ExpertMatrices,
        matrices::{HostMatrices, ImageNumber, ModuleLayout},
    },
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
};

/// Parts of an adapter other than low-rank factors. Ordinary memory holds these parts, because workers do not
/// need them and no pass waits for them.
#[derive(Debug, Clone, Default)]
enum Direct {
    #[default]
    None,
    Scales(Arc<Scales>),
    Prefix(Arc<Prefix>),
    Prompt(Arc<PromptEmbeddings>),
    /// Tokens after which an activated adapter applies.
    Invocation(Invocation),
    Vocabulary(Arc<VocabularyChanges>),
}

impl Direct {
    fn bytes(&self) -> usize {
        match self {
            Self::None | Self::Invocation(_) => 0,
            Self::Scales(scales) => scales.bytes(),
            Self::Prefix(prefix) => prefix.bytes(),
            Self::Prompt(prompt) => prompt.bytes(),
            Self::Vocabulary(changes) => changes.bytes(),
        }
    }
}

/// Matrices of experts by layer, then target. Ordinary memory holds these bytes.
#[derive(Debug)]
struct EncodedExperts {
    modules: Vec<ModuleLayout>,
    bytes: Arc<Vec<u8>>,
}

/// An adapter's values in the kernels' format, with the place of each matrix.
#[derive(Debug)]
pub struct EncodedAdapter {
    /// Matrices by layer, then target, without those of experts; empty for adapters without matrices (IA3,
    /// virtual tokens).
    pub modules: Vec<ModuleLayout>,
    /// Bytes of these matrices.
    pub bytes: Vec<u8>,
    experts: EncodedExperts,
    direct: Direct,
    generation: AdapterVersion,
}

impl EncodedAdapter {
    /// Encodes `adapter`, which must have been checked against `config`.
    #[must_use]
    pub fn new(adapter: &Adapter, config: &ModelConfig, precision: LoraPrecision) -> Self {
        let encode = |bytes: &mut Vec<u8>, module: &LoraModule| {
            let [rows, columns] = linear_shape(config, module.target);
            let LoraModule { layer, target, rank, scale, ref a, ref b } = *module;
            let matrix = MatrixLayout::append(bytes, rank, columns, rows, scale, a, b, precision);
            ModuleLayout { layer, target, matrix }
        };
        let (mut bytes, mut of_experts) = (Vec::new(), Vec::new());
        let (mut modules, mut experts) = (Vec::new(), Vec::new());
        for module in adapter.modules() {
            if module.target.is_of_expert() {
                experts.push(encode(&mut of_experts, module));
            } else {
                modules.push(encode(&mut bytes, module));
            }
        }
        let direct = match &adapter.method {
            MethodWeights::Lora(_) => Direct::None,
            MethodWeights::Activated(_, invocation) => Direct::Invocation(invocation.clone()),
            MethodWeights::Ia3(scales) => Direct::Scales(Arc::clone(scales)),
            MethodWeights::Prefix(prefix) => Direct::Prefix(Arc::clone(prefix)),
            MethodWeights::Prompt(prompt) => Direct::Prompt(Arc::clone(prompt)),
        };
        let experts = EncodedExperts { modules: experts, bytes: Arc::new(of_experts) };
        Self { modules, bytes, experts, direct, generation: adapter.generation }
    }

    /// Returns the scale of each matrix.
    pub fn scales(&self) -> impl Iterator<Item = f32> {
        self.modules.iter().chain(&self.experts.modules).map(|module| module.matrix.scale)
    }

    /// Adds the output scales of a DoRA, or biases.
    #[must_use]
    pub fn with_scales(self, scales: Scales) -> Self {
        Self { direct: Direct::Scales(Arc::new(scales)), ..self }
    }

    /// Adds the changes of embedding and head.
    #[must_use]
    pub fn with_vocabulary(self, changes: VocabularyChanges) -> Self {
        Self { direct: Direct::Vocabulary(Arc::new(changes)), ..self }
    }
}

/// An adapter ready to be computed, at its true ranks.
#[derive(Debug)]
pub struct PreparedAdapter {
    generation: AdapterVersion,
    host: HostMatrices,
    experts: ExpertMatrices,
    direct: Direct,
    device: Mutex<Option<Arc<DeviceCopy>>>,
    /// Cached number of device blocks for a copy.
    device_blocks: OnceLock<u32>,
    tally: RankRowCounters,
}

impl PreparedAdapter {
    /// Encodes `adapter`, which was checked against `config`, into private memory that workers cannot read.
    ///
    /// # Errors
    ///
    /// The kernels do not support the shape of a matrix.
    pub fn new(
        adapter: &Adapter,
        config: &ModelConfig,
        precision: LoraPrecision,
    ) -> Result<Self, LayoutError> {
        Self::of(EncodedAdapter::new(adapter, config, precision), config)
    }

    /// Prepares an encoded adapter in private memory.
    ///
    /// # Errors
    ///
    /// The kernels do not support the shape of a matrix.
    pub fn of(mut encoded: EncodedAdapter, config: &ModelConfig) -> Result<Self, LayoutError> {
        let bytes: SharedBytes = Arc::new(std::mem::take(&mut encoded.bytes));
        Self::over(&encoded, config, ImageNumber::NONE, &bytes)
    }

    /// Prepares an adapter whose encoded bytes lie in `bytes`.
    ///
    /// # Errors
    ///
    /// A matrix does not lie within `bytes`.
    pub fn over(
        encoded: &EncodedAdapter,
        config: &ModelConfig,
        image: ImageNumber,
        bytes: &SharedBytes,
    ) -> Result<Self, LayoutError> {
        let of_experts: SharedBytes = Arc::<Vec<u8>>::clone(&encoded.experts.bytes);
        Ok(Self {
            generation: encoded.generation,
            host: HostMatrices::over(&encoded.modules, config.layers, image, bytes)?,
            experts: ExpertMatrices::over(&encoded.experts.modules, &of_experts)?,
            direct: encoded.direct.clone(),
            device: Mutex::new(None),
            device_blocks: OnceLock::new(),
            tally: RankRowCounters::default(),
        })
    }

    /// Returns the adapter version.
    #[must_use]
    pub fn generation(&self) -> AdapterVersion {
        self.generation
    }

    /// Returns the matrices on the host.
    #[must_use]
    pub fn host(&self) -> &HostMatrices {
        &self.host
    }

    /// Returns the image number for workers.
    #[must_use]
    pub fn image(&self) -> ImageNumber {
        self.host.image()
    }

    /// Returns the largest rank of its layers.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.host.rank().max(self.experts.rank())
    }

    /// Returns the bytes of all values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.host.bytes() + self.experts.bytes() + self.direct.bytes()
    }

    /// Returns the bytes that are copied to the device: those of the low-rank matrices, except for experts.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.host.bytes()
    }

    /// Returns the number of blocks for a copy in `memory`, the memory of this process's device. The result
    /// is `u32::MAX` if no copy is possible.
    #[must_use]
    pub fn device_blocks(&self, memory: &dyn DeviceMemory) -> u32 {
        *self.device_blocks.get_or_init(|| memory.blocks_for(&self.host).unwrap_or(u32::MAX))
    }

    /// True if a pass finds the complete adapter on its device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.host.bytes() == 0 || self.device().is_some_and(|copy| copy.is_complete())
    }

    /// Returns the number of virtual tokens before a prompt. The caller puts that many arbitrary tokens
    /// before a sequence, and the pass fills in the adapter's embeddings, or keys and values.
    #[must_use]
    pub fn virtual_tokens(&self) -> usize {
        match &self.direct {
            Direct::Prefix(prefix) => prefix.tokens,
            Direct::Prompt(prompt) => prompt.tokens,
            Direct::None | Direct::Scales(_) | Direct::Invocation(_) | Direct::Vocabulary(_) => 0,
        }
    }

    /// Returns the embeddings of virtual tokens, if the adapter has any.
    #[must_use]
    pub fn prompt(&self) -> Option<&PromptEmbeddings> {
        if let Direct::Prompt(prompt) = &self.direct { Some(prompt) } else { None }
    }

    /// Returns the invocation; the caller sets the adapter for slices from [`Invocation::begin`] on.
    #[must_use]
    pub fn invocation(&self) -> Option<&Invocation> {
        if let Direct::Invocation(invocation) = &self.direct { Some(invocation) } else { None }
    }

    /// Returns the scaling vectors, if the adapter has any.
    #[must_use]
    pub fn scales(&self) -> Option<&Scales> {
        if let Direct::Scales(scales) = &self.direct { Some(scales) } else { None }
    }

    /// Returns the keys and values of virtual tokens, if the adapter has any.
    #[must_use]
    pub fn prefix(&self) -> Option<&Prefix> {
        if let Direct::Prefix(prefix) = &self.direct { Some(prefix) } else { None }
    }

    /// Returns the changes of embedding and head, if the adapter has any.
    #[must_use]
    pub fn vocabulary(&self) -> Option<&VocabularyChanges> {
        if let Direct::Vocabulary(changes) = &self.direct { Some(changes) } else { None }
    }

    /// Returns the matrices of experts, which only the process of the pass computes with.
    #[must_use]
    pub fn experts(&self) -> &ExpertMatrices {
        &self.experts
    }

    /// Returns counters of the work by place of computation.
    #[must_use]
    pub fn tally(&self) -> &RankRowCounters {
        &self.tally
    }

    /// Returns the current device copy, if any.
    #[must_use]
    pub fn device(&self) -> Option<Arc<DeviceCopy>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the device copy that passes use from the next one on.
    pub fn set_device(&self, copy: Option<Arc<DeviceCopy>>) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = copy;
    }

    /// Returns the matrices of a linear layer, if it is adapted.
    #[must_use]
    pub fn matrix(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        self.host.get(layer, target)
    }

    /// Returns the adapted linear layers in the order of a pass.
    pub fn matrices(&self) -> impl Iterator<Item = (usize, Target, &LoraMatrix)> {
        self.host.iter()
    }
}

/// Products of rows and ranks, by place of computation. Independent counters need no memory ordering.
#[derive(Debug, Default)]
pub struct RankRowCounters {
    device: AtomicU64,
    workers: AtomicU64,
    executor: AtomicU64,
}

impl RankRowCounters {
    /// Counts `rank_rows` that the device computed.
    pub fn device(&self, rank_rows: u64) {
        self.device.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// Counts `rank_rows` that workers computed.
    pub fn workers(&self, rank_rows: u64) {
        self.workers.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// Adds work of the executor, from the host tier.
    pub fn executor(&self, rank_rows: u64) {
        self.executor.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// Returns the counters of device, workers and executor, in this order.
    #[must_use]
    pub fn read(&self) -> [u64; 3] {
        [&self.device, &self.workers, &self.executor].map(|figure| figure.load(Ordering::Relaxed))
    }
}

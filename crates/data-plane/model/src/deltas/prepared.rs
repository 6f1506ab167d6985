//! An adapter in the form the kernels take, in the host tier.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use kernels::lora::{LayoutError, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes};
use types::Generation;

use crate::{
    adapter::{Adapter, Invocation, LoraModule, MethodWeights, Prefix, Scales, VocabularyChanges},
    deltas::{
        device_copy::{DeviceCopy, DeviceMemory},
        matrices::{HostMatrices, ImageNumber, ModuleLayout},
    },
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
};

/// What of an adapter is no factor of a linear layer. It stays in ordinary memory: there is nothing in it for workers to compute,
/// and no pass waits for it.
#[derive(Debug, Clone, Default)]
enum Direct {
    #[default]
    None,
    Scales(Arc<Scales>),
    Prefix(Arc<Prefix>),
    /// Where it begins.
    Invocation(Invocation),
    Vocabulary(Arc<VocabularyChanges>),
}

impl Direct {
    fn bytes(&self) -> usize {
        match self {
            Self::None | Self::Invocation(_) => 0,
            Self::Scales(scales) => scales.bytes(),
            Self::Prefix(prefix) => prefix.bytes(),
            Self::Vocabulary(changes) => changes.bytes(),
        }
    }
}

/// An adapter's numbers as the kernels read them, and where each matrix lies.
#[derive(Debug)]
pub struct EncodedAdapter {
    /// By layer, then target; none in an adapter without matrices (IA3, prefix tuning).
    pub modules: Vec<ModuleLayout>,
    /// All matrices.
    pub bytes: Vec<u8>,
    direct: Direct,
    generation: Generation,
}

impl EncodedAdapter {
    /// Encodes `adapter`, which has been checked against `config`.
    #[must_use]
    pub fn new(adapter: &Adapter, config: &ModelConfig, precision: LoraPrecision) -> Self {
        let mut bytes = Vec::new();
        let encode = |module: &LoraModule| {
            let [rows, columns] = linear_shape(config, module.target);
            let (rank, scale) = (module.rank, module.scale);
            let matrix =
                MatrixLayout::append(&mut bytes, rank, columns, rows, scale, &module.a, &module.b, precision);
            ModuleLayout { layer: module.layer, target: module.target, matrix }
        };
        let modules = adapter.modules().iter().map(encode).collect();
        let direct = match &adapter.method {
            MethodWeights::Lora(_) => Direct::None,
            MethodWeights::Activated(_, invocation) => Direct::Invocation(invocation.clone()),
            MethodWeights::Ia3(scales) => Direct::Scales(Arc::clone(scales)),
            MethodWeights::Prefix(prefix) => Direct::Prefix(Arc::clone(prefix)),
        };
        Self { modules, bytes, direct, generation: adapter.generation }
    }

    /// The same, with what the base's outputs are scaled with: of a DoRA.
    #[must_use]
    pub fn with_scales(self, scales: Scales) -> Self {
        Self { direct: Direct::Scales(Arc::new(scales)), ..self }
    }

    /// The same, with what is done to embedding and head.
    #[must_use]
    pub fn with_vocabulary(self, changes: VocabularyChanges) -> Self {
        Self { direct: Direct::Vocabulary(Arc::new(changes)), ..self }
    }
}

/// An adapter ready to be computed, at its true ranks.
#[derive(Debug)]
pub struct PreparedAdapter {
    generation: Generation,
    host: HostMatrices,
    direct: Direct,
    /// What of it is on the device, or on its way there.
    device: Mutex<Option<Arc<DeviceCopy>>>,
    /// Blocks that it takes on the device of this process.
    device_blocks: OnceLock<u32>,
    tally: RankRowCounters,
}

impl PreparedAdapter {
    /// Takes memory of its own for `adapter`, which has been checked against `config`. No worker can compute it.
    ///
    /// # Errors
    ///
    /// A matrix is of a shape that the kernels do not take.
    pub fn new(
        adapter: &Adapter,
        config: &ModelConfig,
        precision: LoraPrecision,
    ) -> Result<Self, LayoutError> {
        Self::of(EncodedAdapter::new(adapter, config, precision), config)
    }

    /// The same of an adapter that is encoded.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn of(mut encoded: EncodedAdapter, config: &ModelConfig) -> Result<Self, LayoutError> {
        let bytes: SharedBytes = Arc::new(std::mem::take(&mut encoded.bytes));
        Self::over(&encoded, config, ImageNumber::NONE, &bytes)
    }

    /// An adapter whose encoded bytes lie in `bytes`.
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
        Ok(Self {
            generation: encoded.generation,
            host: HostMatrices::over(&encoded.modules, config.layers, image, bytes)?,
            direct: encoded.direct.clone(),
            device: Mutex::new(None),
            device_blocks: OnceLock::new(),
            tally: RankRowCounters::default(),
        })
    }

    /// What it is.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Its matrices on the host.
    #[must_use]
    pub fn host(&self) -> &HostMatrices {
        &self.host
    }

    /// What its bytes are called among workers.
    #[must_use]
    pub fn image(&self) -> ImageNumber {
        self.host.image()
    }

    /// The largest rank of its layers.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.host.rank()
    }

    /// Bytes of all its numbers.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.host.bytes() + self.direct.bytes()
    }

    /// Bytes that travel to the device: those of its low-rank matrices.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.host.bytes()
    }

    /// Blocks that it takes in `memory`, that of this process's device: more than there can be, if it cannot be there.
    #[must_use]
    pub fn device_blocks(&self, memory: &dyn DeviceMemory) -> u32 {
        *self.device_blocks.get_or_init(|| memory.blocks_for(&self.host).unwrap_or(u32::MAX))
    }

    /// True if all of it is where a pass computes.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.host.bytes() == 0 || self.device().is_some_and(|copy| copy.is_complete())
    }

    /// Tokens that stand before a prompt without being part of it: whoever runs a sequence puts as many before its
    /// tokens, any of the vocabulary, and the pass gives them the adapter's keys and values.
    #[must_use]
    pub fn virtual_tokens(&self) -> usize {
        self.prefix().map_or(0, |prefix| prefix.tokens)
    }

    /// What invokes it, if it applies only from there: whoever runs a sequence gives it to the slices from
    /// [`Invocation::begin`] on.
    #[must_use]
    pub fn invocation(&self) -> Option<&Invocation> {
        if let Direct::Invocation(invocation) = &self.direct { Some(invocation) } else { None }
    }

    /// The vectors that scale, if it is of this kind.
    #[must_use]
    pub fn scales(&self) -> Option<&Scales> {
        if let Direct::Scales(scales) = &self.direct { Some(scales) } else { None }
    }

    /// The keys and values of its virtual tokens, if it is of this kind.
    #[must_use]
    pub fn prefix(&self) -> Option<&Prefix> {
        if let Direct::Prefix(prefix) = &self.direct { Some(prefix) } else { None }
    }

    /// What is done to embedding and head, if it is of this kind.
    #[must_use]
    pub fn vocabulary(&self) -> Option<&VocabularyChanges> {
        if let Direct::Vocabulary(changes) = &self.direct { Some(changes) } else { None }
    }

    /// Who computed how much of it.
    #[must_use]
    pub fn tally(&self) -> &RankRowCounters {
        &self.tally
    }

    /// What of it is on the device.
    #[must_use]
    pub fn device(&self) -> Option<Arc<DeviceCopy>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From the next pass on the device's part is computed from `copy`.
    pub fn set_device(&self, copy: Option<Arc<DeviceCopy>>) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = copy;
    }

    /// The matrices of a linear layer, if it is adapted.
    #[must_use]
    pub fn matrix(&self, layer: usize, target: Target) -> Option<&LoraMatrix> {
        self.host.get(layer, target)
    }

    /// The linear layers it changes, in the order of a pass.
    pub fn matrices(&self) -> impl Iterator<Item = (usize, Target, &LoraMatrix)> {
        self.host.iter()
    }
}

/// Rows times ranks of an adapter, by where they were computed. Each figure stands for itself, so nothing is ordered.
#[derive(Debug, Default)]
pub struct RankRowCounters {
    device: AtomicU64,
    workers: AtomicU64,
    executor: AtomicU64,
}

impl RankRowCounters {
    /// Computed on the device.
    pub fn device(&self, rank_rows: u64) {
        self.device.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// Computed by workers.
    pub fn workers(&self, rank_rows: u64) {
        self.workers.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// Computed from the host tier by whoever runs the pass.
    pub fn executor(&self, rank_rows: u64) {
        self.executor.fetch_add(rank_rows, Ordering::Relaxed);
    }

    /// All three, in this order.
    #[must_use]
    pub fn read(&self) -> [u64; 3] {
        [&self.device, &self.workers, &self.executor].map(|figure| figure.load(Ordering::Relaxed))
    }
}

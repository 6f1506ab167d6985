//! Models on both devices.

use std::sync::{Arc, OnceLock};
pub(crate) use testkit::paths::{golden, root};

use kernels::cuda::{Cuda, CudaError};
use model::{
    adapter::Adapter,
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    deltas::{
        device_copy::{DeviceCopy, DeviceMemory as _},
        prepared::PreparedAdapter,
    },
    forward::{LogitRows, SequenceSlice},
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    sources::open::open,
};
use types::BlockId;

pub(crate) use crate::golden_support::error;

/// The device, or `None` with a message.
pub(crate) fn device() -> Option<Arc<Cuda>> {
    static DEVICE: OnceLock<Result<Arc<Cuda>, CudaError>> = OnceLock::new();
    match DEVICE.get_or_init(|| Cuda::open(0)) {
        Ok(cuda) => Some(Arc::clone(cuda)),
        Err(error) => {
            let is_required = std::env::var_os("HOLOBIONT_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!is_required, "HOLOBIONT_REQUIRE_CUDA=1, but {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

pub(crate) fn on_device(cuda: &Arc<Cuda>, name: &str, graphs: Graphs) -> CudaModel {
    at(cuda, &golden("models").join(name), None, graphs)
}

pub(crate) fn at(
    cuda: &Arc<Cuda>,
    path: &std::path::Path,
    kv_dtype: Option<KvPrecision>,
    graphs: Graphs,
) -> CudaModel {
    let source = open(path).unwrap();
    let weights = CudaWeights::load(&*source, cuda, 2, &|_| {}).unwrap();
    CudaModel::new(weights, &CudaOptions { kv_bytes: 32 << 20, kv_dtype, graphs }).unwrap()
}

pub(crate) fn on_cpu(name: &str) -> ResidentModel {
    let source = open(&golden("models").join(name)).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let options = ResidentOptions { cores: vec![0], kv_bytes: 32 << 20, kv_dtype: None };
    ResidentModel::new(weights, &options).unwrap()
}

pub(crate) fn adapter(pass: &CudaModel, path: &std::path::Path) -> Arc<PreparedAdapter> {
    let adapter = Adapter::read(path, pass.config()).unwrap();
    brought(pass, PreparedAdapter::new(&adapter, pass.config(), pass.adapter_precision()).unwrap())
}

pub(crate) fn brought(pass: &CudaModel, prepared: PreparedAdapter) -> Arc<PreparedAdapter> {
    if prepared.device_bytes() > 0 {
        upload(pass, &prepared);
    }
    Arc::new(prepared)
}

/// Uploads an adapter to the pool's last free blocks, since the sequences here use the first.
pub(crate) fn upload(pass: &CudaModel, adapter: &PreparedAdapter) -> Arc<DeviceCopy> {
    let memory = pass.adapter_memory();
    let count = memory.blocks_for(adapter.host()).unwrap() as usize;
    let free = (0..pass.kv_blocks() as u32).rev().filter(|&block| memory.pool.is_own(block));
    let blocks: Vec<BlockId> = free.take(count).map(BlockId).collect();
    let copy = Arc::new(memory.copy_of(adapter.host(), &blocks));
    while copy.next_bytes().is_some() {
        copy.copy_next(adapter.host());
    }
    assert!(copy.is_complete());
    adapter.set_device(Some(Arc::clone(&copy)));
    copy
}

pub(crate) struct CudaSequence<'a> {
    pub(crate) tokens: Vec<u32>,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) adapter: Option<&'a Arc<PreparedAdapter>>,
}

impl<'a> CudaSequence<'a> {
    /// `length` tokens unique to `index`, with capacity for 32 more.
    pub(crate) fn new(index: u32, length: usize, adapter: Option<&'a Arc<PreparedAdapter>>) -> Self {
        let tokens = (0..length as u32).map(|i| (i * 37 + index * 101 + i * i) % 300).collect();
        let count = (length + 32).div_ceil(16) as u32;
        let blocks = (0..count).map(|block| BlockId(index * 16 + block)).collect();
        Self { tokens, blocks, adapter }
    }

    pub(crate) fn slice(
        &self,
        range: std::ops::Range<usize>,
        logits: LogitRows,
    ) -> SequenceSlice<'_, PreparedAdapter> {
        let (start, tokens) = (range.start, &self.tokens[range]);
        SequenceSlice { trunk: &[], tokens, start, blocks: &self.blocks, adapter: self.adapter, logits }
    }
}

//! The frozen weights, packed for the CPU.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use kernels::{
    Activations, Arena, Forms, LinearPart, PackError, PackedMatrix, linear, quant::dequantize_row,
};

use crate::{
    config::ModelConfig,
    forward::{BaseLayers, Compute, LinearGroup, Norms},
    layout::{BLOCK_TARGETS, linear_shape},
    source::{Target, TensorId, WeightSource},
};

/// Why weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The files lack a tensor the architecture has.
    #[error(
        "the model's files have no {0:?}; the file is incomplete or of another architecture than it says"
    )]
    Missing(TensorId),
    /// A tensor is not of the shape the configuration implies.
    #[error("{id:?} is {found:?} but the configuration implies {expected:?} (rows, columns)")]
    Shape {
        /// The tensor.
        id: TensorId,
        /// What the configuration implies.
        expected: (usize, usize),
        /// What the file holds.
        found: (usize, usize),
    },
    /// A tensor cannot be packed.
    #[error("cannot pack {id:?}")]
    Pack {
        /// The tensor.
        id: TensorId,
        /// Cause.
        source: PackError,
    },
}

/// A linear layer.
#[derive(Debug)]
struct Linear {
    matrix: PackedMatrix,
    bias: Option<Vec<f32>>,
}

/// All linear layers of a model and its token embedding.
#[derive(Debug)]
pub struct Weights {
    /// `[layer][q, k, v, o, gate, up, down]`.
    layers: Vec<[Linear; 7]>,
    /// `None` if the head shares the embedding's weights.
    head: Option<Linear>,
    embedding: PackedMatrix,
}

/// How much of the weights has been read and packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Elements that are packed.
    pub done: u64,
    /// Elements of all linear layers and the embedding.
    pub total: u64,
}

/// Memory for weights is asked for in pieces of this size, so that small matrices share huge pages.
const ARENA_CHUNK_BYTES: usize = 32 << 20;

/// The targets of a group and the column of the group's output at which each begins.
#[must_use]
pub fn group_targets(config: &ModelConfig, group: LinearGroup) -> Vec<(Target, usize)> {
    let targets: &[Target] = match group {
        LinearGroup::Qkv => &[Target::Q, Target::K, Target::V],
        LinearGroup::O => &[Target::O],
        LinearGroup::GateUp => &[Target::Gate, Target::Up],
        LinearGroup::Down => &[Target::Down],
        LinearGroup::Head => &[Target::LmHead],
    };
    let mut column = 0;
    let place = |&target| {
        let at = column;
        column += linear_shape(config, target)[0];
        (target, at)
    };
    targets.iter().map(place).collect()
}

impl Weights {
    /// Reads and packs all tensors with `threads` threads.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another shape than the configuration implies, or memory runs out.
    pub fn load(source: &(dyn WeightSource + Sync), threads: usize) -> Result<Self, WeightsError> {
        Self::load_telling(source, threads, &|_| {})
    }

    /// Like [`load`](Self::load), and tells `told`, from any of the threads, how far it is.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another shape than the configuration implies, or memory runs out.
    pub fn load_telling(
        source: &(dyn WeightSource + Sync),
        threads: usize,
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, WeightsError> {
        let config = source.config();
        let ids = || (0..config.layers).flat_map(|layer| BLOCK_TARGETS.map(|target| (layer, target)));
        let mut jobs: Vec<Job> = ids().map(|(layer, target)| Job::Linear(layer, target)).collect();
        // The largest first, so that no thread ends up alone with it.
        jobs.insert(0, Job::Embedding);
        if !config.tied_head {
            jobs.insert(0, Job::Linear(0, Target::LmHead));
        }
        let mut packed = pack_all(source, &jobs, threads, told)?.into_iter();
        let mut next = || packed.next().expect("one result a job");
        let head = (!config.tied_head).then(&mut next);
        let embedding = next().matrix;
        let layers = (0..config.layers).map(|_| std::array::from_fn(|_| next())).collect();
        Ok(Self { layers, head, embedding })
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let layers = self.layers.iter().flatten().chain(&self.head);
        layers.map(|linear| linear.matrix.bytes()).sum::<usize>() + self.embedding.bytes()
    }

    /// True if every layer takes its activations unrounded.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.layers.iter().flatten().chain(&self.head).all(|linear| linear.matrix.is_exact())
    }

    fn part(&self, layer: usize, target: Target, column: usize) -> LinearPart<'_> {
        let linear = match target {
            Target::LmHead => match &self.head {
                Some(head) => head,
                None => {
                    return LinearPart { matrix: &self.embedding, bias: None, column };
                }
            },
            _ => &self.layers[layer][target as usize],
        };
        LinearPart { matrix: &linear.matrix, bias: linear.bias.as_deref(), column }
    }
}

/// Base layers with all weights in memory.
#[derive(Debug)]
pub struct ResidentLayers {
    /// The weights.
    pub weights: Weights,
    /// The shape they have.
    pub config: ModelConfig,
}

impl BaseLayers for ResidentLayers {
    fn linear(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut [f32],
    ) {
        let targets = group_targets(&self.config, group);
        let parts: Vec<LinearPart<'_>> =
            targets.iter().map(|&(target, column)| self.weights.part(layer, target, column)).collect();
        let forms = parts.iter().fold(Forms::default(), |forms, part| forms.and(part.matrix.forms()));
        x.prepare(&mut compute.pool, compute.isa, forms);
        let stride = parts.iter().map(|part| part.matrix.rows()).sum();
        linear(&mut compute.pool, compute.isa, x, &parts, out, stride);
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) {
        for (token, row) in tokens.zip(out.chunks_exact_mut(self.config.hidden_size)) {
            self.weights.embedding.read_row(token as usize, row);
        }
    }
}

/// A matrix to pack.
#[derive(Debug, Clone, Copy)]
enum Job {
    Embedding,
    Linear(usize, Target),
}

impl Job {
    /// Elements of its matrix, as the configuration implies.
    fn elements(self, config: &ModelConfig) -> u64 {
        let (rows, cols) = match self {
            Self::Embedding => (config.vocab_size, config.hidden_size),
            Self::Linear(_, target) => linear_shape(config, target).into(),
        };
        (rows as u64).saturating_mul(cols as u64)
    }
}

/// Packs `jobs`, in their order.
fn pack_all(
    source: &(dyn WeightSource + Sync),
    jobs: &[Job],
    threads: usize,
    told: &(dyn Fn(LoadProgress) + Sync),
) -> Result<Vec<Linear>, WeightsError> {
    let config = source.config();
    let total = jobs.iter().map(|job| job.elements(config)).sum();
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let arena = Arena::new(ARENA_CHUNK_BYTES);
    let results: Mutex<Vec<Option<Result<Linear, WeightsError>>>> =
        Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&job) = jobs.get(index) else { break };
                    let result = pack(source, &arena, job);
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
                    let elements = job.elements(config);
                    let done = done.fetch_add(elements, Ordering::Relaxed) + elements;
                    told(LoadProgress { done, total });
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|result| result.expect("every job was taken")).collect()
}

fn pack(source: &dyn WeightSource, arena: &Arena, job: Job) -> Result<Linear, WeightsError> {
    let config = source.config();
    let (weight, bias, shape) = match job {
        Job::Embedding => (TensorId::TokenEmbedding, None, (config.vocab_size, config.hidden_size)),
        Job::Linear(layer, target) => {
            let bias = TensorId::Bias(layer, target);
            (TensorId::Weight(layer, target), Some(bias), linear_shape(config, target).into())
        }
    };
    let tensor = source.tensor(weight).ok_or(WeightsError::Missing(weight))?;
    expect_shape(weight, shape, (tensor.rows, tensor.cols))?;
    let matrix = PackedMatrix::pack_in(arena, tensor.kind, &tensor.data, tensor.rows, tensor.cols)
        .map_err(|source| WeightsError::Pack { id: weight, source })?;
    drop(tensor);
    source.release(weight);
    let bias = match bias {
        Some(id) => read_vector(source, id, shape.0)?,
        None => None,
    };
    Ok(Linear { matrix, bias })
}

fn expect_shape(id: TensorId, expected: (usize, usize), found: (usize, usize)) -> Result<(), WeightsError> {
    if expected == found { Ok(()) } else { Err(WeightsError::Shape { id, expected, found }) }
}

/// A vector as floats, or `None` if the files have none.
fn read_vector(
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

/// Reads the norms of a model.
///
/// # Errors
///
/// One is missing or has another length than the configuration implies.
pub fn load_norms(source: &dyn WeightSource) -> Result<Norms, WeightsError> {
    let config = source.config();
    let vector = |id, length| read_vector(source, id, length)?.ok_or(WeightsError::Missing(id));
    let of_layers = |id: fn(usize) -> TensorId, length| {
        (0..config.layers).map(|layer| vector(id(layer), length)).collect()
    };
    let of_heads = |id| {
        if config.qk_norm { of_layers(id, config.head_dim) } else { Ok(Vec::new()) }
    };
    Ok(Norms {
        attention: of_layers(TensorId::AttentionNorm, config.hidden_size)?,
        feed_forward: of_layers(TensorId::FeedForwardNorm, config.hidden_size)?,
        query: of_heads(TensorId::QueryNorm)?,
        key: of_heads(TensorId::KeyNorm)?,
        output: vector(TensorId::OutputNorm, config.hidden_size)?,
    })
}

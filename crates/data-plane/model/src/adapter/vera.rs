//! VeRA in PEFT's format: all layers share one A and one B, and each layer has two scaling vectors.
//!
//! The shared matrices are `vera_A`, `[rank, in]`, and `vera_B`, `[out, rank]`, of the widest layers, stored
//! or drawn again from their key. The vectors are `vera_lambda_d`, `[rank]`, and `vera_lambda_b`, `[out]`.
//!
//! A layer's `diag(b) B diag(d) A` is a LoRA with the factors `diag(d) A` and `diag(b) B`, and is read so.

use std::{ops::Range, path::Path};

use kernels::TensorType;

use super::{
    error::AdapterError,
    limits::{MAX_EXPANDED_BYTES, MAX_RANK},
    matrix::{StoredMatrix, StoredModule, decode},
    options::ConfigOptions,
    selection::{Selected, Selection, linear_layers},
    torch_random::TorchGenerator,
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::{fused::Fused, hf_names::module_name},
};

const SAVED: &str = "save_projection";

const KEY: &str = "projection_prng_key";

/// Options that describe how a VeRA was made, and not its result.
const HISTORY: [&str; 3] = ["d_initial", "init_weights", "vera_dropout"];

#[derive(Debug)]
pub(super) struct VeraConfig {
    selection: Selection,
    rank: usize,
    origin: SharedMatrices,
}

#[derive(Debug, Clone, Copy)]
enum SharedMatrices {
    Saved,
    Drawn(u64),
}

/// A linear layer's place in the base's files, where it may be part of a fused layer.
struct PlacedLayer {
    selected: Selected,
    /// Rows within the fused layer.
    rows: Range<usize>,
    /// Shape of the fused layer, `[out, in]`.
    whole: [usize; 2],
}

pub(super) struct Projections {
    /// Matrix of shape `[rank, inputs]`.
    a: Vec<f32>,
    inputs: usize,
    /// Matrix of shape `[outputs, rank]`.
    b: Vec<f32>,
    outputs: usize,
    /// Bytes of all factors so far; bounded, because a small file can describe large factors.
    bytes: u64,
}

impl VeraConfig {
    pub(super) fn from_options(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        options.one_of("bias", &["none"])?;
        let key = options.seed(KEY)?.unwrap_or(0);
        let is_saved = !options.has(SAVED) || options.flag(SAVED)?;
        let origin = if is_saved { SharedMatrices::Saved } else { SharedMatrices::Drawn(key) };
        let selection = Selection::from_options(options)?.with_layers(options)?;
        let rank = options.count("r")?.unwrap_or(256);
        if rank == 0 || rank > MAX_RANK {
            return Err(options.problem("r", format!("is {rank}, which is not between 1 and {MAX_RANK}")));
        }
        options.refuse_the_rest(&HISTORY)?;
        Ok(Self { selection, rank, origin })
    }

    /// Takes the shared matrices from the file, or draws them.
    pub(super) fn projections(
        &self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
    ) -> Result<Projections, AdapterError> {
        match self.origin {
            SharedMatrices::Saved => self.saved(weights),
            SharedMatrices::Drawn(seed) => self.drawn(weights.path(), model, seed),
        }
    }

    fn saved(&self, weights: &mut WeightFile<'_>) -> Result<Projections, AdapterError> {
        let (a, b) = (weights.required("base_model.vera_A")?, weights.required("base_model.vera_B")?);
        let inputs = a.1.shape.last().copied().unwrap_or_default();
        let outputs = b.1.shape.first().copied().unwrap_or_default();
        let numbers = |named, shape| decode(weights.path(), &weights.matrix(named, shape)?);
        let (a, b) = (numbers(a, [self.rank, inputs])?, numbers(b, [outputs, self.rank])?);
        Ok(Projections { a, inputs, b, outputs, bytes: 0 })
    }

    /// Draws A, then B, like PEFT (`_init_vera_A_vera_B`), sized by the widest adapted layers.
    fn drawn(&self, path: &Path, model: &ModelConfig, seed: u64) -> Result<Projections, AdapterError> {
        let [mut outputs, mut inputs] = [0, 0];
        for place in linear_layers(model) {
            let PlacedLayer { selected: Selected::Yes, whole, .. } = self.placed(model, place)? else {
                continue;
            };
            [outputs, inputs] = [outputs.max(whole[0]), inputs.max(whole[1])];
        }
        check_bytes(path, factor_bytes(self.rank, [outputs, inputs]))?;
        let mut generator = TorchGenerator::new(seed);
        let a = generator.kaiming_uniform([self.rank, inputs]);
        let b = generator.kaiming_uniform([outputs, self.rank]);
        Ok(Projections { a, inputs, b, outputs, bytes: 0 })
    }

    pub(super) fn module(
        &self,
        shared: &mut Projections,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
        (layer, target): (usize, Target),
    ) -> Result<Option<StoredModule<'static>>, AdapterError> {
        let name = module_name(layer, target);
        let PlacedLayer { selected, rows, whole } = self.placed(model, (layer, target))?;
        let names = ["d", "b"].map(|part| format!("{name}.vera_lambda_{part}"));
        let Some([d, b]) = weights.take_all(&name, names, selected)? else { return Ok(None) };
        let cols = whole[1];
        shared.check(weights, [rows.end, cols], self.rank)?;
        let d = decode(weights.path(), &weights.vector(d, self.rank)?)?;
        let b = decode(weights.path(), &weights.vector(b, rows.len())?)?;
        shared.bytes += factor_bytes(self.rank, [rows.len(), cols]);
        check_bytes(weights.path(), shared.bytes)?;
        let (a, b) = (shared.scaled_a(&d, cols), shared.scaled_b(&b, rows.start, self.rank));
        let (a, b) = (factor(format!("{name} (A)"), &a), factor(format!("{name} (B)"), &b));
        Ok(Some(StoredModule { layer, target, rank: self.rank, scale: 1.0, a, b }))
    }

    /// Returns the place of a linear layer in the base's files, and whether it is adapted.
    fn placed(
        &self,
        model: &ModelConfig,
        (layer, target): (usize, Target),
    ) -> Result<PlacedLayer, AdapterError> {
        let (module, selected) = self.selection.named(model, (layer, target))?;
        let [outputs, inputs] = linear_shape(model, target);
        // A part of a fused layer uses its own rows of the fused layer's B.
        let fused = Fused::of(model, target)
            .filter(|_| module != self.selection.written(&module_name(layer, target)));
        let (rows, outputs) = fused.map_or((0..outputs, outputs), |fused| (fused.rows, fused.all_rows));
        Ok(PlacedLayer { selected, rows, whole: [outputs, inputs] })
    }
}

impl Projections {
    /// Checks that the matrices are large enough for a layer.
    fn check(
        &self,
        weights: &WeightFile<'_>,
        [outputs, inputs]: [usize; 2],
        rank: usize,
    ) -> Result<(), AdapterError> {
        let shape = |part: &str, expected: [usize; 2], found: [usize; 2]| AdapterError::Shape {
            path: weights.path().to_path_buf(),
            tensor: format!("base_model.vera_{part}"),
            expected: expected.to_vec(),
            found: found.to_vec(),
        };
        if self.inputs < inputs {
            return Err(shape("A", [rank, inputs], [rank, self.inputs]));
        }
        if self.outputs < outputs {
            return Err(shape("B", [outputs, rank], [self.outputs, rank]));
        }
        Ok(())
    }

    /// Returns `diag(d) A` for the first `inputs` inputs.
    fn scaled_a(&self, d: &[f32], inputs: usize) -> Vec<f32> {
        let rows = self.a.chunks_exact(self.inputs).zip(d);
        rows.flat_map(|(row, scale)| row[..inputs].iter().map(move |value| value * scale)).collect()
    }

    /// Returns `diag(b) B` for the outputs from `begin` on.
    fn scaled_b(&self, b: &[f32], begin: usize, rank: usize) -> Vec<f32> {
        let rows = self.b.chunks_exact(rank).skip(begin).zip(b);
        rows.flat_map(|(row, scale)| row.iter().map(move |value| value * scale)).collect()
    }
}

fn factor_bytes(rank: usize, [outputs, inputs]: [usize; 2]) -> u64 {
    (size_of::<f32>() * rank * (outputs + inputs)) as u64
}

fn check_bytes(path: &Path, bytes: u64) -> Result<(), AdapterError> {
    if bytes > MAX_EXPANDED_BYTES {
        return Err(AdapterError::TooLarge { path: path.to_path_buf(), limit: MAX_EXPANDED_BYTES });
    }
    Ok(())
}

fn factor(name: String, values: &[f32]) -> StoredMatrix<'static> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    StoredMatrix { name, kind: TensorType::F32, bytes: bytes.into() }
}

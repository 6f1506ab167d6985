//! VeRA in PEFT's format: all layers share one A and one B, and each layer has two scaling vectors.
//!
//! The shared matrices are `vera_A`, `[rank, in]`, and `vera_B`, `[out, rank]`, of the widest layers, stored
//! or drawn again from their key. The vectors are `vera_lambda_d`, `[rank]`, and `vera_lambda_b`, `[out]`.
//!
//! A layer's `diag(b) B diag(d) A` is a LoRA with the factors `diag(d) A` and `diag(b) B`, and is read so.
//!
//! PVeRA draws the values between A and B from a distribution. A and d of PVeRA have rows for the means, and
//! then as many for the variances. Without `sample_at_inference` the means are used, so the adapter is a VeRA
//! of these rows.

use super::{
    super::{
        error::AdapterError,
        limits::MAX_RANK,
        options::ConfigOptions,
        selection::{Selected, TrainedLayer},
        torch_random::TorchGenerator,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::LowRankProduct,
    rank::take_rank,
};

const SAVED: &str = "save_projection";

const KEY: &str = "projection_prng_key";

const SAMPLED: &str = "sample_at_inference";

#[derive(Debug)]
struct Vera {
    names: &'static MethodNames,
    rank: usize,
    /// Key of matrices that are not in the file.
    key: Option<u64>,
    shared: Projections,
}

/// Names of tensors and options, and the parts of A.
#[derive(Debug)]
struct MethodNames {
    a: &'static str,
    b: &'static str,
    lambdas: [&'static str; 2],
    history: &'static [&'static str],
    /// Rows of A for each rank: means, and variances besides.
    rows_per_rank: usize,
}

const VERA: MethodNames = MethodNames {
    a: "base_model.vera_A",
    b: "base_model.vera_B",
    lambdas: ["vera_lambda_d", "vera_lambda_b"],
    history: &["d_initial", "init_weights", "vera_dropout"],
    rows_per_rank: 1,
};

const PVERA: MethodNames = MethodNames {
    a: "base_model.pvera_A",
    b: "base_model.pvera_B",
    lambdas: ["pvera_lambda_d", "pvera_lambda_b"],
    history: &["d_initial", "generator_seed", "init_weights", "pvera_dropout"],
    rows_per_rank: 2,
};

/// The shared matrices, once they are taken.
#[derive(Debug, Default)]
struct Projections {
    /// Matrix of shape `[rank, inputs]`, with more rows after it if the method has them.
    a: Vec<f32>,
    inputs: usize,
    /// Matrix of shape `[outputs, rank]`.
    b: Vec<f32>,
    outputs: usize,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    of(&VERA, options)
}

pub(super) fn read_probabilistic(
    options: &mut ConfigOptions<'_>,
) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    if options.flag(SAMPLED)? {
        return Err(options.problem(SAMPLED, "is true, but only means are supported; set it to false"));
    }
    of(&PVERA, options)
}

fn of(
    names: &'static MethodNames,
    options: &mut ConfigOptions<'_>,
) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let key = options.seed(KEY)?.unwrap_or(0);
    let is_saved = !options.has(SAVED) || options.flag(SAVED)?;
    let (rank, key) = (take_rank(options, 256)?, (!is_saved).then_some(key));
    Ok(Box::new(Vera { names, rank, key, shared: Projections::default() }))
}

impl ConvertedMethod for Vera {
    fn history(&self) -> &'static [&'static str] {
        self.names.history
    }

    /// Keeps all ranks, so that adapter versions of earlier releases stay valid.
    fn kept_ranks(&self, _layer: &TrainedLayer) -> usize {
        MAX_RANK
    }

    fn share(&mut self, weights: &mut WeightFile<'_>, layers: &[TrainedLayer]) -> Result<(), AdapterError> {
        self.shared = match self.key {
            None => self.saved(weights)?,
            Some(key) => self.drawn(weights, layers, key)?,
        };
        Ok(())
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([d, b]) = weights.take_layer(layer, self.names.lambdas)? else { return Ok(None) };
        let ([outputs, inputs], rank) = (layer.shape, self.rank);
        self.check(weights, layer.shape)?;
        let d = weights.numbers(d, &[rank * self.names.rows_per_rank])?;
        let b = weights.numbers(b, &[outputs])?;
        budget.check(weights.path(), rank, layer.shape)?;
        let (a, b) = (self.shared.scaled_a(&d[..rank], inputs), self.shared.scaled_b(&b, rank));
        Ok(Some(LowRankProduct::exact(rank, 1.0, a, b)))
    }
}

impl Vera {
    fn saved(&self, weights: &mut WeightFile<'_>) -> Result<Projections, AdapterError> {
        let (a, b) = (weights.required(self.names.a)?, weights.required(self.names.b)?);
        let inputs = a.1.shape.last().copied().unwrap_or_default();
        let outputs = b.1.shape.first().copied().unwrap_or_default();
        let a = weights.numbers(a, &[self.rank * self.names.rows_per_rank, inputs])?;
        Ok(Projections { a, inputs, b: weights.numbers(b, &[outputs, self.rank])?, outputs })
    }

    /// Draws A, then B, like PEFT (`_init_vera_A_vera_B`), sized by the widest adapted layers.
    fn drawn(
        &self,
        weights: &WeightFile<'_>,
        layers: &[TrainedLayer],
        key: u64,
    ) -> Result<Projections, AdapterError> {
        let [mut outputs, mut inputs] = [0, 0];
        for layer in layers.iter().filter(|layer| layer.selected == Selected::Yes) {
            [outputs, inputs] = [outputs.max(layer.shape[0]), inputs.max(layer.shape[1])];
        }
        let rows = self.rank * self.names.rows_per_rank;
        ConversionBudget::default().check(weights.path(), rows, [outputs, inputs])?;
        let mut generator = TorchGenerator::new(key);
        let a = generator.kaiming_uniform([rows, inputs]);
        let b = generator.kaiming_uniform([outputs, self.rank]);
        Ok(Projections { a, inputs, b, outputs })
    }

    /// Checks that the shared matrices are large enough for a layer.
    fn check(&self, weights: &WeightFile<'_>, [outputs, inputs]: [usize; 2]) -> Result<(), AdapterError> {
        let shape = |tensor: &str, expected: [usize; 2], found: [usize; 2]| AdapterError::Shape {
            path: weights.path().to_path_buf(),
            tensor: tensor.to_owned(),
            expected: expected.to_vec(),
            found: found.to_vec(),
        };
        let (rank, shared) = (self.rank, &self.shared);
        if shared.inputs < inputs {
            return Err(shape(self.names.a, [rank, inputs], [rank, shared.inputs]));
        }
        if shared.outputs < outputs {
            return Err(shape(self.names.b, [outputs, rank], [shared.outputs, rank]));
        }
        Ok(())
    }
}

impl Projections {
    /// Returns `diag(d) A` for the first `inputs` inputs.
    fn scaled_a(&self, d: &[f32], inputs: usize) -> Vec<f32> {
        let rows = self.a.chunks_exact(self.inputs).zip(d);
        rows.flat_map(|(row, scale)| row[..inputs].iter().map(move |value| value * scale)).collect()
    }

    /// Returns `diag(b) B` for the first outputs.
    fn scaled_b(&self, b: &[f32], rank: usize) -> Vec<f32> {
        let rows = self.b.chunks_exact(rank).zip(b);
        rows.flat_map(|(row, scale)| row.iter().map(move |value| value * scale)).collect()
    }
}

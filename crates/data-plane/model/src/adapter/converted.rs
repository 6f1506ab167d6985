//! Methods of PEFT that are read as LoRAs: the files determine a matrix for each linear layer, which is added
//! to the layer's weights.
//!
//! A method returns factors of that matrix, of any rank. [`ConversionBudget`] brings them to the supported
//! ranks: without an error if the smaller dimension of the layer is one, and by a truncated singular value
//! decomposition otherwise. Time and memory of a conversion are bounded, because a short file can describe
//! large factors.

mod adalora;
mod c3a;
mod delora;
mod fourier;
mod gralora;
mod loha;
mod lokr;
mod miss;
mod poly;
mod randlora;
mod rank;
mod sparse;
mod vblora;
mod vera;

use std::{fmt, ops::Range, path::Path};

use super::{
    error::AdapterError,
    limits::{MAX_CONVERSION_ERROR, MAX_CONVERSION_OPERATIONS, MAX_CONVERTED_BYTES, MAX_RANK},
    matrix::{StoredMatrix, StoredModule},
    options::ConfigOptions,
    product::{self, LowRankProduct},
    selection::{Selection, TrainedLayer},
    svd::OuterProducts,
    warning::AdapterWarning,
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, source::Target},
    sources::hf_names::module_name,
};

/// Loss below which the rounding of 32-bit factors is larger.
const ROUNDING: f64 = 1e-6;

/// Reads a method's own options.
type ReadOptions = fn(&mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError>;

/// Methods by PEFT's names.
const METHODS: [(&str, ReadOptions); 15] = [
    ("ADALORA", adalora::read),
    ("C3A", c3a::read),
    ("DELORA", delora::read),
    ("FOURIERFT", fourier::read),
    ("GRALORA", gralora::read),
    ("LOHA", loha::read),
    ("LOKR", lokr::read),
    ("MISS", miss::read),
    ("POLY", poly::read),
    ("PVERA", vera::read_probabilistic),
    ("RANDLORA", randlora::read),
    ("SHIRA", sparse::read_shira),
    ("SUPERTUNING", sparse::read_supertuning),
    ("VBLORA", vblora::read),
    ("VERA", vera::read),
];

/// A method whose change of a linear layer is a matrix that the files determine.
trait ConvertedMethod: fmt::Debug {
    /// Options that describe how an adapter was made, and not its result.
    fn history(&self) -> &'static [&'static str];

    /// Takes the tensors that all layers share.
    fn share(&mut self, weights: &mut WeightFile<'_>, layers: &[TrainedLayer]) -> Result<(), AdapterError> {
        let _ = (weights, layers);
        Ok(())
    }

    /// Returns the largest number of ranks for which factors of a layer are kept as they are.
    fn kept_ranks(&self, layer: &TrainedLayer) -> usize {
        layer.least().min(MAX_RANK)
    }

    /// Takes the tensors of a layer, and returns factors of its change.
    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError>;
}

#[derive(Debug)]
pub(super) struct ConvertedConfig {
    selection: Selection,
    method: Box<dyn ConvertedMethod>,
    budget: ConversionBudget,
}

impl ConvertedConfig {
    /// Whether the method with this name in PEFT is converted.
    pub(super) fn knows(method: &str) -> bool {
        METHODS.iter().any(|(name, _)| *name == method)
    }

    /// Reads the options of `method`, or returns `None` for a method that is not converted.
    pub(super) fn from_options(
        method: &str,
        options: &mut ConfigOptions<'_>,
    ) -> Option<Result<Self, AdapterError>> {
        let (_, read) = METHODS.iter().find(|(name, _)| *name == method)?;
        Some(Self::read(*read, options))
    }

    fn read(read: ReadOptions, options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        options.one_of("bias", &["none"])?;
        let selection = Selection::from_options(options)?.with_layers(options)?;
        let method = read(options)?;
        options.refuse_the_rest(method.history())?;
        Ok(Self { selection, method, budget: ConversionBudget::default() })
    }

    /// Returns the factors of all adapted layers.
    pub(super) fn modules(
        &mut self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
    ) -> Result<Vec<StoredModule<'static>>, AdapterError> {
        let (mut modules, mut failed) = (Vec::new(), None);
        for converted in self.each(weights, model) {
            match converted {
                Ok(converted) => modules.extend(converted),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(modules), Err)
    }

    /// Returns the errors of all layers.
    pub(super) fn problems(
        &mut self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
    ) -> Vec<AdapterError> {
        self.each(weights, model).into_iter().filter_map(Result::err).collect()
    }

    /// Returns the loss of the conversion, if there was one.
    pub(super) fn warning(&self) -> Option<AdapterWarning> {
        self.budget.worst.clone()
    }

    /// Converts the layers in order, up to an error that the next layer would have again.
    fn each(
        &mut self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
    ) -> Vec<Result<Vec<StoredModule<'static>>, AdapterError>> {
        let layers = match self.selection.trained_layers(model) {
            Ok(layers) => layers,
            Err(error) => return vec![Err(error)],
        };
        if let Err(error) = self.method.share(weights, &layers) {
            return vec![Err(error)];
        }
        let Self { method, budget, .. } = self;
        let mut found = Vec::new();
        for layer in &layers {
            let change = method.change(weights, layer, budget);
            // Training may have left nothing of a layer's change.
            let change = change.map(|change| change.filter(|change| change.rank > 0)).transpose();
            let kept_ranks = method.kept_ranks(layer);
            let fitted = change.map(|change| budget.fit(weights.path(), layer, kept_ranks, change?));
            let is_last = matches!(&fitted, Some(Err(error)) if is_of_all(error));
            found.extend(fitted.map(|fitted| fitted.map(|product| stored(layer, &product))));
            if is_last {
                break;
            }
        }
        found
    }
}

/// Whether an error is about the adapter as a whole, so that other layers would repeat it.
fn is_of_all(error: &AdapterError) -> bool {
    matches!(
        error,
        AdapterError::TooLarge { .. } | AdapterError::Conversion { .. } | AdapterError::Approximation { .. }
    )
}

/// Bounds of one conversion, and its largest loss.
#[derive(Debug, Default)]
struct ConversionBudget {
    bytes: u64,
    operations: u64,
    worst: Option<AdapterWarning>,
}

impl ConversionBudget {
    /// Checks the size of factors before they are made.
    fn check(&self, path: &Path, rank: usize, [outputs, inputs]: [usize; 2]) -> Result<(), AdapterError> {
        let elements = (rank as u64).saturating_mul((outputs + inputs) as u64);
        let bytes = elements.saturating_mul(size_of::<f32>() as u64);
        if self.bytes.saturating_add(bytes) > MAX_CONVERTED_BYTES {
            return Err(AdapterError::TooLarge { path: path.to_path_buf(), limit: MAX_CONVERTED_BYTES });
        }
        Ok(())
    }

    /// Counts multiplications before they are done.
    fn work(
        &mut self,
        path: &Path,
        layer: &TrainedLayer,
        rank: usize,
        operations: u64,
    ) -> Result<(), AdapterError> {
        self.operations = self.operations.saturating_add(operations);
        if self.operations > MAX_CONVERSION_OPERATIONS {
            let (path, module) = (path.to_path_buf(), layer.name.clone());
            return Err(AdapterError::Conversion { path, module, rank });
        }
        Ok(())
    }

    /// Brings the factors of a layer to the supported ranks, unless they have `kept_ranks` or fewer.
    fn fit(
        &mut self,
        path: &Path,
        layer: &TrainedLayer,
        kept_ranks: usize,
        change: LowRankProduct,
    ) -> Result<LowRankProduct, AdapterError> {
        let shape @ [outputs, inputs] = layer.shape;
        let change = if change.rank <= kept_ranks {
            change
        } else if layer.least() <= MAX_RANK {
            self.work(path, layer, change.rank, (outputs * inputs) as u64 * change.rank as u64)?;
            change.multiplied_out(shape)
        } else {
            self.work(path, layer, change.rank, OuterProducts::operations(change.rank, shape))?;
            change.truncated(MAX_RANK)
        };
        self.note(path, layer, &change)?;
        for (_, rows) in &layer.parts {
            self.check(path, change.rank, [rows.len(), inputs])?;
            self.bytes += (size_of::<f32>() * change.rank * (rows.len() + inputs)) as u64;
        }
        Ok(change)
    }

    fn note(
        &mut self,
        path: &Path,
        layer: &TrainedLayer,
        change: &LowRankProduct,
    ) -> Result<(), AdapterError> {
        let &LowRankProduct { rank, error, .. } = change;
        let module = layer.name.clone();
        if error > MAX_CONVERSION_ERROR {
            return Err(AdapterError::Approximation { path: path.to_path_buf(), module, rank, error });
        }
        let known = match &self.worst {
            Some(AdapterWarning::Approximation { error, .. }) => *error,
            _ => 0.0,
        };
        if error > known.max(ROUNDING) {
            self.worst = Some(AdapterWarning::Approximation { module, rank, error });
        }
        Ok(())
    }
}

/// Returns the factors of the base's layers that the trained model's `layer` consists of.
fn stored(layer: &TrainedLayer, change: &LowRankProduct) -> Vec<StoredModule<'static>> {
    let &LowRankProduct { rank, scale, .. } = change;
    let part = |((at, target), rows): &((usize, Target), Range<usize>)| {
        let name = module_name(*at, *target);
        let a = StoredMatrix::of_numbers(format!("{name} (A)"), &change.a);
        let rows = &change.b[rows.start * rank..rows.end * rank];
        let b = StoredMatrix::of_numbers(format!("{name} (B)"), rows);
        StoredModule { layer: *at, target: *target, rank, scale, a, b }
    };
    layer.parts.iter().map(part).collect()
}

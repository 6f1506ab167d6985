//! LoRAs by layer name, without a base: for tools that inspect, compare and merge adapters.

use std::{collections::BTreeMap, path::Path};

use kernels::TensorType;
use serde_json::{Map, Value, json};

use super::{
    error::AdapterError,
    experts,
    kind::AdapterKind,
    lora::{BaseShape, LoraConfig},
    matrix::{StoredFactors, decode},
    merge::{AdapterMergeError, ConcatenatedFactors, Factors, join},
    options::ConfigOptions,
    peft::{METHOD, read_files},
    weight_file::WeightFile,
    writing::{self, CONFIG_FILE, NamedTensor, WEIGHT_FILE, WriteError},
};
use crate::sources::hf_names::EMBEDDING;

/// A LoRA or DoRA in PEFT's format.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedLora {
    /// Value of `base_model_name_or_path` in the configuration.
    pub base_model: Option<String>,
    /// The configuration as written in its file.
    pub options: Map<String, Value>,
    /// Changes of linear layers, by layer name.
    pub modules: BTreeMap<String, NamedModule>,
    is_activated: bool,
}

/// The change of one linear layer: `scale * B A`.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedModule {
    /// Number of rows of A.
    pub rank: usize,
    /// Factor of the product `B A`.
    pub scale: f32,
    /// Number of input features.
    pub inputs: usize,
    /// Number of output features.
    pub outputs: usize,
    /// Matrix A, shape `[rank, in]`.
    pub a: Vec<f32>,
    /// Matrix B, shape `[out, rank]`.
    pub b: Vec<f32>,
    /// Magnitudes of a DoRA, shape `[out]`.
    pub magnitude: Option<Vec<f32>>,
    /// Stored element type; F32 if the matrices' types differ.
    pub kind: TensorType,
}

/// Reasons why adapters were not merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The adapters do not add up.
    #[error(transparent)]
    Sum(#[from] AdapterMergeError),
    /// Two adapters have different shapes for one layer.
    #[error(
        "`{module}` has the shape {one:?} in one adapter and {other:?} in another; use adapters of the \
         same base"
    )]
    Shape {
        /// Name of the layer.
        module: String,
        /// Shape in the first adapter, `[out, in]`.
        one: [usize; 2],
        /// Shape in the other adapter, `[out, in]`.
        other: [usize; 2],
    },
    /// An adapter changes experts.
    #[error(
        "`{module}` is a layer of an expert, and adapters of experts cannot be merged into a file; name the \
         sum in requests instead (`a+b`)"
    )]
    Experts {
        /// Name of an expert's layer.
        module: String,
    },
    /// A combination of factors needs equal ranks.
    #[error(
        "`{module}` has rank {one} in one adapter and {other} in another, and this combination needs equal \
         ranks; use `cat` or `svd`"
    )]
    Ranks {
        /// Name of the layer.
        module: String,
        /// Rank in the first adapter.
        one: usize,
        /// Rank in the other adapter.
        other: usize,
    },
    /// The merged adapter cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Merges the layers of one name, each with its weight.
pub(super) type MergeModules<'a> =
    dyn FnMut(&str, &[(&NamedModule, f32)]) -> Result<NamedModule, MergeError> + 'a;

impl NamedLora {
    /// Reads the adapter in `directory`.
    ///
    /// # Errors
    /// A part of the adapter is missing, broken or unsupported, or the adapter is neither a LoRA nor a DoRA.
    pub fn read(directory: &Path) -> Result<Self, AdapterError> {
        let (config, weights) = read_files(directory)?;
        let config_path = directory.join(CONFIG_FILE);
        let parsed = WeightFile::parse(&directory.join(WEIGHT_FILE), &weights);
        let spelling = parsed.as_ref().map(|weights| weights.spelling().clone()).unwrap_or_default();
        let mut options = ConfigOptions::parse(&config_path, &config, spelling)?;
        let written = options.written();
        let base_model = options.text("base_model_name_or_path")?;
        if !options.has(METHOD) {
            return Err(options.problem(METHOD, "is missing"));
        }
        options.one_of(METHOD, &["LORA"])?;
        let task = options.task()?;
        let config = LoraConfig::from_options(&mut options, BaseShape::ANY, task)?;
        if config.classifies() {
            return Err(AdapterError::Classification { path: directory.to_path_buf() });
        }
        if config.draft_layers().is_some() {
            return Err(AdapterError::Draft { path: directory.to_path_buf() });
        }
        let mut weights = parsed?;
        if config.has_other_parts() || weights.has(&format!("{EMBEDDING}.lora_embedding_A")) {
            return Err(AdapterError::Vocabulary { path: directory.to_path_buf() });
        }
        let mut modules = BTreeMap::new();
        for (name, stored) in experts::read_by_name(&config, &mut weights)? {
            modules.insert(name, NamedModule::of(weights.path(), &stored)?);
        }
        for name in weights.adapted() {
            if let Some(stored) = config.factors(&mut weights, &name)? {
                modules.insert(name, NamedModule::of(weights.path(), &stored)?);
            }
        }
        if let Some(error) = weights.unknown().next() {
            return Err(error);
        }
        if modules.is_empty() {
            return Err(AdapterError::Empty { path: weights.path().to_path_buf() });
        }
        let is_activated = config.invocation().is_some();
        Ok(Self { base_model, options: written, modules, is_activated })
    }

    /// Returns the weighted sum of `parts`, which equals exactly what a request computes with all of them.
    ///
    /// # Errors
    /// See [`MergeError`].
    pub fn merge(parts: &[(Self, f32)]) -> Result<Self, MergeError> {
        Self::merge_modules(parts, &mut |name, parts| merged(name, parts))
    }

    /// Merges `parts` layer by layer with `merge`, which takes the adapters that change a layer.
    pub(super) fn merge_modules(
        parts: &[(Self, f32)],
        merge: &mut MergeModules<'_>,
    ) -> Result<Self, MergeError> {
        if parts.iter().any(|(part, _)| part.is_activated) {
            return Err(AdapterMergeError::Kind(AdapterKind::Activated).into());
        }
        let mut names = parts.iter().flat_map(|(part, _)| part.modules.keys());
        if let Some(module) = names.find(|name| name.contains(".experts.")) {
            return Err(MergeError::Experts { module: module.clone() });
        }
        let mut by_name: BTreeMap<&str, Vec<(&NamedModule, f32)>> = BTreeMap::new();
        for (part, weight) in parts {
            for (name, module) in &part.modules {
                by_name.entry(name).or_default().push((module, *weight));
            }
        }
        let mut modules = BTreeMap::new();
        for (name, parts) in by_name {
            check_parts(name, &parts)?;
            modules.insert(name.to_owned(), merge(name, &parts)?);
        }
        let base_model = parts.iter().find_map(|(part, _)| part.base_model.clone());
        Ok(Self::of_modules(base_model, modules))
    }

    pub(super) fn of_modules(base_model: Option<String>, modules: BTreeMap<String, NamedModule>) -> Self {
        let options = options(base_model.as_deref(), &modules);
        Self { base_model, options, modules, is_activated: false }
    }

    /// Writes the adapter as a PEFT directory at `path`, which must not exist.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        let options = serde_json::to_vec_pretty(&self.options).expect("JSON can be written to memory");
        let tensors: Vec<NamedTensor<'_>> =
            self.modules.iter().flat_map(|(name, module)| module.tensors(name)).collect();
        let kind = same(self.modules.values().map(|module| module.kind));
        writing::write(path, &options, &writing::serialize(&tensors, kind, &[], None)?)
    }
}

impl NamedModule {
    fn of(path: &Path, stored: &StoredFactors<'_>) -> Result<Self, AdapterError> {
        let &StoredFactors { rank, scale, inputs, outputs, ref a, ref b, ref magnitude } = stored;
        let kind =
            same([Some(a), Some(b), magnitude.as_ref()].into_iter().flatten().map(|matrix| matrix.kind));
        let magnitude = magnitude.as_ref().map(|magnitude| decode(path, magnitude)).transpose()?;
        let (a, b) = (decode(path, a)?, decode(path, b)?);
        Ok(Self { rank, scale, inputs, outputs, a, b, magnitude, kind })
    }

    /// Returns the low-rank factors of the change.
    #[must_use]
    pub fn factors(&self) -> Factors<'_> {
        Factors { rank: self.rank, scale: self.scale, a: &self.a, b: &self.b }
    }

    /// Returns the Frobenius inner product of `s B A` with that of `other`, which has the same shape.
    #[must_use]
    pub fn inner(&self, other: &Self) -> f64 {
        let [a, b] = [
            product(&self.rows_of_a(), &other.rows_of_a()),
            product(&self.columns_of_b(), &other.columns_of_b()),
        ];
        let sum: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
        f64::from(self.scale) * f64::from(other.scale) * sum
    }

    /// Returns the Frobenius norm of `s B A`.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.inner(self).max(0.0).sqrt()
    }

    /// Returns the Frobenius norm of the difference to `other`, which has the same shape. Equal factors give
    /// 0; otherwise the result is as exact as 64-bit rounding allows.
    #[must_use]
    pub fn distance(&self, other: &Self) -> f64 {
        if self.factors() == other.factors() {
            return 0.0;
        }
        (self.inner(self) + other.inner(other) - 2.0 * self.inner(other)).max(0.0).sqrt()
    }

    fn rows_of_a(&self) -> Vec<Vec<f64>> {
        self.a
            .chunks_exact(self.inputs.max(1))
            .map(|row| row.iter().copied().map(f64::from).collect())
            .collect()
    }

    fn columns_of_b(&self) -> Vec<Vec<f64>> {
        let column = |rank| self.b.iter().skip(rank).step_by(self.rank).copied().map(f64::from).collect();
        (0..self.rank).map(column).collect()
    }

    fn tensors(&self, name: &str) -> Vec<NamedTensor<'_>> {
        let of = |part: &str, shape: &[usize], values| NamedTensor {
            name: format!("base_model.model.{name}.{part}"),
            shape: shape.to_vec(),
            values,
        };
        let a = of("lora_A.weight", &[self.rank, self.inputs], &self.a[..]);
        let b = of("lora_B.weight", &[self.outputs, self.rank], &self.b[..]);
        let magnitude = self.magnitude.as_ref();
        let magnitude = magnitude.map(|values| of("lora_magnitude_vector", &[self.outputs], &values[..]));
        [a, b].into_iter().chain(magnitude).collect()
    }
}

/// Checks that a layer has one shape and no magnitudes.
fn check_parts(name: &str, parts: &[(&NamedModule, f32)]) -> Result<(), MergeError> {
    let (first, _) = parts[0];
    for (other, _) in parts {
        let [one, other] = [first, other].map(|module| [module.outputs, module.inputs]);
        if one != other {
            return Err(MergeError::Shape { module: name.to_owned(), one, other });
        }
    }
    if parts.iter().any(|(module, _)| module.magnitude.is_some()) {
        return Err(AdapterMergeError::Kind(AdapterKind::Dora).into());
    }
    Ok(())
}

/// Returns the exact sum of a layer's changes.
pub(super) fn merged(name: &str, parts: &[(&NamedModule, f32)]) -> Result<NamedModule, MergeError> {
    let (first, _) = parts[0];
    let factors = parts.iter().map(|(module, weight)| (module.factors(), *weight)).collect();
    let ConcatenatedFactors { rank, scale, a, b, is_verbatim } = join(name, factors)?;
    let stored = same(parts.iter().map(|(module, _)| module.kind));
    let kind = if is_verbatim { stored } else { TensorType::F32 };
    Ok(NamedModule { rank, scale, a, b, magnitude: None, kind, inputs: first.inputs, outputs: first.outputs })
}

/// Returns the common type, or F32, which holds the values of every type.
fn same(mut kinds: impl Iterator<Item = TensorType>) -> TensorType {
    let first = kinds.next().unwrap_or(TensorType::F32);
    if kinds.all(|kind| kind == first) { first } else { TensorType::F32 }
}

/// Returns the configuration of `modules`, with patterns for all but the most frequent ranks and alphas.
fn options(base_model: Option<&str>, modules: &BTreeMap<String, NamedModule>) -> Map<String, Value> {
    let alpha = |module: &NamedModule| f64::from(module.scale) * module.rank as f64;
    let rank = most_frequent(modules.values().map(|module| module.rank)).unwrap_or(1);
    let usual = most_frequent(modules.values().map(|module| alpha(module).to_bits())).unwrap_or_default();
    let other = |is_other: &dyn Fn(&NamedModule) -> bool, value: &dyn Fn(&NamedModule) -> Value| {
        let named = modules.iter().filter(|(_, module)| is_other(module));
        named.map(|(name, module)| (name.clone(), value(module))).collect::<Map<_, _>>()
    };
    let ranks = other(&|module| module.rank != rank, &|module| module.rank.into());
    let alphas = other(&|module| alpha(module).to_bits() != usual, &|module| alpha(module).into());
    let options = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": true,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": f64::from_bits(usual),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules.keys().collect::<Vec<_>>(),
    });
    match options {
        Value::Object(options) => options,
        _ => Map::new(),
    }
}

/// Returns the dot products of each vector of `ones` with each of `others`.
fn product(ones: &[Vec<f64>], others: &[Vec<f64>]) -> Vec<f64> {
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(x, y)| x * y).sum();
    ones.iter().flat_map(|one| others.iter().map(move |other| dot(one, other))).collect()
}

fn most_frequent<T: Ord + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}

//! Adapters in PEFT's format: a directory with `adapter_config.json` and `adapter_model.safetensors`.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use super::{
    Adapter, AdapterError,
    limits::{MAX_CONFIG_BYTES, MAX_HEADER_BYTES, MAX_WEIGHT_BYTES},
    matrix::{StoredMatrix, StoredModule, assemble},
    peft_config::PeftConfig,
};
use crate::{
    config::ModelConfig,
    layout::{self, BLOCK_TARGETS},
    safetensors_file::{StoredTensor, read_contents},
    safetensors_source::module_name,
    source::Target,
    whole_file,
};

/// The configuration's name in an adapter directory.
pub(super) const CONFIG_FILE: &str = "adapter_config.json";
/// The weights' name.
const WEIGHT_FILE: &str = "adapter_model.safetensors";
/// What PEFT wrote before it wrote safetensors.
const PICKLE_FILE: &str = "adapter_model.bin";

/// What PEFT puts before the names of the model it wraps.
const PREFIX: &str = "base_model.model.";

/// Reads before giving up on a directory that changes.
const ATTEMPTS: usize = 3;

/// Reads the adapter in `directory`.
pub(super) fn read(directory: &Path, model: &ModelConfig) -> Result<Adapter, AdapterError> {
    let (config, weights) = read_files(directory)?;
    let mut files = Files::parse(directory, &config, &weights)?;
    let mut modules = Vec::new();
    for (layer, target) in linear_layers(model) {
        modules.extend(files.module(model, layer, target)?);
    }
    if let Some(error) = files.weights.unknown().next() {
        return Err(error);
    }
    assemble(&files.weight_path, modules, files.config.base_model)
}

/// What is wrong with the layers of the adapter in `directory`: all of it, not only the first thing.
pub(super) fn problems(directory: &Path, model: &ModelConfig) -> Result<Vec<AdapterError>, AdapterError> {
    let (config, weights) = read_files(directory)?;
    let mut files = Files::parse(directory, &config, &weights)?;
    let layers = linear_layers(model);
    let mut problems: Vec<_> =
        layers.filter_map(|(layer, target)| files.module(model, layer, target).err()).collect();
    problems.extend(files.weights.unknown());
    Ok(problems)
}

/// Configuration and weights of one adapter.
struct Files<'a> {
    config_path: PathBuf,
    weight_path: PathBuf,
    config: PeftConfig,
    weights: WeightFile<'a>,
}

impl<'a> Files<'a> {
    fn parse(directory: &Path, config: &[u8], weights: &'a [u8]) -> Result<Self, AdapterError> {
        let (config_path, weight_path) = (directory.join(CONFIG_FILE), directory.join(WEIGHT_FILE));
        let config = PeftConfig::parse(&config_path, config)?;
        let weights = WeightFile::parse(&weight_path, weights)?;
        Ok(Self { config_path, weight_path, config, weights })
    }

    /// The adapted linear layer, if there is one.
    fn module(
        &mut self,
        model: &ModelConfig,
        layer: usize,
        target: Target,
    ) -> Result<Option<StoredModule<'a>>, AdapterError> {
        let name = module_name(layer, target);
        let path = || self.weight_path.clone();
        let selected = self.config.selects(&self.config_path, &name)?;
        let (a, b) = match (selected, self.weights.take_pair(&name)?) {
            (false, None) => return Ok(None),
            (false, Some(_)) => return Err(AdapterError::NotTargeted { path: path(), module: name }),
            (true, None) => return Err(AdapterError::Missing { path: path(), tensor: a_name(&name) }),
            (true, Some(pair)) => pair,
        };
        let (rank, scale) = self.config.rank_and_scale(&self.config_path, &name)?;
        let [rows, cols] = layout::linear_shape(model, target);
        let a = self.weights.matrix(a, [rank, cols])?;
        let b = self.weights.matrix(b, [rows, rank])?;
        Ok(Some(StoredModule { layer, target, rank, scale, a, b }))
    }
}

/// Configuration and weights that were there at the same time.
fn read_files(directory: &Path) -> Result<(Vec<u8>, Vec<u8>), AdapterError> {
    let failed = |path: &Path, source: io::Error| AdapterError::Read { path: path.to_path_buf(), source };
    let config_path = directory.join(CONFIG_FILE);
    let weight_path = directory.join(WEIGHT_FILE);
    for _ in 0..ATTEMPTS {
        let config = whole_file::read(&config_path, MAX_CONFIG_BYTES).map_err(|e| failed(&config_path, e))?;
        let weights =
            whole_file::read_if_there(&weight_path, MAX_WEIGHT_BYTES).map_err(|e| failed(&weight_path, e))?;
        let Some(weights) = weights else {
            return Err(without_weights(directory, weight_path));
        };
        let again = whole_file::read(&config_path, MAX_CONFIG_BYTES).map_err(|e| failed(&config_path, e))?;
        if config == again {
            return Ok((config, weights));
        }
    }
    Err(AdapterError::Changing { path: directory.to_path_buf() })
}

fn without_weights(directory: &Path, weights: PathBuf) -> AdapterError {
    let pickle = directory.join(PICKLE_FILE);
    if pickle.exists() {
        return AdapterError::Pickle { path: pickle };
    }
    AdapterError::Read { path: weights, source: io::ErrorKind::NotFound.into() }
}

/// Every linear layer of the base model.
fn linear_layers(model: &ModelConfig) -> impl Iterator<Item = (usize, Target)> {
    (0..model.layers)
        .flat_map(|layer| BLOCK_TARGETS.map(|target| (layer, target)))
        .chain([(0, Target::LmHead)])
}

fn a_name(module: &str) -> String {
    format!("{module}.lora_A.weight")
}

fn b_name(module: &str) -> String {
    format!("{module}.lora_B.weight")
}

/// A tensor and what its file calls it.
type Named = (String, StoredTensor);

/// The tensors of a weight file that no module has taken yet, by their name without [`PREFIX`].
struct WeightFile<'a> {
    path: PathBuf,
    bytes: &'a [u8],
    rest: BTreeMap<String, Named>,
}

impl<'a> WeightFile<'a> {
    fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self, AdapterError> {
        let contents = read_contents(bytes, MAX_HEADER_BYTES)
            .map_err(|source| AdapterError::Weights { path: path.to_path_buf(), source })?;
        let mut rest = BTreeMap::new();
        for (name, stored) in contents {
            let key = name.strip_prefix(PREFIX).unwrap_or(&name).to_owned();
            if rest.insert(key, (name.clone(), stored)).is_some() {
                return Err(AdapterError::Duplicate { path: path.to_path_buf(), tensor: name });
            }
        }
        Ok(Self { path: path.to_path_buf(), bytes, rest })
    }

    /// A and B of a linear layer, or neither.
    fn take_pair(&mut self, module: &str) -> Result<Option<(Named, Named)>, AdapterError> {
        let missing = |tensor| Err(AdapterError::Missing { path: self.path.clone(), tensor });
        match (self.rest.remove(&a_name(module)), self.rest.remove(&b_name(module))) {
            (None, None) => Ok(None),
            (Some(a), Some(b)) => Ok(Some((a, b))),
            (None, Some(_)) => missing(a_name(module)),
            (Some(_), None) => missing(b_name(module)),
        }
    }

    fn matrix(&self, (name, stored): Named, expected: [usize; 2]) -> Result<StoredMatrix<'a>, AdapterError> {
        let StoredTensor { kind, shape, range } = stored;
        match self.bytes.get(range) {
            Some(bytes) if shape == expected => Ok(StoredMatrix { name, kind, bytes: bytes.into() }),
            _ => Err(AdapterError::Shape { path: self.path.clone(), tensor: name, expected, found: shape }),
        }
    }

    /// Why each tensor that no module has taken is refused.
    fn unknown(&self) -> impl Iterator<Item = AdapterError> {
        self.rest.values().map(|(name, _)| {
            let (path, tensor) = (self.path.clone(), name.escape_debug().to_string());
            if name.ends_with(".base_layer.weight") {
                AdapterError::BaseCopy { path, tensor }
            } else {
                AdapterError::UnknownTensor { path, tensor }
            }
        })
    }
}

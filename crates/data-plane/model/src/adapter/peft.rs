//! Adapters in PEFT's format: a directory with `adapter_config.json` and `adapter_model.safetensors`.

use std::{
    io,
    path::{Path, PathBuf},
};

use model_files::whole_file;

use super::{
    beft::{self, BeftConfig},
    converted::ConvertedConfig,
    draft::take_shape,
    error::AdapterError,
    experts,
    ia3::Ia3Config,
    limits::{MAX_CONFIG_BYTES, MAX_WEIGHT_BYTES},
    lora::{BaseShape, LoraConfig, ONLY_PLAIN, TASK},
    matrix::{StoredMatrix, StoredMethod, assemble, assemble_draft},
    method::{AnyAdapter, DraftShape},
    options::{ConfigOptions, Task},
    prefix::PrefixConfig,
    prompt::{self, PromptConfig},
    selection::linear_layers,
    stored_classification::{StoredClassificationHead, assemble_classification},
    stored_vocabulary::{StoredEmbedding, StoredHead, StoredVocabulary, assemble_vocabulary},
    trained_tokens::{self, TrainedTokens},
    warning::AdapterWarning,
    weight_file::WeightFile,
    writing::{CONFIG_FILE, WEIGHT_FILE},
};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::hf_names::module_name,
};

/// Weight file of PEFT versions before safetensors.
const PICKLE_FILE: &str = "adapter_model.bin";

pub(super) const METHOD: &str = "peft_type";

const LORA: &str = "LORA";
const IA3: &str = "IA3";

/// Methods with keys and values of virtual tokens, stored alike.
const PREFIXES: [&str; 2] = ["PREFIX_TUNING", "CARTRIDGE"];

const ATTEMPTS: usize = 3;

pub(super) fn read(
    directory: &Path,
    model: &ModelConfig,
) -> Result<(AnyAdapter, Vec<AdapterWarning>), AdapterError> {
    let (config, weights) = read_files(directory)?;
    let mut files = PeftFiles::parse(directory, model, &config, &weights)?;
    let (method, vocabulary, draft) = (files.method()?, files.vocabulary()?, files.draft()?);
    let head = files.classification_head()?;
    let notes = files.notes(&method, vocabulary.as_ref())?;
    if let Some(error) = files.weights.unknown().next() {
        return Err(error);
    }
    let (path, base_model) = (files.weights.path(), files.base_model);
    let adapter = match (method, vocabulary, draft, head) {
        (StoredMethod::Lora(modules), _, _, Some(head)) => {
            assemble_classification(path, modules, &head, base_model).map(AnyAdapter::Classifies)
        }
        (StoredMethod::Lora(modules), None, Some(shape), _) => {
            assemble_draft(path, shape, modules, base_model).map(AnyAdapter::Drafts)
        }
        (StoredMethod::Lora(modules), Some(vocabulary), None, _) => {
            assemble_vocabulary(path, modules, &vocabulary, base_model).map(AnyAdapter::Vocabulary)
        }
        (method, ..) => assemble(path, method, base_model),
    };
    Ok((adapter?, notes))
}

/// Returns all errors of the tensors in `directory`, not only the first.
pub(super) fn problems(directory: &Path, model: &ModelConfig) -> Result<Vec<AdapterError>, AdapterError> {
    let (config, weights) = read_files(directory)?;
    let mut files = PeftFiles::parse(directory, model, &config, &weights)?;
    let mut problems = files.problems();
    problems.extend(files.draft().err());
    problems.extend(files.copies().err());
    problems.extend(files.weights.unknown());
    Ok(problems)
}

enum MethodConfig {
    Lora(LoraConfig),
    Ia3(Ia3Config),
    Prefix(PrefixConfig),
    Prompt(PromptConfig),
    Tokens(TrainedTokens),
    Beft(BeftConfig),
    Converted(ConvertedConfig),
}

impl MethodConfig {
    fn from_options(options: &mut ConfigOptions<'_>, model: &ModelConfig) -> Result<Self, AdapterError> {
        let Some(method) = options.take(METHOD) else { return Err(options.problem(METHOD, "is missing")) };
        let name = method.as_str().filter(|name| Self::knows(name));
        let name = name.ok_or_else(|| options.refused_type(METHOD, &method))?;
        let task = options.task()?;
        if task == Task::Classification && name != LORA {
            return Err(options.problem(TASK, ONLY_PLAIN));
        }
        if let Some(config) = ConvertedConfig::from_options(name, options) {
            return config.map(Self::Converted);
        }
        match name {
            IA3 => Ia3Config::from_options(options).map(Self::Ia3),
            beft::METHOD => BeftConfig::from_options(options).map(Self::Beft),
            trained_tokens::METHOD => {
                TrainedTokens::from_options(options, model.vocab_size).map(Self::Tokens)
            }
            _ if PREFIXES.contains(&name) => PrefixConfig::from_options(options, model).map(Self::Prefix),
            _ if prompt::METHODS.contains(&name) => {
                PromptConfig::from_options(name, options, model).map(Self::Prompt)
            }
            _ => LoraConfig::from_options(options, BaseShape::of(model), task).map(Self::Lora),
        }
    }

    fn knows(name: &str) -> bool {
        [LORA, IA3, beft::METHOD, trained_tokens::METHOD].contains(&name)
            || PREFIXES.contains(&name)
            || prompt::METHODS.contains(&name)
            || ConvertedConfig::knows(name)
    }
}

struct PeftFiles<'a> {
    model: &'a ModelConfig,
    config: MethodConfig,
    base_model: Option<String>,
    weights: WeightFile<'a>,
}

impl<'a> PeftFiles<'a> {
    fn parse(
        directory: &Path,
        model: &'a ModelConfig,
        config: &[u8],
        weights: &'a [u8],
    ) -> Result<Self, AdapterError> {
        let config_path = directory.join(CONFIG_FILE);
        // The configuration uses the spelling of the weights, so these are parsed first; errors of the
        // configuration are reported first.
        let weights = WeightFile::parse(&directory.join(WEIGHT_FILE), weights);
        let weights = weights.and_then(|weights| weights.of_base(model));
        let spelling = weights.as_ref().map(|weights| weights.spelling().clone()).unwrap_or_default();
        let mut options = ConfigOptions::parse(&config_path, config, spelling)?;
        let base_model = options.text("base_model_name_or_path")?;
        let config = MethodConfig::from_options(&mut options, model)?;
        let weights = weights?;
        Ok(Self { model, config, base_model, weights })
    }

    /// Returns the method's tensors, or the first error.
    fn method(&mut self) -> Result<StoredMethod<'a>, AdapterError> {
        let Self { model, config, weights, .. } = self;
        let layers = linear_layers(model);
        Ok(match config {
            MethodConfig::Lora(config) => {
                let read = layers.filter_map(|place| config.module(weights, model, place).transpose());
                let mut modules = read.collect::<Result<Vec<_>, _>>()?;
                modules.extend(experts::read(config, weights, model)?);
                if let Some(invocation) = config.invocation() {
                    return Ok(StoredMethod::Activated(modules, invocation.clone()));
                }
                if let Some(biases) = config.biases(weights, model, &modules)? {
                    return Ok(StoredMethod::Biased(modules, biases));
                }
                if !config.is_dora() {
                    return Ok(StoredMethod::Lora(modules));
                }
                config.refuse_experts(&modules)?;
                let with_magnitude = modules.into_iter().map(|module| {
                    let magnitude = magnitude(config, weights, model, (module.layer, module.target))?;
                    Ok((module, magnitude))
                });
                StoredMethod::Dora(with_magnitude.collect::<Result<_, AdapterError>>()?)
            }
            MethodConfig::Ia3(config) => {
                let read = layers.filter_map(|place| config.vector(weights, model, place).transpose());
                StoredMethod::Ia3(read.collect::<Result<_, _>>()?)
            }
            MethodConfig::Prefix(config) => StoredMethod::Prefix(config.embeddings(weights, model)?),
            MethodConfig::Prompt(config) => StoredMethod::Prompt(config.embeddings(weights, model)?),
            MethodConfig::Tokens(_) => StoredMethod::Lora(Vec::new()),
            MethodConfig::Beft(config) => StoredMethod::Biased(Vec::new(), config.biases(weights, model)?),
            MethodConfig::Converted(config) => StoredMethod::Lora(config.modules(weights, model)?),
        })
    }

    fn vocabulary(&mut self) -> Result<Option<StoredVocabulary<'a>>, AdapterError> {
        match &self.config {
            MethodConfig::Lora(config) => config.vocabulary(&mut self.weights, self.model),
            MethodConfig::Tokens(config) => {
                let [embedding, head] = config.read(&mut self.weights, self.model)?;
                let (embedding, head) = (embedding.map(StoredEmbedding::Rows), head.map(StoredHead::Rows));
                Ok(Some(StoredVocabulary { hidden: self.model.hidden_size, embedding, head }))
            }
            _ => Ok(None),
        }
    }

    fn classification_head(&mut self) -> Result<Option<StoredClassificationHead<'a>>, AdapterError> {
        match &self.config {
            MethodConfig::Lora(config) => config.classification_head(&mut self.weights, self.model),
            _ => Ok(None),
        }
    }

    /// Takes unused copies of the base's embedding and head. An adapter that replaces only one of the two may
    /// have trained the other as well, through shared weights. A changed copy is not taken, so the adapter is
    /// refused.
    fn copies(&mut self) -> Result<Vec<AdapterWarning>, AdapterError> {
        match &self.config {
            MethodConfig::Lora(config) if config.saves_modules() => Ok(Vec::new()),
            _ => self.weights.take_copies(self.model),
        }
    }

    /// Returns warnings about file contents without effect, and takes the copies of the base's weights.
    fn notes(
        &mut self,
        method: &StoredMethod<'_>,
        vocabulary: Option<&StoredVocabulary<'_>>,
    ) -> Result<Vec<AdapterWarning>, AdapterError> {
        let mut notes = self.copies()?;
        if let MethodConfig::Lora(config) = &self.config {
            let embedding = vocabulary.and_then(|vocabulary| vocabulary.embedding.as_ref());
            notes.extend(config.unused_patterns(self.model, method.places().into_iter(), embedding)?);
        }
        if let MethodConfig::Converted(config) = &self.config {
            notes.extend(config.warning());
        }
        Ok(notes)
    }

    fn draft(&mut self) -> Result<Option<DraftShape>, AdapterError> {
        match &self.config {
            MethodConfig::Lora(config) => {
                let layers = config.draft_layers();
                layers.map(|layers| take_shape(&mut self.weights, self.model, layers)).transpose()
            }
            _ => Ok(None),
        }
    }

    fn problems(&mut self) -> Vec<AdapterError> {
        let Self { model, config, weights, .. } = self;
        let layers = linear_layers(model);
        match config {
            MethodConfig::Lora(config) => {
                let mut problem = |place| match config.module(weights, model, place) {
                    Ok(Some(_)) if config.is_dora() => magnitude(config, weights, model, place).err(),
                    module => module.err(),
                };
                let mut problems: Vec<_> = layers.filter_map(&mut problem).collect();
                problems.extend(experts::read(config, weights, model).err());
                problems.extend(config.vocabulary(weights, model).err());
                problems.extend(config.classification_head(weights, model).err());
                problems
            }
            MethodConfig::Tokens(config) => config.read(weights, model).err().into_iter().collect(),
            MethodConfig::Beft(config) => config.biases(weights, model).err().into_iter().collect(),
            MethodConfig::Prompt(config) => config.embeddings(weights, model).err().into_iter().collect(),
            MethodConfig::Converted(config) => config.problems(weights, model),
            MethodConfig::Ia3(config) => {
                layers.filter_map(|place| config.vector(weights, model, place).err()).collect()
            }
            MethodConfig::Prefix(config) => config.embeddings(weights, model).err().into_iter().collect(),
        }
    }
}

fn magnitude<'a>(
    config: &LoraConfig,
    weights: &mut WeightFile<'a>,
    model: &ModelConfig,
    (layer, target): (usize, Target),
) -> Result<StoredMatrix<'a>, AdapterError> {
    config.magnitude(weights, &module_name(layer, target), linear_shape(model, target)[0])
}

/// Reads configuration and weights that existed at the same time.
pub(super) fn read_files(directory: &Path) -> Result<(Vec<u8>, Vec<u8>), AdapterError> {
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

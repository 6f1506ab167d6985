//! LoRA in PEFT's format: A and B of each linear layer, with ranks and scales from the configuration.

use std::{collections::BTreeSet, path::Path};

use serde_json::Value;

use super::{
    draft,
    error::AdapterError,
    expert_names::{ExpertParameters, names_in_model},
    invocation::Invocation,
    limits::MAX_RANK,
    matrix::{StoredBias, StoredFactors, StoredMatrix, StoredModule},
    modules_to_save::{EmbeddingTying, SAVED, SavedModules},
    options::{ConfigOptions, Task, as_count, option_error},
    patterns::ByPattern,
    selection::{Selected, Selection},
    stored_classification::{LabelNames, StoredClassificationHead},
    stored_vocabulary::{StoredEmbedding, StoredEmbeddingFactors, StoredHead, StoredVocabulary},
    trained_tokens::{BESIDE_LORA, TrainedTokens},
    warning::AdapterWarning,
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape, source::Target},
    sources::hf_names::{EMBEDDING, module_name},
};

/// Options that describe how a LoRA was made, and not its result.
const HISTORY: [&str; 5] =
    ["eva_config", "loftq_config", "lora_dropout", "megatron_core", "qalora_group_size"];

/// Initializations that do not change the base; all others subtract the adapter's initial weights from it.
const INITIALIZATIONS: [&str; 4] = ["gaussian", "eva", "mica", "orthogonal"];

/// Prefixes of initializations that PEFT can convert on saving to an adapter of the unchanged base.
const CONVERTIBLE: [&str; 4] = ["pissa", "olora", "corda", "lora_ga"];

pub(super) const TASK: &str = "task_type";

/// Refusal of a classification head beside anything but a plain LoRA.
pub(super) const ONLY_PLAIN: &str = "is SEQ_CLS, which only a plain LoRA supports; train it as plain LoRA";

pub(super) const DORA: &str = "use_dora";

/// Option that gives B a bias.
const BIASED: &str = "lora_bias";

const ACTIVATED: &str = "alora_invocation_tokens";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scaling {
    /// Scale `alpha / rank` (LoRA).
    ByRank,
    /// Scale `alpha / sqrt(rank)` (rsLoRA).
    ByRoot,
}

/// Facts about the base that the options are checked against.
#[derive(Debug, Clone, Copy)]
pub(super) struct BaseShape {
    pub(super) layers: usize,
    pub(super) vocab_size: usize,
    pub(super) tying: EmbeddingTying,
}

impl BaseShape {
    /// No particular base, so every layer and token is accepted.
    pub(super) const ANY: Self =
        Self { layers: usize::MAX, vocab_size: usize::MAX, tying: EmbeddingTying::Apart };

    pub(super) fn of(model: &ModelConfig) -> Self {
        let tying = if model.tied_head { EmbeddingTying::Tied } else { EmbeddingTying::Apart };
        Self { layers: model.layers, vocab_size: model.vocab_size, tying }
    }
}

#[derive(Debug)]
pub(super) struct LoraConfig {
    selection: Selection,
    parameters: ExpertParameters,
    rank: usize,
    ranks: ByPattern<usize>,
    alpha: f64,
    alphas: ByPattern<f64>,
    scaling: Scaling,
    /// Number of base layers that a draft computes; `None` for an answering adapter.
    draft_layers: Option<usize>,
    is_dora: bool,
    invocation: Option<Invocation>,
    saved: SavedModules,
    /// Names of the labels, if the adapter classifies.
    labels: Option<LabelNames>,
    tokens: TrainedTokens,
    has_biases: bool,
}

impl LoraConfig {
    pub(super) fn from_options(
        options: &mut ConfigOptions<'_>,
        base: BaseShape,
        task: Task,
    ) -> Result<Self, AdapterError> {
        check_kind(options)?;
        let scaling = if options.flag("use_rslora")? { Scaling::ByRoot } else { Scaling::ByRank };
        let (saved, labels) = match task {
            Task::Language => (SavedModules::from_options(options, base.tying)?, None),
            Task::Classification => {
                (SavedModules::of_classifier(options)?, Some(LabelNames::from_options(options)?))
            }
        };
        let config = Self {
            selection: Selection::from_options(options)?.with_layers(options)?,
            parameters: ExpertParameters::from_options(options)?,
            rank: options.count("r")?.unwrap_or(8),
            ranks: options.by_pattern("rank_pattern", as_count)?,
            alpha: options.number("lora_alpha")?.unwrap_or(8.0),
            alphas: options.by_pattern("alpha_pattern", Value::as_f64)?,
            scaling,
            draft_layers: draft::take_layers(options, base.layers)?,
            is_dora: options.flag(DORA)?,
            invocation: take_invocation(options, base.vocab_size)?,
            saved,
            labels,
            tokens: TrainedTokens::beside_lora(options, base.vocab_size)?,
            has_biases: options.flag(BIASED)?,
        };
        if config.invocation.is_some() && (config.is_dora || config.draft_layers.is_some()) {
            return Err(options.problem(
                ACTIVATED,
                "is set, which a DoRA or a draft adapter does not support; train it as plain LoRA",
            ));
        }
        if config.is_dora && config.draft_layers.is_some() {
            return Err(options
                .problem(DORA, "is true, which a draft adapter does not support; train it as plain LoRA"));
        }
        config.check_parts(options)?;
        options.refuse_the_rest(&HISTORY)?;
        Ok(config)
    }

    /// Refuses parts beside the factors that do not go together.
    fn check_parts(&self, options: &ConfigOptions<'_>) -> Result<(), AdapterError> {
        if self.classifies() && !self.is_plain() {
            return Err(options.problem(TASK, ONLY_PLAIN));
        }
        if self.parameters.are_any() && (!self.is_plain() || self.has_biases) {
            return Err(options.problem(
                "target_parameters",
                "is set, which a DoRA, an activated LoRA, a draft adapter or `lora_bias` does not support; \
                 train it as plain LoRA",
            ));
        }
        let parts = [
            (SAVED, self.saves_modules()),
            (BESIDE_LORA, self.tokens.is_any()),
            (BIASED, self.has_biases),
            (TASK, self.classifies()),
        ];
        let mut set = parts.iter().filter(|(_, is_set)| *is_set).map(|(option, _)| *option);
        let Some(first) = set.next() else { return Ok(()) };
        if !self.is_plain() {
            return Err(options.problem(
                first,
                "is set, which a DoRA, an activated LoRA or a draft adapter does not support; train it \
                 as plain LoRA",
            ));
        }
        match set.next() {
            None => Ok(()),
            Some(second) => {
                Err(options.problem(second, format!("is set beside `{first}`; train with one of them")))
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.selection.path()
    }

    pub(super) fn parameters(&self) -> &ExpertParameters {
        &self.parameters
    }

    /// Whether `target_modules` selects the linear layer `module`.
    pub(super) fn selects(&self, module: &str) -> Result<Selected, AdapterError> {
        self.selection.of(module)
    }

    /// Translates the layer name `module` to the spelling of the trained model.
    pub(super) fn written(&self, module: &str) -> String {
        self.selection.written(module)
    }

    pub(super) fn draft_layers(&self) -> Option<usize> {
        self.draft_layers
    }

    /// Whether the adapter is neither a draft nor a DoRA nor an activated LoRA.
    fn is_plain(&self) -> bool {
        self.draft_layers.is_none() && !self.is_dora && self.invocation.is_none()
    }

    pub(super) fn saves_modules(&self) -> bool {
        self.saved.is_any()
    }

    /// Whether the adapter has a classification head.
    pub(super) fn classifies(&self) -> bool {
        self.labels.is_some()
    }

    /// Returns the classification head, if the adapter classifies; a missing one is an error.
    pub(super) fn classification_head<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<Option<StoredClassificationHead<'a>>, AdapterError> {
        self.labels.as_ref().map(|labels| StoredClassificationHead::read(labels, weights, model)).transpose()
    }

    /// Whether the adapter has more than factors of linear layers.
    pub(super) fn has_other_parts(&self) -> bool {
        self.saves_modules() || self.tokens.is_any() || self.has_biases
    }

    /// Returns the biases of the adapted layers, if B has any.
    pub(super) fn biases(
        &self,
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
        modules: &[StoredModule<'_>],
    ) -> Result<Option<Vec<StoredBias>>, AdapterError> {
        if !self.has_biases {
            return Ok(None);
        }
        let bias = |module: &StoredModule<'_>| -> Result<StoredBias, AdapterError> {
            let &StoredModule { layer, target, scale, .. } = module;
            let stored = weights.required(&format!("{}.lora_B.bias", module_name(layer, target)))?;
            let values = weights.numbers(stored, &linear_shape(model, target)[..1])?;
            Ok(StoredBias { layer, target, values: values.into_iter().map(|value| scale * value).collect() })
        };
        modules.iter().map(bias).collect::<Result<_, _>>().map(Some)
    }

    pub(super) fn invocation(&self) -> Option<&Invocation> {
        self.invocation.as_ref()
    }

    pub(super) fn is_dora(&self) -> bool {
        self.is_dora
    }

    /// Refuses experts among the `modules` of a DoRA.
    pub(super) fn refuse_experts(&self, modules: &[StoredModule<'_>]) -> Result<(), AdapterError> {
        if !modules.iter().any(|module| module.target.is_of_expert()) {
            return Ok(());
        }
        let problem = "is true, which adapters of experts do not support; train it as plain LoRA";
        Err(option_error(self.path(), DORA, problem))
    }

    /// Returns the magnitude of an adapted linear layer of a DoRA, shape `[outputs]`.
    pub(super) fn magnitude<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        module: &str,
        outputs: usize,
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        let named = weights.required(&format!("{module}.lora_magnitude_vector"))?;
        weights.vector(named, outputs)
    }

    pub(super) fn module<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
        (layer, target): (usize, Target),
    ) -> Result<Option<StoredModule<'a>>, AdapterError> {
        if target == Target::LmHead && self.saved.head {
            return Ok(None);
        }
        let name = module_name(layer, target);
        // A draft cannot adapt layers that it does not compute, even if its targets select them.
        let is_beyond = target != Target::LmHead && self.draft_layers.is_some_and(|layers| layer >= layers);
        let (module, selected) = self.selection.named(model, (layer, target))?;
        let selected = if is_beyond { Selected::No } else { selected };
        let mut names = ["A", "B"].map(|part| format!("{name}.lora_{part}.weight")).into_iter();
        if let Some(layers) = self.draft_layers.filter(|_| is_beyond)
            && names.any(|name| weights.has(&name))
        {
            return Err(AdapterError::BeyondDraft {
                path: weights.path().to_path_buf(),
                module: name,
                layers,
            });
        }
        self.factors_of(weights, model, (layer, target), &name, (module, selected))
    }

    /// Takes the factors of the linear layer `name`; `trained` is its name in the trained model, and whether
    /// it is selected.
    pub(super) fn factors_of<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
        (layer, target): (usize, Target),
        name: &str,
        (trained, selected): (String, Selected),
    ) -> Result<Option<StoredModule<'a>>, AdapterError> {
        let names = ["A", "B"].map(|part| format!("{name}.lora_{part}.weight"));
        let Some([a, b]) = weights.take_all(name, names, selected)? else { return Ok(None) };
        let (rank, scale) = self.rank_and_scale(&trained)?;
        let [rows, cols] = linear_shape(model, target);
        let a = weights.matrix(a, [rank, cols])?;
        let b = weights.matrix(b, [rows, rank])?;
        Ok(Some(StoredModule { layer, target, rank, scale, a, b }))
    }

    /// Returns the factors of the linear layer `name` in any base; the file gives the shape.
    pub(super) fn factors<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        name: &str,
    ) -> Result<Option<StoredFactors<'a>>, AdapterError> {
        let names = ["A", "B"].map(|part| format!("{name}.lora_{part}.weight"));
        let selected = self.selection.of(name)?;
        let Some([a, b]) = weights.take_all(name, names, selected)? else { return Ok(None) };
        let (rank, scale) = self.rank_and_scale(&self.selection.written(name))?;
        let (inputs, outputs) = (a.1.shape.last().copied(), b.1.shape.first().copied());
        let (inputs, outputs) = (inputs.unwrap_or_default(), outputs.unwrap_or_default());
        let (a, b) = (weights.matrix(a, [rank, inputs])?, weights.matrix(b, [outputs, rank])?);
        let magnitude = if self.is_dora { Some(self.magnitude(weights, name, outputs)?) } else { None };
        Ok(Some(StoredFactors { rank, scale, inputs, outputs, a, b, magnitude }))
    }

    /// Returns the changes of embedding and head by a plain LoRA; head factors are a [module](Self::module).
    pub(super) fn vocabulary<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<Option<StoredVocabulary<'a>>, AdapterError> {
        let [saved, head] = self.saved.read(weights, model)?;
        let [embedding_rows, head_rows] = self.tokens.read(weights, model)?;
        let embedding = match (saved, embedding_rows) {
            (Some(matrix), _) => Some(StoredEmbedding::Saved(matrix)),
            (None, Some(rows)) => Some(StoredEmbedding::Rows(rows)),
            (None, None) => self.embedding(weights, model)?.map(StoredEmbedding::Factors),
        };
        let head = head.map(StoredHead::Saved).or(head_rows.map(StoredHead::Rows));
        let is_any = embedding.is_some() || head.is_some();
        Ok(is_any.then_some(StoredVocabulary { hidden: model.hidden_size, embedding, head }))
    }

    fn embedding<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<Option<StoredEmbeddingFactors<'a>>, AdapterError> {
        if !self.is_plain() || self.classifies() {
            return Ok(None);
        }
        let names = ["A", "B"].map(|part| format!("{EMBEDDING}.lora_embedding_{part}"));
        let Some([a, b]) = weights.take_all(EMBEDDING, names, self.selection.of(EMBEDDING)?)? else {
            return Ok(None);
        };
        let (rank, scale) = self.rank_and_scale(&self.selection.written(EMBEDDING))?;
        let (vocab, hidden) = (model.vocab_size, model.hidden_size);
        let (a, b) = (weights.matrix(a, [rank, vocab])?, weights.matrix(b, [hidden, rank])?);
        Ok(Some(StoredEmbeddingFactors { rank, scale, a, b }))
    }

    /// Returns the keys of rank and alpha patterns that match no adapted layer. Adapted are the layers at
    /// `places`, and the embedding if `embedding` is present.
    pub(super) fn unused_patterns(
        &self,
        model: &ModelConfig,
        places: impl Iterator<Item = (usize, Target)>,
        embedding: Option<&StoredEmbedding<'_>>,
    ) -> Result<Vec<AdapterWarning>, AdapterError> {
        let mut names = BTreeSet::new();
        for (layer, target) in places {
            match target {
                Target::Expert(expert, part) => {
                    let in_model = names_in_model(model, layer, expert, part);
                    names.extend(in_model.iter().map(|name| self.written(name)));
                }
                _ => {
                    names.insert(self.selection.named(model, (layer, target))?.0);
                }
            }
        }
        names.extend(embedding.map(|_| self.selection.written(EMBEDDING)));
        let of =
            |option, pattern: &str| AdapterWarning::UnusedPattern { option, pattern: pattern.to_owned() };
        let ranks = self.ranks.unused(&names).map(|pattern| of("rank_pattern", pattern));
        let alphas = self.alphas.unused(&names).map(|pattern| of("alpha_pattern", pattern));
        Ok(ranks.chain(alphas).collect())
    }

    pub(super) fn rank_and_scale(&self, module: &str) -> Result<(usize, f32), AdapterError> {
        let path = self.selection.path();
        let problem = |option| move |problem| option_error(path, option, problem);
        let rank = self.ranks.get(module, self.rank).map_err(problem("rank_pattern"))?;
        if rank == 0 || rank > MAX_RANK {
            return Err(AdapterError::Rank { path: path.to_path_buf(), module: module.to_owned(), rank });
        }
        let alpha = self.alphas.get(module, self.alpha).map_err(problem("alpha_pattern"))?;
        #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
        let rank_number = rank as f64;
        let scale = match self.scaling {
            Scaling::ByRank => alpha / rank_number,
            Scaling::ByRoot => alpha / rank_number.sqrt(),
        };
        #[expect(clippy::cast_possible_truncation, reason = "PEFT rounds the scale to single precision too")]
        let scale = scale as f32;
        if scale.is_finite() {
            Ok((rank, scale))
        } else {
            Err(option_error(path, "lora_alpha", format!("of {alpha} is too large")))
        }
    }
}

fn take_invocation(
    options: &mut ConfigOptions<'_>,
    vocab_size: usize,
) -> Result<Option<Invocation>, AdapterError> {
    let Some(value) = options.take(ACTIVATED) else { return Ok(None) };
    let ids = value.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    Invocation::new(ids, vocab_size).map(Some).map_err(|problem| options.problem(ACTIVATED, problem))
}

fn check_kind(options: &mut ConfigOptions<'_>) -> Result<(), AdapterError> {
    options.one_of("bias", &["none"])?;
    match options.take("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if INITIALIZATIONS.contains(&name.as_str()) => Ok(()),
        Some(Value::String(name)) if CONVERTIBLE.iter().any(|beginning| name.starts_with(beginning)) => {
            Err(options.changed_base(&name.into()))
        }
        Some(other) => Err(options.unsupported("init_lora_weights", &other)),
    }
}

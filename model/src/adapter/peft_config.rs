//! `adapter_config.json` of PEFT: which linear layers a LoRA adapts, with which rank and scale.
//!
//! Options that change what an adapter computes and that are not implemented are refused by name. The rule for
//! options nobody here has heard of is the same: they must be off (null, false or empty).

use std::path::Path;

use serde_json::{Map, Value};

use super::{
    AdapterError,
    limits::{MAX_EXPRESSION_BYTES, MAX_PATTERNS, MAX_RANK},
    patterns::{ByPattern, Layers, Names, Pattern, is_plain},
};
use crate::small_json;

/// Options that say how an adapter was made, not what it computes.
const HISTORY: [&str; 10] = [
    "auto_mapping",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// Entries of `layers_pattern`: what the list of layers is called, of which a model has one.
const MAX_LAYERS_PATTERNS: usize = 8;

/// Initializations that leave the base model's weights alone. The others subtract what they put into the adapter.
const INITIALIZATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// How the scale follows from alpha and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scaling {
    /// `alpha / rank`.
    ByRank,
    /// `alpha / sqrt(rank)` (rsLoRA).
    ByRoot,
}

/// What an `adapter_config.json` says.
#[derive(Debug)]
pub(super) struct PeftConfig {
    /// `base_model_name_or_path`.
    pub(super) base_model: Option<String>,
    rank: usize,
    ranks: ByPattern<usize>,
    alpha: f64,
    alphas: ByPattern<f64>,
    scaling: Scaling,
    targets: Names,
    excluded: Option<Names>,
    layers: Option<Layers>,
}

impl PeftConfig {
    /// Reads and checks the configuration in `json`; `path` is for messages.
    pub(super) fn parse(path: &Path, json: &[u8]) -> Result<Self, AdapterError> {
        let options: Map<String, Value> = small_json::parse(json)
            .map_err(|source| AdapterError::Json { path: path.to_path_buf(), source })?;
        let mut options = Options { path, options, expression_bytes: 0 };
        options.check_kind()?;
        let scaling = if options.flag("use_rslora")? { Scaling::ByRoot } else { Scaling::ByRank };
        let targets = options.targets()?;
        let config = Self {
            base_model: options.text("base_model_name_or_path")?,
            rank: options.count("r")?.unwrap_or(8),
            ranks: options.by_pattern("rank_pattern", as_count)?,
            alpha: options.number("lora_alpha")?.unwrap_or(8.0),
            alphas: options.by_pattern("alpha_pattern", Value::as_f64)?,
            scaling,
            layers: options.layers(&targets)?,
            targets,
            excluded: options.names("exclude_modules")?,
        };
        options.refuse_the_rest()?;
        Ok(config)
    }

    /// True if the linear layer called `module` is adapted.
    pub(super) fn selects(&self, path: &Path, module: &str) -> Result<bool, AdapterError> {
        let problem = |option| move |problem| option_error(path, option, problem);
        if let Some(excluded) = &self.excluded
            && excluded.select(module).map_err(problem("exclude_modules"))?
        {
            return Ok(false);
        }
        if !self.targets.select(module).map_err(problem("target_modules"))? {
            return Ok(false);
        }
        match &self.layers {
            None => Ok(true),
            Some(layers) => layers.select(module).map_err(problem("layers_pattern")),
        }
    }

    /// Rank and scale of the linear layer called `module`.
    pub(super) fn rank_and_scale(&self, path: &Path, module: &str) -> Result<(usize, f32), AdapterError> {
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

fn option_error(path: &Path, option: &str, problem: impl Into<String>) -> AdapterError {
    AdapterError::Option { path: path.to_path_buf(), option: option.to_owned(), problem: problem.into() }
}

fn as_count(value: &Value) -> Option<usize> {
    value.as_u64()?.try_into().ok()
}

/// True for the values that mean an option is off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// The options not looked at yet.
struct Options<'a> {
    path: &'a Path,
    options: Map<String, Value>,
    /// Of the patterns compiled so far.
    expression_bytes: usize,
}

impl Options<'_> {
    /// Removes an option; null is the same as absent.
    fn take(&mut self, option: &str) -> Option<Value> {
        self.options.shift_remove(option).filter(|value| !value.is_null())
    }

    fn problem(&self, option: &str, problem: impl Into<String>) -> AdapterError {
        option_error(self.path, option, problem)
    }

    fn unsupported(&self, option: &str, value: &Value) -> AdapterError {
        const SHOWN: usize = 64;
        let mut text = value.to_string();
        if let Some((end, _)) = text.char_indices().nth(SHOWN) {
            text.truncate(end);
            text.push_str("...");
        }
        AdapterError::Unsupported { path: self.path.to_path_buf(), option: option.to_owned(), value: text }
    }

    fn typed<T>(
        &mut self,
        option: &str,
        kind: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, AdapterError> {
        let Some(value) = self.take(option) else {
            return Ok(None);
        };
        convert(&value).map(Some).ok_or_else(|| self.problem(option, format!("is not {kind}")))
    }

    fn count(&mut self, option: &str) -> Result<Option<usize>, AdapterError> {
        self.typed(option, "a count", as_count)
    }

    fn number(&mut self, option: &str) -> Result<Option<f64>, AdapterError> {
        self.typed(option, "a number", Value::as_f64)
    }

    fn text(&mut self, option: &str) -> Result<Option<String>, AdapterError> {
        self.typed(option, "a text", |value| value.as_str().map(str::to_owned))
    }

    fn flag(&mut self, option: &str) -> Result<bool, AdapterError> {
        Ok(self.typed(option, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// An option whose only supported values are `known`; absent is fine.
    fn one_of(&mut self, option: &str, known: &[&str]) -> Result<(), AdapterError> {
        match self.take(option) {
            Some(value) if !value.as_str().is_some_and(|value| known.contains(&value)) => {
                Err(self.unsupported(option, &value))
            }
            _ => Ok(()),
        }
    }

    fn check_kind(&mut self) -> Result<(), AdapterError> {
        if self.options.get("peft_type").is_none_or(Value::is_null) {
            return Err(self.problem("peft_type", "is missing"));
        }
        self.one_of("peft_type", &["LORA"])?;
        self.one_of("task_type", &["CAUSAL_LM"])?;
        self.one_of("bias", &["none"])?;
        match self.take("init_lora_weights") {
            None | Some(Value::Bool(_)) => Ok(()),
            Some(Value::String(name)) if INITIALIZATIONS.contains(&name.as_str()) => Ok(()),
            Some(other) => Err(self.unsupported("init_lora_weights", &other)),
        }
    }

    fn refuse_the_rest(&self) -> Result<(), AdapterError> {
        let unknown =
            |(option, value): &(&String, &Value)| !HISTORY.contains(&option.as_str()) && !is_off(value);
        match self.options.iter().find(unknown) {
            None => Ok(()),
            Some((option, value)) => Err(self.unsupported(option, value)),
        }
    }

    fn targets(&mut self) -> Result<Names, AdapterError> {
        let all = |value: &Value| value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("all-linear"));
        if self.options.get("target_modules").is_some_and(all) {
            self.take("target_modules");
            return Ok(Names::AllLinear);
        }
        self.names("target_modules")?.ok_or_else(|| self.problem("target_modules", "is missing"))
    }

    /// Names in a list, or an expression for them.
    fn names(&mut self, option: &str) -> Result<Option<Names>, AdapterError> {
        match self.take(option) {
            None => Ok(None),
            Some(value) if is_off(&value) => Ok(None),
            Some(Value::String(pattern)) => {
                self.pattern(option, &pattern, Pattern::whole).map(|pattern| Some(Names::Pattern(pattern)))
            }
            Some(value) => self.texts(option, value).map(|list| Some(Names::List(list))),
        }
    }

    /// Compiles a pattern, if all of them together are not too long: compiled, they grow.
    fn pattern(
        &mut self,
        option: &str,
        pattern: &str,
        compile: impl Fn(&str) -> Result<Pattern, String>,
    ) -> Result<Pattern, AdapterError> {
        if !is_plain(pattern) {
            self.expression_bytes = self.expression_bytes.saturating_add(pattern.len());
        }
        if self.expression_bytes > MAX_EXPRESSION_BYTES {
            let problem =
                format!("has more than {MAX_EXPRESSION_BYTES} bytes of patterns that are no plain names");
            return Err(self.problem(option, problem));
        }
        compile(pattern).map_err(|problem| self.problem(option, problem))
    }

    /// A text or a list of them.
    fn texts(&self, option: &str, value: Value) -> Result<Vec<String>, AdapterError> {
        let values = if let Value::Array(values) = value { values } else { vec![value] };
        self.check_entries(option, values.len())?;
        let texts: Option<_> = values.iter().map(|value| value.as_str().map(str::to_owned)).collect();
        texts.ok_or_else(|| self.problem(option, "is neither a text nor a list of texts"))
    }

    fn check_entries(&self, option: &str, entries: usize) -> Result<(), AdapterError> {
        if entries <= MAX_PATTERNS {
            return Ok(());
        }
        Err(self.problem(option, format!("has {entries} entries, and the limit is {MAX_PATTERNS}")))
    }

    /// `layers_to_transform` and `layers_pattern`, which PEFT allows beside a list of targets only.
    fn layers(&mut self, targets: &Names) -> Result<Option<Layers>, AdapterError> {
        let indices = self.take("layers_to_transform").filter(|value| !is_off(value));
        let pattern = self.take("layers_pattern").filter(|value| !is_off(value));
        let Some(indices) = indices else {
            let Some(_) = pattern else { return Ok(None) };
            return Err(self.problem("layers_pattern", "is given without layers_to_transform"));
        };
        if !matches!(targets, Names::List(_)) {
            return Err(
                self.problem("layers_to_transform", "is given beside target_modules that are no list")
            );
        }
        let indices = if let Value::Array(indices) = indices { indices } else { vec![indices] };
        self.check_entries("layers_to_transform", indices.len())?;
        let indices: Option<Vec<usize>> = indices.iter().map(as_count).collect();
        let indices =
            indices.ok_or_else(|| self.problem("layers_to_transform", "is not a list of layers"))?;
        let texts = pattern.map_or_else(|| Ok(Vec::new()), |value| self.texts("layers_pattern", value))?;
        if texts.len() > MAX_LAYERS_PATTERNS {
            return Err(
                self.problem("layers_pattern", format!("has more than {MAX_LAYERS_PATTERNS} entries"))
            );
        }
        let patterns: Result<_, _> =
            texts.iter().map(|text| self.pattern("layers_pattern", text, Pattern::numbered)).collect();
        Ok(Some(Layers { indices, patterns: patterns? }))
    }

    fn by_pattern<T>(
        &mut self,
        option: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<ByPattern<T>, AdapterError> {
        let map = match self.take(option) {
            None => return Ok(ByPattern(Vec::new())),
            Some(Value::Object(map)) => map,
            Some(_) => return Err(self.problem(option, "is not a map from names to numbers")),
        };
        self.check_entries(option, map.len())?;
        let mut entries = Vec::with_capacity(map.len());
        for (name, value) in &map {
            let pattern = self.pattern(option, name, Pattern::ending)?;
            let value = convert(value).ok_or_else(|| {
                self.problem(option, format!("has no usable number for \"{}\"", name.escape_debug()))
            })?;
            entries.push((pattern, value));
        }
        Ok(ByPattern(entries))
    }
}

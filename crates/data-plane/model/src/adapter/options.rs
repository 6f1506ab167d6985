//! Options of an `adapter_config.json`, taken out one by one.
//!
//! Options that change the result of an adapter and are not implemented are refused by name. Unknown options
//! must be off (null, false or empty).

use std::path::Path;

use model_files::bounded_json;
use serde_json::{Map, Value};

use super::{
    error::AdapterError,
    limits::{MAX_EXPRESSION_BYTES, MAX_PATTERNS},
    patterns::{ByPattern, LayerFilter, ModuleNames, Pattern, is_plain},
    peft_types::refusal,
    tensor_names::TensorNameScheme,
};

/// Options of every method that describe how an adapter was made, and not its result.
const HISTORY: [&str; 5] = ["auto_mapping", "inference_mode", "peft_version", "revision", "runtime_config"];

/// Purpose of an adapter's training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Text generation or embeddings, whose adapters change the same layers.
    Language,
    /// Classification of sequences, by a head of the adapter's own.
    Classification,
}

/// Maximum entries of `layers_pattern`, the names of a model's layer list.
const MAX_LAYERS_PATTERNS: usize = 8;

pub(super) fn option_error(path: &Path, option: &str, problem: impl Into<String>) -> AdapterError {
    AdapterError::Option { path: path.to_path_buf(), option: option.to_owned(), problem: problem.into() }
}

/// Returns a non-negative integer, written as `16` or as `16.0`.
pub(super) fn as_count(value: &Value) -> Option<usize> {
    /// From here on 64-bit floats cannot represent every integer.
    const EXACT: f64 = (1u64 << 53) as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole and in range")]
    let whole =
        |number: f64| ((0.0..EXACT).contains(&number) && number.fract() == 0.0).then_some(number as u64);
    value.as_u64().or_else(|| whole(value.as_f64()?))?.try_into().ok()
}

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

fn shortened(value: &Value) -> String {
    const SHOWN: usize = 64;
    let mut text = value.to_string();
    if let Some((end, _)) = text.char_indices().nth(SHOWN) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// The options that are not taken yet.
#[derive(Debug)]
pub(super) struct ConfigOptions<'a> {
    path: &'a Path,
    options: Map<String, Value>,
    /// Bytes of the patterns compiled so far.
    expression_bytes: usize,
    spelling: TensorNameScheme,
}

impl<'a> ConfigOptions<'a> {
    /// Parses the options in `json` from the file at `path`; `spelling` is that of the weights' layer names.
    pub(super) fn parse(
        path: &'a Path,
        json: &[u8],
        spelling: TensorNameScheme,
    ) -> Result<Self, AdapterError> {
        let options: Map<String, Value> = bounded_json::parse(json)
            .map_err(|source| AdapterError::Json { path: path.to_path_buf(), source })?;
        Ok(Self { path, options, expression_bytes: 0, spelling })
    }

    pub(super) fn written(&self) -> Map<String, Value> {
        self.options.clone()
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    pub(super) fn spelling(&self) -> &TensorNameScheme {
        &self.spelling
    }

    /// Removes an option; null counts as absent.
    pub(super) fn take(&mut self, option: &str) -> Option<Value> {
        self.options.shift_remove(option).filter(|value| !value.is_null())
    }

    /// Sets an option that the file leaves to a default.
    pub(super) fn set(&mut self, option: &str, value: Value) {
        self.options.insert(option.to_owned(), value);
    }

    /// True if the option is present and not null.
    pub(super) fn has(&self, option: &str) -> bool {
        self.options.get(option).is_some_and(|value| !value.is_null())
    }

    pub(super) fn problem(&self, option: &str, problem: impl Into<String>) -> AdapterError {
        option_error(self.path, option, problem)
    }

    pub(super) fn unsupported(&self, option: &str, value: &Value) -> AdapterError {
        let (path, value) = (self.path.to_path_buf(), shortened(value));
        AdapterError::Unsupported { path, option: option.to_owned(), value }
    }

    pub(super) fn task(&mut self) -> Result<Task, AdapterError> {
        let Some(value) = self.take("task_type") else { return Ok(Task::Language) };
        match value.as_str() {
            Some("CAUSAL_LM" | "FEATURE_EXTRACTION") => Ok(Task::Language),
            Some("SEQ_CLS") => Ok(Task::Classification),
            _ => Err(AdapterError::Task { path: self.path.to_path_buf(), value: shortened(&value) }),
        }
    }

    pub(super) fn changed_base(&self, value: &Value) -> AdapterError {
        AdapterError::ChangedBase { path: self.path.to_path_buf(), value: shortened(value) }
    }

    /// Returns the error for an adapter type that is not served: with a reason for the types of PEFT.
    pub(super) fn refused_type(&self, option: &str, value: &Value) -> AdapterError {
        match value.as_str().and_then(|name| Some((name, refusal(name)?))) {
            None => self.unsupported(option, value),
            Some((name, because)) => {
                AdapterError::Type { path: self.path.to_path_buf(), name: name.to_owned(), because }
            }
        }
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

    pub(super) fn count(&mut self, option: &str) -> Result<Option<usize>, AdapterError> {
        self.typed(option, "a count", as_count)
    }

    /// Takes an integer of 64 bits, signed or unsigned, as PyTorch accepts seeds, and returns its bits.
    pub(super) fn seed(&mut self, option: &str) -> Result<Option<u64>, AdapterError> {
        let bits = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        self.typed(option, "a seed of 64 bits", bits)
    }

    pub(super) fn number(&mut self, option: &str) -> Result<Option<f64>, AdapterError> {
        self.typed(option, "a number", Value::as_f64)
    }

    /// Takes the count `key` from an option that must have no other key.
    pub(super) fn count_in(&mut self, option: &str, key: &str) -> Result<Option<usize>, AdapterError> {
        let kind = format!("an object with a count called `{key}` and nothing else");
        self.typed(option, &kind, |value| {
            let map = value.as_object().filter(|map| map.len() == 1)?;
            as_count(map.get(key)?)
        })
    }

    pub(super) fn text(&mut self, option: &str) -> Result<Option<String>, AdapterError> {
        self.typed(option, "a text", |value| value.as_str().map(str::to_owned))
    }

    pub(super) fn flag(&mut self, option: &str) -> Result<bool, AdapterError> {
        Ok(self.typed(option, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Takes an option whose only supported values are `known`; absence is accepted.
    pub(super) fn one_of(&mut self, option: &str, known: &[&str]) -> Result<(), AdapterError> {
        match self.take(option) {
            Some(value) if !value.as_str().is_some_and(|value| known.contains(&value)) => {
                Err(self.unsupported(option, &value))
            }
            _ => Ok(()),
        }
    }

    /// Refuses all remaining options except `history`, which do not affect a finished adapter.
    pub(super) fn refuse_the_rest(&self, history: &[&str]) -> Result<(), AdapterError> {
        let matters = |option: &str| !HISTORY.contains(&option) && !history.contains(&option);
        let unknown = |(option, value): &(&String, &Value)| matters(option) && !is_off(value);
        match self.options.iter().find(unknown) {
            None => Ok(()),
            Some((option, value)) => Err(self.unsupported(option, value)),
        }
    }

    pub(super) fn targets(&mut self) -> Result<ModuleNames, AdapterError> {
        let all = |value: &Value| value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("all-linear"));
        if self.options.get("target_modules").is_some_and(all) {
            self.take("target_modules");
            return Ok(ModuleNames::AllLinear);
        }
        let has_parameters = self.options.get("target_parameters").is_some_and(|value| !is_off(value));
        match self.names("target_modules")? {
            Some(names) => Ok(names),
            None if has_parameters => Ok(ModuleNames::List(Vec::new())),
            None => Err(self.problem("target_modules", "is missing")),
        }
    }

    /// Takes a list of names, or one pattern for them.
    pub(super) fn names(&mut self, option: &str) -> Result<Option<ModuleNames>, AdapterError> {
        match self.take(option) {
            None => Ok(None),
            Some(value) if is_off(&value) => Ok(None),
            Some(Value::String(pattern)) => self
                .pattern(option, &pattern, Pattern::whole)
                .map(|pattern| Some(ModuleNames::Pattern(pattern))),
            Some(value) => self.texts(option, value).map(|list| Some(ModuleNames::List(list))),
        }
    }

    /// Compiles a pattern. The total length is limited, because compiled patterns grow.
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
                format!("has more than {MAX_EXPRESSION_BYTES} bytes of patterns that are not plain names");
            return Err(self.problem(option, problem));
        }
        compile(pattern).map_err(|problem| self.problem(option, problem))
    }

    /// Takes a string or a list of strings; an option that is off gives an empty list.
    pub(super) fn list(&mut self, option: &str) -> Result<Vec<String>, AdapterError> {
        match self.take(option).filter(|value| !is_off(value)) {
            None => Ok(Vec::new()),
            Some(value) => self.texts(option, value),
        }
    }

    fn texts(&self, option: &str, value: Value) -> Result<Vec<String>, AdapterError> {
        let values = if let Value::Array(values) = value { values } else { vec![value] };
        self.check_entries(option, values.len())?;
        let texts: Option<_> = values.iter().map(|value| value.as_str().map(str::to_owned)).collect();
        texts.ok_or_else(|| self.problem(option, "is neither a string nor a list of strings"))
    }

    fn check_entries(&self, option: &str, entries: usize) -> Result<(), AdapterError> {
        if entries <= MAX_PATTERNS {
            return Ok(());
        }
        Err(self.problem(option, format!("has {entries} entries, and the limit is {MAX_PATTERNS}")))
    }

    /// Takes `layers_to_transform` and `layers_pattern`, which PEFT allows only beside a list of targets.
    pub(super) fn layers(&mut self, targets: &ModuleNames) -> Result<Option<LayerFilter>, AdapterError> {
        let indices = self.take("layers_to_transform").filter(|value| !is_off(value));
        let pattern = self.take("layers_pattern").filter(|value| !is_off(value));
        let Some(indices) = indices else {
            let Some(_) = pattern else { return Ok(None) };
            return Err(self.problem("layers_pattern", "is set without layers_to_transform"));
        };
        if !matches!(targets, ModuleNames::List(_)) {
            return Err(self.problem("layers_to_transform", "is set, but target_modules is not a list"));
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
        Ok(Some(LayerFilter { indices, patterns: patterns? }))
    }

    pub(super) fn by_pattern<T>(
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
            entries.push((name.clone(), pattern, value));
        }
        Ok(ByPattern(entries))
    }
}

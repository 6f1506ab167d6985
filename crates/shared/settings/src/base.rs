//! A base beside the first one, as `holobiont up` passes it to the gateway in one option.

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize, Serializer};

use crate::{
    choices::{ReasoningParser, ToolCallParser},
    values::{MAX_PROCESS_NAME_BYTES, is_process_name},
};

/// Maximum number of bases of a deployment.
pub const MAX_BASES: usize = 16;

/// Base of a gateway beside the first one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BaseOption {
    /// Unique name of the base in administration, and of its state directory.
    pub name: String,
    /// Unique name of the base in requests.
    pub served_name: String,
    /// Model whose tokenizer the gateway reads while the executors load it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Sockets of the executors by name.
    pub executors: BTreeMap<String, PathBuf>,
    /// Expected number of workers of each executor, in the order of the executors' names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<u32>,
    /// Directories of the adapters that are loaded at the start, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub adapters: BTreeMap<String, PathBuf>,
    /// Format of tool calls in the model's output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "as_text", deserialize_with = "crate::file::setting")]
    pub tool_call_parser: Option<ToolCallParser>,
    /// Tags around the model's reasoning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "as_text", deserialize_with = "crate::file::setting")]
    pub reasoning_parser: Option<ReasoningParser>,
    /// Tokens that classify or score texts, separated by commas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classifier_from_token: Option<String>,
    /// File with the prompt that scores a document for a query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_template: Option<PathBuf>,
    /// Time without requests after which the base sleeps; 0 is never.
    #[serde(default)]
    pub sleep_after_s: u64,
    /// Host memory that the executors of the base may use.
    #[serde(default)]
    pub host_bytes: u64,
}

/// Reason why the option of a base is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BaseOptionError {
    /// Text that is not a base in TOML.
    #[error(
        "this is not a base: {0}; write {{name=\"small\",served_name=\"small\",executors={{small=\"PATH\"}}}}"
    )]
    Syntax(String),
    /// Name that is not a process name, see [`is_process_name`].
    #[error(
        "a base needs a `name` of at most {MAX_PROCESS_NAME_BYTES} lower-case letters, digits and '-', not `{0}`"
    )]
    Name(String),
    /// Base for which the option lists no executors.
    #[error("the base `{0}` has no executors; add `executors`")]
    NoExecutor(String),
}

impl FromStr for BaseOption {
    type Err = BaseOptionError;

    /// Parses an inline table of TOML, the form of an option.
    fn from_str(text: &str) -> Result<Self, BaseOptionError> {
        #[derive(Deserialize)]
        struct BaseLine {
            base: BaseOption,
        }
        let read = toml::from_str::<BaseLine>(&format!("base = {text}"));
        let base = read.map_err(|error| BaseOptionError::Syntax(error.message().to_owned()))?.base;
        if !is_process_name(&base.name) {
            return Err(BaseOptionError::Name(base.name));
        }
        if base.executors.is_empty() {
            return Err(BaseOptionError::NoExecutor(base.name));
        }
        Ok(base)
    }
}

impl fmt::Display for BaseOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = toml::Value::try_from(self).map_err(|_| fmt::Error)?;
        write!(f, "{value}")
    }
}

fn as_text<T: fmt::Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_read_as_it_was_written() {
        let base = BaseOption {
            name: "small".to_owned(),
            served_name: "org/Small-1.5".to_owned(),
            model: Some("/models/a b\"c.gguf".to_owned()),
            executors: [("small".to_owned(), "/run/small.sock".into())].into(),
            workers: vec![2],
            adapters: [("pirate".to_owned(), "/adapters/pirate".into())].into(),
            tool_call_parser: Some(ToolCallParser::Hermes),
            sleep_after_s: 60,
            host_bytes: 1 << 30,
            ..BaseOption::default()
        };
        assert_eq!(base.to_string().parse(), Ok(base));
    }

    #[test]
    fn a_base_without_a_name_or_executors_is_refused() {
        let error = |text: &str| text.parse::<BaseOption>().unwrap_err();
        let named = |name: &str| format!("{{name='{name}',served_name='x',executors={{}}}}");
        assert_eq!(error(&named("A b")), BaseOptionError::Name("A b".to_owned()));
        assert_eq!(error(&named("a")), BaseOptionError::NoExecutor("a".to_owned()));
        assert!(matches!(error("a"), BaseOptionError::Syntax(_)));
    }
}

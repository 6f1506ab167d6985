//! Requested structured output, and the grammar text that executors take.

use std::sync::Arc;

use serde::Serialize;
use text::grammar::{Enforcement, Grammar, ReasoningPrefix, Warning};

use crate::errors::ApiError;

#[derive(Debug, Clone, PartialEq)]
pub struct Structure {
    /// The field that requests the structured output.
    pub field: String,
    pub grammar: Grammar,
    /// Treatment of schema keywords that a grammar cannot express.
    pub enforcement: Enforcement,
}

/// A keyword of a schema that the grammar does not enforce.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SchemaWarning {
    /// Location of the keyword: the request's field and the path within its schema.
    pub param: String,
    pub keyword: String,
    /// The reason, and what to write instead.
    pub message: String,
}

/// A grammar as executors take it, with the field that requested it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrammarSource {
    /// Text of the grammar on the wire.
    pub source: Arc<str>,
    /// Name of the request field that contains the grammar, for error messages.
    pub field: String,
    /// The field that an error names if the grammar does not compile.
    pub param: String,
    /// The callers' grammars inside this one. Each is compiled first, so that a refusal names its own field.
    pub parts: Vec<GrammarSource>,
    /// The keywords that the grammar does not enforce.
    pub warnings: Vec<SchemaWarning>,
}

impl SchemaWarning {
    #[must_use]
    pub fn of(field: &str, warning: Warning) -> Self {
        let Warning { path, keyword, message } = warning;
        Self { param: format!("{field}{path}"), keyword, message }
    }
}

impl Structure {
    /// Returns structured output whose keywords are all enforced.
    #[must_use]
    pub fn strict(field: impl Into<String>, grammar: Grammar) -> Self {
        Self { field: field.into(), grammar, enforcement: Enforcement::Strict }
    }

    /// Returns the grammar for executors, with `thought` before the answer; the grammar is not compiled yet.
    ///
    /// # Errors
    /// The schema or grammar cannot be expressed.
    pub fn source(&self, thought: Option<ReasoningPrefix>) -> Result<GrammarSource, ApiError> {
        let source = self.grammar.source_behind(thought, self.enforcement);
        let source = source.map_err(|error| refused(&self.field, &error))?;
        let warnings = source.warnings.into_iter().map(|warning| SchemaWarning::of(&self.field, warning));
        Ok(GrammarSource::new(source.text, &self.field).with_warnings(warnings.collect()))
    }
}

impl GrammarSource {
    /// Returns a grammar that `field` requested, without warnings.
    #[must_use]
    pub fn new(source: String, field: &str) -> Self {
        let (source, field) = (source.into(), field.to_owned());
        Self { source, param: field.clone(), field, parts: Vec::new(), warnings: Vec::new() }
    }

    /// Adds warnings and logs them, because not every caller reads the answer's warnings.
    #[must_use]
    pub(crate) fn with_warnings(self, warnings: Vec<SchemaWarning>) -> Self {
        for SchemaWarning { param, keyword, message } in &warnings {
            tracing::info!(param, keyword, message, "a keyword of the schema is not enforced");
        }
        Self { warnings, ..self }
    }
}

pub(crate) fn refused(field: &str, error: &impl std::fmt::Display) -> ApiError {
    ApiError::bad_request("invalid_grammar", format!("'{field}' is not usable: {error}")).of(field)
}

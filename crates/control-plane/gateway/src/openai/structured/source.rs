//! What is asked for as a grammar, and the form in which an executor takes it.

use std::sync::Arc;

use serde::Serialize;
use text::grammar::{Enforcement, Grammar, Thought, Warning};

use crate::errors::ApiError;

/// What is asked for, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Structure {
    /// The field that asks for it.
    pub field: String,
    /// What it asks for.
    pub grammar: Grammar,
    /// What becomes of a schema's keywords that cannot be held.
    pub enforcement: Enforcement,
}

/// A keyword of a schema that an answer need not keep to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SchemaWarning {
    /// Where the keyword stands: the field of the request, and the way within its schema.
    pub param: String,
    /// The keyword.
    pub keyword: String,
    /// Why, and what to write instead.
    pub message: String,
}

/// A grammar as an executor takes it, and what asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrammarSource {
    /// The form in which it travels.
    pub source: Arc<str>,
    /// The field that asks for it, as a message names it.
    pub field: String,
    /// The field that is to blame if it cannot be honoured.
    pub param: String,
    /// Grammars of callers that it is made of. They are compiled before it, so that a refusal names their field.
    pub parts: Vec<GrammarSource>,
    /// What of the request an answer need not keep to.
    pub warnings: Vec<SchemaWarning>,
}

impl SchemaWarning {
    /// Of the schema in `field`.
    #[must_use]
    pub fn of(field: &str, warning: Warning) -> Self {
        let Warning { path, keyword, message } = warning;
        Self { param: format!("{field}{path}"), keyword, message }
    }
}

impl Structure {
    /// Text of this grammar, all of it.
    #[must_use]
    pub fn strict(field: impl Into<String>, grammar: Grammar) -> Self {
        Self { field: field.into(), grammar, enforcement: Enforcement::Strict }
    }

    /// The grammar as an executor takes it, with `thought` before the answer. Nobody has compiled it yet.
    ///
    /// # Errors
    /// It cannot be honoured.
    pub fn source(&self, thought: Option<Thought>) -> Result<GrammarSource, ApiError> {
        let source = self.grammar.source_behind(thought, self.enforcement);
        let source = source.map_err(|error| refused(&self.field, &error))?;
        let warnings = source.warnings.into_iter().map(|warning| SchemaWarning::of(&self.field, warning));
        Ok(GrammarSource::new(source.text, &self.field).with_warnings(warnings.collect()))
    }
}

impl GrammarSource {
    /// A grammar that `field` asks for, of which every keyword is kept to.
    #[must_use]
    pub fn new(source: String, field: &str) -> Self {
        let (source, field) = (source.into(), field.to_owned());
        Self { source, param: field.clone(), field, parts: Vec::new(), warnings: Vec::new() }
    }

    /// The same grammar, of which some keywords need not be kept to. That is logged, since not every caller reads its answers.
    #[must_use]
    pub fn with_warnings(self, warnings: Vec<SchemaWarning>) -> Self {
        for SchemaWarning { param, keyword, message } in &warnings {
            tracing::info!(param, keyword, message, "an answer need not keep to a keyword of its schema");
        }
        Self { warnings, ..self }
    }
}

/// What is wrong with the grammar in `field`.
pub fn refused(field: &str, error: &impl std::fmt::Display) -> ApiError {
    ApiError::bad_request("invalid_grammar", format!("'{field}' cannot be used: {error}")).of(field)
}

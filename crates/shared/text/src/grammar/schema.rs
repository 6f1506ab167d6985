//! Rewrites a JSON schema to keywords that the library supports.
//!
//! The library (`llguidance`) knows about half of JSON Schema's keywords and refuses the others. A rewrite
//! allows the same values as the schema, or fewer if a value would have no end, but never more without a
//! [`Warning`].
//!
//! # Layout
//!
//! - `walk`: the traversal of all subschemas by keyword.
//! - `numbers`, `texts` (with `formats` and `patterns`), `arrays`, `objects`, `properties`: rewrites of one
//!   type's keywords.
//! - `logic`: rewrites of `oneOf`, `not`, `if`, with `cases`, `negation` and `disjoint`.
//! - `references`: targets of `$ref`. `ends`: whether values are finite. `values`: small queries on a schema.

mod arrays;
mod cases;
mod disjoint;
mod ends;
mod formats;
mod logic;
mod negation;
mod numbers;
mod objects;
mod patterns;
mod properties;
mod references;
#[cfg(test)]
mod tests;
mod texts;
mod values;
mod walk;

use serde_json::{Map, Value, json};

use self::references::Document;
use super::GrammarError;

/// White space between two JSON tokens: enough for indentation, but bounded.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Keyword for the library's own options, which could void the guarantees for every schema.
pub(super) const LIBRARY_OPTIONS: &str = "x-guidance";

/// Maximum number of schemas that the rewrites of one schema may produce.
const MAX_NODES: usize = 20_000;

/// Treatment of a keyword that cannot be enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enforcement {
    /// The schema is refused with the keyword's name.
    #[default]
    Strict,
    /// The keyword is dropped with a [`Warning`].
    BestEffort,
}

/// A keyword that an answer need not conform to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// JSON pointer to the keyword's schema (`/properties/name`); empty at the root.
    pub path: String,
    /// Name of the dropped keyword.
    pub keyword: String,
    /// Reason, and what to write instead.
    pub message: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, keyword, message } = self;
        let place = if path.is_empty() { "the root of the schema" } else { path };
        write!(f, "'{keyword}' at {place} is not supported: {message}")
    }
}

/// Returns a schema as part of a Lark rule, with the keywords that are not enforced.
///
/// # Errors
/// The errors of [`prepared`].
pub fn lark_json(schema: &Value, enforcement: Enforcement) -> Result<(String, Vec<Warning>), GrammarError> {
    let (schema, warnings) = prepared(schema, enforcement)?;
    Ok((format!("%json {schema}"), warnings))
}

/// Rewrites `schema` to keywords that the library supports, with bounded white space.
///
/// # Errors
/// If the schema sets the library's own options, allows no finite value, or holds a keyword that
/// `enforcement` refuses.
pub(super) fn prepared(
    schema: &Value,
    enforcement: Enforcement,
) -> Result<(Value, Vec<Warning>), GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    let Value::Object(map) = &mut schema else { return Ok((schema, Vec::new())) };
    if map.contains_key(LIBRARY_OPTIONS) {
        return Err(GrammarError::LibraryOptions);
    }
    // The library takes keywords of later drafts for annotations if an earlier draft is named.
    map.remove("$schema");
    references::hoist(&mut schema);
    let mut preparation = Preparation::new(&schema, enforcement);
    preparation.schema(&mut schema)?;
    ends::prune(&mut schema)?;
    if let Value::Object(map) = &mut schema {
        map.insert(LIBRARY_OPTIONS.to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    Ok((schema, preparation.warnings))
}

struct Preparation {
    enforcement: Enforcement,
    warnings: Vec<Warning>,
    /// Names and indices from the root to the current schema.
    path: Vec<String>,
    /// The schema as received, to resolve references.
    document: Document,
    nodes: usize,
    steps: numbers::Steps,
}

impl Preparation {
    fn new(root: &Value, enforcement: Enforcement) -> Self {
        Self {
            enforcement,
            warnings: Vec::new(),
            path: Vec::new(),
            document: Document::new(root),
            nodes: 0,
            steps: numbers::Steps::of(root),
        }
    }

    /// Refuses `keyword` of the current schema, or records a warning.
    fn cannot_hold(&mut self, keyword: &str, message: impl Into<String>) -> Result<(), GrammarError> {
        let escaped = self.path.iter().map(|part| part.replace('~', "~0").replace('/', "~1"));
        let path = escaped.map(|part| format!("/{part}")).collect();
        let warning = Warning { path, keyword: keyword.to_owned(), message: message.into() };
        match self.enforcement {
            Enforcement::Strict => Err(GrammarError::Keyword(warning)),
            Enforcement::BestEffort => {
                self.warnings.push(warning);
                Ok(())
            }
        }
    }

    /// Removes `keyword` from `map`, with an error or a warning.
    fn drop_keyword(
        &mut self,
        map: &mut Map<String, Value>,
        keyword: &str,
        message: impl Into<String>,
    ) -> Result<(), GrammarError> {
        map.remove(keyword);
        self.cannot_hold(keyword, message)
    }
}

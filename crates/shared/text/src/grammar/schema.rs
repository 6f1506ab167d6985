//! What becomes of a JSON schema before the library sees it: rewritten to keywords that the library holds.
//!
//! The library (`llguidance`) knows about half of JSON Schema's keywords and refuses the others. A rewrite here allows the
//! same values as the schema did, or fewer where a value would have no end; never more without a [`Warning`].
//!
//! # Layout
//!
//! - `walk`: which keyword holds schemas, and the way through all of them.
//! - `numbers`, `texts` (with `formats` and `patterns`), `arrays`, `objects`, `properties`: keywords of one type each.
//! - `logic`: `oneOf`, `not`, `if`, with `cases`, `negation` and `disjoint`.
//! - `references`: where a `$ref` leads. `ends`: whether any value is finite. `values`: small questions about a schema.

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

/// White space between two parts of a JSON text: enough to indent it, and an end to it.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// What a schema may say to the library and not to us: it would take back what is promised of every schema.
pub(super) const LIBRARY_OPTIONS: &str = "x-guidance";

/// Most schemas within one that a rewrite may lead to.
const MAX_NODES: usize = 20_000;

/// What happens to a keyword that cannot be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enforcement {
    /// The schema is refused, by the keyword's name.
    #[default]
    Strict,
    /// The keyword is dropped, with a [`Warning`].
    BestEffort,
}

/// A keyword that an answer need not keep to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where the keyword stands, as a JSON pointer (`/properties/name`); empty at the root.
    pub path: String,
    /// The keyword.
    pub keyword: String,
    /// Why, and what to write instead.
    pub message: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, keyword, message } = self;
        let place = if path.is_empty() { "the root of the schema" } else { path };
        write!(f, "'{keyword}' at {place} cannot be held: {message}")
    }
}

/// A schema as a rule's part of Lark, and what an answer need not keep to.
///
/// # Errors
/// See [`prepared`].
pub fn lark_json(schema: &Value, enforcement: Enforcement) -> Result<(String, Vec<Warning>), GrammarError> {
    let (schema, warnings) = prepared(schema, enforcement)?;
    Ok((format!("%json {schema}"), warnings))
}

/// `schema` in keywords that the library holds, with an end to white space.
///
/// # Errors
/// The schema sets the library's own options, allows no finite value, or holds what is refused under `enforcement`.
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
    // The library takes keywords of later drafts for annotations where an earlier draft is named.
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

/// The way of one schema through all rewrites.
struct Preparation {
    enforcement: Enforcement,
    warnings: Vec<Warning>,
    /// Names and indices from the root to the schema at hand.
    path: Vec<String>,
    /// The schema as it was sent, for references.
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

    /// Refuses `keyword` of the schema at hand, or notes that it is dropped.
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

    /// Takes `keyword` out of `map`, refused or noted.
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

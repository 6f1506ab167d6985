//! Grammars that constrain an answer, as the set of tokens that may come next (`llguidance`).
//!
//! A [`Grammar`] is the constraint of a request. [`Grammar::source`] is its single wire form.
//! [`Grammars::compile`] turns that into a [`Matcher`], which accepts the tokens of one answer and returns
//! the allowed next tokens. The allowed tokens depend only on the grammar and on the bytes of the tokens so
//! far. No token is ever forced or tokenized again, so a resumed answer continues as it would have.
//!
//! # Layout
//!
//! - `gbnf`: conversion of llama.cpp's grammar format. `lark`: schemas within a Lark grammar. `schema`:
//!   rewrites of a JSON schema for the library.
//! - `reasoning`: reasoning content before an answer. `harmony`: the same in the messages of gpt-oss. `tag`:
//!   what delimits it. `matcher`: state of one answer. `digits`: bounds on the length of numbers.
//! - `tokens`: the vocabulary in the library's form.
//!
//! # Principles
//!
//! - Grammars are untrusted: the source, its compiled form and each step are bounded, and exceeding a bound
//!   is an error.
//! - An unsupported keyword is refused by name, or dropped with a [`Warning`] if the caller asked for that,
//!   never silently.

mod digits;
mod gbnf;
mod harmony;
mod lark;
mod matcher;
mod reasoning;
mod schema;
mod tag;
mod tokens;

use std::sync::Arc;

use llguidance::{
    ParserFactory,
    api::{GrammarWithLexer, ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use serde_json::{Value, json};

use self::{
    digits::{NumberLength, TokensByFirstByte},
    matcher::SpecialTokenMode,
};
pub use self::{
    gbnf::GbnfError,
    harmony::HarmonyTags,
    lark::lark_source,
    matcher::{MatchError, Matcher, TokenSet},
    reasoning::ReasoningPrefix,
    schema::{Enforcement, Warning, lark_json},
    tag::Tag,
    tokens::{TokenBytes, Tokens},
};
use crate::tokenizer::Tokenizer;

/// Maximum length of a grammar's source in bytes.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// Maximum bracket depth of an expression or Lark grammar, and maximum lines of the latter, since each is a
/// level of the compiler's recursion.
pub const MAX_DEPTH: usize = 64;
/// Maximum number of rules of a Lark grammar.
pub const MAX_RULES: usize = 1024;

/// Stack size of the compiling thread, with a reserve beyond the deepest accepted grammar.
pub(crate) const COMPILER_STACK_BYTES: usize = 64 << 20;

/// Generous estimate of a compiled grammar's memory without its lexer, in bytes per source byte: symbols,
/// rules and names.
const BYTES_PER_SOURCE_BYTE: usize = 32;

/// Constraint on the text of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON text that conforms to a schema.
    Json(Value),
    /// A text that a regular expression matches as a whole (syntax of the crate `regex`).
    Regex(String),
    /// A text of a grammar in the library's variant of Lark, with start rule `start`.
    Lark(String),
    /// A text of such a Lark grammar whose schemas [`lark_json`] made.
    Rules(String),
    /// A text of a grammar in the Backus-Naur form of llama.cpp, with start rule `root`.
    Gbnf(String),
    /// One of the listed texts.
    Choice(Vec<String>),
}

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The source exceeds [`MAX_SOURCE_BYTES`].
    #[error("it has {bytes} bytes, and the limit is {MAX_SOURCE_BYTES}; make it smaller")]
    TooLong {
        /// Length of the source in bytes.
        bytes: usize,
    },
    /// Brackets are nested deeper than [`MAX_DEPTH`].
    #[error("its brackets are nested more than {MAX_DEPTH} levels deep; make it flatter")]
    TooDeep,
    /// The grammar has more than [`MAX_RULES`] rules.
    #[error("it has more than {MAX_RULES} lines; join lines or make it smaller")]
    TooManyRules,
    /// The compiling thread did not start or ended by a fault.
    #[error("it could not be compiled: {0}; send the request again")]
    Compiler(String),
    /// The grammar is not valid in Backus-Naur form.
    #[error(transparent)]
    Gbnf(#[from] GbnfError),
    /// The list of choices is empty.
    #[error("it has no choices; give at least one")]
    NoChoice,
    /// A schema or grammar sets the library's own options.
    #[error("'{}' and options of '%llguidance' are not supported; leave them out", schema::LIBRARY_OPTIONS)]
    LibraryOptions,
    /// A schema in Lark is not valid JSON.
    #[error("the text after '%json' is not JSON: {0}; write a schema in braces")]
    NoSchema(String),
    /// A keyword of a schema cannot be enforced.
    #[error("{0}")]
    Keyword(Warning),
    /// The `multipleOf` of a schema is not positive.
    #[error("'multipleOf' must be above 0; correct or remove it")]
    NoStep,
    /// A schema expands to too many schemas.
    #[error("it nests too many schemas; make it smaller")]
    TooManySchemas,
    /// A recursive schema has no finite value.
    #[error("it allows no finite value; make a property optional, or add a choice without a reference")]
    Endless,
    /// The library refuses the grammar, with its message.
    #[error("it is not supported: {0}")]
    Refused(String),
    /// The vocabulary has no token that ends an answer.
    #[error("the model has no end token, so no answer could end where the grammar ends")]
    NoEnd,
    /// The library cannot use the vocabulary.
    #[error("the model's vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
}

impl Grammar {
    /// Allows any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Self::Json(json!({ "type": "object" }))
    }

    /// Returns the form that requests carry and that [`Grammars::compile`] takes.
    ///
    /// # Errors
    /// If the grammar is too long, empty, or holds an unsupported part.
    pub fn source(&self) -> Result<String, GrammarError> {
        self.source_behind(None, Enforcement::Strict).map(|source| source.text)
    }

    /// Returns the source with reasoning content `thought` before the answer, if any; `enforcement` says
    /// how unsupported keywords of a schema are treated.
    ///
    /// # Errors
    /// The errors of [`Self::source`].
    pub fn source_behind(
        &self,
        thought: Option<ReasoningPrefix>,
        enforcement: Enforcement,
    ) -> Result<Source, GrammarError> {
        let (form, warnings) = self.form(enforcement)?;
        let mut grammars = vec![form];
        if let Some(thought) = thought {
            grammars[0].name = Some(ReasoningPrefix::ANSWER.to_owned());
            grammars.insert(0, GrammarWithLexer::from_lark(thought.lark()));
        }
        let text = json!(TopLevelGrammar { grammars, max_tokens: None }).to_string();
        checked(&text).map(|()| Source { text, warnings })
    }

    /// Converts the grammar to the library's type.
    fn form(&self, enforcement: Enforcement) -> Result<(GrammarWithLexer, Vec<Warning>), GrammarError> {
        let form = match self {
            Self::Json(schema) => {
                let (schema, warnings) = schema::prepared(schema, enforcement)?;
                return Ok((GrammarWithLexer::from_json_schema(schema), warnings));
            }
            Self::Regex(expression) => {
                check_depth(expression)?;
                GrammarWithLexer::from_regex(expression)
            }
            Self::Lark(source) => {
                check_depth(source)?;
                GrammarWithLexer::from_lark(lark_source(source)?)
            }
            Self::Rules(source) => GrammarWithLexer::from_lark(source.clone()),
            Self::Gbnf(source) => {
                check_depth(source)?;
                checked(source)?;
                GrammarWithLexer::from_lark(gbnf::lark(source)?)
            }
            Self::Choice(choices) if choices.is_empty() => return Err(GrammarError::NoChoice),
            Self::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|choice| lark_string(choice)).collect();
                GrammarWithLexer::from_lark(format!("start: {}", choices.join(" | ")))
            }
        };
        Ok((form, Vec::new()))
    }
}

/// A grammar in the form that requests carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Text that [`Grammars::compile`] takes.
    pub text: String,
    /// Keywords that an answer need not conform to.
    pub warnings: Vec<Warning>,
}

/// Quotes a text as a terminal of Lark.
#[must_use]
pub fn lark_string(text: &str) -> String {
    if text.is_empty() { "\"\"".to_owned() } else { Value::from(text).to_string() }
}

fn checked(source: &str) -> Result<(), GrammarError> {
    let bytes = source.len();
    if bytes > MAX_SOURCE_BYTES { Err(GrammarError::TooLong { bytes }) } else { Ok(()) }
}

/// Refuses too deeply nested brackets; brackets in quotes count as well.
fn check_depth(source: &str) -> Result<(), GrammarError> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in source.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > MAX_DEPTH { Err(GrammarError::TooDeep) } else { Ok(()) }
}

/// Bounds on the compiled grammar and on each of its steps. The library does not count all of its work;
/// uncounted work ends the process of [`sandbox`](crate::sandbox). A step that uses all of its fuel takes
/// about 20 ms.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000,
        max_lexer_states: 30_000,
        max_grammar_size: 100_000,
        max_items_in_row: 2_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Compiler of grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    end_tokens: Arc<[u32]>,
    beginnings: Arc<TokensByFirstByte>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("end_tokens", &self.end_tokens).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Prepares matchers for the vocabulary of `tokenizer`.
    ///
    /// # Errors
    /// If no token ends an answer, or the library cannot use the vocabulary.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        Self::over(&Tokens::of(tokenizer))
    }

    /// Prepares matchers for the vocabulary `tokens`.
    ///
    /// # Errors
    /// If no token ends an answer, or the library cannot use the vocabulary.
    pub fn over(tokens: &Tokens) -> Result<Self, GrammarError> {
        let environment = tokens.environment().ok_or(GrammarError::NoEnd)?;
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| GrammarError::Vocabulary(words_of(&error)))?;
        *factory.limits_mut() = limits();
        factory.quiet();
        let beginnings = Arc::new(TokensByFirstByte::of(environment.tok_trie()));
        Ok(Self { factory, end_tokens: tokens.end_tokens().into(), beginnings })
    }

    /// Creates a matcher at the beginning of an answer. A source that no
    /// [`Sandbox`](crate::sandbox::Sandbox) has judged may take minutes and gigabytes.
    ///
    /// # Errors
    /// If the library refuses the grammar, or compiling it exceeds the bounds.
    pub fn compile(&self, source: &str) -> Result<Matcher, GrammarError> {
        checked(source)?;
        let grammar: TopLevelGrammar =
            serde_json::from_str(source).map_err(|error| GrammarError::Refused(error.to_string()))?;
        for lark in grammar.grammars.iter().filter_map(|part| part.lark_grammar.as_deref()) {
            check_depth(lark)?;
            if lark.lines().count() > MAX_RULES {
                return Err(GrammarError::TooManyRules);
            }
        }
        let numbers = grammar.grammars.iter().any(may_have_json).then(NumberLength::default);
        let specials = if grammar.grammars.iter().any(may_name_tokens) {
            SpecialTokenMode::Named
        } else {
            SpecialTokenMode::None
        };
        let parser = self.on_a_deep_stack(|factory| factory.create_parser(grammar))?;
        let parser = parser.map_err(|error| GrammarError::Refused(words_of(&error)))?;
        let bytes = BYTES_PER_SOURCE_BYTE * source.len() + parser.parser.lexer_stats().num_bytes;
        let inner = llguidance::Matcher::new(Ok(parser));
        let (end_tokens, beginnings) = (Arc::clone(&self.end_tokens), Arc::clone(&self.beginnings));
        Ok(Matcher::new(inner, end_tokens, bytes, beginnings, (numbers, specials)))
    }

    /// Runs `work` on a thread with a large stack, because the library recurses into rules and expressions.
    fn on_a_deep_stack<T: Send>(
        &self,
        work: impl FnOnce(&ParserFactory) -> T + Send,
    ) -> Result<T, GrammarError> {
        let fault = |error: &dyn std::fmt::Display| GrammarError::Compiler(error.to_string());
        std::thread::scope(|scope| {
            let compiler = std::thread::Builder::new().name("compiler".to_owned());
            let compiler = compiler.stack_size(COMPILER_STACK_BYTES);
            let compiler =
                compiler.spawn_scoped(scope, || work(&self.factory)).map_err(|error| fault(&error))?;
            compiler.join().map_err(|_| fault(&"a fault of this program"))
        })
    }
}

/// Whether `grammar` is or contains a JSON schema.
fn may_have_json(grammar: &GrammarWithLexer) -> bool {
    let lark = grammar.lark_grammar.as_deref();
    grammar.json_schema.is_some() || lark.is_some_and(|lark| lark.contains(lark::JSON))
}

/// Whether `grammar` may name special tokens, between `<` and `>`.
fn may_name_tokens(grammar: &GrammarWithLexer) -> bool {
    grammar.lark_grammar.as_deref().is_some_and(|lark| lark.contains('<'))
}

/// Advice of the library to its callers, and the replacement for users of this server.
const ADVICE: [(&str, &str); 2] = [
    (
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "Use anyOf, or give each choice a property with its own const",
    ),
    (" without 'referencing' feature", ""),
];

/// Returns the library's message in one line, without the source location.
fn words_of(error: &impl std::fmt::Display) -> String {
    let words = error.to_string();
    let words = words.split("<backtrace>").next().unwrap_or_default();
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    ADVICE.iter().fold(words, |words, (advice, instead)| words.replace(advice, instead))
}

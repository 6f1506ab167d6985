//! What an answer has to look like, as the set of tokens that may come next (`llguidance`).
//!
//! Three things, one after the other: a [`Grammar`] is what somebody asks for; [`Grammar::source`] is the one form in which it
//! travels; [`Grammars::compile`] makes a [`Matcher`] of that, which is told the tokens of one answer and says what may follow.
//! What may follow depends on the grammar and on the bytes of the tokens so far alone: no token is ever forced or put
//! together otherwise, so an answer that is taken up again goes on as it would have.
//!
//! # Layout
//!
//! - `gbnf`: another way to write a grammar. `lark`: schemas within one in Lark. `schema`: what becomes of a schema before the
//!   library sees it.
//! - `reasoning`: what may stand before an answer. `matcher`: one answer on its way through a grammar. `digits`: an end to numbers.
//! - `tokens`: what the tokens of a vocabulary are to a grammar.
//!
//! # Principles
//!
//! - A grammar comes from anybody: its source, what is made of it, and each step have bounds, and beyond them is an error.
//! - What cannot be honoured is refused by name, or dropped with a [`Warning`] where the caller asked for that; never in silence.

mod digits;
mod gbnf;
mod lark;
mod matcher;
mod reasoning;
mod schema;
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
    digits::{Beginnings, Digits},
    matcher::Specials,
};
pub use self::{
    gbnf::GbnfError,
    lark::lark_source,
    matcher::{MatchError, Matcher, TokenSet},
    reasoning::{Tag, Thought},
    schema::{Enforcement, Warning, lark_json},
    tokens::{TokenBytes, Tokens},
};
use crate::tokenizer::Tokenizer;

/// Longest source of a grammar in bytes.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// Deepest brackets in one another of an expression or a grammar in Lark, and most lines of the latter: each is a depth of the compiler.
pub const MAX_DEPTH: usize = 64;
/// Most rules of a grammar in Lark.
pub const MAX_RULES: usize = 1024;

/// Stack of the thread that compiles: for the deepest that is taken, with room to spare.
pub(crate) const COMPILER_STACK_BYTES: usize = 64 << 20;

/// Memory of a compiled grammar beside its lexer, for each byte of its source: an estimate of symbols, rules and names that is large.
const BYTES_PER_SOURCE_BYTE: usize = 32;

/// What an answer has to look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON text that a schema allows.
    Json(Value),
    /// A text that an expression matches from beginning to end (syntax of the crate `regex`).
    Regex(String),
    /// A text of a grammar in the library's variant of Lark; its rule `start` is all of it.
    Lark(String),
    /// The same, with schemas that [`lark_json`] made.
    Rules(String),
    /// A text of a grammar in the Backus-Naur form of llama.cpp; its rule `root` is all of it.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// Its source is too long.
    #[error("it has {bytes} bytes, but at most {MAX_SOURCE_BYTES} are taken; make it smaller")]
    TooLong {
        /// As it is.
        bytes: usize,
    },
    /// Its brackets are too deep in one another.
    #[error("its brackets are more than {MAX_DEPTH} deep in one another; make it flatter")]
    TooDeep,
    /// It has too many rules.
    #[error("it has more than {MAX_RULES} lines, of which each may be a rule; join them or make it smaller")]
    TooManyRules,
    /// There is no thread to compile it on, or it has ended by a fault.
    #[error("it could not be compiled: {0}; send the request again")]
    Compiler(String),
    /// It is no grammar in Backus-Naur form.
    #[error(transparent)]
    Gbnf(#[from] GbnfError),
    /// It has nothing to choose from.
    #[error("it has no choices; give at least one")]
    NoChoice,
    /// A schema or a grammar that sets the library's own options.
    #[error("'{}' and options of '%llguidance' are not supported; leave them out", schema::LIBRARY_OPTIONS)]
    LibraryOptions,
    /// A schema in Lark that is no JSON.
    #[error("what stands behind '%json' is no JSON: {0}; write a schema in braces")]
    NoSchema(String),
    /// A keyword of a schema that cannot be held.
    #[error("{0}")]
    Keyword(Warning),
    /// Numbers with a step of nothing.
    #[error("'multipleOf' has to be above 0; leave it out or say a step")]
    NoStep,
    /// A schema that becomes too large.
    #[error("it leads to too many schemas within one another; make it smaller")]
    TooManySchemas,
    /// A schema whose values hold others like them again and again.
    #[error(
        "it allows no value that has an end; let a property be left out, or add a choice that refers to nothing"
    )]
    Endless,
    /// The library cannot honour it, and says what of it.
    #[error("it cannot be honoured: {0}")]
    Refused(String),
    /// The vocabulary has no token that ends an answer.
    #[error("the model has no token that ends an answer, so no answer could end where the grammar does")]
    NoEnd,
    /// The vocabulary is none that the library can use.
    #[error("the model's vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
}

impl Grammar {
    /// Any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Self::Json(json!({ "type": "object" }))
    }

    /// The form in which it travels, and that [`Grammars::compile`] takes.
    ///
    /// # Errors
    /// It is too long, asks for nothing, or holds what cannot be held.
    pub fn source(&self) -> Result<String, GrammarError> {
        self.source_behind(None, Enforcement::Strict).map(|source| source.text)
    }

    /// The same with `thought` before the answer, if there may be one; `enforcement` says what becomes of a schema's keywords that
    /// cannot be held.
    ///
    /// # Errors
    /// As [`Self::source`].
    pub fn source_behind(
        &self,
        thought: Option<Thought>,
        enforcement: Enforcement,
    ) -> Result<Source, GrammarError> {
        let (form, warnings) = self.form(enforcement)?;
        let mut grammars = vec![form];
        if let Some(thought) = thought {
            grammars[0].name = Some(Thought::ANSWER.to_owned());
            grammars.insert(0, GrammarWithLexer::from_lark(thought.lark()));
        }
        let text = json!(TopLevelGrammar { grammars, max_tokens: None }).to_string();
        checked(&text).map(|()| Source { text, warnings })
    }

    /// As the library has it.
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

/// A grammar as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// What [`Grammars::compile`] takes.
    pub text: String,
    /// What of it an answer need not keep to.
    pub warnings: Vec<Warning>,
}

/// A text as a terminal of Lark.
#[must_use]
pub fn lark_string(text: &str) -> String {
    if text.is_empty() { "\"\"".to_owned() } else { Value::from(text).to_string() }
}

fn checked(source: &str) -> Result<(), GrammarError> {
    let bytes = source.len();
    if bytes > MAX_SOURCE_BYTES { Err(GrammarError::TooLong { bytes }) } else { Ok(()) }
}

/// Refuses brackets that are too deep in one another, wherever they stand: what is quoted counts as well.
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

/// Bounds on what a grammar may become, and on each of its steps. The library does not count all of its work against them: what it
/// does not count ends the process of [`sandbox`](crate::sandbox). A step that takes all of its fuel computes for about 20 ms.
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

/// Makes matchers for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    end_tokens: Arc<[u32]>,
    beginnings: Arc<Beginnings>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("end_tokens", &self.end_tokens).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For the vocabulary of `tokenizer`.
    ///
    /// # Errors
    /// No answer in it could end, or the library cannot use it.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        Self::over(&Tokens::of(tokenizer))
    }

    /// For these tokens.
    ///
    /// # Errors
    /// No answer in them could end, or the library cannot use them.
    pub fn over(tokens: &Tokens) -> Result<Self, GrammarError> {
        let environment = tokens.environment().ok_or(GrammarError::NoEnd)?;
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| GrammarError::Vocabulary(words_of(&error)))?;
        *factory.limits_mut() = limits();
        factory.quiet();
        let beginnings = Arc::new(Beginnings::of(environment.tok_trie()));
        Ok(Self { factory, end_tokens: tokens.end_tokens().into(), beginnings })
    }

    /// A matcher at the beginning of an answer. A source that no [`Sandbox`](crate::sandbox::Sandbox) has judged may take minutes
    /// and gigabytes.
    ///
    /// # Errors
    /// The grammar cannot be honoured, or not within the bounds.
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
        let numbers = grammar.grammars.iter().any(may_have_json).then(Digits::default);
        let specials =
            if grammar.grammars.iter().any(may_name_tokens) { Specials::Named } else { Specials::None };
        let parser = self.on_a_deep_stack(|factory| factory.create_parser(grammar))?;
        let parser = parser.map_err(|error| GrammarError::Refused(words_of(&error)))?;
        let bytes = BYTES_PER_SOURCE_BYTE * source.len() + parser.parser.lexer_stats().num_bytes;
        let inner = llguidance::Matcher::new(Ok(parser));
        let (end_tokens, beginnings) = (Arc::clone(&self.end_tokens), Arc::clone(&self.beginnings));
        Ok(Matcher::new(inner, end_tokens, bytes, beginnings, (numbers, specials)))
    }

    /// What comes of `work` on a thread of its own: the library goes down into rules and expressions call by call.
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

/// Whether `grammar` is a schema or holds one.
fn may_have_json(grammar: &GrammarWithLexer) -> bool {
    let lark = grammar.lark_grammar.as_deref();
    grammar.json_schema.is_some() || lark.is_some_and(|lark| lark.contains(lark::JSON))
}

/// Whether `grammar` is one that may name special tokens: between `<` and `>`.
fn may_name_tokens(grammar: &GrammarWithLexer) -> bool {
    grammar.lark_grammar.as_deref().is_some_and(|lark| lark.contains('<'))
}

/// What the library advises whoever links it, and what a caller can do instead.
const ADVICE: [(&str, &str); 2] = [
    (
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "Say anyOf, or give each choice a property with a const of its own",
    ),
    (" without 'referencing' feature", ""),
];

/// What the library says, in one line and without where it was.
fn words_of(error: &impl std::fmt::Display) -> String {
    let words = error.to_string();
    let words = words.split("<backtrace>").next().unwrap_or_default();
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    ADVICE.iter().fold(words, |words, (advice, instead)| words.replace(advice, instead))
}

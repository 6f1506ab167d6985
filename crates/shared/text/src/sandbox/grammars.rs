//! Compiles grammars, to find out whether they can be compiled within the limits.

use std::{path::PathBuf, sync::Arc};

use super::{
    SandboxError,
    helper::{Helper, HelperError},
    work::Work,
};
use crate::grammar::{GrammarError, Grammars, Tokens};

/// Judges grammars in one process.
#[derive(Debug)]
pub struct GrammarSandbox(Helper<Compile>);

impl GrammarSandbox {
    /// Creates a sandbox for `tokens`. `program` becomes the helper process by its first argument.
    #[must_use]
    pub fn new(program: PathBuf, tokens: Arc<Tokens>) -> Self {
        Self(Helper::new(program, tokens))
    }

    /// Checks that `source` can be compiled within the limits. Blocks until the process has answered.
    ///
    /// # Errors
    /// If the grammar is refused, exceeds the limits, or no helper process is available.
    pub fn judge(&mut self, source: &str) -> Result<(), SandboxError> {
        match self.0.ask(&source) {
            Ok(verdict) => verdict.map_err(SandboxError::Refused),
            Err(HelperError::TooMuch) => Err(SandboxError::TooMuch),
            Err(HelperError::Failed) => {
                Err(SandboxError::Refused("the compiler failed on it; simplify the grammar".to_owned()))
            }
            Err(HelperError::Unavailable(why)) => Err(SandboxError::Unavailable(why)),
        }
    }
}

/// Compilation of grammars over one vocabulary; an answer is the reason for a refusal.
#[derive(Debug)]
pub(super) struct Compile(Result<Grammars, GrammarError>);

impl Work for Compile {
    const ARGUMENT: &'static str = "grammar-compiler";
    const NAME: &'static std::ffi::CStr = c"grammars";
    const NICENESS: i32 = 19;

    type Setup = Tokens;
    type Question = String;
    type Answer = Result<(), String>;

    fn new(tokens: &Tokens) -> Self {
        Self(Grammars::over(tokens))
    }

    fn answer(&self, source: String) -> Result<(), String> {
        let grammars = self.0.as_ref().map_err(ToString::to_string)?;
        grammars.compile(&source).map(|_| ()).map_err(|error| error.to_string())
    }
}

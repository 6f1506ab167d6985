//! Does work whose cost a tenant chooses in a process with limits on memory and CPU time.
//!
//! ```text
//!   gateway, base-executor                        the same program with another first argument
//!   GrammarSandbox::judge  -- vocabulary, once -->   Grammars::over
//!                          -- source ------------>   Grammars::compile
//!                          <- verdict ------------   dropped
//!   TemplateSandbox        -- template, messages ->  ChatTemplate::new, render
//!                          <- text ---------------
//! ```
//!
//! The libraries bound most costs of a grammar and of a template, but not all: `multipleOf` alone can take
//! minutes and gigabytes, and a template doubles a string in one step. Work beyond a limit ends the process,
//! and the next question starts another. A serving process compiles only grammars that this process has
//! compiled before; compilation is deterministic, so the second one costs as much as the first.
//!
//! # Layout
//!
//! - `work`: what a process does, as a trait. `grammars`, `templates`: the two kinds.
//! - `helper`: the parent's side. `child`: the process. `frame`: the messages on the pipes.

mod child;
mod frame;
mod grammars;
mod helper;
mod templates;
mod work;

pub use self::{
    child::{ChildError, serve},
    frame::FrameError,
    grammars::GrammarSandbox,
    templates::{SandboxedTemplate, TemplateSandbox},
};

/// Path of the running program, valid even if its file was replaced since.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// CPU time limit of one answer, in milliseconds.
pub const CPU_MS: u64 = 500;

/// Memory limit of a process in bytes, in addition to the vocabulary of grammars.
pub const MEMORY_BYTES: u64 = 256 << 20;

/// Maximum number of processes of one kind per gateway or executor: two, so that one tenant's slow work
/// leaves one for other tenants.
pub const PROCESSES: usize = 2;

/// Why a grammar is not compiled outside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The grammar is invalid or unsupported.
    #[error("{0}")]
    Refused(String),
    /// The compilation exceeded a limit and was ended.
    #[error(
        "its compilation needs more than {CPU_MS} ms or {} MiB of memory; make it smaller, with shorter \
         repetitions and smaller multiples",
        MEMORY_BYTES >> 20
    )]
    TooMuch,
    /// No compiler process could give a verdict.
    #[error("it could not be compiled: {0}; send the request again")]
    Unavailable(String),
}

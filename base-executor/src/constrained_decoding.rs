//! Structured output: compiles grammars and computes token masks, beside the forward pass.
//!
//! ```text
//!   compute    | pass over a step's rows      | draw | pass ...
//!   masks      | mask, mask ...               |      | mask ...
//!   compiling  | compile .........................................
//! ```
//!
//! A [`GrammarState`] is one sequence's position in its grammar. While a pass computes the logits, a thread
//! takes in the tokens drawn last and computes which may follow, also after each draft token. The compute
//! thread waits at most [`LOOK_BUDGET`] for the masks when the logits are ready. A sequence whose mask is
//! late skips that step, and its token is computed again later.
//!
//! Compilers are separate threads at the lowest priority, so masks never wait for them. Both queues serve
//! tenants in turn. An unknown grammar is first compiled in a limited process ([`text::sandbox`]), because
//! gateways are not trusted here.
//!
//! A matcher knows only the tokens of its own answer. The result does not depend on other sequences, on
//! drafting, on the time of a mask, or on where an answer was resumed.
//!
//! # Layout
//!
//! - `grammar_state`: the engine's side. `compile_workers`, `mask_workers`: threads of [`GrammarWorkers`].

mod compile_workers;
mod grammar_state;
mod mask_workers;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use model_files::{gguf::GgufFile, model_files::ModelFiles};
use text::{
    grammar::{MatchError, Tokens},
    sandbox::PROCESSES,
    tenant_queue::TenantQueue,
    tokenizer::Tokenizer,
};
use types::TenantId;

use self::{
    compile_workers::{Compile, Compilers},
    mask_workers::GrammarWork,
};
pub(crate) use self::{grammar_state::GrammarState, mask_workers::AllowedTokens};

/// Wakes the engine for its next step.
type EngineWaker = Arc<dyn Fn() + Send + Sync>;

/// Maximum wait of the compute thread for all masks of a step, once the logits are ready.
pub(crate) const LOOK_BUDGET: Duration = Duration::from_millis(5);

/// Bounds of the number of mask threads. Sixteen sequences keep one thread busy for about a millisecond per
/// step. At least two are needed, because one tenant never occupies all of them.
const MIN_LOOKERS: usize = 2;
const MAX_LOOKERS: usize = 4;

/// Number of cores per mask thread.
const CORES_PER_LOOKER: usize = 8;

/// The engine bounds its requests, so neither queue needs a limit.
const NO_LIMIT: usize = usize::MAX;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GrammarStateError {
    /// The grammar is invalid; gateways normally detect that first.
    #[error("cannot use the grammar: {0}")]
    Grammar(String),
    /// The matcher cannot continue.
    #[error(transparent)]
    Match(#[from] MatchError),
    /// A thread has panicked.
    #[error("the executor failed to compute the allowed next tokens; see its log")]
    Fault,
}

/// Reads the vocabulary when the first grammar arrives.
pub type Vocabulary = Box<dyn Fn() -> anyhow::Result<Tokens> + Send + Sync>;

/// The engine's handle of the threads.
pub struct GrammarWorkers {
    work: Arc<TenantQueue<GrammarWork>>,
    compiling: Arc<TenantQueue<Compile>>,
    budget: Duration,
}

impl fmt::Debug for GrammarWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helpers").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl GrammarWorkers {
    /// Starts the threads for the vocabulary of the model at `path`; `program` is the compiling process. A
    /// thread calls `waker` whenever a waiting sequence can continue.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn of_model(
        path: PathBuf,
        program: PathBuf,
        waker: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        Self::over(Box::new(move || read(&path)), program, LOOK_BUDGET, waker)
    }

    /// Starts the threads for the vocabulary that `read` returns, with `budget` in place of [`LOOK_BUDGET`].
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn over(
        read: Vocabulary,
        program: PathBuf,
        budget: Duration,
        waker: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let lookers = (cores / CORES_PER_LOOKER).clamp(MIN_LOOKERS, MAX_LOOKERS);
        let waker: EngineWaker = Arc::new(waker);
        let work = Arc::new(TenantQueue::new(NO_LIMIT, lookers));
        let compiling = Arc::new(TenantQueue::new(NO_LIMIT, PROCESSES));
        // Dropping `helpers` ends the started threads if a later one fails to start.
        let helpers = Self { work: Arc::clone(&work), compiling: Arc::clone(&compiling), budget };
        let compilers = Arc::new(Compilers::new(read, program));
        for _ in 0..lookers {
            let (work, compiling) = (Arc::clone(&work), Arc::clone(&compiling));
            let (compilers, waker) = (Arc::clone(&compilers), Arc::clone(&waker));
            // The thread is not joined, because it ends when its queue is closed.
            crate::spawn("grammars", move || mask_workers::serve(&work, &compiling, &compilers, &waker))?;
        }
        for _ in 0..PROCESSES {
            let (queue, compilers, waker) =
                (Arc::clone(&compiling), Arc::clone(&compilers), Arc::clone(&waker));
            crate::spawn("compiler", move || compilers.serve(&queue, &waker))?;
        }
        Ok(helpers)
    }

    /// Returns the state of grammar `source` for a sequence whose answer begins after `begin` tokens.
    pub(crate) fn guide(&self, tenant: TenantId, source: String, begin: usize) -> GrammarState {
        GrammarState::new(Arc::clone(&self.work), tenant, source, begin)
    }

    pub(crate) fn budget(&self) -> Duration {
        self.budget
    }
}

impl Drop for GrammarWorkers {
    fn drop(&mut self) {
        self.work.close();
        self.compiling.close();
    }
}

fn read(path: &Path) -> anyhow::Result<Tokens> {
    let tokenizer = match ModelFiles::text_at(path)? {
        ModelFiles::Gguf(path) => Tokenizer::from_gguf(&GgufFile::open(&path)?)?,
        ModelFiles::Directory(path) => Tokenizer::from_directory(&path)?,
    };
    Ok(Tokens::of(&tokenizer))
}

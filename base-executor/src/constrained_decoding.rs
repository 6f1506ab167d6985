//! What answers have to look like: grammars are compiled, and what may come next is found out, beside the pass.
//!
//! ```text
//!   compute    | pass over a step's rows      | draw | pass ...
//!   looking    | allowed, allowed ...         |      | allowed ...
//!   compiling  | compile .........................................
//! ```
//!
//! A [`GrammarState`] is one sequence's way through its grammar. While a pass computes the sequence's logits a thread takes in the tokens
//! that were drawn last and finds out which may come next, and behind each drafted token, which may come there. The compute thread
//! asks for that when the logits are there and waits for [`LOOK_BUDGET`] at most: a sequence whose answer is later sits that step
//! out alone, and its token is computed again in a later one.
//!
//! Compiling has threads of its own at the lowest priority, so that no look waits behind a compilation. Either queue takes tenants
//! in turn. A grammar that is not known yet is first compiled in a process with limits ([`text::sandbox`]): what comes from a
//! gateway is judged here like what comes from anybody.
//!
//! Nothing of it depends on who else is there, on how tokens were drafted, on when an answer is found, or on where an answer was
//! taken up again: a matcher knows the tokens of its own answer, from the first on, and nothing else.
//!
//! # Layout
//!
//! - `grammar_state`: the side of a sequence. `compile_workers`, `mask_workers`: the threads. [`GrammarWorkers`], here: all of them.

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

/// Wakes the engine, so that it makes its next step.
type EngineWaker = Arc<dyn Fn() + Send + Sync>;

/// How long the compute thread waits for all looks of a step together, once the logits are there.
pub const LOOK_BUDGET: Duration = Duration::from_millis(5);

/// Threads that look: each has one answer at a time, and sixteen of them keep one busy for about a millisecond in a step. There are two
/// at least, because one tenant never occupies all of them.
const MIN_LOOKERS: usize = 2;
const MAX_LOOKERS: usize = 4;

/// Cores for each thread that looks.
const CORES_PER_LOOKER: usize = 8;

/// The engine holds no more requests than it has room for, so neither queue needs a limit of its own.
const NO_LIMIT: usize = usize::MAX;

/// Why a sequence has no guide, or none any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarStateError {
    /// What comes from a gateway cannot be honoured; gateways find that out before.
    #[error("the grammar cannot be used: {0}")]
    Grammar(String),
    /// The matcher cannot go on.
    #[error(transparent)]
    Match(#[from] MatchError),
    /// A helper has failed.
    #[error("finding out what may come next has failed; the executor's log says more")]
    Fault,
}

/// Reads the vocabulary when the first grammar comes.
pub type Vocabulary = Box<dyn Fn() -> anyhow::Result<Tokens> + Send + Sync>;

/// The threads, from the side of the engine.
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
    /// Those for the vocabulary of the model at `path`, whose processes that compile are `program`. `bell` is called, on a helper's
    /// thread, whenever a sequence that waits can go on.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn of_model(
        path: PathBuf,
        program: PathBuf,
        bell: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        Self::over(Box::new(move || read(&path)), program, LOOK_BUDGET, bell)
    }

    /// Those for the vocabulary that `read` gives. The compute thread waits for the looks of a step for `budget`.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn over(
        read: Vocabulary,
        program: PathBuf,
        budget: Duration,
        bell: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let lookers = (cores / CORES_PER_LOOKER).clamp(MIN_LOOKERS, MAX_LOOKERS);
        let bell: EngineWaker = Arc::new(bell);
        let work = Arc::new(TenantQueue::new(NO_LIMIT, lookers));
        let compiling = Arc::new(TenantQueue::new(NO_LIMIT, PROCESSES));
        // What is started is told to end if not all of it can be.
        let helpers = Self { work: Arc::clone(&work), compiling: Arc::clone(&compiling), budget };
        let compilers = Arc::new(Compilers::new(read, program));
        for _ in 0..lookers {
            let (work, compiling) = (Arc::clone(&work), Arc::clone(&compiling));
            let (compilers, bell) = (Arc::clone(&compilers), Arc::clone(&bell));
            // Not joined at the end: the thread ends when its queue is closed.
            crate::spawn("grammars", move || mask_workers::serve(&work, &compiling, &compilers, &bell))?;
        }
        for _ in 0..PROCESSES {
            let (queue, compilers, bell) =
                (Arc::clone(&compiling), Arc::clone(&compilers), Arc::clone(&bell));
            crate::spawn("compiler", move || compilers.serve(&queue, &bell))?;
        }
        Ok(helpers)
    }

    /// A way through the grammar that `source` says, for a sequence of `tenant` whose answer begins behind its first `begin` tokens.
    pub(crate) fn guide(&self, tenant: TenantId, source: String, begin: usize) -> GrammarState {
        GrammarState::new(Arc::clone(&self.work), tenant, source, begin)
    }

    /// How long the compute thread waits for the looks of a step.
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

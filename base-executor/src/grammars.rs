//! What answers have to look like: grammars are compiled, and what may come next is found out, beside the pass.
//!
//! ```text
//!   compute   | pass over a step's rows        | draw | pass ...
//!   helpers   | compile | allowed, allowed ... |      | allowed ...
//! ```
//!
//! A [`Guide`] is one sequence's way through its grammar. While a pass computes the sequence's logits a helper takes in the
//! tokens that were drawn last and finds out which may come next, and behind each drafted token, which may come there. The compute
//! thread asks for that when the logits are there, and waits only for what is not found out by then.
//!
//! Nothing of it depends on who else is there, on how tokens were drafted, or on where an answer was taken up again: a
//! matcher knows the tokens of its own answer, from the first on, and nothing else.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread,
};

use anyhow::Context as _;
use files::{gguf::GgufFile, model_files::ModelFiles};
use speculation::tree::{NodeId, TokenTree};
use text::{
    grammar::{Grammars, MatchError, Matcher, TokenSet},
    tokenizer::Tokenizer,
};

/// Most helpers: each has one answer at a time, and sixteen of them keep one busy for about a millisecond in a step.
const MAX_HELPERS: usize = 4;

/// Cores for each helper.
const CORES_PER_HELPER: usize = 8;

/// Why a sequence has no guide, or none any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuideError {
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

/// What may come next, and behind each drafted token.
#[derive(Debug)]
pub(crate) struct Allowed {
    next: Result<TokenSet, MatchError>,
    /// By node; `None` behind a token that may not come itself.
    behind: Vec<Option<TokenSet>>,
}

impl Allowed {
    /// What may come behind `node` (`None`: behind the last token that was drawn).
    pub(crate) fn at(&self, node: Option<NodeId>) -> Result<&TokenSet, GuideError> {
        match node {
            None => self.next.as_ref().map_err(|error| GuideError::Match(error.clone())),
            Some(node) => self.behind.get(node.index()).and_then(Option::as_ref).ok_or(GuideError::Fault),
        }
    }
}

type Looked = Result<(Box<Matcher>, Allowed), GuideError>;

/// What a helper is asked.
enum Job {
    Compile { source: String, reply: Sender<Result<Box<Matcher>, GuideError>> },
    Look { matcher: Box<Matcher>, said: Vec<u32>, tree: TokenTree, reply: Sender<Looked> },
}

/// One sequence's way through its grammar.
pub(crate) struct Guide {
    state: State,
    /// So many tokens of the sequence its matcher knows of.
    known: usize,
    jobs: Sender<Job>,
}

enum State {
    Compiling(Receiver<Result<Box<Matcher>, GuideError>>),
    Idle(Box<Matcher>),
    Looking(Receiver<Looked>),
    Failed(GuideError),
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Guide {
    /// Its grammar is compiled, or cannot be.
    pub(crate) fn is_ready(&mut self) -> bool {
        if let State::Compiling(reply) = &self.state {
            match reply.try_recv() {
                Ok(compiled) => self.compiled(compiled),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => self.state = State::Failed(GuideError::Fault),
            }
        }
        true
    }

    fn compiled(&mut self, compiled: Result<Box<Matcher>, GuideError>) {
        self.state = compiled.map_or_else(State::Failed, State::Idle);
    }

    /// Has a helper find out what may come behind `tokens`, and behind each node of `tree`.
    pub(crate) fn look(&mut self, tokens: &[u32], tree: TokenTree) {
        if !self.is_ready() || !matches!(self.state, State::Idle(_)) {
            return;
        }
        let (reply, looked) = channel();
        let State::Idle(matcher) = std::mem::replace(&mut self.state, State::Looking(looked)) else { return };
        let said = tokens[self.known..].to_vec();
        self.known = tokens.len();
        if self.jobs.send(Job::Look { matcher, said, tree, reply }).is_err() {
            self.state = State::Failed(GuideError::Fault);
        }
    }

    /// What was found out since; waits for it.
    pub(crate) fn allowed(&mut self) -> Result<Allowed, GuideError> {
        let looked = match &self.state {
            State::Looking(looked) => looked.recv().unwrap_or(Err(GuideError::Fault)),
            State::Failed(error) => Err(error.clone()),
            State::Idle(_) | State::Compiling(_) => Err(GuideError::Fault),
        };
        let (state, allowed) = match looked {
            Ok((matcher, allowed)) => (State::Idle(matcher), Ok(allowed)),
            Err(error) => (State::Failed(error.clone()), Err(error)),
        };
        self.state = state;
        allowed
    }
}

/// Who knows the vocabulary: it is read when the first grammar comes.
type Vocabulary = Box<dyn Fn() -> anyhow::Result<Grammars> + Send + Sync>;

/// The helpers.
#[derive(Debug)]
pub struct Helpers {
    jobs: Sender<Job>,
}

impl Helpers {
    /// Those for the vocabulary of the model at `path`. `compiled` is called, on a helper's thread, whenever a grammar is.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn of_model(path: PathBuf, compiled: impl Fn() + Send + Clone + 'static) -> anyhow::Result<Self> {
        Self::over(Box::new(move || read(&path)), compiled)
    }

    /// Those for the vocabulary that `read` gives.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn over(read: Vocabulary, compiled: impl Fn() + Send + Clone + 'static) -> anyhow::Result<Self> {
        let (jobs, queue) = channel();
        let (queue, shared) =
            (Arc::new(Mutex::new(queue)), Arc::new(Shared { read, known: OnceLock::new() }));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..(cores / CORES_PER_HELPER).clamp(1, MAX_HELPERS) {
            let (queue, shared, compiled) = (Arc::clone(&queue), Arc::clone(&shared), compiled.clone());
            // Not joined at the end: it ends when nobody can ask it any more.
            crate::spawn("grammars", move || serve(&queue, &shared, &compiled))?;
        }
        Ok(Self { jobs })
    }

    /// A way through the grammar that `source` says, for a sequence whose answer begins behind its first `begin` tokens.
    pub(crate) fn guide(&self, source: String, begin: usize) -> Guide {
        let (reply, compiled) = channel();
        let state = match self.jobs.send(Job::Compile { source, reply }) {
            Ok(()) => State::Compiling(compiled),
            Err(_) => State::Failed(GuideError::Fault),
        };
        Guide { state, known: begin, jobs: self.jobs.clone() }
    }
}

fn read(path: &std::path::Path) -> anyhow::Result<Grammars> {
    let tokenizer = match ModelFiles::text_at(path)? {
        ModelFiles::Gguf(path) => Tokenizer::from_gguf(&GgufFile::open(&path)?)?,
        ModelFiles::Directory(path) => Tokenizer::from_directory(&path)?,
    };
    Grammars::of(&tokenizer).context("grammars cannot be used with this model")
}

/// What all helpers share.
struct Shared {
    read: Vocabulary,
    known: OnceLock<Result<Grammars, GuideError>>,
}

impl Shared {
    fn compile(&self, source: &str) -> Result<Box<Matcher>, GuideError> {
        let known = self.known.get_or_init(|| {
            (self.read)().map_err(|error| {
                tracing::error!(error = %format!("{error:#}"), "the vocabulary cannot be read for grammars");
                GuideError::Grammar(format!("{error:#}"))
            })
        });
        let grammars = known.as_ref().map_err(Clone::clone)?;
        let matcher = grammars.compile(source).map_err(|error| GuideError::Grammar(error.to_string()))?;
        Ok(Box::new(matcher))
    }
}

/// A helper's loop: ends when all who could ask are gone.
fn serve(queue: &Mutex<Receiver<Job>>, shared: &Shared, compiled: &impl Fn()) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        // Whoever asked may be gone, and a job that panics takes its matcher along: its sequence alone ends with an error.
        let _ = catch_unwind(AssertUnwindSafe(|| match job {
            Job::Compile { source, reply } => {
                let _ = reply.send(shared.compile(&source));
                compiled();
            }
            Job::Look { matcher, said, tree, reply } => {
                let _ = reply.send(look(matcher, &said, &tree));
            }
        }));
    }
}

fn look(mut matcher: Box<Matcher>, said: &[u32], tree: &TokenTree) -> Looked {
    said.iter().try_for_each(|&token| matcher.accept(token))?;
    let (next, mut behind) = (matcher.allowed(), vec![None; tree.len()]);
    if let Some(next) = next.as_ref().ok().filter(|_| !tree.is_empty()) {
        // Of a copy: a guess that the matcher cannot follow is no reason to end the answer.
        let _ = look_behind(&mut matcher.clone(), tree, None, next, &mut behind);
    }
    Ok((matcher, Allowed { next, behind }))
}

/// Finds out what may come behind those guesses behind `at` that may come themselves. The matcher stands at `at`, before and after.
fn look_behind(
    matcher: &mut Matcher,
    tree: &TokenTree,
    at: Option<NodeId>,
    next: &TokenSet,
    behind: &mut [Option<TokenSet>],
) -> Result<(), MatchError> {
    for node in tree.children(at) {
        let token = tree.token(node);
        if !next.contains(token) || matcher.ends_with(token) {
            continue;
        }
        matcher.accept(token)?;
        if let Ok(then) = matcher.allowed() {
            look_behind(matcher, tree, Some(node), &then, behind)?;
            behind[node.index()] = Some(then);
        }
        matcher.take_back(1)?;
    }
    Ok(())
}

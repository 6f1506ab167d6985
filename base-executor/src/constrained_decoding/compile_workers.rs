//! The threads that compile grammars: first in a limited process, then here for the matcher.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use anyhow::Context as _;
use text::{
    grammar::{Grammars, Matcher, Tokens},
    sandbox::{GrammarSandbox, SandboxError},
    tenant_cache::{CacheLimits, TenantCache},
    tenant_queue::TenantQueue,
};
use tokio::sync::oneshot;
use types::TenantId;

use super::{EngineWaker, GrammarStateError, Vocabulary};

/// Bytes of compiled grammars kept for later requests of the same tenant.
const KEPT: CacheLimits = CacheLimits { tenant_bytes: 64 << 20, total_bytes: 256 << 20 };

/// Added niceness of a compiling thread, since steps have precedence.
const NICENESS: i32 = 19;

pub(super) type Compiled = Result<Box<Matcher>, GrammarStateError>;

/// A request to compile a grammar.
#[derive(Debug)]
pub(super) struct Compile {
    pub(super) tenant: TenantId,
    pub(super) source: String,
    pub(super) reply: oneshot::Sender<Compiled>,
}

/// State that all compiling threads share.
pub(super) struct Compilers {
    read: Vocabulary,
    program: PathBuf,
    known: OnceLock<Result<CompilerVocabulary, GrammarStateError>>,
    kept: Mutex<TenantCache<Box<str>, Matcher>>,
}

struct CompilerVocabulary {
    tokens: Arc<Tokens>,
    grammars: Grammars,
}

impl Compilers {
    pub(super) fn new(read: Vocabulary, program: PathBuf) -> Self {
        Self { read, program, known: OnceLock::new(), kept: Mutex::new(TenantCache::new(KEPT)) }
    }

    /// Returns a copy of a matcher that `tenant` had compiled before, with its own memory.
    pub(super) fn kept(&self, tenant: TenantId, source: &str) -> Option<Box<Matcher>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // A clone shares its memory, so the deep copy happens outside the lock.
        let matcher = kept.get(tenant, |known| **known == *source)?.clone();
        drop(kept);
        Some(Box::new(matcher.deep_clone()))
    }

    /// Compiles queued grammars until the queue is closed.
    pub(super) fn serve(&self, queue: &TenantQueue<Compile>, waker: &EngineWaker) {
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::warn!(%error, "cannot lower the priority of a grammar thread");
        }
        let mut sandbox = None;
        while let Some(mut taken) = queue.take() {
            // The requesting sequence may have ended.
            let Some(Compile { tenant, source, reply }) =
                taken.item.take().filter(|asked| !asked.reply.is_closed())
            else {
                continue;
            };
            let compiled = catch_unwind(AssertUnwindSafe(|| self.compile(&mut sandbox, tenant, &source)));
            let _ = reply.send(compiled.unwrap_or(Err(GrammarStateError::Fault)));
            drop(taken);
            waker();
        }
    }

    fn compile(&self, sandbox: &mut Option<GrammarSandbox>, tenant: TenantId, source: &str) -> Compiled {
        // Another sequence of the tenant may have compiled the grammar meanwhile.
        if let Some(matcher) = self.kept(tenant, source) {
            return Ok(matcher);
        }
        let CompilerVocabulary { tokens, grammars } =
            self.known.get_or_init(|| self.know()).as_ref().map_err(Clone::clone)?;
        let sandbox =
            sandbox.get_or_insert_with(|| GrammarSandbox::new(self.program.clone(), Arc::clone(tokens)));
        sandbox.judge(source).map_err(|error| match error {
            SandboxError::Refused(_) | SandboxError::TooMuch => GrammarStateError::Grammar(error.to_string()),
            SandboxError::Unavailable(_) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the compiler of grammars is not available"
                );
                GrammarStateError::Fault
            }
        })?;
        let matcher =
            grammars.compile(source).map_err(|error| GrammarStateError::Grammar(error.to_string()))?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(tenant, source.into(), matcher.deep_clone(), matcher.bytes() + source.len());
        Ok(Box::new(matcher))
    }

    fn know(&self) -> Result<CompilerVocabulary, GrammarStateError> {
        let known = (self.read)().and_then(|tokens| {
            let grammars = Grammars::over(&tokens).context("cannot use grammars with this model")?;
            Ok(CompilerVocabulary { tokens: Arc::new(tokens), grammars })
        });
        known.map_err(|error| {
            tracing::error!(error = %format!("{error:#}"), "cannot read the vocabulary for grammars");
            GrammarStateError::Grammar(format!("{error:#}"))
        })
    }
}

//! Checks that a grammar can be compiled before its request waits in a queue.
//!
//! ```text
//!     request -> cached verdict? -> queue of its tenant -> one of two threads -> its process (text::sandbox)
//! ```
//!
//! A grammar is compiled in a process with limits, never in this process. Tenants alternate, and one tenant
//! never occupies both threads. Verdicts are cached for the tenant that requested them.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use text::{
    sandbox::{GrammarSandbox, PROCESSES, SandboxError},
    tenant_cache::{CacheLimits, TenantCache},
    tenant_queue::TenantQueue,
};
use tokio::sync::{OnceCell, oneshot};
use types::TenantId;

use crate::{errors::ApiError, lock::lock, tenant_memory::TenantMemory, text::Text};

/// Maximum number of waiting grammars per tenant. Requests with the same grammar count once.
const MAX_WAITING: usize = 64;

/// Limits of the verdict cache in bytes.
const VERDICTS: CacheLimits = CacheLimits { tenant_bytes: 256 << 10, total_bytes: 8 << 20 };

/// Bytes of a cached verdict besides its message: key, cache entry, and the cell in which requests wait.
const VERDICT_BYTES: usize = 256;

/// Verdict on a compiled grammar; the error says why the grammar cannot be used.
pub type GrammarCheckResult = Result<(), String>;

/// Cell in which requests wait for the verdict on one grammar.
type GrammarCheckCell = Arc<OnceCell<GrammarCheckResult>>;

#[derive(Debug)]
pub struct GrammarChecks {
    program: PathBuf,
    memory: Arc<TenantMemory>,
    /// Checker for the vocabulary that was used last.
    checker: Mutex<Option<Arc<GrammarChecker>>>,
}

struct GrammarChecker {
    text: Arc<dyn Text>,
    queue: TenantQueue<PendingCheck>,
    verdicts: Mutex<TenantCache<[u8; 32], GrammarCheckCell>>,
}

struct PendingCheck {
    source: Arc<str>,
    reply: oneshot::Sender<Result<(), SandboxError>>,
}

impl fmt::Debug for GrammarChecker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checker").field("text", &self.text).finish_non_exhaustive()
    }
}

impl GrammarChecks {
    /// Creates checks that run `program` and count waiting grammars in `memory`. The first grammar starts
    /// the processes.
    #[must_use]
    pub fn new(program: PathBuf, memory: Arc<TenantMemory>) -> Self {
        Self { program, memory, checker: Mutex::new(None) }
    }

    /// Returns whether the grammar `source` of `tenant` can be used with the vocabulary of `text`. The
    /// tenant's cache is named by `owner`.
    ///
    /// # Errors
    /// If the grammar cannot be checked now, for example because too many grammars of the tenant wait.
    pub async fn check(
        &self,
        text: &Arc<dyn Text>,
        (owner, tenant): (TenantId, &Arc<str>),
        source: &Arc<str>,
    ) -> Result<GrammarCheckResult, ApiError> {
        let checker = self.checker(text)?;
        let key = *blake3::hash(source.as_bytes()).as_bytes();
        let cell = checker.cell(owner, key);
        let compile = || async {
            let _held = self.memory.reserve(tenant, source.len())?;
            checker.compile(owner, Arc::clone(source)).await
        };
        let verdict = cell.get_or_try_init(compile).await?;
        checker.keep(owner, key, &cell, verdict);
        Ok(verdict.clone())
    }

    /// Returns the checker for the vocabulary of `text`, and starts one if there is none.
    fn checker(&self, text: &Arc<dyn Text>) -> Result<Arc<GrammarChecker>, ApiError> {
        let mut current = lock(&self.checker);
        if let Some(checker) = current.as_ref().filter(|checker| Arc::ptr_eq(&checker.text, text)) {
            return Ok(Arc::clone(checker));
        }
        let checker = GrammarChecker::start(&self.program, Arc::clone(text))
            .map_err(|error| ApiError::internal(format!("cannot start a thread for grammars: {error}")))?;
        if let Some(before) = current.replace(Arc::clone(&checker)) {
            before.queue.close();
        }
        Ok(checker)
    }
}

impl Drop for GrammarChecks {
    fn drop(&mut self) {
        if let Some(checker) = &*lock(&self.checker) {
            checker.queue.close();
        }
    }
}

impl GrammarChecker {
    fn start(program: &Path, text: Arc<dyn Text>) -> std::io::Result<Arc<Self>> {
        let queue = TenantQueue::new(MAX_WAITING, PROCESSES);
        let checker = Arc::new(Self { text, queue, verdicts: Mutex::new(TenantCache::new(VERDICTS)) });
        let tokens = Arc::new(OnceLock::new());
        for _ in 0..PROCESSES {
            let (checker, tokens, program) = (Arc::clone(&checker), Arc::clone(&tokens), program.to_owned());
            let work = move || {
                let tokens = tokens.get_or_init(|| Arc::new(checker.text.tokens()));
                checker.work(&mut GrammarSandbox::new(program, Arc::clone(tokens)));
            };
            // The thread is not joined; it ends when the queue is closed.
            std::thread::Builder::new().name("grammars".to_owned()).spawn(work)?;
        }
        Ok(checker)
    }

    /// Checks waiting grammars until the queue is closed.
    fn work(&self, sandbox: &mut GrammarSandbox) {
        while let Some(mut taken) = self.queue.take() {
            // The request may have been cancelled meanwhile.
            if let Some(check) = taken.item.take().filter(|check| !check.reply.is_closed()) {
                let _ = check.reply.send(sandbox.judge(&check.source));
            }
        }
    }

    fn cell(&self, owner: TenantId, key: [u8; 32]) -> GrammarCheckCell {
        let mut verdicts = lock(&self.verdicts);
        if let Some(cell) = verdicts.get(owner, |known| *known == key) {
            return Arc::clone(cell);
        }
        let cell = GrammarCheckCell::default();
        verdicts.insert(owner, key, Arc::clone(&cell), VERDICT_BYTES);
        cell
    }

    async fn compile(&self, owner: TenantId, source: Arc<str>) -> Result<GrammarCheckResult, ApiError> {
        let (reply, verdict) = oneshot::channel();
        self.queue.push(owner, PendingCheck { source, reply }).map_err(|full| {
            let message = format!("too many grammars of this tenant at once: {full}; send fewer at once");
            ApiError::busy("grammar_queue_full", message)
        })?;
        match verdict.await {
            Ok(Ok(())) => Ok(Ok(())),
            Ok(Err(error @ (SandboxError::Refused(_) | SandboxError::TooMuch))) => Ok(Err(error.to_string())),
            Ok(Err(error @ SandboxError::Unavailable(_))) => {
                tracing::error!(error = &error as &dyn std::error::Error, "cannot check a grammar");
                Err(ApiError::internal(format!("cannot check the grammar: {error}")))
            }
            Err(_) => Err(ApiError::internal(
                "the model was replaced while the grammar was checked; send the request again",
            )),
        }
    }

    /// Replaces the estimated size of a cached verdict by its actual size.
    fn keep(&self, owner: TenantId, key: [u8; 32], cell: &GrammarCheckCell, verdict: &GrammarCheckResult) {
        let bytes = VERDICT_BYTES + verdict.as_ref().err().map_or(0, String::len);
        lock(&self.verdicts).insert(owner, key, Arc::clone(cell), bytes);
    }
}

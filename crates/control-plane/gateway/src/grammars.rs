//! Finds out whether grammars can be honoured before anybody waits for an answer.
//!
//! ```text
//!   request -> verdict that is known? -> queue of its tenant -> one of two threads -> its process (text::sandbox)
//! ```
//!
//! A grammar is compiled in a process with limits, never in this one. Tenants take turns, one of them never occupies both threads,
//! and verdicts are kept for the tenant that asked alone.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use text::{
    sandbox::{PROCESSES, Sandbox, SandboxError},
    tenant_cache::{CacheLimits, TenantCache},
    tenant_queue::TenantQueue,
};
use tokio::sync::{OnceCell, oneshot};
use types::TenantId;

use crate::{errors::ApiError, lock::lock, tenant_memory::TenantMemory, text::Text};

/// Grammars of a tenant that wait to be compiled. Requests for one and the same grammar wait together, as one.
const MAX_WAITING: usize = 64;

/// Bytes of the verdicts that are kept.
const VERDICTS: CacheLimits = CacheLimits { tenant_bytes: 256 << 10, total_bytes: 8 << 20 };

/// Bytes of a verdict beside its message: its key, its place in the cache, and the cell in which several wait for it.
const VERDICT_BYTES: usize = 256;

/// What came of a grammar that was compiled: nothing, or why it cannot be honoured.
pub type GrammarCheckResult = Result<(), String>;

/// Where requests wait for the verdict of one grammar.
type GrammarCheckCell = Arc<OnceCell<GrammarCheckResult>>;

/// See the module's description.
#[derive(Debug)]
pub struct GrammarChecks {
    program: PathBuf,
    memory: Arc<TenantMemory>,
    /// For the vocabulary that was served last.
    checker: Mutex<Option<Arc<GrammarChecker>>>,
}

/// Checks grammars against one vocabulary.
struct GrammarChecker {
    text: Arc<dyn Text>,
    queue: TenantQueue<PendingCheck>,
    verdicts: Mutex<TenantCache<[u8; 32], GrammarCheckCell>>,
}

/// A grammar that waits for its verdict.
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
    /// Checks whose processes are `program`; sources that wait are counted in `memory`. Nothing is started before the first grammar.
    #[must_use]
    pub fn new(program: PathBuf, memory: Arc<TenantMemory>) -> Self {
        Self { program, memory, checker: Mutex::new(None) }
    }

    /// Whether the grammar `source` of a tenant can be honoured over the vocabulary of `text`; `owner` names the tenant's caches.
    ///
    /// # Errors
    /// That cannot be found out now: too many grammars of the tenant wait.
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

    /// The one for the vocabulary of `text`.
    fn checker(&self, text: &Arc<dyn Text>) -> Result<Arc<GrammarChecker>, ApiError> {
        let mut current = lock(&self.checker);
        if let Some(checker) = current.as_ref().filter(|checker| Arc::ptr_eq(&checker.text, text)) {
            return Ok(Arc::clone(checker));
        }
        let checker = GrammarChecker::start(&self.program, Arc::clone(text))
            .map_err(|error| ApiError::internal(format!("no thread can be started for grammars: {error}")))?;
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
                checker.work(&mut Sandbox::new(program, Arc::clone(tokens)));
            };
            // Not joined: the thread ends when the queue is closed.
            std::thread::Builder::new().name("grammars".to_owned()).spawn(work)?;
        }
        Ok(checker)
    }

    /// Judges what waits until the queue is closed.
    fn work(&self, sandbox: &mut Sandbox) {
        while let Some(mut taken) = self.queue.take() {
            // Nobody may wait for it any more.
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
            let message =
                format!("too many grammars of this tenant are being checked: {full}; send fewer at once");
            ApiError::busy("grammar_queue_full", message)
        })?;
        match verdict.await {
            Ok(Ok(())) => Ok(Ok(())),
            Ok(Err(error @ (SandboxError::Refused(_) | SandboxError::TooMuch))) => Ok(Err(error.to_string())),
            Ok(Err(error @ SandboxError::Unavailable(_))) => {
                tracing::error!(error = &error as &dyn std::error::Error, "a grammar was not checked");
                Err(ApiError::internal(format!("the grammar could not be checked: {error}")))
            }
            Err(_) => {
                Err(ApiError::internal("the model was replaced while a grammar was checked; send it again"))
            }
        }
    }

    /// Counts what the verdict really takes.
    fn keep(&self, owner: TenantId, key: [u8; 32], cell: &GrammarCheckCell, verdict: &GrammarCheckResult) {
        let bytes = VERDICT_BYTES + verdict.as_ref().err().map_or(0, String::len);
        lock(&self.verdicts).insert(owner, key, Arc::clone(cell), bytes);
    }
}

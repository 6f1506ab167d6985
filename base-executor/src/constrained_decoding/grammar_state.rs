//! The engine's side of one sequence's grammar.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use speculation::tree::TokenTree;
use text::{grammar::Matcher, tenant_queue::TenantQueue};
use tokio::sync::oneshot::{self, error::TryRecvError};
use types::TenantId;

use super::{
    GrammarStateError,
    compile_workers::{Compile, Compiled},
    mask_workers::{AllowedTokens, GrammarWork, MaskRequest, MaskResult},
};

/// Position of a sequence in its grammar, and the state of its pending mask.
pub(crate) struct GrammarState {
    state: MatcherState,
    tenant: TenantId,
    /// Number of the sequence's tokens that the matcher knows.
    known: usize,
    work: Arc<TenantQueue<GrammarWork>>,
}

enum MatcherState {
    Compiling(oneshot::Receiver<Compiled>),
    Idle(Box<Matcher>),
    Looking { reply: Receiver<MaskResult>, is_late: Arc<AtomicBool> },
    Looked(Box<Matcher>, AllowedTokens),
    Failed(GrammarStateError),
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("known", &self.known).finish_non_exhaustive()
    }
}

impl GrammarState {
    pub(super) fn new(
        work: Arc<TenantQueue<GrammarWork>>,
        tenant: TenantId,
        source: String,
        begin: usize,
    ) -> Self {
        let (reply, compiled) = oneshot::channel();
        let asked = work.push(tenant, GrammarWork::Begin(Compile { tenant, source, reply }));
        let state = asked
            .map_or(MatcherState::Failed(GrammarStateError::Fault), |()| MatcherState::Compiling(compiled));
        Self { state, tenant, known: begin, work }
    }

    /// Whether neither a compilation nor a late mask is pending.
    pub(crate) fn is_ready(&mut self) -> bool {
        match &mut self.state {
            MatcherState::Compiling(reply) => match reply.try_recv() {
                Ok(compiled) => self.state = compiled.map_or_else(MatcherState::Failed, MatcherState::Idle),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Closed) => self.state = MatcherState::Failed(GrammarStateError::Fault),
            },
            MatcherState::Looking { is_late, .. } if is_late.load(SeqCst) => {
                return self.wait(Duration::ZERO);
            }
            _ => {}
        }
        true
    }

    /// Whether the pending mask was late at the latest wait.
    pub(crate) fn is_late(&self) -> bool {
        matches!(&self.state, MatcherState::Looking { is_late, .. } if is_late.load(SeqCst))
    }

    /// Requests the masks after `tokens`, and after each node of `tree`.
    pub(crate) fn request_mask(&mut self, tokens: &[u32], tree: TokenTree) {
        if !self.is_ready() || !matches!(self.state, MatcherState::Idle(_)) {
            return;
        }
        let ((reply, looked), is_late) = (channel(), Arc::new(AtomicBool::new(false)));
        let looking = MatcherState::Looking { reply: looked, is_late: Arc::clone(&is_late) };
        let MatcherState::Idle(matcher) = std::mem::replace(&mut self.state, looking) else { return };
        let said = tokens[self.known..].to_vec();
        self.known = tokens.len();
        if self
            .work
            .push(self.tenant, GrammarWork::Look(MaskRequest { matcher, said, tree, reply, is_late }))
            .is_err()
        {
            self.state = MatcherState::Failed(GrammarStateError::Fault);
        }
    }

    /// Waits until `until` for the mask. Returns false if the sequence must skip this step. The sequence [is
    /// ready](Self::is_ready) again when the mask arrives, without masks after draft tokens.
    pub(crate) fn has_looked(&mut self, until: Instant) -> bool {
        if self.wait(until.saturating_duration_since(Instant::now())) {
            return true;
        }
        if let MatcherState::Looking { is_late, .. } = &self.state {
            is_late.store(true, SeqCst);
        }
        false
    }

    fn wait(&mut self, patience: Duration) -> bool {
        let MatcherState::Looking { reply, is_late } = &self.state else { return true };
        let looked = match reply.recv_timeout(patience) {
            Ok(looked) => looked,
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => Err(GrammarStateError::Fault),
        };
        // The tree of a skipped step no longer exists.
        let is_late = is_late.load(SeqCst);
        self.state = match looked {
            Ok((matcher, AllowedTokens { next, .. })) if is_late => {
                MatcherState::Looked(matcher, AllowedTokens::new(next, Vec::new()))
            }
            Ok((matcher, allowed)) => MatcherState::Looked(matcher, allowed),
            Err(error) => MatcherState::Failed(error),
        };
        true
    }

    /// Returns the computed masks.
    pub(crate) fn allowed(&mut self) -> Result<AllowedTokens, GrammarStateError> {
        match std::mem::replace(&mut self.state, MatcherState::Failed(GrammarStateError::Fault)) {
            MatcherState::Looked(matcher, allowed) => {
                self.state = MatcherState::Idle(matcher);
                Ok(allowed)
            }
            MatcherState::Failed(error) => {
                self.state = MatcherState::Failed(error.clone());
                Err(error)
            }
            MatcherState::Idle(_) | MatcherState::Compiling(_) | MatcherState::Looking { .. } => {
                Err(GrammarStateError::Fault)
            }
        }
    }
}

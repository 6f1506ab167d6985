//! One sequence's way through its grammar, on the side of the engine.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use ids::TenantId;
use speculation::tree::TokenTree;
use text::{grammar::Matcher, tenant_queue::TenantQueue};
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::{
    GuideError,
    compiling::{Compile, Compiled},
    looking::{Allowed, Look, Looked, Work},
};

/// See the module's description.
pub(crate) struct Guide {
    state: State,
    tenant: TenantId,
    /// So many tokens of the sequence its matcher knows of.
    known: usize,
    work: Arc<TenantQueue<Work>>,
}

enum State {
    Compiling(oneshot::Receiver<Compiled>),
    Idle(Box<Matcher>),
    Looking { reply: Receiver<Looked>, is_late: Arc<AtomicBool> },
    Looked(Box<Matcher>, Allowed),
    Failed(GuideError),
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Guide {
    pub(super) fn new(work: Arc<TenantQueue<Work>>, tenant: TenantId, source: String, begin: usize) -> Self {
        let (reply, compiled) = oneshot::channel();
        let asked = work.push(tenant, Work::Begin(Compile { tenant, source, reply }));
        let state = asked.map_or(State::Failed(GuideError::Fault), |()| State::Compiling(compiled));
        Self { state, tenant, known: begin, work }
    }

    /// Nothing is waited for: neither for its grammar to be compiled nor for a look that was late.
    pub(crate) fn is_ready(&mut self) -> bool {
        match &mut self.state {
            State::Compiling(reply) => match reply.try_recv() {
                Ok(compiled) => self.state = compiled.map_or_else(State::Failed, State::Idle),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Closed) => self.state = State::Failed(GuideError::Fault),
            },
            State::Looking { is_late, .. } if is_late.load(SeqCst) => return self.wait(Duration::ZERO),
            _ => {}
        }
        true
    }

    /// A look was late when it was last waited for.
    pub(crate) fn is_late(&self) -> bool {
        matches!(&self.state, State::Looking { is_late, .. } if is_late.load(SeqCst))
    }

    /// Has a helper find out what may come behind `tokens`, and behind each node of `tree`.
    pub(crate) fn look(&mut self, tokens: &[u32], tree: TokenTree) {
        if !self.is_ready() || !matches!(self.state, State::Idle(_)) {
            return;
        }
        let ((reply, looked), is_late) = (channel(), Arc::new(AtomicBool::new(false)));
        let looking = State::Looking { reply: looked, is_late: Arc::clone(&is_late) };
        let State::Idle(matcher) = std::mem::replace(&mut self.state, looking) else { return };
        let said = tokens[self.known..].to_vec();
        self.known = tokens.len();
        if self.work.push(self.tenant, Work::Look(Look { matcher, said, tree, reply, is_late })).is_err() {
            self.state = State::Failed(GuideError::Fault);
        }
    }

    /// Waits until `until` for what is looked for. Returns false if the sequence has to sit this step out: from then on it
    /// [is ready](Self::is_ready) when the answer is there, and what may come behind drafted tokens is forgotten.
    pub(crate) fn has_looked(&mut self, until: Instant) -> bool {
        if self.wait(until.saturating_duration_since(Instant::now())) {
            return true;
        }
        if let State::Looking { is_late, .. } = &self.state {
            is_late.store(true, SeqCst);
        }
        false
    }

    fn wait(&mut self, patience: Duration) -> bool {
        let State::Looking { reply, is_late } = &self.state else { return true };
        let looked = match reply.recv_timeout(patience) {
            Ok(looked) => looked,
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => Err(GuideError::Fault),
        };
        // The tree of a step that was sat out is gone.
        let is_late = is_late.load(SeqCst);
        self.state = match looked {
            Ok((matcher, Allowed { next, .. })) if is_late => {
                State::Looked(matcher, Allowed::new(next, Vec::new()))
            }
            Ok((matcher, allowed)) => State::Looked(matcher, allowed),
            Err(error) => State::Failed(error),
        };
        true
    }

    /// What was found out since.
    pub(crate) fn allowed(&mut self) -> Result<Allowed, GuideError> {
        match std::mem::replace(&mut self.state, State::Failed(GuideError::Fault)) {
            State::Looked(matcher, allowed) => {
                self.state = State::Idle(matcher);
                Ok(allowed)
            }
            State::Failed(error) => {
                self.state = State::Failed(error.clone());
                Err(error)
            }
            State::Idle(_) | State::Compiling(_) | State::Looking { .. } => Err(GuideError::Fault),
        }
    }
}

//! Turns requests into sequences, or refuses them.

use std::time::Instant;

use kv_cache::{Namespace, PrefixPath};
use model::{
    forward::{BLOCK_TOKENS, ForwardPass},
    linear_sites::SitePath,
};
use shmproto::message::Generate;
use types::{AdapterId, TenantId};

use super::{
    Engine,
    admission::{self, AdapterTraits, AdmissionRefusal},
    event::{ConnectionId, RequestKey},
    sequence::{AdapterHold, Sequence, SequenceAdapter, SequenceOrigin, failure},
};
use crate::constrained_decoding::GrammarState;

impl<P: ForwardPass> Engine<P> {
    pub(super) fn generate(&mut self, connection: ConnectionId, request: Generate, received_at: Instant) {
        if !self.outboxes.is_open(connection) {
            return;
        }
        failpoint::pass("executor.admission");
        let caller = RequestKey { connection, request: request.request };
        match self.accept(caller, request, received_at) {
            Ok(sequence) => self.queues.push(sequence),
            Err(refusal) => self.outboxes.output(caller, failure(caller.request, refusal.into())),
        }
    }

    fn accept(
        &mut self,
        caller: RequestKey,
        request: Generate,
        received_at: Instant,
    ) -> Result<Sequence<P::Adapter>, AdmissionRefusal> {
        if self.draining_until.is_some() {
            return Err(AdmissionRefusal::ShuttingDown);
        }
        if self.queues.iter().any(|sequence| sequence.caller == caller) {
            return Err(AdmissionRefusal::DuplicateRequest(caller.request));
        }
        let virtual_tokens = request.adapter.map_or(0, |id| self.tiers.host.virtual_tokens(AdapterId(id)));
        let vocab_size = self.computing.vocab_size();
        let head = request.adapter.and_then(|id| self.tiers.host.classification_head(AdapterId(id)));
        let traits = AdapterTraits { virtual_tokens, head };
        let task = admission::check(&request, received_at, vocab_size, &self.limits, traits)?;
        let under_way = self.queues.iter().count();
        if under_way >= self.limits.max_running + self.limits.max_waiting {
            return Err(AdmissionRefusal::QueueFull { under_way });
        }
        let waiting_tokens: usize = self.queues.idle().map(Sequence::pending).sum();
        if waiting_tokens > 0 && waiting_tokens + request.prompt.len() > self.limits.max_waiting_tokens {
            return Err(AdmissionRefusal::QueueLong { waiting_tokens });
        }
        let guide = self.guide(&request, virtual_tokens)?;
        let adapted = request.adapter.map(|id| self.adapt(AdapterId(id))).transpose()?;
        self.kv.note_request(request.adapter.map(AdapterId));
        if task.path == SitePath::Linear && !self.computing.pass.takes_linear() {
            return Err(AdmissionRefusal::NoExact);
        }
        let trail = self.trail(&request, task.path);
        let origin = SequenceOrigin { caller, received_at };
        Ok(Sequence::new(origin, adapted, trail, request.prompt, task).guided(guide))
    }

    /// Returns the namespaces of a request's KV blocks; an activated adapter begins at its invocation.
    fn trail(&self, request: &Generate, path: SitePath) -> PrefixPath {
        let of = |adapter, namespace| Namespace {
            adapter,
            sharing: sharing(namespace, path),
            owner: TenantId(request.owner),
        };
        let adapter = request.adapter.map(AdapterId);
        let own = of(adapter, request.namespace);
        let Some(invocation) = adapter.and_then(|id| self.tiers.host.invocation(id)) else {
            return PrefixPath::whole(own);
        };
        let asked = request.prompt.len().saturating_sub(request.generated as usize);
        let begin = invocation.begin(&request.prompt[..asked]);
        PrefixPath::activated(of(None, request.base_namespace), own, begin, BLOCK_TOKENS)
    }

    /// Returns the grammar state of a request with a grammar; tokens generated before are answer tokens.
    fn guide(
        &self,
        request: &Generate,
        virtual_tokens: usize,
    ) -> Result<Option<GrammarState>, AdmissionRefusal> {
        let Some(grammar) = &request.grammar else { return Ok(None) };
        let helpers = self.grammars.as_ref().ok_or(AdmissionRefusal::NoGrammars)?;
        let begin = (virtual_tokens + request.prompt.len()).saturating_sub(request.generated as usize);
        Ok(Some(helpers.guide(TenantId(request.owner), grammar.clone(), begin)))
    }

    fn adapt(&mut self, id: AdapterId) -> Result<SequenceAdapter<P::Adapter>, AdmissionRefusal> {
        let adapter = self.tiers.host.acquire(id)?;
        Ok(SequenceAdapter { id, adapter, hold: AdapterHold::None })
    }

    pub(super) fn cancel(&mut self, caller: RequestKey) {
        failpoint::pass("executor.cancel");
        self.stats.cancelled += self.drop_where(|sequence| sequence.caller == caller);
    }
}

/// Returns the namespace for `path`; KV blocks of different paths differ in bits and are not shared.
fn sharing(namespace: [u8; 32], path: SitePath) -> [u8; 32] {
    match path {
        SitePath::Fast => namespace,
        SitePath::Linear => blake3::derive_key("holobiont 2026 exact kv namespace v1", &namespace),
        SitePath::Ring => blake3::derive_key("holobiont 2026 ring kv namespace v1", &namespace),
    }
}

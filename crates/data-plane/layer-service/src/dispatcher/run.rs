//! Batches, and calls that join a resident pass.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use kernels::Activations;
use model::linear_sites::{EvaluateError, EvaluateSites, PassHooks, SiteCall, SiteId};
use shmproto::layer::{CallClass, CallStatus, ReplyHeader};

use super::{CoBatchedCalls, Dispatcher, SessionFault, call::CallRefusal};
use crate::{
    batcher::ChunkBoundary,
    batching_policy::is_background,
    call_queue::{AllowedClasses, CallChunk, any_class},
    event_queue::Reply,
    session::CompletedCall,
};

/// Refusal of the calls of a batch that has failed.
const FAULT: CallRefusal = CallRefusal { status: CallStatus::Failed, retry_after_ms: 0 };

/// Refusal of calls for which the device lacks memory even for a few rows; a later retry may succeed.
const NO_MEMORY: CallRefusal = CallRefusal { status: CallStatus::Busy, retry_after_ms: 100 };

/// Result of one run of the dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ComputedRows {
    /// Number of computed rows; 0 if no call was due.
    pub rows: usize,
    /// Time that background calls took.
    pub background: Duration,
}

#[derive(Debug, Clone, Copy)]
struct BatchResult {
    /// Rows of the batch, including those of a resident pass.
    rows: usize,
    took: Duration,
}

impl BatchResult {
    /// Returns the share of `rows` rows in the computing time.
    fn part(&self, rows: usize) -> Duration {
        self.took.mul_f64(rows as f64 / self.rows.max(1) as f64)
    }
}

impl Dispatcher {
    /// Computes the next batch, if one is due.
    pub fn run_due(&mut self, base: &mut dyn EvaluateSites) -> ComputedRows {
        let mut pieces = std::mem::take(&mut self.scratch.pieces);
        let call = self.batcher.next(self.clock.now(), any_class, &mut pieces);
        let ran = call.map_or(ComputedRows::default(), |call| self.compute(call, &pieces, base));
        self.scratch.pieces = pieces;
        ran
    }

    /// Computes due calls after a step of requests that took `step`, until none is due or as much time has
    /// passed. Background calls get only their share.
    pub fn run_beside(&mut self, step: Duration, base: &mut dyn EvaluateSites) {
        let begin = self.clock.now();
        self.allowance.earn(step);
        loop {
            let ran = self.run_beside_pass(self.allowance.allowed(self.training_waits()), base);
            self.allowance.spend(ran.background);
            if ran.rows == 0 || self.clock.now().saturating_duration_since(begin) >= step {
                return;
            }
            self.poll();
        }
    }

    /// Like [`Dispatcher::run_due`], for allowed classes, without calls that the next resident pass can join.
    fn run_beside_pass(&mut self, allowed: AllowedClasses, base: &mut dyn EvaluateSites) -> ComputedRows {
        let mut pieces = std::mem::take(&mut self.scratch.pieces);
        let call = self.batcher.next_beside(self.clock.now(), allowed, &mut pieces);
        let ran = call.map_or(ComputedRows::default(), |call| self.compute(call, &pieces, base));
        self.scratch.pieces = pieces;
        ran
    }

    /// Serves the calls that need the current layer chunk of streamed weights, also those expected in a
    /// moment, before a resident pass moves to the chunk of `site`.
    fn before_leaving(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        loop {
            let allowed = self.allowance.allowed(self.training_waits());
            let mut pieces = std::mem::take(&mut self.scratch.pieces);
            match self.batcher.before_leaving(self.clock.now(), site, allowed, &mut pieces) {
                ChunkBoundary::Serve(call) => {
                    let ran = self.compute(call, &pieces, base);
                    self.allowance.spend(ran.background);
                }
                ChunkBoundary::Hold(until) => self.wait_for_calls(Some(until)),
                ChunkBoundary::Go => {
                    self.scratch.pieces = pieces;
                    return;
                }
            }
            self.scratch.pieces = pieces;
            self.poll();
        }
    }

    /// Returns how long the oldest call of a trainer has waited.
    fn training_waits(&self) -> Duration {
        let first = self.batcher.first_of(CallClass::Training);
        first.map_or(Duration::ZERO, |came| self.clock.now().saturating_duration_since(came))
    }

    fn compute(
        &mut self,
        call: SiteCall,
        pieces: &[CallChunk],
        base: &mut dyn EvaluateSites,
    ) -> ComputedRows {
        let begun = self.clock.now();
        let rows = pieces.iter().map(|piece| piece.rows).sum();
        let background = self.background_rows(pieces);
        let Some((input, output)) = self.widths(call) else { return ComputedRows::default() };
        let (mut x, mut out) = (std::mem::take(&mut self.scratch.x), std::mem::take(&mut self.scratch.out));
        x.reshape(rows, input);
        let mut rest = x.values_mut();
        for piece in pieces {
            let (own, others) = rest.split_at_mut(piece.rows * input);
            self.gather(piece, begun, own);
            rest = others;
        }
        // The buffer never shrinks, because a batch writes every element that it uses.
        if out.len() < rows * output {
            out.resize(rows * output, 0.0);
        }
        let answers = &mut out[..rows * output];
        failpoint::pass("layer.before_batch");
        let computed = catch_unwind(AssertUnwindSafe(|| base.evaluate(call, &mut x, answers)));
        let took = self.clock.now().saturating_duration_since(begun);
        failpoint::pass("layer.after_batch");
        match computed {
            Ok(Ok(())) => self.distribute_rows(pieces, answers, output, BatchResult { rows, took }),
            Ok(Err(EvaluateError::NoMemory(error))) => {
                tracing::warn!(%error, calls = pieces.len(), "no memory for a batch; clients must repeat \
                    its calls");
                self.fail(pieces, NO_MEMORY);
            }
            Ok(Err(error)) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, calls = pieces.len(), "a batch failed; its calls end with an error");
                self.fail(pieces, FAULT);
            }
            Err(_) => {
                tracing::error!(calls = pieces.len(), "a batch panicked; its calls end with an error");
                self.fail(pieces, FAULT);
            }
        }
        (self.scratch.x, self.scratch.out) = (x, out);
        self.registry.counts().batches.add(1);
        self.disconnect_faulty();
        ComputedRows { rows, background: BatchResult { rows, took }.part(background) }
    }

    fn background_rows(&self, pieces: &[CallChunk]) -> usize {
        let is_background = |piece: &&CallChunk| {
            self.calls.get(&piece.id).is_some_and(|call| is_background(call.header.class))
        };
        pieces.iter().filter(is_background).map(|piece| piece.rows).sum()
    }

    fn widths(&self, call: SiteCall) -> Option<(usize, usize)> {
        self.sites.get(call.site.0 as usize)?.words(call)
    }

    fn gather(&mut self, piece: &CallChunk, begun: Instant, rows: &mut [f32]) {
        let Some(call) = self.calls.get_mut(&piece.id) else { return rows.fill(0.0) };
        call.waited.get_or_insert(begun.saturating_duration_since(call.arrived));
        let Some(client) = self.clients.get(&call.connection) else { return rows.fill(0.0) };
        if let Err(violation) = client.peer.read(call, piece, rows) {
            rows.fill(0.0);
            self.gone.push((call.connection, SessionFault::Violation(violation)));
        }
    }

    /// Distributes the output rows of a batch, and answers the calls that are complete.
    fn distribute_rows(&mut self, pieces: &[CallChunk], out: &[f32], width: usize, done: BatchResult) {
        let mut rest = out;
        for piece in pieces {
            let (own, others) = rest.split_at(piece.rows * width);
            self.keep(piece, own, done);
            rest = others;
        }
    }

    fn keep(&mut self, piece: &CallChunk, rows: &[f32], done: BatchResult) {
        let Some(call) = self.calls.get_mut(&piece.id) else { return };
        let Some(client) = self.clients.get_mut(&call.connection) else { return };
        call.computed += done.part(piece.rows);
        call.batch_rows = call.batch_rows.max(done.rows);
        if let Err(violation) = client.peer.write(call, piece, rows) {
            self.gone.push((call.connection, SessionFault::Violation(violation)));
        } else if piece.is_last {
            self.answer(piece);
        }
    }

    fn answer(&mut self, piece: &CallChunk) {
        let Some(call) = self.calls.remove(&piece.id) else { return };
        let Some(client) = self.clients.get_mut(&call.connection) else { return };
        let (header, asked) = (&call.header, &call.asked);
        let waited = call.waited.unwrap_or_default();
        client.account.answered(&CompletedCall {
            class: header.class,
            rows: header.rows.into(),
            bytes: (asked.coming_bytes(), asked.output_bytes(asked.rows)),
            waited,
            computed: call.computed,
            batch_rows: call.batch_rows as u64,
        });
        let reply = ReplyHeader {
            status: CallStatus::Done,
            dtype: header.dtype,
            retry_after_ms: 0,
            rows: header.rows,
            sequence: header.sequence,
            waited_us: u32::try_from(waited.as_micros()).unwrap_or(u32::MAX),
            batch_rows: u32::try_from(call.batch_rows).unwrap_or(u32::MAX),
        };
        client.answered(header);
        self.batcher.answered(call.connection, asked.call, header.class, self.clock.now());
        self.rows.release(&client.info.tenant, header.rows);
        let payload = call.payload.map(|both| both.output);
        failpoint::pass("layer.before_answer");
        if let Err(fault) = client.peer.reply(Reply { header: reply, payload }) {
            self.gone.push((call.connection, fault));
        }
    }

    /// Refuses the calls of a failed batch, which clients may repeat; all other calls continue.
    fn fail(&mut self, pieces: &[CallChunk], why: CallRefusal) {
        for piece in pieces {
            let Some(call) = self.calls.remove(&piece.id) else { continue };
            self.batcher.remove(call.asked.call, piece.id);
            let Some(client) = self.clients.get_mut(&call.connection) else { continue };
            client.account.refused();
            client.forget(&call.header);
            self.rows.release(&client.info.tenant, call.header.rows);
            let header = ReplyHeader::refusal(&call.header, why.status, why.retry_after_ms);
            if let Err(fault) = client.peer.reply(Reply { header, payload: None }) {
                self.gone.push((call.connection, fault));
            }
        }
    }

    /// Refuses calls that joined a pass which did not reach its end.
    pub(super) fn give_up_joined(&mut self) {
        if self.joined.take().is_some() {
            let pieces = std::mem::take(&mut self.scratch.joined);
            self.fail(&pieces, FAULT);
            self.scratch.joined = pieces;
        }
    }
}

impl PassHooks for Dispatcher {
    fn is_waiting(&mut self) -> bool {
        self.poll();
        !self.batcher.is_empty()
    }

    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        self.poll();
        if self.batcher.is_streamed() {
            return self.before_leaving(site, base);
        }
        let mut left = self.settings.batching.urgent_rows;
        while left > 0 && !self.batcher.is_empty() {
            let mut pieces = std::mem::take(&mut self.scratch.pieces);
            let call = self.batcher.next_urgent(self.clock.now(), site, left, &mut pieces);
            let ran = call.map_or(ComputedRows::default(), |call| self.compute(call, &pieces, base));
            self.scratch.pieces = pieces;
            if ran.rows == 0 {
                return;
            }
            left = left.saturating_sub(ran.rows);
        }
    }

    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize {
        if self.batcher.is_empty() {
            return 0;
        }
        let now = self.clock.now();
        // A pass gets at most twice as long, because clients that wait for its tokens pay for it.
        let max_rows = x.rows().max(self.settings.batching.join_rows);
        let mut pieces = std::mem::take(&mut self.scratch.joined);
        self.batcher.join(now, call, max_rows, &mut pieces);
        let mut rows = std::mem::take(&mut self.scratch.rows);
        let mut joined = 0;
        for piece in &pieces {
            rows.resize(piece.rows * x.width(), 0.0);
            self.gather(piece, now, &mut rows);
            x.append(&rows);
            joined += piece.rows;
        }
        (self.scratch.rows, self.scratch.joined) = (rows, pieces);
        if joined > 0 {
            self.joined = Some(CoBatchedCalls { call, rows: x.rows(), since: now });
            failpoint::pass("layer.joined_pass");
        }
        joined
    }

    fn part(&mut self, out: &[f32]) {
        let Some(CoBatchedCalls { call, rows, since }) = self.joined.take() else { return };
        let Some((_, width)) = self.widths(call) else { return };
        let pieces = std::mem::take(&mut self.scratch.joined);
        let took = self.clock.now().saturating_duration_since(since);
        self.distribute_rows(&pieces, out, width, BatchResult { rows, took });
        let joined: usize = pieces.iter().map(|piece| piece.rows).sum();
        self.registry.counts().joined_rows.add(joined as u64);
        self.scratch.joined = pieces;
        self.disconnect_faulty();
    }
}

//! Calls, split to the executor's limits and retried.

use std::time::{Duration, Instant};

use model::linear_sites::{ModularRange, SiteId};
use shmproto::layer::{
    CallClass, CallHeader, CallStatus, Dtype, MAX_ROWS, ReplyHeader, RowSource, SiteOp, SitePath,
    control::Site,
};

use super::{ClientSettings, Session, retry_policy::RetryPolicy};
use crate::error::{CallError, LinkError};

/// Maximum number of attempts at a call on which the executor fails.
const MAX_FAILURES: u32 = 3;

/// Parameters of a call, besides its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerCall {
    /// Number of the linear group in the catalog.
    pub site: SiteId,
    /// One of the site's linear layers, or all side by side.
    pub part: Option<u8>,
    /// Forward, with or without the bias, or backward.
    pub op: SiteOp,
    /// Arithmetic of the site: quantized, float or modular.
    pub path: SitePath,
    /// Purpose of the rows, which decides their priority.
    pub class: CallClass,
}

/// Returns modulus and bits of rows on the modular path; `None` if the site has none.
#[must_use]
pub fn modular_range(site: &Site, op: SiteOp) -> Option<ModularRange> {
    let is_even = site.parts.iter().map(|part| part.rows).chain([site.columns]).all(|size| size % 2 == 0);
    ModularRange::new(site.ring.as_ref()?.l1[usize::from(op == SiteOp::Backward)], is_even)
}

impl Session {
    /// Takes the rows `x` through a site into `out`; on the modular path they are integers in wire format.
    ///
    /// # Errors
    /// Fails if the executor is gone and does not come back, is at capacity, or refuses the call. `out` is
    /// undefined then.
    pub fn call(&mut self, ask: LayerCall, x: &[f32], out: &mut [f32]) -> Result<(), CallError> {
        self.call_beside(ask, x, out, &mut || {})
    }

    /// Like [`call`](Self::call), and calls `meanwhile` each time that rows are sent.
    pub(crate) fn call_beside(
        &mut self,
        ask: LayerCall,
        x: &[f32],
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), CallError> {
        let (input, output) = self.words(ask)?;
        let rows = x.len() / input;
        let shape = |reason| CallError::Shape { site: ask.site.0, rows, reason };
        if !x.len().is_multiple_of(input) || rows.checked_mul(output) != Some(out.len()) {
            return Err(shape("widths of the rows are not the site's"));
        }
        let most = self.rows_of_call(input + output).ok_or_else(|| shape("not one row is taken"))?;
        for (x, out) in x.chunks(most * input).zip(out.chunks_mut(most * output)) {
            let mut trial = CallAttempt::new(self, ask, x.len() / input, RowSource::Rows)?;
            while !self.attempt(&mut trial, x, out, meanwhile)? {}
        }
        Ok(())
    }

    /// Returns the words of 32 bits of an input row and of an output row.
    pub(crate) fn words(&self, ask: LayerCall) -> Result<(usize, usize), CallError> {
        let (input, output) = self.widths(ask)?;
        if ask.path != SitePath::Ring {
            return Ok((input, output));
        }
        let range = modular_range(&self.catalog.sites[ask.site.0 as usize], ask.op);
        let modulus = range.ok_or(CallError::NoRing { site: ask.site.0 })?.modulus;
        Ok((modulus.words(input), modulus.words(output)))
    }

    /// Returns the elements of an input row and of an output row.
    pub(crate) fn widths(&self, ask: LayerCall) -> Result<(usize, usize), CallError> {
        let unknown = CallError::UnknownSite { site: ask.site.0 };
        let Some(site) = self.catalog.sites.get(ask.site.0 as usize) else { return Err(unknown) };
        if !site.has_path(ask.path) {
            let site = ask.site.0;
            return Err(if ask.path == SitePath::Ring {
                CallError::NoRing { site }
            } else {
                CallError::Nonlinear { site }
            });
        }
        let outputs = match ask.part {
            None => site.parts.iter().map(|part| part.rows as usize).sum(),
            Some(part) => site.parts.get(usize::from(part)).ok_or(unknown)?.rows as usize,
        };
        let columns = site.columns as usize;
        Ok(if ask.op == SiteOp::Backward { (outputs, columns) } else { (columns, outputs) })
    }

    /// Returns the maximum rows of one call; `width` is the number of words of a row and its answer.
    pub(crate) fn rows_of_call(&self, width: usize) -> Option<usize> {
        let opened = &self.opened;
        let rows = self.settings.max_rows.min(opened.max_rows).min(opened.max_waiting_rows).min(MAX_ROWS);
        let row_bytes = (width * self.settings.dtype.bytes()) as u64;
        // Only half of the quota is used, so that several clients of a tenant fit.
        let affordable = opened.max_bytes / 2 / row_bytes;
        usize::try_from(u64::from(rows).min(affordable)).ok().filter(|&rows| rows > 0)
    }

    /// Makes one attempt at a call, and calls `meanwhile` once if the call is sent. Returns false, after a
    /// pause, if the call was not answered and another attempt is worthwhile.
    ///
    /// # Errors
    /// Fails if no attempt will be answered.
    pub(crate) fn attempt(
        &mut self,
        trial: &mut CallAttempt,
        x: &[f32],
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<bool, CallError> {
        let header = match trial.header {
            Some(header) => header,
            None => CallHeader { sequence: self.next_number(), ..trial.call },
        };
        self.usage.repeats += u64::from(trial.is_repeated);
        let begun = Instant::now();
        failpoint::pass("client.before_call");
        let reply = match self.linked(&mut trial.patience)?.call_beside(&header, x, out, meanwhile) {
            Ok(reply) if reply.status == CallStatus::Done => {
                failpoint::pass("client.after_call");
                self.note(&reply, begun.elapsed(), x.len(), out.len());
                return Ok(true);
            }
            Ok(reply) => reply,
            Err(error) => {
                // The retry has the same number, because the executor may still compute the call.
                trial.header = Some(header);
                trial.is_repeated = true;
                return self.lose(error, &mut trial.patience).map(|()| false);
            }
        };
        trial.header = None;
        trial.failures += u32::from(reply.status == CallStatus::Failed);
        let sent_before = std::mem::replace(&mut trial.is_repeated, true);
        let tried = AttemptState { failures: trial.failures, sent_before };
        self.refused(&header, &reply, &mut trial.patience, tried).map(|()| false)
    }

    fn next_number(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Decides whether a refused call deserves another attempt, and waits until then.
    fn refused(
        &mut self,
        call: &CallHeader,
        reply: &ReplyHeader,
        patience: &mut RetryPolicy,
        tried: AttemptState,
    ) -> Result<(), CallError> {
        let (site, rows) = (call.site, call.rows as usize);
        match reply.status {
            CallStatus::Draining => self.lose(LinkError::Draining, patience),
            CallStatus::Quota | CallStatus::Busy if patience.wait(reply.retry_after_ms) => Ok(()),
            CallStatus::Quota => {
                Err(CallError::Quota { tenant: self.opened.tenant.clone(), waited_ms: patience.waited_ms() })
            }
            CallStatus::Busy => Err(CallError::Busy { waited_ms: patience.waited_ms() }),
            CallStatus::Failed if tried.failures < MAX_FAILURES && patience.wait(0) => Ok(()),
            CallStatus::Failed => Err(CallError::Failed { site, attempts: tried.failures }),
            // The executor answered the call before the loss, and accepts it under another number.
            CallStatus::Sequence if tried.sent_before && patience.wait(0) => Ok(()),
            CallStatus::Sequence | CallStatus::Done => {
                Err(LinkError::Protocol("a number is refused that was never used".to_owned()).into())
            }
            CallStatus::Shape => Err(CallError::Shape { site, rows, reason: "the executor says so" }),
            CallStatus::Nonlinear if call.path == SitePath::Ring => Err(CallError::NoRing { site }),
            CallStatus::Nonlinear => Err(CallError::Nonlinear { site }),
            CallStatus::UnknownSite => Err(CallError::UnknownSite { site }),
            CallStatus::Unsuited => Err(CallError::Unsuited { site, reason: "the executor says so" }),
        }
    }

    fn note(&mut self, reply: &ReplyHeader, took: Duration, sent: usize, received: usize) {
        let (usage, bytes) = (&mut self.usage, self.settings.dtype.bytes());
        usage.calls += 1;
        usage.rows += u64::from(reply.rows);
        usage.bytes_out += (sent * bytes) as u64;
        usage.bytes_in += (received * bytes) as u64;
        usage.waited_us += u64::from(reply.waited_us);
        usage.calls_us += u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        usage.latencies.add(took);
    }
}

#[derive(Debug, Clone, Copy)]
struct AttemptState {
    failures: u32,
    /// Whether the call was sent before, perhaps under this number.
    sent_before: bool,
}

/// A call that is retried until it is answered.
#[derive(Debug)]
pub(crate) struct CallAttempt {
    /// Header without the sequence number.
    call: CallHeader,
    /// Header that was sent over a lost connection, to be sent again unchanged.
    header: Option<CallHeader>,
    patience: RetryPolicy,
    failures: u32,
    is_repeated: bool,
}

impl CallAttempt {
    /// Makes a call of `rows` rows from `source`.
    ///
    /// # Errors
    /// Fails if the parameters contradict each other.
    pub(crate) fn new(
        session: &Session,
        ask: LayerCall,
        rows: usize,
        source: RowSource,
    ) -> Result<Self, CallError> {
        let LayerCall { site, part, op, path, class } = ask;
        let ClientSettings { dtype, patience, .. } = *session.settings();
        let unsuited = |reason| Err(CallError::Unsuited { site: site.0, reason });
        match path {
            SitePath::Ring if op == SiteOp::Forward => return unsuited("a bias is no ring element"),
            SitePath::Ring if dtype != Dtype::F32 => {
                return unsuited("bf16 would round what is exact: use f32");
            }
            SitePath::Fast | SitePath::Linear if source == RowSource::Draw => {
                return unsuited("only the ring path has draws");
            }
            _ => {}
        }
        let rows = u32::try_from(rows).unwrap_or(MAX_ROWS);
        let (site, sequence, input, output) = (site.0, 0, 0, 0);
        let call = CallHeader { op, path, class, dtype, site, part, source, sequence, rows, input, output };
        Ok(Self { call, header: None, patience: RetryPolicy::new(patience), failures: 0, is_repeated: false })
    }

    /// Gives the next attempt a new number, because it has other rows.
    pub(crate) fn renew(&mut self) {
        self.header = None;
    }
}

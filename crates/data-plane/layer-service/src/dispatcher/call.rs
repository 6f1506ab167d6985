//! Checks of a call, and its state while it waits.

use std::time::{Duration, Instant};

use model::linear_sites::{Site, SiteCall, SiteId};
use shmproto::layer::{
    CallHeader, CallStatus, Dtype, RowSource, SiteOp, SitePath,
    seeded_rows::{DRAW_BYTES, SeededRows},
};

use crate::{ConnectionId, event_queue::Payload, quota::OverQuota};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallRefusal {
    pub(super) status: CallStatus,
    pub(super) retry_after_ms: u32,
}

impl From<CallStatus> for CallRefusal {
    fn from(status: CallStatus) -> Self {
        Self { status, retry_after_ms: 0 }
    }
}

impl From<OverQuota> for CallRefusal {
    fn from(over: OverQuota) -> Self {
        Self { status: CallStatus::Quota, retry_after_ms: over.retry_after_ms }
    }
}

/// Parameters of a call after comparison with its site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ResolvedCall {
    pub(super) call: SiteCall,
    pub(super) rows: usize,
    /// Words of 32 bits of an input row.
    pub(super) input: usize,
    /// Words of 32 bits of an output row.
    pub(super) output: usize,
    pub(super) dtype: Dtype,
    /// Whether rows are sent, or a seed for them.
    pub(super) source: RowSource,
}

impl ResolvedCall {
    pub(super) fn by(header: &CallHeader, sites: &[Site], max_rows: u32) -> Result<Self, CallStatus> {
        let site = sites.get(header.site as usize).ok_or(CallStatus::UnknownSite)?;
        let path = path(header, site);
        let call = SiteCall { site: SiteId(header.site), part: header.part, op: header.op, path };
        if !suits(header) {
            return Err(CallStatus::Unsuited);
        }
        if path == SitePath::Ring && site.ring.is_none() {
            return Err(CallStatus::Nonlinear);
        }
        let (input, output) = site.words(call).ok_or(CallStatus::UnknownSite)?;
        if header.rows > max_rows {
            return Err(CallStatus::Shape);
        }
        let CallHeader { dtype, source, .. } = *header;
        Ok(Self { call, rows: header.rows as usize, input, output, dtype, source })
    }

    /// Returns the bytes that are sent for all rows.
    pub(super) fn coming_bytes(&self) -> u64 {
        match self.source {
            RowSource::Rows => self.input_bytes(self.rows),
            RowSource::Draw => DRAW_BYTES as u64,
        }
    }

    /// Returns the bytes of `rows` input rows.
    pub(super) fn input_bytes(&self, rows: usize) -> u64 {
        bytes(rows, self.input, self.dtype)
    }

    /// Returns the bytes of `rows` output rows.
    pub(super) fn output_bytes(&self, rows: usize) -> u64 {
        bytes(rows, self.output, self.dtype)
    }
}

/// At most 2^16 rows of a site's width, of which as many rows are weights in memory, so u64 cannot overflow.
fn bytes(rows: usize, width: usize, dtype: Dtype) -> u64 {
    rows as u64 * width as u64 * dtype.bytes() as u64
}

/// Whether the parameters fit: the modular path has no bias and no bf16, and only this path takes seeds.
fn suits(header: &CallHeader) -> bool {
    match header.path {
        SitePath::Ring => header.op != SiteOp::Forward && header.dtype == Dtype::F32,
        SitePath::Fast | SitePath::Linear => header.source == RowSource::Rows,
    }
}

/// Where both paths are the same arithmetic, calls for either share a queue.
fn path(header: &CallHeader, site: &Site) -> SitePath {
    match (header.path, header.op) {
        (path, _) if path == SitePath::Ring || !site.fast_is_linear => path,
        (_, SiteOp::Backward) => SitePath::Linear,
        (_, SiteOp::Forward | SiteOp::ForwardNoBias) => SitePath::Fast,
    }
}

#[derive(Debug)]
pub(super) struct AcceptedCall {
    pub(super) connection: ConnectionId,
    pub(super) header: CallHeader,
    pub(super) asked: ResolvedCall,
    pub(super) arrived: Instant,
    /// Waiting time until the first of its rows were computed.
    pub(super) waited: Option<Duration>,
    /// The call's share of its batches' computing time.
    pub(super) computed: Duration,
    /// Rows of the largest of its batches.
    pub(super) batch_rows: usize,
    /// Seed of the rows, if they were not sent.
    pub(super) draw: Option<SeededRows>,
    /// Buffers of a remote call.
    pub(super) payload: Option<RemoteBuffers>,
}

#[derive(Debug)]
pub(super) struct RemoteBuffers {
    pub(super) input: Payload,
    pub(super) output: Payload,
}

impl AcceptedCall {
    pub(super) fn new(
        connection: ConnectionId,
        header: CallHeader,
        asked: ResolvedCall,
        arrived: Instant,
        draw: Option<SeededRows>,
        payload: Option<RemoteBuffers>,
    ) -> Self {
        let (waited, computed, batch_rows) = (None, Duration::ZERO, 0);
        Self { connection, header, asked, arrived, waited, computed, batch_rows, draw, payload }
    }
}

impl Payload {
    /// Reserves the tenant's memory for the answer, too.
    pub(super) fn with_answer(self, asked: &ResolvedCall) -> Result<RemoteBuffers, CallRefusal> {
        let over = OverQuota { retry_after_ms: super::RETRY_MS };
        let held = self.held.another(asked.output_bytes(asked.rows)).map_err(|_| over)?;
        Ok(RemoteBuffers { input: self, output: Payload { bytes: Vec::new(), held } })
    }
}

#[cfg(test)]
mod tests {
    use model::linear_sites::{ModularSite, SitePart};

    use super::*;
    use shmproto::layer::CallClass;

    fn site(fast_is_linear: bool) -> Site {
        let part = |rows| SitePart { name: "m".to_owned(), rows, has_bias: false };
        Site {
            columns: 4,
            parts: vec![part(8), part(2)],
            fast_is_linear,
            arithmetic: model::linear_sites::Arithmetic::Unrounded,
            ring: None,
        }
    }

    fn header(op: SiteOp, path: SitePath, part: Option<u8>) -> CallHeader {
        let (class, dtype) = (CallClass::Training, Dtype::F32);
        let source = RowSource::Rows;
        CallHeader {
            op,
            path,
            class,
            dtype,
            site: 0,
            part,
            source,
            sequence: 1,
            rows: 3,
            input: 0,
            output: 0,
        }
    }

    #[test]
    fn a_call_has_the_widths_of_its_site_and_part() {
        let widths = |op, part| {
            ResolvedCall::by(&header(op, SitePath::Linear, part), &[site(false)], 10)
                .map(|a| (a.input, a.output))
        };
        assert_eq!(widths(SiteOp::Forward, None), Ok((4, 10)));
        assert_eq!(widths(SiteOp::ForwardNoBias, Some(0)), Ok((4, 8)));
        assert_eq!(widths(SiteOp::Backward, Some(1)), Ok((2, 4)));
        assert_eq!(widths(SiteOp::Forward, Some(2)), Err(CallStatus::UnknownSite));
    }

    #[test]
    fn backward_takes_the_path_that_was_asked_for_where_there_are_two() {
        let asked = |path, fast_is_linear| {
            ResolvedCall::by(&header(SiteOp::Backward, path, None), &[site(fast_is_linear)], 10)
                .map(|asked| asked.call.path)
        };
        assert_eq!(asked(SitePath::Fast, false), Ok(SitePath::Fast));
        assert_eq!(asked(SitePath::Fast, true), Ok(SitePath::Linear));
        assert_eq!(asked(SitePath::Linear, false), Ok(SitePath::Linear));
    }

    #[test]
    fn calls_for_paths_that_are_one_meet_in_one_lane() {
        let asked = |path| {
            ResolvedCall::by(&header(SiteOp::Forward, path, None), &[site(true)], 10).map(|asked| asked.call)
        };
        assert_eq!(asked(SitePath::Linear), asked(SitePath::Fast));
    }

    #[test]
    fn the_ring_path_has_rows_of_six_or_eight_bytes_a_number_and_neither_bias_nor_bf16() {
        let ring = ModularSite { weight_exponent: -8, l1: [9; 2], commitment: [0; 32] };
        let with = Site { ring: Some(ring), ..site(true) };
        let asked = |site: &Site, header| {
            ResolvedCall::by(&header, std::slice::from_ref(site), 10)
                .map(|asked| (asked.call.path, asked.input, asked.output))
        };
        let plain = header(SiteOp::ForwardNoBias, SitePath::Ring, None);
        assert_eq!(asked(&with, plain), Ok((SitePath::Ring, 6, 15)));
        let drawn = CallHeader { op: SiteOp::Backward, part: Some(1), source: RowSource::Draw, ..plain };
        assert_eq!(asked(&with, drawn), Ok((SitePath::Ring, 3, 6)));
        let wide = Site { ring: Some(ModularSite { l1: [9, 1 << 40], ..ring }), ..site(true) };
        assert_eq!(asked(&wide, drawn), Ok((SitePath::Ring, 4, 8)));
        assert_eq!(asked(&site(true), plain), Err(CallStatus::Nonlinear));
        let unsuited = [
            CallHeader { op: SiteOp::Forward, ..plain },
            CallHeader { dtype: Dtype::Bf16, ..plain },
            CallHeader { path: SitePath::Linear, source: RowSource::Draw, ..plain },
            CallHeader { path: SitePath::Fast, source: RowSource::Draw, ..plain },
        ];
        for header in unsuited {
            assert_eq!(asked(&with, header), Err(CallStatus::Unsuited), "{header:?}");
        }
    }

    #[test]
    fn more_rows_than_a_tenant_may_have_waiting_never_fit() {
        assert_eq!(
            ResolvedCall::by(&header(SiteOp::Forward, SitePath::Fast, None), &[site(false)], 2),
            Err(CallStatus::Shape)
        );
        let beyond = CallHeader { site: 1, ..header(SiteOp::Forward, SitePath::Fast, None) };
        assert_eq!(ResolvedCall::by(&beyond, &[site(false)], 10), Err(CallStatus::UnknownSite));
    }
}

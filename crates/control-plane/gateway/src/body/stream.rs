//! A body that is taken piece by piece, of any length that its reader accepts.
//!
//! A sender may lag `--body-timeout-ms` behind [`LEAST_BYTES_PER_S`], like the sender of a form.

use std::time::{Duration, Instant};

use axum::{
    body::{Body, Bytes, HttpBody as _},
    extract::Request,
};
use http_body_util::BodyExt as _;
use tokio::time::timeout;

use super::{broken, caller_of, check_encoding, form::LEAST_BYTES_PER_S, is, kind};
use crate::{app::App, errors::ApiError, slow_peer_timeout::PeerTimeBudget, tenant_memory::Reservation};

/// Content types of a body of bytes.
const KINDS: [&str; 2] = ["application/octet-stream", "application/x-safetensors"];

/// Memory that a body takes: a file header, and the bytes that its reader collects.
const BODY_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(crate) struct BinaryBody {
    body: Body,
    limit: Duration,
    budget: PeerTimeBudget,
    _memory: Reservation,
}

impl BinaryBody {
    /// # Errors
    /// If the body has another content type, is compressed, or the caller's tenant has no memory left.
    pub(crate) fn of(request: Request, app: &App) -> Result<Self, ApiError> {
        let kind = kind(&request);
        if !KINDS.iter().any(|wanted| is(kind, wanted)) {
            return Err(ApiError::not_binary(kind));
        }
        check_encoding(&request)?;
        let limit = app.connections.body_timeout;
        let budget = PeerTimeBudget::new(limit, LEAST_BYTES_PER_S);
        let memory = app.memory.reserve(&caller_of(&request)?.tenant, BODY_BYTES)?;
        Ok(Self { body: request.into_body(), limit, budget, _memory: memory })
    }

    /// Length in bytes as far as the request declares one.
    pub(crate) fn declared_bytes(&self) -> u64 {
        self.body.size_hint().lower()
    }

    /// Returns the next bytes; `None` at the end.
    ///
    /// # Errors
    /// If the body breaks off or arrives too slowly.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            let began = Instant::now();
            let frame = timeout(self.budget.left(), self.body.frame()).await;
            let frame = frame.map_err(|_| ApiError::body_too_slow(LEAST_BYTES_PER_S, self.limit))?;
            let Some(frame) = frame.transpose().map_err(|error| broken(&error))? else { return Ok(None) };
            // Other frames are trailers, which mean nothing here.
            if let Ok(bytes) = frame.into_data() {
                self.budget.moved(began.elapsed(), bytes.len() as u64);
                return Ok(Some(bytes));
            }
        }
    }
}

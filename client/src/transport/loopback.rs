//! An executor in this process: for tests, for examples, and for measuring the cost of a transport.
//!
//! The loopback speaks the whole protocol without a medium. Rows are rounded as on the wire.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use kernels::Activations;
use model::linear_sites::{EvaluateSites, SiteCall, SiteId};
use shmproto::{
    codec::Wire as _,
    layer::{
        CallHeader, CallStatus, ReplyHeader, RowSource, SitePath,
        control::{
            CATALOG, Catalog, Fetch, Fetched, FromLayers, MAX_FETCH_BYTES, RefusalCode, SessionOpened,
            SessionRefused, SessionStats, ToLayers,
        },
        seeded_rows::{DRAW_WORDS, SeededRows},
    },
};

use super::{Connect, Transport};
use crate::{error::LinkError, rows};

/// Number of executors so far, so that each gets its own instance number.
static INSTANCES: AtomicU64 = AtomicU64::new(1);

const MAX_ROWS: u32 = 4096;

/// An executor in this process. Clones refer to the same executor.
#[derive(Clone)]
pub struct Loopback {
    executor: Arc<Mutex<LoopbackExecutor>>,
}

struct LoopbackExecutor {
    base: Box<dyn EvaluateSites + Send>,
    catalog: Vec<u8>,
    files: Vec<Vec<u8>>,
    instance: u64,
    sessions: u64,
    stats: SessionStats,
    x: Activations,
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").finish_non_exhaustive()
    }
}

impl Loopback {
    /// Serves `base`, described by `catalog`, and the catalog's `files`.
    #[must_use]
    pub fn new(base: Box<dyn EvaluateSites + Send>, catalog: &Catalog, files: Vec<Vec<u8>>) -> Self {
        let executor = LoopbackExecutor {
            base,
            catalog: catalog.to_bytes(),
            files,
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            sessions: 0,
            stats: SessionStats::default(),
            x: Activations::default(),
        };
        Self { executor: Arc::new(Mutex::new(executor)) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut LoopbackExecutor) -> T) -> T {
        act(&mut self.executor.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Connect for Loopback {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        Ok(Box::new(self.clone()))
    }

    fn is_far(&self) -> bool {
        false
    }
}

impl Transport for Loopback {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        Ok(self.with(|executor| executor.answer(message)))
    }

    fn send_oneway(&mut self, _message: &ToLayers) {}

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        Ok(self.with(|executor| executor.call(call, x, out)))
    }
}

fn refused(code: RefusalCode, message: &str) -> FromLayers {
    FromLayers::Refused(SessionRefused { code, message: message.to_owned(), retry_after_ms: 0 })
}

impl LoopbackExecutor {
    fn answer(&mut self, message: &ToLayers) -> FromLayers {
        match message {
            ToLayers::Open(open) if open.session > self.sessions => {
                refused(RefusalCode::NoSuchSession, "open a new one")
            }
            ToLayers::Open(open) => {
                self.sessions += u64::from(open.session == 0);
                FromLayers::Opened(SessionOpened {
                    session: if open.session == 0 { self.sessions } else { open.session },
                    instance: self.instance,
                    tenant: "loopback".to_owned(),
                    catalog_bytes: u32::try_from(self.catalog.len()).unwrap_or(u32::MAX),
                    max_rows: MAX_ROWS,
                    max_waiting_rows: MAX_ROWS,
                    max_bytes: 1 << 30,
                })
            }
            ToLayers::Fetch(fetch) => self.fetch(fetch),
            ToLayers::GetStats => FromLayers::Stats(self.stats.clone()),
            ToLayers::Channel(_) | ToLayers::Close => {
                refused(RefusalCode::Malformed, "nothing is carried anywhere")
            }
        }
    }

    fn fetch(&self, fetch: &Fetch) -> FromLayers {
        let blob = match fetch.blob {
            CATALOG => Some(&self.catalog),
            file => self.files.get(file as usize - 1),
        };
        let from = usize::try_from(fetch.offset).ok();
        let bytes = blob.zip(from).and_then(|(blob, from)| blob.get(from..));
        match bytes {
            Some(bytes) => {
                let count = bytes.len().min(fetch.bytes.min(MAX_FETCH_BYTES) as usize);
                let (blob, offset) = (fetch.blob, fetch.offset);
                FromLayers::Fetched(Fetched { blob, offset, bytes: bytes[..count].to_vec() })
            }
            None => refused(RefusalCode::NoSuchBlob, "ask for what the catalog lists"),
        }
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> ReplyHeader {
        let CallHeader { part, op, path, .. } = *call;
        let asked = SiteCall { site: SiteId(call.site), part, op, path };
        let site = self.base.sites().get(call.site as usize);
        if call.path == SitePath::Ring && site.is_some_and(|site| site.ring.is_none()) {
            return ReplyHeader::refusal(call, CallStatus::Nonlinear, 0);
        }
        let Some((input, output)) = site.and_then(|site| site.words(asked)) else {
            return ReplyHeader::refusal(call, CallStatus::UnknownSite, 0);
        };
        let rows = call.rows as usize;
        let coming = if call.source == RowSource::Draw { DRAW_WORDS } else { rows * input };
        if (coming, rows * output) != (x.len(), out.len()) || call.rows > MAX_ROWS {
            return ReplyHeader::refusal(call, CallStatus::Shape, 0);
        }
        self.x.reshape(rows, input);
        match <&[f32; DRAW_WORDS]>::try_from(x) {
            Ok(words) if call.source == RowSource::Draw => {
                SeededRows::from_words(words).fill(0, input, self.x.values_mut());
            }
            _ => self.x.values_mut().copy_from_slice(x),
        }
        rows::round(call.dtype, self.x.values_mut());
        if self.base.evaluate(asked, &mut self.x, out).is_err() {
            return ReplyHeader::refusal(call, CallStatus::Failed, 0);
        }
        rows::round(call.dtype, out);
        self.stats.calls += 1;
        self.stats.rows[call.class as usize] += u64::from(call.rows);
        ReplyHeader {
            rows: call.rows,
            batch_rows: call.rows,
            ..ReplyHeader::refusal(call, CallStatus::Done, 0)
        }
    }
}

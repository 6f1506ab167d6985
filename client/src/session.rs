//! A session with an executor, which outlives connections.
//!
//! A session opens, fetches the catalog of the base, and makes calls. If a connection is lost, or another
//! executor answers at the address, the session reconnects, resumes or opens anew, and repeats unanswered
//! calls. Calls have no side effects, so this is safe. A session never continues over another base.
//!
//! # Layout
//!
//! - this file: opening, control messages
//! - [`calls`]: calls, split to the executor's limits, with retries
//! - `opening`: from a connection to a session with a valid catalog
//! - `settings`, `retry_policy`: client settings, and the waiting between retries
//! - `distinct_executors`: two sessions that must never use the same executor
//! - [`usage`]: counters of calls, rows, bytes and waiting times

pub mod calls;
pub(crate) mod distinct_executors;
mod opening;
mod retry_policy;
mod settings;
pub mod usage;

use std::sync::Arc;

use shmproto::layer::control::{
    Catalog, Fetch, FromLayers, MAX_FETCH_BYTES, RefusalCode, SessionOpened, SessionRefused, SessionStats,
    ToLayers,
};

pub use self::settings::ClientSettings;

use self::{
    distinct_executors::DistinctExecutors, opening::OpenedSession as Fresh, retry_policy::RetryPolicy,
    usage::SessionUsage,
};
use crate::{
    error::{CallError, LinkError},
    transport::{Connect, Transport},
};

/// A session for one thread; several sessions in a process are independent.
#[derive(Debug)]
pub struct Session {
    connector: Arc<dyn Connect>,
    settings: ClientSettings,
    /// `None` after a failure from which the session has not recovered.
    transport: Option<Box<dyn Transport>>,
    opened: SessionOpened,
    catalog: Catalog,
    sequence: u64,
    usage: SessionUsage,
    /// Guard against sharing an executor with another session.
    apart: Option<DistinctExecutors>,
}

impl Session {
    /// Connects, opens a session and fetches the catalog. Waits for an executor that is at capacity, but not
    /// for one that is unreachable.
    ///
    /// # Errors
    /// Fails if the executor is unreachable or refuses, or its catalog is not valid.
    pub fn open(connector: Box<dyn Connect>, settings: ClientSettings) -> Result<Self, CallError> {
        let mut patience = RetryPolicy::new(settings.patience);
        let fresh = loop {
            match opening::open(&*connector, &settings, None) {
                Ok(fresh) => break fresh,
                Err(error @ LinkError::Refused(_)) if error.may_pass() => {
                    if !patience.wait(error.retry_after_ms()) {
                        return Err(CallError::of_link(error, "of this key", patience.waited_ms()));
                    }
                }
                Err(error) => return Err(CallError::of_link(error, "of this key", patience.waited_ms())),
            }
        };
        let Fresh { transport, opened, catalog } = fresh;
        let transport = Some(transport);
        let usage = SessionUsage::default();
        let (connector, sequence, apart) = (connector.into(), 0, None);
        Ok(Self { connector, settings, transport, opened, catalog, sequence, usage, apart })
    }

    /// Opens another session with the same executor, over its own connection; `None` at the session limit.
    ///
    /// # Errors
    /// Fails if the executor is gone and does not come back, or refuses for another reason.
    pub fn another(&self) -> Result<Option<Self>, CallError> {
        let mut session = Self {
            connector: Arc::clone(&self.connector),
            settings: self.settings.clone(),
            transport: None,
            opened: self.opened.clone(),
            catalog: self.catalog.clone(),
            sequence: 0,
            usage: SessionUsage::default(),
            apart: None,
        };
        let mut patience = RetryPolicy::new(self.settings.patience);
        while session.transport.is_none() {
            match opening::open(&*session.connector, &session.settings, None) {
                Ok(fresh) => session.adopt(fresh)?,
                Err(LinkError::Refused(SessionRefused {
                    code: RefusalCode::Quota | RefusalCode::Busy,
                    ..
                })) => {
                    return Ok(None);
                }
                Err(error) => session.lose(error, &mut patience)?,
            }
        }
        session.usage = SessionUsage::default();
        Ok(Some(session))
    }

    /// Returns the limits that the executor granted.
    #[must_use]
    pub fn opened(&self) -> &SessionOpened {
        &self.opened
    }

    /// Returns the catalog of the base.
    #[must_use]
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Whether the executor computes on another machine.
    #[must_use]
    pub fn is_far(&self) -> bool {
        self.connector.is_far()
    }

    /// Returns the settings of the client.
    #[must_use]
    pub fn settings(&self) -> &ClientSettings {
        &self.settings
    }

    /// Returns the counters of this session.
    #[must_use]
    pub fn usage(&self) -> &SessionUsage {
        &self.usage
    }

    /// Resets the latency histogram.
    pub fn forget_latencies(&mut self) {
        self.usage.latencies.clear();
    }

    /// Asks for the executor's stats of this session.
    ///
    /// # Errors
    /// Fails if the executor is gone and does not come back.
    pub fn stats(&mut self) -> Result<SessionStats, CallError> {
        match self.ask(&ToLayers::GetStats)? {
            FromLayers::Stats(stats) => Ok(stats),
            other => Err(opening::unexpected("GetStats", &other).into()),
        }
    }

    /// Fetches bytes of a file of the catalog from `offset`: at least one, at most `bytes`.
    ///
    /// # Errors
    /// Fails if the executor is gone and does not come back, or does not offer these bytes.
    pub fn fetch(&mut self, blob: u32, offset: u64, bytes: u64) -> Result<Vec<u8>, CallError> {
        let bytes = u32::try_from(bytes).unwrap_or(MAX_FETCH_BYTES).min(MAX_FETCH_BYTES);
        let fetch = Fetch { blob, offset, bytes };
        let answer = self.ask(&ToLayers::Fetch(fetch.clone()))?;
        Ok(opening::fetched(&fetch, answer)?)
    }

    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, CallError> {
        let mut patience = RetryPolicy::new(self.settings.patience);
        loop {
            let error = match self.linked(&mut patience)?.ask(message) {
                Ok(FromLayers::Draining) => LinkError::Draining,
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            self.lose(error, &mut patience)?;
        }
    }

    /// Returns the connection, and reconnects if the last one was lost.
    fn linked(&mut self, patience: &mut RetryPolicy) -> Result<&mut dyn Transport, CallError> {
        while self.transport.is_none() {
            match opening::open(&*self.connector, &self.settings, Some(&self.opened)) {
                Ok(fresh) => self.adopt(fresh)?,
                Err(error) => self.lose(error, patience)?,
            }
        }
        Ok(self.transport.as_deref_mut().expect("it was just made"))
    }

    /// Continues over another connection, if it leads to the same base.
    fn adopt(&mut self, fresh: Fresh) -> Result<(), CallError> {
        let Fresh { transport, opened, catalog } = fresh;
        if (catalog.base_hash, &catalog.sites) != (self.catalog.base_hash, &self.catalog.sites) {
            let hexadecimal = |hash: [u8; 32]| types::AdapterVersion(hash).to_string();
            let (had, found) = (self.catalog.base_hash, catalog.base_hash);
            return Err(CallError::OtherBase { had: hexadecimal(had), found: hexadecimal(found) });
        }
        if let Some(apart) = &self.apart {
            apart.register_instance(&opened)?;
        }
        self.usage.reconnections += 1;
        (self.transport, self.opened) = (Some(transport), opened);
        Ok(())
    }

    /// Closes the connection and waits before the next attempt.
    fn lose(&mut self, error: LinkError, patience: &mut RetryPolicy) -> Result<(), CallError> {
        self.transport = None;
        if !error.may_pass() {
            return Err(CallError::of_link(error, &self.opened.tenant, patience.waited_ms()));
        }
        if patience.wait(error.retry_after_ms()) {
            return Ok(());
        }
        let (instance, waited_ms) = (self.opened.instance, patience.waited_ms());
        match CallError::of_link(error, &self.opened.tenant, waited_ms) {
            CallError::Link(source) => Err(CallError::PeerGone { instance, waited_ms, source }),
            full => Err(full),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(transport) = &mut self.transport {
            transport.send_oneway(&ToLayers::Close);
        }
    }
}

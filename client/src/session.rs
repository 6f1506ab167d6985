//! A session with an executor: it outlives connections.
//!
//! A session opens, knows the catalog of the base, and makes calls. Where a connection is lost, or another executor
//! answers at the address, it connects again, takes its session over or opens a new one, and repeats what was not
//! answered: calls are pure, so that is safe. It never goes on over another base.
//!
//! # Layout
//!
//! - this file: opening, control messages
//! - [`calls`]: calls, cut to what the executor takes, repeated where that helps
//! - `opening`: from a connection to a session with a catalog that makes sense
//! - `settings`, `retry_policy`: how it behaves, and how long it waits
//! - `distinct_executors`: two sessions that must never meet
//! - [`usage`]: what was sent, received and waited for

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

/// A session. One thread uses it; several sessions in a process are independent.
#[derive(Debug)]
pub struct Session {
    connector: Arc<dyn Connect>,
    settings: ClientSettings,
    /// `None` after a failure that was not mended.
    transport: Option<Box<dyn Transport>>,
    opened: SessionOpened,
    catalog: Catalog,
    sequence: u64,
    usage: SessionUsage,
    /// Whose executor this session must never be at.
    apart: Option<DistinctExecutors>,
}

impl Session {
    /// Connects, opens a session and fetches the catalog. An executor that has no room is waited for; one that is not
    /// there is not.
    ///
    /// # Errors
    /// Nobody is there, or it refuses, or its catalog makes no sense.
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

    /// Another session with the same executor, over a connection of its own; `None` if it grants no more of them.
    ///
    /// # Errors
    /// The executor is gone and does not come back, or refuses for another reason.
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

    /// What the executor granted.
    #[must_use]
    pub fn opened(&self) -> &SessionOpened {
        &self.opened
    }

    /// What the base is.
    #[must_use]
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Whether the executor computes on another machine.
    #[must_use]
    pub fn is_far(&self) -> bool {
        self.connector.is_far()
    }

    /// How the client behaves.
    #[must_use]
    pub fn settings(&self) -> &ClientSettings {
        &self.settings
    }

    /// What has been sent, received and waited for.
    #[must_use]
    pub fn usage(&self) -> &SessionUsage {
        &self.usage
    }

    /// Begins to count latencies anew.
    pub fn forget_latencies(&mut self) {
        self.usage.latencies.clear();
    }

    /// What the executor counted.
    ///
    /// # Errors
    /// The executor is gone and does not come back.
    pub fn stats(&mut self) -> Result<SessionStats, CallError> {
        match self.ask(&ToLayers::GetStats)? {
            FromLayers::Stats(stats) => Ok(stats),
            other => Err(opening::unexpected("GetStats", &other).into()),
        }
    }

    /// Bytes of a file of the catalog, from `offset`: at least one, at most `bytes`.
    ///
    /// # Errors
    /// The executor is gone and does not come back, or does not give these bytes out.
    pub fn fetch(&mut self, blob: u32, offset: u64, bytes: u64) -> Result<Vec<u8>, CallError> {
        let bytes = u32::try_from(bytes).unwrap_or(MAX_FETCH_BYTES).min(MAX_FETCH_BYTES);
        let fetch = Fetch { blob, offset, bytes };
        let answer = self.ask(&ToLayers::Fetch(fetch.clone()))?;
        Ok(opening::fetched(&fetch, answer)?)
    }

    /// Asks, and asks again on another connection if this one is lost.
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

    /// The connection; made anew where the last one was lost.
    fn linked(&mut self, patience: &mut RetryPolicy) -> Result<&mut dyn Transport, CallError> {
        while self.transport.is_none() {
            match opening::open(&*self.connector, &self.settings, Some(&self.opened)) {
                Ok(fresh) => self.adopt(fresh)?,
                Err(error) => self.lose(error, patience)?,
            }
        }
        Ok(self.transport.as_deref_mut().expect("it was just made"))
    }

    /// Goes on over another connection, if it leads to the same base.
    fn adopt(&mut self, fresh: Fresh) -> Result<(), CallError> {
        let Fresh { transport, opened, catalog } = fresh;
        if (catalog.base_hash, &catalog.sites) != (self.catalog.base_hash, &self.catalog.sites) {
            let hexadecimal = |hash: [u8; 32]| types::Generation(hash).to_string();
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

    /// Gives the connection up and waits before another is tried.
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

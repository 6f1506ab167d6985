//! Timings of single calls, recorded between a session and its connection.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use client::{
    error::LinkError,
    transport::{Connect, Transport},
};
use shmproto::layer::{
    CallHeader, CallStatus, ReplyHeader,
    control::{FromLayers, ToLayers},
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ObservedCall {
    /// Number of the call's linear group in the catalog.
    pub(super) site: u32,
    pub(super) rows: u32,
    /// From the call to its answer.
    pub(super) took: Duration,
    /// Time in the call queue, as the executor reports it.
    pub(super) waited: Duration,
    /// Rows of the batch, its own included.
    pub(super) batch_rows: u32,
}

/// Records calls. Clones share one record.
#[derive(Debug, Clone, Default)]
pub(super) struct CallWatcher(Arc<Mutex<Vec<ObservedCall>>>);

impl CallWatcher {
    pub(super) fn drain(&self) -> Vec<ObservedCall> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, seen: ObservedCall) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }
}

#[derive(Debug)]
pub(super) struct WatchedConnector {
    pub(super) connector: Box<dyn Connect>,
    pub(super) watcher: CallWatcher,
}

impl Connect for WatchedConnector {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        let transport = self.connector.connect()?;
        Ok(Box::new(WatchedTransport { transport, watcher: self.watcher.clone() }))
    }

    fn layout_hash(&self) -> u64 {
        self.connector.layout_hash()
    }
}

#[derive(Debug)]
struct WatchedTransport {
    transport: Box<dyn Transport>,
    watcher: CallWatcher,
}

impl Transport for WatchedTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        self.transport.ask(message)
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        self.transport.send_oneway(message);
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        let begun = Instant::now();
        let reply = self.transport.call(call, x, out)?;
        if reply.status == CallStatus::Done {
            let ReplyHeader { waited_us, batch_rows, .. } = reply;
            let waited = Duration::from_micros(waited_us.into());
            let (site, rows) = (call.site, call.rows);
            self.watcher.note(ObservedCall { site, rows, took: begun.elapsed(), waited, batch_rows });
        }
        Ok(reply)
    }
}

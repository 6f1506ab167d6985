//! What became of single calls, seen between a session and its connection.

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

/// A call that was answered with rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ObservedCall {
    /// The linear group it was for, by its number in the catalog.
    pub(super) site: u32,
    /// Rows it had.
    pub(super) rows: u32,
    /// From its sending to its answer.
    pub(super) took: Duration,
    /// Time it waited for its turn, as the executor says.
    pub(super) waited: Duration,
    /// Rows it was computed together with, its own among them.
    pub(super) batch_rows: u32,
}

/// Takes notes. Clones write the same ones.
#[derive(Debug, Clone, Default)]
pub(super) struct CallWatcher(Arc<Mutex<Vec<ObservedCall>>>);

impl CallWatcher {
    /// What was seen since the last time this was asked.
    pub(super) fn drain(&self) -> Vec<ObservedCall> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, seen: ObservedCall) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }
}

/// Makes connections whose calls are seen.
#[derive(Debug)]
pub(super) struct WatchedConnector {
    /// Makes them.
    pub(super) connector: Box<dyn Connect>,
    /// Sees their calls.
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

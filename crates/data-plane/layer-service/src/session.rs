//! Identity and counters of a session.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use shmproto::layer::{CallClass, control::SessionStats};

use super::{SessionId, SessionTransport, Tenant};

/// Identity of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionInfo {
    /// Number by which the client knows the session.
    pub number: SessionId,
    /// Tenant who owns the session.
    pub tenant: Tenant,
    /// Name that the client gave itself.
    pub name: String,
    /// Masking mode that the client reports.
    pub masking: String,
    /// Transport of the session's calls.
    pub transport: SessionTransport,
}

/// Counters of a session, written by the compute thread and its connection, read by any thread. The counters
/// are independent, so relaxed ordering suffices.
#[derive(Debug, Default)]
pub struct SessionCounters {
    calls: AtomicU64,
    refused: AtomicU64,
    rows: [AtomicU64; CallClass::ALL.len()],
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    wait_us: AtomicU64,
    compute_us: AtomicU64,
    batch_rows: AtomicU64,
    waiting_rows: AtomicU64,
    slab_bytes: AtomicU64,
    in_flight: AtomicU32,
    is_closed: AtomicBool,
}

/// A call that was answered with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedCall {
    /// Purpose of the rows.
    pub class: CallClass,
    /// Number of its rows.
    pub rows: u64,
    /// Bytes of its input and output rows on the wire.
    pub bytes: (u64, u64),
    /// Waiting time until the first rows were computed.
    pub waited: Duration,
    /// The call's share of its batches' computing time.
    pub computed: Duration,
    /// Rows of the largest of its batches.
    pub batch_rows: u64,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn add(to: &AtomicU64, count: u64) {
    to.fetch_add(count, Ordering::Relaxed);
}

impl SessionCounters {
    /// Adds the values of an answered call.
    pub fn answered(&self, call: &CompletedCall) {
        add(&self.calls, 1);
        add(&self.rows[call.class as usize], call.rows);
        add(&self.bytes_in, call.bytes.0);
        add(&self.bytes_out, call.bytes.1);
        add(&self.wait_us, micros(call.waited));
        add(&self.compute_us, micros(call.computed));
        add(&self.batch_rows, call.batch_rows);
    }

    /// Counts a refused call.
    pub fn refused(&self) {
        add(&self.refused, 1);
    }

    /// Returns the usage so far.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        SessionStats {
            calls: read(&self.calls),
            refused: read(&self.refused),
            rows: std::array::from_fn(|class| read(&self.rows[class])),
            bytes_in: read(&self.bytes_in),
            bytes_out: read(&self.bytes_out),
            wait_us: read(&self.wait_us),
            compute_us: read(&self.compute_us),
            batch_rows: read(&self.batch_rows),
        }
    }

    /// Returns the number of rows that wait now.
    #[must_use]
    pub fn waiting_rows(&self) -> u64 {
        self.waiting_rows.load(Ordering::Relaxed)
    }

    /// Sets the number of waiting rows.
    pub fn set_waiting_rows(&self, rows: u64) {
        self.waiting_rows.store(rows, Ordering::Relaxed);
    }

    /// Returns the bytes of the session's slab.
    #[must_use]
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes.load(Ordering::Relaxed)
    }

    /// Sets the bytes of the session's slab.
    pub fn set_slab_bytes(&self, bytes: u64) {
        self.slab_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts a concurrent call; false if there are `most` already.
    pub fn begin_call(&self, most: u32) -> bool {
        let count = |calls: u32| (calls < most).then_some(calls + 1);
        self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_ok()
    }

    /// Counts that a concurrent call has ended.
    pub fn end_call(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Marks the session as closed, so that its connection is closed too.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Whether the dispatcher has closed the session.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

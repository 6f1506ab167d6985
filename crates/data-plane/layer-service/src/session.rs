//! A session: who it is, and what it uses.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use shmproto::layer::{CallClass, control::SessionStats};

use super::{SessionId, SessionTransport, Tenant};

/// Who a session is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionFacts {
    /// What its client calls it.
    pub number: SessionId,
    /// Whose it is.
    pub tenant: Tenant,
    /// What the client calls itself.
    pub name: String,
    /// How the client protects its activations, as it says.
    pub masking: String,
    /// How its calls come.
    pub transport: SessionTransport,
}

/// What a session uses: written by the compute thread and its door, read by anyone. Each figure stands for itself, so
/// nothing is ordered.
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
    /// What the rows were for.
    pub class: CallClass,
    /// Its rows.
    pub rows: u64,
    /// Bytes of its inputs and outputs as they travelled.
    pub bytes: (u64, u64),
    /// How long it waited for its turn.
    pub waited: Duration,
    /// Its part of the time its batches took.
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
    /// Adds what a call took.
    pub fn answered(&self, call: &CompletedCall) {
        add(&self.calls, 1);
        add(&self.rows[call.class as usize], call.rows);
        add(&self.bytes_in, call.bytes.0);
        add(&self.bytes_out, call.bytes.1);
        add(&self.wait_us, micros(call.waited));
        add(&self.compute_us, micros(call.computed));
        add(&self.batch_rows, call.batch_rows);
    }

    /// A call was refused.
    pub fn refused(&self) {
        add(&self.refused, 1);
    }

    /// What it has used so far.
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

    /// Rows that wait now.
    #[must_use]
    pub fn waiting_rows(&self) -> u64 {
        self.waiting_rows.load(Ordering::Relaxed)
    }

    /// Notes how many rows wait.
    pub fn set_waiting_rows(&self, rows: u64) {
        self.waiting_rows.store(rows, Ordering::Relaxed);
    }

    /// Bytes of its slab.
    #[must_use]
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes.load(Ordering::Relaxed)
    }

    /// Notes the size of its slab.
    pub fn set_slab_bytes(&self, bytes: u64) {
        self.slab_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts a call that is under way, unless there are `most`.
    pub fn begin_call(&self, most: u32) -> bool {
        let count = |calls: u32| (calls < most).then_some(calls + 1);
        self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_ok()
    }

    /// A call is not under way any more.
    pub fn end_call(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// The hub has closed the session: its door is to hang up.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Whether the hub has closed it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

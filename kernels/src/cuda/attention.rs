//! Attention over the paged KV cache on the device, the counterpart of [`crate::attention`] on the CPU.
//!
//! A [`RowTable`] describes a batch once per pass and serves all layers:
//!
//! - Sequences with few new rows (decode, drafts) become *items* of up to 8 queries. The contexts are cut
//!   into spans, so that one long sequence occupies the whole device.
//! - Sequences with many new rows (prefill) become *tiles* of up to 64 queries.
//!
//! A batch may mix both. A row's bits depend on its own sequence alone: its keys and values, its position,
//! and the division of the sequence into passes.
//!
//! Elements of the KV cache have 16 or 32 bits. With 16 bits the tensor cores multiply halves and sum in 32
//! bits; with 32 bits a plain kernel computes in 32 bits. New keys, values and queries beyond 65,504, the
//! largest half, are clamped to it on conversion; NaN stays NaN.

mod pool;
mod row_table;

pub use pool::KvPool;
pub use row_table::{RowTable, TableShape};

//! Attention over paged keys and values on the device: what [`crate::attention`] is on the CPU.
//!
//! A batch is described once a pass by a [`RowTable`] and serves all layers:
//!
//! - sequences with few new rows (decode, drafts) become *items* of up to 8 queries, whose context is cut into spans, so
//!   that one long sequence occupies the whole device;
//! - sequences with many (prefill) become *tiles* of up to 64 queries.
//!
//! Both in one batch go side by side. A row's bits depend on its own sequence alone: on its keys and values, on its
//! position, and on how its sequence was cut into passes; never on other sequences.
//!
//! Keys and values are kept in 16 or 32 bits. With 16 the arithmetic is the tensor cores': products of halves, summed in
//! 32 bits; with 32 a plain kernel does everything in 32 bits. New keys, values and queries beyond 65,504, the largest
//! half, are limited to it where they become halves, and stay NaN if they are.

mod pool;
mod row_table;

pub use pool::KvPool;
pub use row_table::{RowTable, TableShape};

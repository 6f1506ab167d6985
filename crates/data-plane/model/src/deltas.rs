//! What adapters change, row by row.
//!
//! # Layout
//!
//! - [`matrices`]: an adapter's matrices on the host. [`device_copy`]: on their way to the device, or there; [`cpu_copy`]:
//!   where that is the CPU. [`prepared`]: the whole adapter, as a pass takes it.
//! - [`batch`]: the deltas of a batch; [`adapter_rows`]: which of its rows are whose. `adapter_lm_heads`: logits of heads of their own.
//! - [`assist`]: who sums the ranks that the device does not hold.

mod adapter_lm_heads;
pub mod adapter_rows;
pub mod assist;
pub mod batch;
pub mod cpu_copy;
pub mod device_copy;
pub mod matrices;
pub mod prepared;

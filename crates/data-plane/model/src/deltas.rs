//! Deltas of adapters, row by row.
//!
//! # Layout
//!
//! - [`matrices`]: an adapter's matrices on the host.
//! - [`device_copy`]: copies of these matrices that are on the device or being copied.
//! - [`cpu_copy`]: such copies where the device is the CPU.
//! - [`expert_matrices`]: an adapter's matrices of experts.
//! - [`prepared`]: the whole adapter in the form that a pass takes.
//! - [`batch`]: the deltas of a batch.
//! - [`adapter_rows`]: the adapter of each row of a batch.
//! - `adapter_lm_heads`: logits of adapters with their own head.
//! - [`assist`]: partial sums of ranks that the device does not hold.

mod adapter_lm_heads;
pub mod adapter_rows;
pub mod assist;
pub mod batch;
pub mod cpu_copy;
pub mod device_copy;
pub mod expert_matrices;
pub mod matrices;
pub mod prepared;

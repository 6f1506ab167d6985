//! Arithmetic of the models, on the CPU and on an NVIDIA GPU.
//!
//! # Layout
//!
//! - [`isa`], `simd`: instruction sets; kernels are written once over sixteen lanes.
//! - [`pool`]: the pinned thread pool that every kernel runs on.
//! - [`activations`], [`linear`](mod@linear): packed weights of 4, 8, 16 and 32 bits, and the rows that they
//!   multiply.
//! - [`lora`]: low-rank deltas of many adapters and ranks in one call.
//! - [`attention`]: paged KV cache with grouped heads.
//! - [`blocks`]: memory that the KV cache shares with adapters.
//! - [`elementwise`]: norms, rotary embedding, gating, caps, probabilities.
//! - [`backward`]: gradients of all of these.
//! - [`quant`]: block formats of weight files.
//! - `buffer`, `element`: memory of all arrays, and element types of 16 and 32 bits.
//! - [`cuda`]: the same operations on a GPU.
//! - [`limits`]: peak rates of the machine, for benchmarks.
//! - [`reference`]: a plain implementation of each operation, for tests.
//!
//! # Principles
//!
//! - **Batch-invariant** on the CPU. The order of each output element's sum depends on the weights alone,
//!   never on the batch, the number of threads, or the start of a chunk. Tests compare bits.
//! - `unsafe` stays inside: public functions check the kernels' conditions once per call.
//! - This crate knows no models.

pub mod activations;
pub mod attention;
pub mod backward;
pub mod blocks;
mod buffer;
pub mod cuda;
mod element;
pub mod elementwise;
pub mod isa;
pub mod limits;
pub mod linear;
pub mod lora;
pub mod pool;
pub mod quant;
pub mod reference;
mod simd;

pub use activations::{ActivationForms, Activations, Rounding};
pub use buffer::{Arena, PageSlab};
pub use isa::Isa;
pub use linear::{
    LinearPart, ModularForm, Modulus, PackError, PackedLayout, PackedMatrix, SumFrom, linear, linear_bf16,
    linear_ring, linear_ring_by_words, linear_ring_transposed, linear_transposed, linear_transposed_bf16,
    linear_transposed_rounded, linear_unrounded,
};
pub use pool::{BorrowedCores, ThreadPool};
pub use types::TensorType;

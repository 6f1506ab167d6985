//! Arithmetic: on the CPU, and the same on an NVIDIA GPU.
//!
//! # Layout
//!
//! - [`isa`], `simd`: instruction sets; kernels are written once over sixteen lanes.
//! - [`pool`]: the pinned thread pool every kernel runs on.
//! - [`activations`], [`linear`](mod@linear): packed weights of 4, 8, 16 and 32 bits and the rows they are multiplied with.
//! - [`lora`]: low-rank deltas of many adapters and ranks in one call.
//! - [`attention`]: paged keys and values, grouped heads.
//! - [`blocks`]: the memory that keys and values share with adapters.
//! - [`elementwise`]: norms, rotary embedding, gating, caps, probabilities.
//! - [`backward`]: gradients of all of these.
//! - [`quant`]: the block formats of weight files.
//! - `buffer`, `element`: the memory they lie in, and numbers of 16 and 32 bits.
//! - [`cuda`]: the same on a GPU.
//! - [`limits`]: what the machine can do at most, for benchmarks.
//! - [`reference`]: each operation once more, plainly, for tests.
//!
//! # Principles
//!
//! - **Batch-invariant** on the CPU. Every output element is summed in an order that depends on the weights alone: never
//!   on the batch, the number of threads, or where a chunk begins. Tests compare bits.
//! - `unsafe` stays inside: public functions check what the kernels rely on, once a call.
//! - Nothing here knows what a model is.

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
    LinearPart, ModularForm, Modulus, PackError, PackedLayout, PackedMatrix, SumFrom, linear, linear_ring,
    linear_ring_by_words, linear_ring_transposed, linear_transposed, linear_transposed_rounded,
    linear_unrounded,
};
pub use pool::ThreadPool;
pub use types::TensorType;

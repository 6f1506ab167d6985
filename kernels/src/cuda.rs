//! The arithmetic of this crate on an NVIDIA GPU.
//!
//! The sources are `kernels/cuda/*.cu`, one operation per file with its mathematics in the header. The build
//! compiles them ahead of time to PTX inside the binary; the driver compiles PTX for the device and caches
//! the result. Each kernel has a launcher here: a safe function that checks shapes, enqueues, and returns.
//!
//! # Layout
//!
//! - [`context`], [`error`]: a device opened for this process, and its errors.
//! - [`stream`], `event`, [`graph`]: order of work on the device.
//! - [`memory`], [`matrix`]: memory of the device, and host memory that the device reaches. `transfer`:
//!   copies.
//! - [`blocks`]: blocks that hold KV cache or adapters.
//! - [`norm`], [`rope`], [`gate`]: operations on a row between two linear layers. [`rows`]: moves rows.
//! - [`embed`](mod@embed): rows of the token table. [`sample`]: the next token of each row of logits.
//! - [`attention`]: the table of a batch's rows, the KV cache, and attention over it.
//! - [`lora`]: adapter copies on the device and their deltas. [`board`]: partial sums that CPU workers
//!   compute.
//! - [`weight`], [`linear`](mod@linear), [`blas`]: weights of any type, products with them, and cuBLASLt.
//! - [`modular`]: exact products with weights modulo 2^64.
//! - `lab`: baselines that papers compare with, apart from serving code.
//! - `modules`, [`cubins`], `launch`: the compiled kernels, as PTX and as machine code, and the only code
//!   that launches them.
//!
//! # Principles
//!
//! - The driver is loaded at run time. Without a driver [`Cuda::open`] fails with one line, and no other code
//!   here runs.
//! - Launchers only enqueue: within a stream each launch sees the writes of earlier launches. The host waits
//!   where it reads.
//! - Sums have 32 bits for all element kinds. Tests compare results with the CPU by tolerance; results of
//!   `modular` equal the CPU's bit for bit.
//! - All code also runs on the CPU with a stand-in for the driver (`kernels/cuda/on_cpu`), so the tests need
//!   no GPU.

pub mod attention;
pub mod blas;
pub mod blocks;
pub mod board;
pub mod context;
pub mod cubins;
pub mod embed;
pub mod error;
mod event;
pub mod gate;
pub mod graph;
mod lab;
mod launch;
pub mod linear;
pub mod lora;
pub mod matrix;
pub mod memory;
pub mod modular;
mod modules;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod stream;
mod transfer;
pub mod weight;

pub use blas::{Blas, BlasError};
pub use blocks::{BlockMemory, DeviceBlockLease};
pub use context::{Cuda, DeviceInfo};
pub use cubins::{CubinError, KernelCode};
pub use error::CudaError;
pub use event::CudaEvent;
pub use graph::{Graph, Replay};
pub use linear::{LinearPart, Workspace, linear, linear_transposed};
pub use matrix::Matrix;
pub use memory::{DeviceVec, HostMapping, HostWords, Pinned, PlainNumber};
pub use modular::{ModularPart, ModularScratch, linear_ring, linear_ring_transposed};
pub use norm::Norm;
pub use sample::{ChoiceReport, ChosenToken, ChosenTokens, TokenChoice};
pub use stream::CudaStream;
pub use weight::{Weight, WeightUploader};

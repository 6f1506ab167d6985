//! The same arithmetic on an NVIDIA GPU.
//!
//! The sources are `kernels/cuda/*.cu`, one operation a file with its mathematics in its header; they are compiled ahead
//! to PTX, which stands in the binary and which the driver compiles for the device and keeps. Beside each stands its
//! launcher here: a safe function that checks shapes, enqueues, and returns.
//!
//! # Layout
//!
//! - [`context`]: a device opened for this process. [`stream`], `event`, [`graph`]: the order of work on it.
//! - [`memory`], [`matrix`]: memory of the device, and of the host where the device reaches it. `transfer`: copies.
//! - [`blocks`]: blocks of keys and values or of adapters, whichever needs them.
//! - [`norm`], [`rope`], [`gate`]: what happens to a row between two linear layers. [`rows`]: moving rows about.
//! - [`embed`](mod@embed): rows of the token table. [`sample`]: the next token of each row of logits.
//! - [`attention`]: the table of a batch's rows, blocks of keys and values, and what is computed over them.
//! - [`lora`]: adapters' copies on the device, and their deltas. [`board`]: what CPU workers compute of them meanwhile.
//! - [`weight`], [`linear`](mod@linear), [`blas`]: weights of any type, what is multiplied with them, and cuBLASLt.
//! - [`modular`]: what is multiplied with them modulo 2^64, exactly.
//! - `lab`: what papers compare with, apart from what serves.
//! - `modules`, `launch`: the compiled kernels, and the one place that calls them.
//!
//! # Principles
//!
//! - The driver is loaded at run time. Without one, [`Cuda::open`] says so in one line, and nothing else here is reached.
//! - Launchers only enqueue: on one stream each sees what those before it wrote. The host waits where it reads.
//! - Sums are in 32 bits whatever the kind of the numbers; a result is compared with the CPU's by tolerance, not by bits;
//!   but those of `modular` are the CPU's to the last bit.
//! - Everything runs on the CPU too, on a stand-in for the driver (`kernels/cuda/emulator`): so do the tests.

pub mod attention;
pub mod blas;
pub mod blocks;
pub mod board;
pub mod context;
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

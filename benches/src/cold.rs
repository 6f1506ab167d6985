//! Adapters that are not on the device: the three modes of a cold start, on the real executor and a real worker.
//!
//! One core for the base model, one for a `lora-worker`, as much of CaraServe's setting as two cores allow (CHECKLIST
//! C-20, C-22, C-25, C-28). The link between host tier and device is emulated: every line says so, and how fast it is.
//! Requests go straight to the executors over ZeroMQ, as a gateway sends them: text and HTTP would cost the cores more
//! than the differences that are looked for.
//!
//! - [`executor`]: an executor in one mode with its worker, and requests to it.
//! - [`arrivals`]: who asks when for which adapter, and how much.
//! - [`adapters`]: many adapters from one file of weights.
//! - [`starts`], [`decode`], [`crossover`]: the benchmarks. [`history`], [`conversations`]: of keys and values that left the device.

pub(crate) mod adapters;
mod arrivals;
mod conversations;
pub(crate) mod crossover;
pub(crate) mod decode;
mod executor;
pub(crate) mod history;
pub(crate) mod starts;
mod tables;

pub(crate) use self::{
    arrivals::{ColdLoad, Popularity, RequestArrival},
    executor::{ColdCompute, ColdExecutor, ExecutorPlacement, Mode, ServedTiming},
};

//! Cold starts: the three modes of requests whose adapter is not on the device, with a real executor and a
//! real worker.
//!
//! One core runs the base and one a `lora-worker`: as much of CaraServe's setting as two cores allow
//!. The link between host tier and device is emulated; every line names
//! its speed. Requests reach the executors over ZeroMQ, as from a gateway: text and HTTP would cost the cores
//! more than the differences under test.
//!
//! - [`executor`]: an executor in one mode with its worker, and requests to it.
//! - [`arrivals`]: times, adapters and lengths of the requests.
//! - [`adapters`]: many adapters from one file of weights.
//! - [`starts`], [`decode`], [`crossover`]: the benchmarks. [`history`], [`conversations`]: benchmarks of
//!   offloaded KV cache.

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

//! The ZeroMQ listener: admission of clients, and isolation from hostile ones.

mod admission;
mod hostile;
mod support;
mod traffic;

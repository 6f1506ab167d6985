//! The layer service without a process: over the tiny model, and behind its ZeroMQ listener.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod calls;
mod remote;
mod ring;
mod streamed;
#[path = "../../../../../base-executor/tests/suite/tiny.rs"]
#[allow(dead_code, reason = "its adapters are for the tests of the program")]
mod tiny;

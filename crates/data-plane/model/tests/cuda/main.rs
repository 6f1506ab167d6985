//! The pass on a GPU or the driver's stand-in (`scripts/cuda-on-cpu`), compared with transformers and with
//! the pass on the CPU. Without a driver the tests print a message and pass, unless
//! `HOLOBIONT_REQUIRE_CUDA=1`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod golden;
#[path = "../golden_support/mod.rs"]
mod golden_support;
mod pass_hooks;
mod ring;
mod shortage;
mod steps;
mod support;

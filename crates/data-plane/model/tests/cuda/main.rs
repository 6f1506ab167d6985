//! The pass on a GPU, or on the driver's stand-in (`scripts/cuda-on-cpu`), judged by transformers and by the pass on the
//! CPU. Without any driver the tests say so and pass, unless `HOLOBIONT_REQUIRE_CUDA=1`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod company;
mod golden;
#[path = "../golden_support/mod.rs"]
mod golden_support;
mod ring;
mod shortage;
mod steps;
mod support;

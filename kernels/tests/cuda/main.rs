//! The launchers of [`kernels::cuda`], each against a plain reference on the CPU.
//!
//! The tests use the driver that the loader finds: a GPU's, or the stand-in of `scripts/cuda-on-cpu`. Without
//! a driver they print a message and pass, unless `HOLOBIONT_REQUIRE_CUDA=1`. `stand_in` tests the stand-in
//! itself.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attention;
mod blas;
mod board;
mod cubins;
mod embed;
mod gate;
mod graph;
mod linear;
mod lora;
mod norm;
mod ring;
mod rope;
mod rows;
mod sample;
mod stand_in;
mod support;
mod weight;

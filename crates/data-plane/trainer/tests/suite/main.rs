//! Training jobs compared with PEFT and with themselves: data, losses, steps, and state after faults.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod course;
mod data;
mod drafts;
mod faults;
mod golden;
mod loss;
mod microbatches;
mod serve;
mod steps;
mod support;

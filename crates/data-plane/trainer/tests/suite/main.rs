//! Training jobs compared with PEFT and with themselves: data, losses, steps, and state after faults.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod course;
mod data;
mod drafts;
mod early_stopping;
mod faults;
mod golden;
mod kto;
mod loss;
mod microbatches;
mod published_formats;
mod rollout_data;
mod serve;
mod sources;
mod steps;
mod support;

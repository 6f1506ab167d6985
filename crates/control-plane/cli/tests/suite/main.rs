//! The program as users type it, beside fake companion programs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chat;
mod common;
mod files;
mod gateway;
mod hub;
mod operator;
mod trainer;
mod tune;
mod up;
mod workers;

//! The program as people type it, beside programs that stand for the others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chat;
mod common;
mod files;
mod gateway;
mod operator;
mod trainer;
mod tune;
mod up;
mod workers;

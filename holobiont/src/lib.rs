//! The command a person types: `up`, `pull`, `chat`, `ls`, `bench`.
//!
//! # Layout
//!
//! - [`cli`]: arguments in, exit code out
//! - `config`: one TOML file describes a deployment; environment and flags override it
//! - `up`: starts and supervises `base-executor` and `gateway`
//! - `pull`, `models`, `hub`, `home`: models on this machine
//! - `client`, `sse`: the gateway seen from outside; `chat`, `ls` and `bench` use it
//! - `terminal`, [`exit`]: data on stdout, the rest on stderr; every error says cause, why and what to type next
//!
//! # Principles
//!
//! This crate touches no tensor and parses no model: it knows the other processes by their flags, their `ready` line
//! and their HTTP API alone. Nothing is asked of the user while a command runs, and nothing dials out unless a command
//! says so by its name.
#![forbid(unsafe_code)]

mod bench;
mod chat;
pub mod cli;
mod client;
mod config;
pub mod exit;
mod home;
mod hub;
mod ls;
mod models;
mod pull;
mod sse;
mod terminal;
mod up;

//! The command a person types.
//!
//! # Layout
//!
//! - [`cli`]: arguments in, exit code out
//! - `commands`: one room for each command
//! - `deployment`: one TOML file describes a deployment, environment and flags override it; who computes where; where
//!   its things lie; the one that runs
//! - `client`: the gateway seen from outside
//! - `models`, `home`: models on this machine, by name and from a hub
//! - `terminal`, [`exit`]: data on stdout, the rest on stderr; every error says cause, why and what to type next
//! - `fuzz_hooks`: the doors through which the crate `fuzz` gets at the parsers
//! - `../python`: the two programs that `pull` hands to a Python interpreter
//!
//! # Principles
//!
//! Commands know the rooms below them, `client`, `deployment` and `models`; those know `terminal` and `exit`, and no
//! command.
//!
//! This crate touches no tensor, and reads model files through `model` alone: it knows the other processes by their
//! flags, their `ready` line and their HTTP API. Nothing is asked of anybody but a person at a terminal, and nothing
//! dials out unless a command says so by its name.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod cli;
mod client;
mod commands;
mod deployment;
pub mod exit;
#[doc(hidden)]
pub mod fuzz_hooks;
mod home;
mod models;
mod terminal;

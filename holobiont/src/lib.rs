//! The command a person types.
//!
//! # Layout
//!
//! - [`cli`]: arguments in, exit code out
//! - `config`: one TOML file describes a deployment; environment and flags override it; `cores`: who computes where
//! - `up`, `down`, `logs`: starts and supervises `base-executor`, `lora-worker`s and `gateway`, stops them, shows what they said;
//!   `deployment` is how the later ones find the first
//! - `check`, `doctor`: what of a configuration and of this machine would not work, as `findings`
//! - `pull`, `models`, `hub`, `home`: models on this machine
//! - `client`, `sse`: the gateway seen from outside; `chat`, `ls`, `ps`, `status`, `show`, `adapters` and `bench` use it
//! - `key`: the key file; `cert`: certificates for renting base layers over TLS
//! - [`manual`]: completions, man pages and the reference, made from the command line
//! - `terminal`, `progress`, `table`, [`exit`]: data on stdout, the rest on stderr; every error says cause, why and what
//!   to type next
//! - `hostile`: the doors through which the crate `fuzz` gets at the parsers
//!
//! # Principles
//!
//! This crate touches no tensor, and reads model files through `model` alone: it knows the other processes by their
//! flags, their `ready` line and their HTTP API. Nothing is asked of anybody but a person at a terminal, and nothing
//! dials out unless a command says so by its name.
#![forbid(unsafe_code)]

mod adapters;
mod bench;
mod cert;
mod chat;
mod check;
pub mod cli;
mod client;
mod config;
mod cores;
mod deployment;
mod doctor;
mod down;
pub mod exit;
mod findings;
mod home;
#[doc(hidden)]
pub mod hostile;
mod hub;
mod key;
mod logs;
mod ls;
pub mod manual;
mod models;
mod progress;
mod ps;
mod pull;
mod show;
mod sibling;
mod sse;
mod status;
mod table;
mod terminal;
mod up;

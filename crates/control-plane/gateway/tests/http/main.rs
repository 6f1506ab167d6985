//! The gateway's public interface: real HTTP in front, an executor with canned answers behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod client;
mod fake_executor;
mod fake_trainer;
mod harness;
mod text;

mod access;
mod adapter_mixtures;
mod adapter_switches;
mod adapters;
mod anthropic;
mod bases;
mod batches;
mod classify;
mod completions;
mod embeddings;
mod every_route;
mod executors;
mod files;
mod fleet;
mod floods;
mod grammars;
mod histories;
mod jobs;
mod limits;
mod models;
mod ollama;
mod pages;
mod process;
mod provisional;
mod pushes;
mod reasoning;
mod receipts;
mod refusals;
mod responses;
mod scoring;
mod service;
mod streaming;
mod targets;
mod templates;
mod tinker;
mod tinker_exports;
mod tinker_floods;
mod tinker_kept;
mod token_ids;
mod tools;
mod uploads;
mod uris;
mod warnings;

use testkit::servers;

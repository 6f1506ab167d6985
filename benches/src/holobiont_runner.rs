//! Our side: the executor's own forward pass, and Holobiont as a server.

mod helper;
mod server;

use anyhow::Result;

pub(crate) use helper::BenchProgram;
pub(crate) use server::{
    DeploymentPlacement, EnvSetting, Holobiont, Installation, NamedAdapter, RequestModels,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyntheticLoad {
    /// Tokens of each prompt, at least one.
    pub(crate) prompt_tokens: usize,
    /// Tokens to generate after each prompt; 0 measures prefill alone.
    pub(crate) generated_tokens: usize,
    pub(crate) streams: usize,
}

/// Speeds over all streams together; 0 if the load has no such phase.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TokenRates {
    pub(crate) prefill_tokens_per_s: f64,
    pub(crate) decode_tokens_per_s: f64,
}

/// Runs a load through the forward pass that serves requests, without HTTP.
pub(crate) trait HolobiontRunner {
    /// Runs `load` once, after a warm-up.
    ///
    /// # Errors
    /// Fails if the load cannot be run or measured.
    fn rates(&self, load: SyntheticLoad) -> Result<TokenRates>;
}

//! A split client in the test's process with access to all logits.

use std::{ops::ControlFlow, path::Path, sync::Arc, time::Duration};

use client::{
    error::CallError,
    generate::{GenerateError, GenerateRequest},
    masking::Masking,
    session::{ClientSettings, Session},
    speculative::{BaselineRule, DraftPolicy},
    split_model::{ClientAdapter, SplitModel, SplitOptions},
    text::Text,
    transport::Connect,
};
use model::{
    client_weights::client_base::ClientBase,
    forward::{BLOCK_TOKENS, LogitRows, SequenceSlice},
    sampling::{Sampling, SamplingParams, logprobs},
};
use shmproto::layer::SitePath;
use speculation::ngram::{AcceptanceTable, Ngram};
use text::detokenize::TextStart;
use types::BlockId;

use crate::{
    client::{CompletionRequest, TEMPERATURE},
    fixtures,
};

/// Unmasked rows on the quantized path.
pub const OPEN: Masking = Masking::Off { path: SitePath::Fast };
/// Unmasked rows with unrounded activations, the arithmetic of masking.
pub const LINEAR: Masking = Masking::Off { path: SitePath::Linear };

const CHUNK: usize = 256;
/// Number of draft tokens per step, regardless of their acceptance probability.
const DRAFT: usize = 6;
/// Number of alternatives, equal to those requested from the gateway.
const TOP: usize = 5;
/// Token id that stands for an adapter's virtual tokens.
const VIRTUAL: u32 = 0;

/// Log-probabilities of a token as an answer with `logprobs` reports them: the bits of 32-bit floats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenScore {
    /// Value of the chosen token.
    pub chosen: u32,
    /// Values of the most likely tokens, best first.
    pub top: Vec<u32>,
}

impl TokenScore {
    fn of(logits: &[f32], token: u32) -> Self {
        let (chosen, top) = logprobs(logits, token, TOP);
        Self { chosen: chosen.to_bits(), top: top.into_iter().map(|(_, score)| score.to_bits()).collect() }
    }
}

/// A split client with its model parts and KV cache.
#[derive(Debug)]
pub struct SplitTenant {
    model: SplitModel,
    adapter: Option<ClientAdapter>,
}

impl SplitTenant {
    /// Connects to the layers of the model at `path` through `connector`, with `masking`. A local client
    /// sends `key` itself.
    ///
    /// # Errors
    /// If the executor refuses the client.
    pub fn rent(
        path: &Path,
        connector: Box<dyn Connect>,
        masking: Masking,
        key: Option<&str>,
        patience: Duration,
    ) -> Result<Self, CallError> {
        let settings = ClientSettings {
            key: key.map(str::to_owned),
            name: "tenant".to_owned(),
            masking: masking.as_str().to_owned(),
            patience,
            ..ClientSettings::default()
        };
        let mut session = Session::open(connector, settings)?;
        let mask = masking.prepare(&mut session, &mut |_, _| {})?;
        let base = ClientBase::open(path).expect("the model of the tests");
        let options = SplitOptions {
            effort: DraftPolicy::Compared(BaselineRule::Nodes(DRAFT)),
            ..SplitOptions::default()
        };
        let split = SplitModel::new(base, session, mask, &options);
        Ok(Self { model: split.expect("a split model"), adapter: None })
    }

    /// Opens the adapter at `path`, if any.
    #[must_use]
    pub fn with(mut self, path: Option<&Path>) -> Self {
        self.wear(path);
        self
    }

    /// Switches to another adapter, or to none.
    pub fn wear(&mut self, path: Option<&Path>) {
        self.adapter = path.map(|path| self.model.load_adapter(path).expect("the adapter fits"));
    }

    /// Returns the session with the executor.
    #[must_use]
    pub fn session(&mut self) -> &mut Session {
        self.model.session_mut()
    }

    /// Returns the greedy continuation of `prompt` with exactly `count` tokens.
    ///
    /// # Errors
    /// If the executor is gone or refuses.
    pub fn generate(&mut self, prompt: &[u32], count: usize) -> Result<Vec<u32>, GenerateError> {
        let task = self.task(prompt, count, None);
        let generated =
            self.model.generate(&task, self.adapter.as_ref(), &mut |_| ControlFlow::Continue(()))?;
        Ok(generated.tokens)
    }

    /// Answers a request with this client's adapter and n-gram draft tokens; also returns the number of
    /// accepted draft tokens.
    ///
    /// # Errors
    /// If the executor is gone or refuses.
    pub fn drafted(&mut self, ask: &CompletionRequest) -> Result<(Vec<u32>, u64), GenerateError> {
        let task = self.task(&ask.prompt, ask.max_tokens as usize, ask.seed);
        let mut ngram = Ngram::new(&ask.prompt, AcceptanceTable::default());
        let on_token = &mut |_| ControlFlow::Continue(());
        let generated = self.model.generate_drafted(&task, self.adapter.as_ref(), &mut ngram, on_token)?;
        Ok((generated.tokens, generated.drafted.accepted))
    }

    /// Describes the generation of `count` tokens after `prompt`: greedy, or sampled with a seed.
    fn task(&self, prompt: &[u32], count: usize, seed: Option<u64>) -> GenerateRequest {
        let temperature = if seed.is_some() { TEMPERATURE } else { 0.0 };
        let request = Sampling { temperature, seed: seed.unwrap_or(0), ..Sampling::default() };
        let sampling = SamplingParams::new(request, self.model.config().vocab_size).expect("it is possible");
        GenerateRequest { prompt: prompt.to_vec(), sampling, max_tokens: count, stop_tokens: Vec::new() }
    }

    /// Generates greedily and returns the scores of each token. [`generate`](Self::generate) must not follow,
    /// because both use the same blocks.
    pub fn scored(&mut self, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<TokenScore>) {
        let mut tokens = vec![VIRTUAL; self.virtual_tokens()];
        tokens.extend_from_slice(prompt);
        let mut computed = 0;
        let scored = (0..count).map(|_| {
            let logits = self.pass(&tokens, &mut computed, LogitRows::Last);
            let token = likeliest(&logits);
            tokens.push(token);
            (token, TokenScore::of(&logits, token))
        });
        scored.unzip()
    }

    /// Returns the logits of every position of `prompt`.
    pub fn logits(&mut self, prompt: &[u32]) -> Vec<f32> {
        self.pass(prompt, &mut 0, LogitRows::All)
    }

    /// Computes the tokens from `computed` on and returns the wanted logits.
    fn pass(&mut self, tokens: &[u32], computed: &mut usize, wanted: LogitRows) -> Vec<f32> {
        let blocks: Vec<BlockId> = (0..).take(tokens.len().div_ceil(BLOCK_TOKENS)).map(BlockId).collect();
        let (mut all, mut logits) = (Vec::new(), Vec::new());
        while *computed < tokens.len() {
            let end = tokens.len().min(*computed + CHUNK);
            let is_wanted = end == tokens.len() || wanted == LogitRows::All;
            let slice = SequenceSlice {
                trunk: &[],
                tokens: &tokens[*computed..end],
                start: *computed,
                blocks: &blocks,
                adapter: self.adapter.as_ref().map(ClientAdapter::prepared),
                logits: if is_wanted { wanted } else { LogitRows::None },
            };
            self.model.forward(&[slice], &mut logits).expect("the executor answers");
            if is_wanted {
                all.append(&mut logits);
            }
            *computed = end;
        }
        all
    }

    fn virtual_tokens(&self) -> usize {
        self.adapter.as_ref().map_or(0, |adapter| adapter.prepared().virtual_tokens())
    }
}

/// Returns the most likely token; of equals the one with the lowest id.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, &logit) in (0..).zip(logits) {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

/// Returns the tokenizer of the default model.
#[must_use]
pub fn text() -> Arc<Text> {
    let base = ClientBase::open(&fixtures::model()).expect("the model of the tests");
    Arc::new(Text::load(&base.files).expect("its tokenizer"))
}

/// Decodes tokens that continue a text.
#[must_use]
pub fn continuation(text: &Text, tokens: &[u32]) -> String {
    let mut decoder = text.decoder(TextStart::Continuation);
    let mut whole = String::new();
    tokens.iter().for_each(|&token| whole.push_str(decoder.push(token)));
    whole + decoder.finish()
}

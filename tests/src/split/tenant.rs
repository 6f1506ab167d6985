//! A split client in the test's own process, whose every logit can be looked at.

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
    sampling::{SamplingParams, SamplingRequest, logprobs},
};
use shmproto::layer::Path as SitePath;
use speculation::ngram::{AcceptanceTable, Ngram};
use text::detokenize::TextStart;
use types::BlockId;

use crate::{
    client::{CompletionRequest, TEMPERATURE},
    fixtures,
};

/// Rows that go in the clear, with the executor's own arithmetic.
pub const OPEN: Masking = Masking::Off { path: SitePath::Fast };
/// The same with unrounded activations: what masking computes with.
pub const LINEAR: Masking = Masking::Off { path: SitePath::Linear };

/// Rows of a pass over a prompt.
const CHUNK: usize = 256;
/// Tokens that are drafted at once, whatever they promise.
const DRAFT: usize = 6;
/// As many alternatives as the gateway is asked for.
const TOP: usize = 5;
/// What stands for an adapter's virtual tokens.
const VIRTUAL: u32 = 0;

/// The scores of a token as an answer with `logprobs` reports them: the bits of 32-bit floats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenScore {
    /// Of the token.
    pub chosen: u32,
    /// Of the likeliest tokens, best first.
    pub top: Vec<u32>,
}

impl TokenScore {
    fn of(logits: &[f32], token: u32) -> Self {
        let (chosen, top) = logprobs(logits, token, TOP);
        Self { chosen: chosen.to_bits(), top: top.into_iter().map(|(_, score)| score.to_bits()).collect() }
    }
}

/// A split client.
#[derive(Debug)]
pub struct SplitTenant {
    model: SplitModel,
    adapter: Option<ClientAdapter>,
}

impl SplitTenant {
    /// Rents layers of the model at `path` from what `connector` leads to, masked as `masking` says. A local client shows `key`
    /// itself.
    ///
    /// # Errors
    /// The executor does not let it in.
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

    /// Puts the adapter at `path` to use, or none.
    #[must_use]
    pub fn with(mut self, path: Option<&Path>) -> Self {
        self.wear(path);
        self
    }

    /// Puts another adapter to use, or none.
    pub fn wear(&mut self, path: Option<&Path>) {
        self.adapter = path.map(|path| self.model.load_adapter(path).expect("the adapter fits"));
    }

    /// The session.
    #[must_use]
    pub fn session(&mut self) -> &mut Session {
        self.model.session_mut()
    }

    /// The likeliest continuation of `prompt`, exactly `count` tokens.
    ///
    /// # Errors
    /// The executor is gone, or refuses.
    pub fn generate(&mut self, prompt: &[u32], count: usize) -> Result<Vec<u32>, GenerateError> {
        let task = self.task(prompt, count, None);
        let generated =
            self.model.generate(&task, self.adapter.as_ref(), &mut |_| ControlFlow::Continue(()))?;
        Ok(generated.tokens)
    }

    /// What is asked for, of this tenant's adapter, with tokens guessed at home out of what was said before; and how many
    /// guesses came true.
    ///
    /// # Errors
    /// The executor is gone, or refuses.
    pub fn drafted(&mut self, ask: &CompletionRequest) -> Result<(Vec<u32>, u64), GenerateError> {
        let task = self.task(&ask.prompt, ask.max_tokens as usize, ask.seed);
        let mut ngram = Ngram::new(&ask.prompt, AcceptanceTable::default());
        let on_token = &mut |_| ControlFlow::Continue(());
        let generated = self.model.generate_drafted(&task, self.adapter.as_ref(), &mut ngram, on_token)?;
        Ok((generated.tokens, generated.drafted.accepted))
    }

    /// `count` tokens behind `prompt`: the likeliest, or drawn with a seed.
    fn task(&self, prompt: &[u32], count: usize, seed: Option<u64>) -> GenerateRequest {
        let temperature = if seed.is_some() { TEMPERATURE } else { 0.0 };
        let request = SamplingRequest { temperature, seed: seed.unwrap_or(0), ..SamplingRequest::default() };
        let sampling = SamplingParams::new(request, self.model.config().vocab_size).expect("it is possible");
        GenerateRequest { prompt: prompt.to_vec(), sampling, max_tokens: count, stop_tokens: Vec::new() }
    }

    /// The same with the scores of each token. Nothing may be [generated](Self::generate) afterwards: both use the same
    /// blocks.
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

    /// The logits of every position of `prompt`.
    pub fn logits(&mut self, prompt: &[u32]) -> Vec<f32> {
        self.pass(prompt, &mut 0, LogitRows::All)
    }

    /// Takes the tokens from `computed` on through the model, and returns the logits that are wanted.
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

/// The lowest of the tokens that no other is likelier than.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, &logit) in (0..).zip(logits) {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

/// The tokenizer of the model of all tests.
#[must_use]
pub fn text() -> Arc<Text> {
    let base = ClientBase::open(&fixtures::model()).expect("the model of the tests");
    Arc::new(Text::load(&base.files).expect("its tokenizer"))
}

/// The text of tokens that continue others.
#[must_use]
pub fn continuation(text: &Text, tokens: &[u32]) -> String {
    let mut decoder = text.decoder(TextStart::Continuation);
    let mut whole = String::new();
    tokens.iter().for_each(|&token| whole.push_str(decoder.push(token)));
    whole + decoder.finish()
}

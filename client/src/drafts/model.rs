//! A smaller model as a draft, in this process.
//!
//! Keys and values are kept for one text, the one that was guessed at last. A branch that shares its beginning is computed from
//! where it leaves it: the draft is small, and its branches are short.

use std::{convert::Infallible, path::Path};

use files::model_files::ModelFiles;
use ids::BlockId;
use model::{
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{KvDtype, LoadedWeights, ResidentError, ResidentModel, ResidentOptions},
    sampling::logprobs,
    sources::open::{OpenError, open},
    weights::tensors::WeightsError,
};
use speculation::{
    draft::{Draft, Guess, MAX_GUESSES},
    tree::{NodeId, TokenTree},
};
use text::tokenizer::Tokenizer;

use crate::text::{Text, TextFilesError};

/// Tokens of a text that the draft reads at once.
const CHUNK_TOKENS: usize = 256;

/// Why a model cannot draft.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// It cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It has no text side.
    #[error(transparent)]
    Text(#[from] TextFilesError),
    /// Its weights are not what its configuration says.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// There is no memory for it, or no thread.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// Its tokens are others.
    #[error(
        "the draft's tokenizer is another one (token {token} is {draft:?} there and {base:?} in the base): a draft must be \
         of the base's family"
    )]
    Tokenizer {
        /// The first token that differs.
        token: u32,
        /// What it is in the draft.
        draft: String,
        /// What it is in the base.
        base: String,
    },
}

/// See the module.
#[derive(Debug)]
pub struct ModelDraft {
    model: ResidentModel,
    blocks: Vec<BlockId>,
    /// What the target has said and was asked.
    verified: Vec<u32>,
    /// The text whose keys and values are there.
    computed: Vec<u32>,
    logits: Vec<f32>,
    /// Tokens that both models have.
    vocab_size: usize,
}

impl ModelDraft {
    /// Reads the model at `path` for a base with `tokenizer` and `vocab_size` tokens. It computes on `cores`, as the client
    /// does, and keeps keys and values in at most `kv_bytes`.
    ///
    /// # Errors
    /// It cannot be read, or its tokenizer is another one.
    pub fn load(
        path: &Path,
        (tokenizer, vocab_size): (&Tokenizer, usize),
        cores: &[usize],
        kv_bytes: usize,
    ) -> Result<Self, DraftError> {
        let source = open(path)?;
        let own = Text::load(&ModelFiles::at(path).map_err(OpenError::from)?)?;
        compare(own.tokenizer(), tokenizer)?;
        let weights = LoadedWeights::load(&*source, cores.len().max(1))?;
        let vocab_size = vocab_size.min(weights.config().vocab_size);
        let block_bytes = weights.kv_shape(KvDtype::Auto).block_bytes();
        let longest = weights.config().context_length.div_ceil(BLOCK_TOKENS).saturating_mul(block_bytes);
        let options = ResidentOptions {
            cores: cores.to_vec(),
            kv_bytes: kv_bytes.min(longest),
            kv_dtype: KvDtype::Auto,
        };
        let model = ResidentModel::new(weights, &options)?;
        let blocks = (0..u32::try_from(model.kv_blocks()).unwrap_or(u32::MAX)).map(BlockId).collect();
        Ok(Self { model, blocks, verified: Vec::new(), computed: Vec::new(), logits: Vec::new(), vocab_size })
    }

    /// Another text begins, with `prompt`.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.verified.clear();
        self.verified.extend_from_slice(prompt);
    }

    /// Computes what of `text`, which has at least one token, is not there: logits of its last token.
    fn read(&mut self, text: &[u32]) {
        let same = self.computed.iter().zip(text).take_while(|(a, b)| a == b).count();
        let mut start = same.min(text.len() - 1);
        self.computed.truncate(start);
        for tokens in text[start..].chunks(CHUNK_TOKENS) {
            let blocks = &self.blocks;
            let slice =
                SequenceSlice { trunk: &[], tokens, start, blocks, adapter: None, logits: LogitRows::Last };
            let Ok(()) = self.model.forward_in_company(&[slice], &mut self.logits, &mut model::sites::Alone);
            start += tokens.len();
            self.computed.extend_from_slice(tokens);
        }
    }
}

impl Draft for ModelDraft {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.verified.extend_from_slice(tokens);
        Ok(())
    }

    /// None where the text is too long for the draft, or has a token that it does not know.
    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<Guess>, Infallible> {
        let path = at.into_iter().flat_map(|at| tree.path(at).iter()).map(|node| tree.token(node));
        let text: Vec<u32> = self.verified.iter().copied().chain(path).collect();
        let room = (self.blocks.len() * BLOCK_TOKENS).min(self.model.config().context_length);
        if text.is_empty() || text.len() > room || text.iter().any(|&token| token as usize >= self.vocab_size)
        {
            return Ok(Vec::new());
        }
        self.read(&text);
        let (_, likely) = logprobs(&self.logits, text[0], MAX_GUESSES);
        let known = likely.into_iter().filter(|&(token, _)| (token as usize) < self.vocab_size);
        Ok(known.map(|(token, logprob)| Guess { token, probability: f64::from(logprob).exp() }).collect())
    }
}

/// Every token of both is the same.
fn compare(draft: &Tokenizer, base: &Tokenizer) -> Result<(), DraftError> {
    let tokens = draft.vocab_size().max(base.vocab_size());
    let differs = |&token: &u32| draft.token_bytes(token) != base.token_bytes(token);
    match (0..u32::try_from(tokens).unwrap_or(u32::MAX)).find(differs) {
        None => Ok(()),
        Some(token) => Err(DraftError::Tokenizer {
            token,
            draft: draft.token_text(token).into_owned(),
            base: base.token_text(token).into_owned(),
        }),
    }
}

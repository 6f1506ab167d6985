//! From a session to a model that answers.

use std::path::PathBuf;

use model::{
    resident::KvDtype,
    sampling::{SamplingParams, SamplingRequest},
    sources::open::OpenError,
};
use model_files::generation_defaults::GenerationDefaults;

use super::{
    drafts::{AnyDrafter, DraftArguments},
    exit::CliError,
    masking::MaskingArguments,
    remote_base::{ConnectedBase, RemoteBaseArguments},
    size::ByteSize,
    terminal::Terminal,
};
use crate::{
    base::BaseError,
    split_model::{ClientAdapter, SplitModel, SplitOptions},
    text::Text,
};

/// What is run, and with how much of this machine.
#[derive(Debug, clap::Args)]
pub(super) struct SetupArguments {
    #[command(flatten)]
    pub(super) rent: RemoteBaseArguments,
    #[command(flatten)]
    masking: MaskingArguments,
    /// Directory of your adapter
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Memory for keys and values
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    kv_bytes: ByteSize,
    /// Cores to compute on, as 0,2,3; else one thread that is not pinned
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<usize>,
    #[command(flatten)]
    drafts: DraftArguments,
}

/// How an answer is drawn.
#[derive(Debug, clap::Args)]
pub(super) struct SamplingArguments {
    /// Most tokens of an answer; 0 for none
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(super) max_tokens: usize,
    /// 0 for the likeliest answer; else as the model's makers say
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Draws from the likeliest tokens up to this sum of probabilities
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draws from this many of the likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Fixes what is drawn; else it is another each time
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Goes on after the model has ended its answer
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingArguments {
    /// Tokens that end an answer: the tokenizer's, and those the model's makers add.
    pub(super) fn stop_tokens(&self, ready: &ReadyModel) -> Vec<u32> {
        match self.ignore_eos {
            true => Vec::new(),
            false => [ready.text.stop_tokens(), &ready.defaults.eos_token_ids].concat(),
        }
    }

    /// The sampling that is asked for, over what the model's makers recommend.
    pub(super) fn params(&self, ready: &ReadyModel) -> Result<SamplingParams, CliError> {
        let defaults = &ready.defaults;
        let neutral = SamplingRequest::default();
        let request = SamplingRequest {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(neutral.temperature),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(neutral.top_p),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
            repetition_penalty: defaults.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            seed: self.seed.unwrap_or_else(rand::random),
            ..neutral
        };
        let vocab_size = ready.model.config().vocab_size;
        SamplingParams::new(request, vocab_size).map_err(|error| CliError::Usage(error.to_string()))
    }
}

/// A model that answers.
#[derive(Debug)]
pub(super) struct ReadyModel {
    pub(super) model: SplitModel,
    pub(super) adapter: Option<ClientAdapter>,
    pub(super) text: Text,
    /// Who guesses its tokens, if somebody does.
    pub(super) guesses: Option<AnyDrafter>,
    defaults: GenerationDefaults,
    /// How activations travel and what the executor sees of them, in words.
    pub(super) mode: String,
}

impl SetupArguments {
    /// Connects, fetches what is missing, and says the mode once.
    pub(super) fn ready(&self, terminal: Terminal) -> Result<ReadyModel, CliError> {
        let masking = self.masking.masking(&self.rent, terminal)?;
        // Before anything is fetched for it.
        if let Some(path) = &self.adapter {
            std::fs::metadata(path).map_err(|source| CliError::Read { path: path.clone(), source })?;
        }
        let ConnectedBase { mut session, base, text } = self.rent.rent(&masking, terminal)?;
        let defaults = base.files.generation_defaults().map_err(OpenError::from).map_err(BaseError::from)?;
        let mut progress = terminal.progress("preparing noises");
        let mask = masking.prepare(&mut session, &mut |done, total| progress(done as u64, total as u64))?;
        let kv_bytes = usize::try_from(self.kv_bytes.0).unwrap_or(usize::MAX);
        let options = SplitOptions {
            cores: self.cores.clone(),
            kv_bytes,
            kv_dtype: KvDtype::Auto,
            effort: self.drafts.effort(),
            ..SplitOptions::default()
        };
        let files = base.files.clone();
        let model = SplitModel::new(base, session, mask, &options)?;
        let adapter = self.adapter.as_ref().map(|path| model.load_adapter(path)).transpose()?;
        let guesses = self.drafts.guesses(&model, &files, &self.cores)?;
        let mode = format!("split over {}, masking {}", self.rent.connect.transport()?, model.mode());
        terminal.note(format_args!("{mode}: {}", what_is_seen(&model)));
        Ok(ReadyModel { model, adapter, text, guesses, defaults, mode })
    }
}

fn what_is_seen(model: &SplitModel) -> &'static str {
    match model.mode() {
        "off" => "the executor sees activations; see docs/guides/split.md",
        "shares" => {
            "neither executor sees activations, unless both put together what they saw; see `privacy`"
        }
        "pads" => "the executor sees no activations; see `privacy`",
        _ => "the executor sees obfuscated activations, which is no secrecy; see docs/guides/split.md",
    }
}

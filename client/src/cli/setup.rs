//! From arguments to a model that is ready to generate.

use std::path::PathBuf;

use model::{
    sampling::{Sampling, SamplingParams},
    sources::open::OpenError,
};
use model_files::generation_defaults::GenerationDefaults;
use settings::ByteCount;

use super::{
    drafts::{AnyDrafter, DraftArguments},
    exit::CliError,
    masking::MaskingArguments,
    remote_base::{ConnectedBase, RemoteBaseArguments},
    terminal::Terminal,
};
use crate::{
    base::BaseError,
    split_model::{ClientAdapter, SplitModel, SplitOptions},
    text::Text,
};

#[derive(Debug, clap::Args)]
pub(super) struct SetupArguments {
    #[command(flatten)]
    pub(super) rent: RemoteBaseArguments,
    #[command(flatten)]
    masking: MaskingArguments,
    /// Directory of your adapter
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Memory for the KV cache
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    kv_bytes: ByteCount,
    /// Cores to compute on, as 0,2,3; else one unpinned thread
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<usize>,
    #[command(flatten)]
    drafts: DraftArguments,
}

#[derive(Debug, clap::Args)]
pub(super) struct SamplingArguments {
    /// Maximum number of tokens in an answer; 0 for none
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(super) max_tokens: usize,
    /// Sampling temperature, 0 for the most likely tokens [default: as the model recommends]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Samples from the most likely tokens up to this sum of probabilities
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Samples from this many of the most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Seed that makes an answer reproducible; else each answer is random
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Continues after the model has ended its answer
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingArguments {
    /// Returns the tokens that end an answer: the tokenizer's, and those of the model's generation defaults.
    pub(super) fn stop_tokens(&self, ready: &ReadyModel) -> Vec<u32> {
        match self.ignore_eos {
            true => Vec::new(),
            false => [ready.text.stop_tokens(), &ready.defaults.eos_token_ids].concat(),
        }
    }

    /// Returns the sampling parameters: the options, else the model's generation defaults.
    pub(super) fn params(&self, ready: &ReadyModel) -> Result<SamplingParams, CliError> {
        let defaults = &ready.defaults;
        let neutral = Sampling::default();
        let request = Sampling {
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

#[derive(Debug)]
pub(super) struct ReadyModel {
    pub(super) model: SplitModel,
    pub(super) adapter: Option<ClientAdapter>,
    pub(super) text: Text,
    /// Drafter, if speculative decoding is on.
    pub(super) guesses: Option<AnyDrafter>,
    defaults: GenerationDefaults,
    /// Transport and masking mode, for messages.
    pub(super) mode: String,
}

impl SetupArguments {
    /// Connects, fetches what is missing, and prints the mode once.
    pub(super) fn ready(&self, terminal: Terminal) -> Result<ReadyModel, CliError> {
        let masking = self.masking.masking(&self.rent, terminal)?;
        // A missing adapter is reported before anything is fetched.
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
            kv_dtype: None,
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
        "shares" => "neither executor sees activations, unless both combine their data; see `privacy`",
        "pads" => "the executor sees no activations; see `privacy`",
        _ => "the executor sees obfuscated activations, which are not secret; see docs/guides/split.md",
    }
}

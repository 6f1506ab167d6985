//! `base-executor check`: reports whether an adapter is usable with a base model, and all reasons against it.
//!
//! Exit status: 0 usable, 1 unusable, 3 the model or the adapter is missing.

mod adapter_text;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use clap::Parser;
use kernels::lora::LoraPrecision;
use model::{
    adapter::{
        Adapter, AdapterError, AdapterKind, AdapterWarning, AnyAdapter, DraftShape, VocabularyChanges,
    },
    deltas::prepared::{EncodedAdapter, PreparedAdapter},
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::source::{Target, TensorId, WeightSource},
};
use model_files::location::{hub_cache, resolve};
use serde_json::{Value, json};
use types::BlockId;

use self::adapter_text::ComparedText;

/// Exit status for a missing model or adapter.
const NOT_FOUND: u8 = 3;

/// Number of probe tokens, all different.
const PROBE_TOKENS: u32 = BLOCK_TOKENS as u32;

/// Checks whether an adapter is usable with a base model, and why not.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(name = "base-executor check", version)]
pub struct CheckConfig {
    /// Base model: a GGUF file, a directory, or a hub name (org/name@revision).
    #[arg(long, value_name = "NAME_OR_PATH", env = "HOLOBIONT_MODEL")]
    pub model: String,
    /// Adapter: a directory in PEFT's format or a GGUF adapter.
    #[arg(long, value_name = "PATH")]
    pub adapter: PathBuf,
    /// Also run a short prompt with and without the adapter and compare the logits.
    #[arg(long)]
    pub probe: bool,
    /// Print one JSON object instead of lines to read.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug)]
enum AdapterCheckReport {
    NotFound(String),
    Unusable(Vec<AdapterError>),
    /// The text files beside the adapter are unusable.
    BadText(String),
    Usable(AdapterSummary),
}

#[derive(Debug)]
struct AdapterSummary {
    kind: AdapterKind,
    generation: String,
    modules: usize,
    rank: usize,
    /// Modules of the base that the adapter has copies of, by PEFT's names.
    saved: Vec<&'static str>,
    /// Labels of the adapter's classification head.
    labels: Vec<String>,
    virtual_tokens: usize,
    bytes: usize,
    base_model: Option<String>,
    /// Layers and tokens that a draft adapter computes.
    draft: Option<DraftShape>,
    probe: Option<LogitShift>,
    /// Whether the adapter has its own chat template.
    has_template: bool,
    /// Parts of the adapter's files that have no effect, and differences from the base's tokenizer.
    notes: Vec<String>,
}

fn words(draft: &DraftShape) -> String {
    let tokens = draft.shortlist.as_ref().map_or("all".to_owned(), |ids| ids.len().to_string());
    format!("the first {} layers, {tokens} tokens; it answers no requests", draft.layers)
}

/// Change of the logits by the adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LogitShift {
    largest: f64,
    rms: f64,
}

/// Checks an adapter and prints the report.
///
/// # Errors
/// If the base model cannot be read, or memory for the probe is missing.
pub fn run(config: &CheckConfig) -> anyhow::Result<ExitCode> {
    let report = examine(config)?;
    if config.json {
        println!("{}", report.json());
    } else {
        report.lines().iter().for_each(|line| println!("{line}"));
    }
    Ok(match report {
        AdapterCheckReport::Usable(_) => ExitCode::SUCCESS,
        AdapterCheckReport::Unusable(_) | AdapterCheckReport::BadText(_) => ExitCode::FAILURE,
        AdapterCheckReport::NotFound(_) => ExitCode::from(NOT_FOUND),
    })
}

fn examine(config: &CheckConfig) -> anyhow::Result<AdapterCheckReport> {
    let model = match resolve(&config.model, &hub_cache()) {
        Ok(model) if model.exists() => model,
        Ok(model) => return Ok(not_found("base model", &model)),
        Err(error) => return Ok(AdapterCheckReport::NotFound(error.to_string())),
    };
    if !config.adapter.exists() {
        return Ok(not_found("adapter", &config.adapter));
    }
    let source = model::sources::open::open(&model)?;
    let Ok((adapter, notes)) = AnyAdapter::read_with_notes(&config.adapter, source.config()) else {
        return Ok(AdapterCheckReport::Unusable(AnyAdapter::problems(&config.adapter, source.config())));
    };
    let ComparedText { template, warnings } = match adapter_text::compare(&model, &config.adapter) {
        Ok(compared) => compared,
        Err(error) => return Ok(AdapterCheckReport::BadText(error.to_string())),
    };
    let draft = match &adapter {
        AnyAdapter::Drafts(draft) => Some(draft.shape.clone()),
        _ => None,
    };
    let kind = adapter.kind();
    let prepared = Arc::new(prepared(&*source, &adapter)?);
    let (vocabulary, modules) = (adapter.vocabulary(), adapter.modules());
    let head = adapter.classification_head();
    let adapter = adapter.adapter();
    Ok(AdapterCheckReport::Usable(AdapterSummary {
        kind,
        generation: match &template {
            Some(source) => adapter.generation.with_chat_template(source).to_string(),
            None => adapter.generation.to_string(),
        },
        modules,
        rank: adapter.method.rank().max(vocabulary.map_or(0, VocabularyChanges::rank)),
        saved: vocabulary.map_or_else(Vec::new, VocabularyChanges::saved),
        labels: head.map_or_else(Vec::new, |head| head.labels().to_vec()),
        virtual_tokens: adapter.method.virtual_tokens(),
        bytes: prepared.bytes() + head.map_or(0, |head| head.bytes()),
        base_model: adapter.base_model.clone(),
        // A draft adapter changes no answer.
        probe: if config.probe && draft.is_none() { Some(probe(&*source, &prepared)?) } else { None },
        draft,
        has_template: template.is_some(),
        notes: notes.iter().map(AdapterWarning::to_string).chain(warnings).collect(),
    }))
}

fn not_found(what: &str, path: &Path) -> AdapterCheckReport {
    AdapterCheckReport::NotFound(format!("there is no {what} at {}; check the path", path.display()))
}

/// Prepares an adapter as the executor does; DoRA needs the base weights.
fn prepared(source: &(dyn WeightSource + Sync), adapter: &AnyAdapter) -> anyhow::Result<PreparedAdapter> {
    let (config, precision) = (source.config(), precision(source));
    let encode = |adapter: &Adapter| EncodedAdapter::new(adapter, config, precision);
    let encoded = match adapter {
        AnyAdapter::Answers(_) | AnyAdapter::Drafts(_) | AnyAdapter::Classifies(_) => {
            encode(adapter.adapter())
        }
        AnyAdapter::Vocabulary(it) => encode(&it.adapter).with_vocabulary(it.changes.clone()),
        AnyAdapter::Biased(it) => encode(&it.adapter).with_scales(it.biases.clone()),
        AnyAdapter::Decomposed(dora) => {
            let base = LoadedWeights::open(source, None, process::allowed_cores()?.len(), &|_| {})?.shared();
            let (adapter, scales) = dora.over(config, |layer, target| base.linear_layer(layer, target))?;
            encode(&adapter).with_scales(scales)
        }
    };
    Ok(PreparedAdapter::of(encoded, config)?)
}

/// Returns the executor's adapter precision for these weights.
fn precision(source: &dyn WeightSource) -> LoraPrecision {
    use kernels::TensorType::{Bf16, F16, F32};
    match source.tensor(TensorId::Weight(0, Target::Q)).map(|tensor| tensor.kind) {
        Some(F32 | F16 | Bf16) => LoraPrecision::Exact,
        _ => LoraPrecision::Compact,
    }
}

/// Compares the logits of a fixed prompt with and without the adapter.
fn probe(source: &(dyn WeightSource + Sync), adapter: &Arc<PreparedAdapter>) -> anyhow::Result<LogitShift> {
    let cores = process::allowed_cores()?;
    let weights = LoadedWeights::load(source, cores.len())?;
    let blocks = (adapter.virtual_tokens() + PROBE_TOKENS as usize).div_ceil(BLOCK_TOKENS);
    let kv_bytes = blocks * weights.kv_shape(None).block_bytes();
    let blocks: Vec<BlockId> = (0..).map(BlockId).take(blocks).collect();
    let options = ResidentOptions { cores, kv_bytes, kv_dtype: None };
    let mut model = ResidentModel::new(weights, &options)?;
    let vocab = u32::try_from(model.vocab_size()).unwrap_or(u32::MAX).max(1);
    let tokens: Vec<u32> = (0..PROBE_TOKENS).map(|index| (index * 7919 + 1) % vocab).collect();
    let mut logits = |adapter: Option<&Arc<PreparedAdapter>>| {
        let mut rows = Vec::new();
        let start = adapter.map_or(0, |adapter| adapter.virtual_tokens());
        let prefix = vec![0; start];
        let slice = |tokens, start, logits| SequenceSlice {
            trunk: &[],
            tokens,
            start,
            blocks: &blocks,
            adapter,
            logits,
        };
        if start > 0 {
            model.forward(&[slice(&prefix, 0, LogitRows::None)], &mut rows);
        }
        model.forward(&[slice(&tokens, start, LogitRows::All)], &mut rows);
        rows
    };
    Ok(change(&logits(None), &logits(Some(adapter))))
}

fn change(without: &[f32], with: &[f32]) -> LogitShift {
    let differences = || without.iter().zip(with).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs());
    let squares: f64 = differences().map(|difference| difference * difference).sum();
    LogitShift {
        largest: differences().fold(0.0, f64::max),
        rms: (squares / without.len().max(1) as f64).sqrt(),
    }
}

impl AdapterCheckReport {
    fn lines(&self) -> Vec<String> {
        match self {
            Self::NotFound(why) => vec![why.clone()],
            Self::Unusable(problems) => {
                let count = problems.len();
                let head = format!("not usable: {count} problem{}", if count == 1 { "" } else { "s" });
                std::iter::once(head).chain(problems.iter().map(|problem| format!("  {problem}"))).collect()
            }
            Self::BadText(why) => vec!["not usable: 1 problem".to_owned(), format!("  {why}")],
            Self::Usable(summary) => summary.lines(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::NotFound(why) => {
                json!({ "usable": false, "found": false, "problems": [{ "message": why }] })
            }
            Self::Unusable(problems) => {
                let problems: Vec<Value> = problems.iter().map(problem).collect();
                json!({ "usable": false, "found": true, "problems": problems })
            }
            Self::BadText(why) => {
                json!({ "usable": false, "found": true, "problems": [{ "message": why }] })
            }
            Self::Usable(summary) => summary.json(),
        }
    }
}

/// Returns a problem as JSON, with the tensor, module or option that it concerns.
fn problem(error: &AdapterError) -> Value {
    let message = error.to_string();
    match error {
        AdapterError::Shape { tensor, expected, found, .. } => {
            json!({ "tensor": tensor, "expected": expected, "found": found, "message": message })
        }
        AdapterError::UnknownTensor { tensor, .. }
        | AdapterError::Expert { tensor, .. }
        | AdapterError::Router { tensor, .. }
        | AdapterError::BaseCopy { tensor, .. }
        | AdapterError::ResizedVocabulary { tensor, .. }
        | AdapterError::ForeignNames { tensor, .. }
        | AdapterError::MixedNames { tensor, .. }
        | AdapterError::Duplicate { tensor, .. }
        | AdapterError::Missing { tensor, .. }
        | AdapterError::NotFinite { tensor, .. } => json!({ "tensor": tensor, "message": message }),
        AdapterError::NotTargeted { module, .. } | AdapterError::Rank { module, .. } => {
            json!({ "module": module, "message": message })
        }
        AdapterError::Unsupported { option, .. } | AdapterError::Option { option, .. } => {
            json!({ "option": option, "message": message })
        }
        _ => json!({ "message": message }),
    }
}

impl AdapterSummary {
    fn lines(&self) -> Vec<String> {
        let Self { kind, generation, modules, rank, saved, virtual_tokens, bytes, base_model, draft, .. } =
            self;
        let mut lines = vec![
            "usable".to_owned(),
            format!("  kind        {kind}"),
            format!("  generation  {generation}"),
            format!("  modules     {modules}"),
        ];
        lines.extend(match kind {
            AdapterKind::Lora
            | AdapterKind::Dora
            | AdapterKind::Activated
            | AdapterKind::Embedding
            | AdapterKind::Saved
            | AdapterKind::Classification
            | AdapterKind::Tokens
            | AdapterKind::Biased => Some(format!("  rank        {rank}")),
            AdapterKind::Ia3 => None,
            AdapterKind::Prefix | AdapterKind::Prompt => {
                Some(format!("  prefix      {virtual_tokens} virtual tokens"))
            }
        });
        if !saved.is_empty() {
            lines.push(format!("  saved       {}", saved.join(", ")));
        }
        if !self.labels.is_empty() {
            let labels: Vec<String> =
                self.labels.iter().map(|label| label.escape_debug().to_string()).collect();
            lines.push(format!("  labels      {}", labels.join(", ")));
        }
        lines.extend(draft.as_ref().map(|draft| format!("  draft       {}", words(draft))));
        lines.push(format!("  bytes       {bytes}"));
        lines.extend(self.has_template.then(|| "  template    the adapter's own chat template".to_owned()));
        lines.extend(base_model.as_ref().map(|name| format!("  trained on  {}", name.escape_debug())));
        lines.extend(self.probe.map(|change| match change {
            LogitShift { largest: 0.0, .. } => {
                "  probe       no logit changes: the adapter has no effect".to_owned()
            }
            LogitShift { largest, rms } => {
                format!("  probe       logits change by up to {largest:.4}, {rms:.4} on average (rms)")
            }
        }));
        lines.extend(self.notes.iter().map(|note| format!("  note        {note}")));
        lines
    }

    fn json(&self) -> Value {
        let Self { kind, generation, modules, rank, saved, virtual_tokens, bytes, base_model, draft, .. } =
            self;
        let kind = match kind {
            AdapterKind::Lora => "lora",
            AdapterKind::Dora => "dora",
            AdapterKind::Activated => "alora",
            AdapterKind::Embedding => "embedding",
            AdapterKind::Saved => "saved",
            AdapterKind::Classification => "classification",
            AdapterKind::Ia3 => "ia3",
            AdapterKind::Prefix => "prefix",
            AdapterKind::Prompt => "prompt",
            AdapterKind::Tokens => "tokens",
            AdapterKind::Biased => "biased",
        };
        let probe = self.probe.map(|LogitShift { largest, rms }| {
            json!({ "changes": largest > 0.0, "largest_change": largest, "rms_change": rms, "tokens": PROBE_TOKENS })
        });
        let draft = draft.as_ref().map(|draft| {
            json!({ "layers": draft.layers, "tokens": draft.shortlist.as_ref().map(|ids| ids.len()) })
        });
        json!({
            "usable": true, "found": true, "kind": kind, "generation": generation, "modules": modules,
            "rank": rank, "saved": saved, "labels": self.labels, "virtual_tokens": virtual_tokens, "bytes": bytes, "base_model": base_model, "draft": draft, "probe": probe, "problems": [],
            "own_chat_template": self.has_template, "notes": self.notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_measured_by_its_largest_and_its_mean_square() {
        assert_eq!(change(&[1.0, 2.0], &[1.0, 2.0]), LogitShift { largest: 0.0, rms: 0.0 });
        assert_eq!(change(&[0.0; 4], &[0.0, -2.0, 0.0, 0.0]), LogitShift { largest: 2.0, rms: 1.0 });
    }
}

//! `holobiont adapters convert`: writes the LoRA that an executor serves for an adapter, or one of fewer
//! ranks.

use std::path::{Path, PathBuf};

use model::adapter::{
    Adapter, AdapterKind, AdapterWarning, AnyAdapter,
    by_name::{MergeError, NamedLora},
    combination::TruncationLoss,
    limits::MAX_RANK,
};
use serde_json::json;

use super::AdaptersError;
use crate::{
    client::GatewayClient,
    terminal::{PrintFormat, Terminal, table::size},
};

/// Arguments of the subcommand `adapters convert`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConvertArguments {
    /// Directory of a PEFT adapter of a type that is served as a LoRA
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Directory of the LoRA; it must not exist
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Maximum rank of each layer; smaller changes are cut by their singular values
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_RANK as u64))]
    rank: Option<u64>,
    /// Base model: a path, or a name that `holobiont ls` shows [default: the gateway's model, else the only
    /// one]
    #[arg(long, value_name = "NAME_OR_PATH")]
    model: Option<String>,
}

pub(super) fn run(
    arguments: &ConvertArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let ConvertArguments { directory, output, rank, model } = arguments;
    if output.exists() {
        return Err(AdaptersError::Exists(output.clone()));
    }
    let base = super::base_model(model.as_deref(), client)?;
    let source = model::sources::open::open(&base).map_err(AdaptersError::Base)?;
    let (adapter, notes) = AnyAdapter::read_with_notes(directory, source.config())?;
    let adapter = lora(adapter, directory)?;
    let whole = NamedLora::of(&adapter, source.config());
    let rank = rank.and_then(|rank| usize::try_from(rank).ok()).unwrap_or(MAX_RANK);
    let (written, loss) = whole.truncated(rank);
    written.write(output).map_err(MergeError::from)?;
    report(output, &written, &notes, loss.as_ref(), terminal);
    Ok(())
}

/// Returns the adapter if it is a LoRA, or was read as one.
fn lora(adapter: AnyAdapter, directory: &Path) -> Result<Adapter, AdaptersError> {
    let kind = adapter.kind();
    if kind != AdapterKind::Lora {
        return Err(AdaptersError::NoLora { directory: directory.to_owned(), kind });
    }
    Ok(adapter.answering(directory)?)
}

fn report(
    output: &Path,
    written: &NamedLora,
    notes: &[AdapterWarning],
    loss: Option<&TruncationLoss>,
    terminal: Terminal,
) {
    let rank = written.modules.values().map(|module| module.rank).max().unwrap_or(0);
    let (bytes, modules) = (super::stats::weight_bytes(output), written.modules.len());
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({
            "output": output,
            "modules": modules,
            "rank": rank,
            "bytes": bytes,
            "largest_error": loss.map_or(0.0, |loss| loss.error),
            "module_of_largest_error": loss.map(|loss| &loss.module),
            "notes": notes.iter().map(AdapterWarning::to_string).collect::<Vec<_>>(),
        })),
        PrintFormat::Human => {
            let error = loss.map_or_else(
                || "without a further error".to_owned(),
                |loss| format!("{:.2} % of the change of {} is missing", 100.0 * loss.error, loss.module),
            );
            terminal.print(format!(
                "{} is written: rank {rank}, {}, {modules} modules changed, {error}",
                output.display(),
                size(bytes)
            ));
            notes.iter().for_each(|note| terminal.print(format!("  note  {note}")));
        }
    }
}

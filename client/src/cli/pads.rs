//! The command `pads`: makes pads in advance, and shows how many are left.

use std::path::{Path, PathBuf};

use model::site_model::SiteModel;
use rustix::thread::CpuSet;
use serde_json::json;
use settings::ByteCount;

use super::{
    exit::CliError,
    terminal::{OutputFormat, Terminal},
};
use crate::{
    error::CallError,
    masking::{
        Direction,
        one_time_pads::{maker::PadGenerator, pool::PadPool},
    },
};
use model::linear_sites::SiteId;

const USUAL_BYTES: u64 = 4 << 30;

#[derive(Debug, clap::Args)]
pub(super) struct PadArguments {
    /// Directory of the pads [default: $XDG_STATE_HOME/holobiont/pads, or the same in ~/.local/state]
    #[arg(long = "pads", value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Maximum total size of the stored pads [default: 4GiB]
    #[arg(long, value_name = "SIZE")]
    pad_bytes: Option<ByteCount>,
}

impl PadArguments {
    pub(super) fn is_said(&self) -> bool {
        self.directory.is_some() || self.pad_bytes.is_some()
    }

    pub(super) fn most_bytes(&self) -> u64 {
        self.pad_bytes.map_or(USUAL_BYTES, |size| size.0)
    }

    pub(super) fn directory(&self) -> Result<PathBuf, CliError> {
        if let Some(directory) = &self.directory {
            return Ok(directory.clone());
        }
        let set =
            |name| std::env::var_os(name).filter(|value| Path::new(value).is_absolute()).map(PathBuf::from);
        let base = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
        let missing = || CliError::Usage("neither XDG_STATE_HOME nor HOME is set: use --pads DIR".to_owned());
        Ok(base.ok_or_else(missing)?.join("holobiont/pads"))
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct PadPoolArguments {
    #[command(subcommand)]
    what: PadsCommand,
}

#[derive(Debug, clap::Subcommand)]
enum PadsCommand {
    /// Makes pads from your own copy of the model, without an executor
    Prepare(PreparePads),
    /// Shows how many pads are left
    Show(Show),
}

#[derive(Debug, clap::Args)]
struct PreparePads {
    /// Your own copy of the executor's model
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    #[command(flatten)]
    pads: PadArguments,
    /// Number of tokens, in prompts and answers, for which pads are made
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
    /// Makes pads for gradients too, for training an adapter
    #[arg(long)]
    gradients: bool,
}

#[derive(Debug, clap::Args)]
struct Show {
    #[command(flatten)]
    pads: PadArguments,
}

pub(super) fn run(arguments: &PadPoolArguments, terminal: Terminal) -> Result<(), CliError> {
    match &arguments.what {
        PadsCommand::Prepare(arguments) => prepare(arguments, terminal),
        PadsCommand::Show(arguments) => {
            let pool = PadPool::open(&arguments.pads.directory()?).map_err(CallError::from)?;
            print(&pool, terminal)
        }
    }
}

/// Opens the client's own weights, with a thread on each of `cores`; `why` names the option that needs them.
pub(super) fn own_weights(
    path: Option<&Path>,
    why: &'static str,
    cores: &[usize],
    terminal: Terminal,
) -> Result<SiteModel, CliError> {
    let missing = || {
        let why = format!("{why} needs your own copy of the model: use --model PATH");
        CliError::Usage(format!("{why}; the executor's own files cannot check the executor"))
    };
    let path = path.ok_or_else(missing)?;
    terminal.note(format_args!("reading the weights of {}", path.display()));
    let mut model = SiteModel::open(path, cores)?;
    model.commit();
    Ok(model)
}

/// Returns the cores that this process may use; if unknown, none, which means one thread.
pub(super) fn all_cores() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).ok();
    set.map(|set| (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()).unwrap_or_default()
}

fn prepare(arguments: &PreparePads, terminal: Terminal) -> Result<(), CliError> {
    crate::secrets::keep_memory_private()?;
    // No request waits for this process, so it may use all cores.
    let base = own_weights(Some(&arguments.model), "this", &all_cores(), terminal)?;
    let mut maker = PadGenerator::new(Box::new(base), arguments.pads.most_bytes());
    let pool = PadPool::create(&arguments.pads.directory()?, maker.commitment()?, &maker.shapes());
    let mut pool = pool.map_err(CallError::from)?;
    let directions: &[Direction] =
        if arguments.gradients { &[Direction::Forward, Direction::Backward] } else { &[Direction::Forward] };
    let mut progress = terminal.progress("making pads");
    maker.prepare(&mut pool, arguments.tokens, directions, &mut progress)?;
    print(&pool, terminal)
}

fn print(pool: &PadPool, terminal: Terminal) -> Result<(), CliError> {
    let left = |direction| {
        let sites = (0..pool.shapes().len()).map(|site| SiteId(u32::try_from(site).unwrap_or(u32::MAX)));
        sites.map(|site| pool.left(site, direction)).min().unwrap_or(0)
    };
    let (forward, backward) = (left(Direction::Forward), left(Direction::Backward));
    if terminal.format == OutputFormat::Json {
        let token_bytes = pool.token_bytes(Direction::Forward);
        terminal.print(json!({
            "tokens": forward,
            "gradient_tokens": backward,
            "bytes": pool.bytes(),
            "token_bytes": token_bytes,
            "gradient_token_bytes": pool.token_bytes(Direction::Backward),
        }))?;
        return Ok(());
    }
    let line = format!("pads for {forward} tokens, and for gradients of {backward}: {} bytes", pool.bytes());
    Ok(terminal.print(line)?)
}

//! `holobiont adapters stats`: summarizes the files of LoRA adapters.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use model::adapter::{
    by_name::{NamedLora, NamedModule},
    writing::WEIGHT_FILE,
};
use serde_json::{Value, json};

use super::AdaptersError;
use crate::terminal::{
    PrintFormat, Terminal, TextStyle, printable,
    table::{pairs, size, table},
};

/// Arguments of the subcommand `adapters stats`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatsArguments {
    /// Directories of PEFT adapters
    #[arg(value_name = "DIR", required = true)]
    directories: Vec<PathBuf>,
}

/// Stats of the layers that share the last part of their name.
#[derive(Debug, Default)]
pub(super) struct TargetStats {
    modules: usize,
    ranks: (usize, usize),
    norms: f64,
    largest: (f64, String),
}

impl TargetStats {
    /// Returns the last part of a module's name, which all blocks share.
    pub(super) fn of(module: &str) -> &str {
        module.rsplit('.').next().unwrap_or(module)
    }

    fn add(&mut self, name: &str, module: &NamedModule) {
        let norm = module.norm();
        let (least, most) = if self.modules == 0 { (module.rank, module.rank) } else { self.ranks };
        self.modules += 1;
        self.ranks = (least.min(module.rank), most.max(module.rank));
        self.norms += norm;
        if norm >= self.largest.0 {
            self.largest = (norm, name.to_owned());
        }
    }

    fn mean(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "there are a few hundred layers")]
        let modules = self.modules as f64;
        self.norms / modules.max(1.0)
    }

    fn ranks(&self) -> String {
        let (least, most) = self.ranks;
        if least == most { most.to_string() } else { format!("{least}-{most}") }
    }
}

/// Stats of one adapter.
struct Stats {
    directory: PathBuf,
    kind: &'static str,
    base_model: Option<String>,
    dtypes: Vec<String>,
    modules: usize,
    rank: usize,
    parameters: usize,
    bytes: u64,
    norm: f64,
    targets: BTreeMap<String, TargetStats>,
}

pub(super) fn run(arguments: &StatsArguments, terminal: Terminal) -> Result<(), AdaptersError> {
    for directory in &arguments.directories {
        let stats = Stats::of(directory, NamedLora::read(directory)?);
        match terminal.format {
            PrintFormat::Json => terminal.print(stats.json()),
            PrintFormat::Human => terminal.print(stats.text(terminal.ink())),
        }
    }
    Ok(())
}

/// Returns the size in bytes of an adapter's weight file.
pub(super) fn weight_bytes(directory: &Path) -> u64 {
    fs::metadata(directory.join(WEIGHT_FILE)).map_or(0, |file| file.len())
}

impl Stats {
    fn of(directory: &Path, adapter: NamedLora) -> Self {
        let NamedLora { base_model, modules, .. } = adapter;
        let mut targets: BTreeMap<String, TargetStats> = BTreeMap::new();
        for (name, module) in &modules {
            targets.entry(TargetStats::of(name).to_owned()).or_default().add(name, module);
        }
        let numbers = |module: &NamedModule| {
            module.a.len() + module.b.len() + module.magnitude.as_ref().map_or(0, Vec::len)
        };
        let mut dtypes: Vec<String> =
            modules.values().map(|module| format!("{:?}", module.kind).to_uppercase()).collect();
        dtypes.sort();
        dtypes.dedup();
        let is_dora = modules.values().any(|module| module.magnitude.is_some());
        Self {
            directory: directory.to_owned(),
            kind: if is_dora { "DoRA" } else { "LoRA" },
            base_model,
            dtypes,
            modules: modules.len(),
            rank: modules.values().map(|module| module.rank).max().unwrap_or(0),
            parameters: modules.values().map(numbers).sum(),
            bytes: weight_bytes(directory),
            norm: modules.values().map(|module| module.norm().powi(2)).sum::<f64>().sqrt(),
            targets,
        }
    }

    fn json(&self) -> Value {
        let target = |(name, target): (&String, &TargetStats)| {
            let (norm, module) = &target.largest;
            json!({
                "target": name,
                "modules": target.modules,
                "ranks": [target.ranks.0, target.ranks.1],
                "mean_norm": target.mean(),
                "largest_norm": norm,
                "largest": module,
            })
        };
        json!({
            "directory": self.directory,
            "kind": self.kind,
            "base_model": self.base_model,
            "dtypes": self.dtypes,
            "modules": self.modules,
            "rank": self.rank,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "norm": self.norm,
            "targets": self.targets.iter().map(target).collect::<Vec<_>>(),
        })
    }

    fn text(&self, ink: TextStyle) -> String {
        let fact = |name: &str, value: String| (name.to_owned(), value);
        let facts = [
            fact("adapter", self.directory.display().to_string()),
            fact("kind", self.kind.to_owned()),
            fact("base model", self.base_model.as_deref().map_or_else(|| "-".to_owned(), printable)),
            fact(
                "numbers",
                format!("{} of {}, {}", self.parameters, self.dtypes.join(", "), size(self.bytes)),
            ),
            fact("rank", self.rank.to_string()),
            fact("modules", self.modules.to_string()),
            fact("norm", format!("{:.4}", self.norm)),
        ];
        let rows = self.targets.iter().map(|(name, target)| {
            let (norm, module) = &target.largest;
            let largest = format!("{norm:.4} {}", printable(module));
            [
                printable(name),
                target.modules.to_string(),
                target.ranks(),
                format!("{:.4}", target.mean()),
                largest,
            ]
        });
        let head = ["TARGET", "MODULES", "RANK", "NORM", "LARGEST"];
        format!("{}\n\n{}", pairs(ink, &facts), table(ink, head, &rows.collect::<Vec<_>>()))
    }
}

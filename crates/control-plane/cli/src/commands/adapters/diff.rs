//! `holobiont adapters diff`: compares two LoRA adapters layer by layer.

use std::{collections::BTreeSet, path::PathBuf};

use model::adapter::by_name::{NamedLora, NamedModule};
use serde_json::{Map, Value, json};

use super::{AdaptersError, stats::TargetStats};
use crate::terminal::{
    PrintFormat, Terminal, TextStyle, printable,
    table::{pairs, table},
};

/// Arguments of the subcommand `adapters diff`.
#[derive(Debug, clap::Args)]
pub(crate) struct DiffArguments {
    /// Directory of a PEFT adapter
    #[arg(value_name = "DIR")]
    one: PathBuf,
    /// Directory of the other PEFT adapter
    #[arg(value_name = "OTHER_DIR")]
    other: PathBuf,
}

/// Deltas of two adapters in one layer.
struct LayerPair<'a> {
    name: &'a str,
    /// Norms of the two deltas; `distance` is the norm of their difference.
    norms: [f64; 2],
    distance: f64,
}

impl LayerPair<'_> {
    /// Returns the distance relative to the larger norm.
    fn relative(&self) -> f64 {
        share(self.distance, self.norms)
    }
}

/// Result of the comparison.
struct Difference<'a> {
    pairs: Vec<LayerPair<'a>>,
    /// Layers that only one adapter changes or whose shapes differ.
    apart: [Vec<&'a str>; 2],
    /// Options that differ, with both values; null for a missing value.
    options: Map<String, Value>,
}

pub(super) fn run(arguments: &DiffArguments, terminal: Terminal) -> Result<(), AdaptersError> {
    let (one, other) = (NamedLora::read(&arguments.one)?, NamedLora::read(&arguments.other)?);
    let difference = Difference::of(&one, &other);
    match terminal.format {
        PrintFormat::Json => terminal.print(difference.json()),
        PrintFormat::Human => terminal.print(difference.text(terminal.ink())),
    }
    Ok(())
}

fn share(distance: f64, norms: [f64; 2]) -> f64 {
    let largest = norms[0].max(norms[1]);
    if largest > 0.0 { distance / largest } else { 0.0 }
}

impl<'a> Difference<'a> {
    fn of(one: &'a NamedLora, other: &'a NamedLora) -> Self {
        let (mut pairs, mut apart) = (Vec::new(), [Vec::new(), Vec::new()]);
        let shape = |module: &NamedModule| [module.outputs, module.inputs];
        for (name, module) in &one.modules {
            match other.modules.get(name) {
                Some(its) if shape(its) == shape(module) => pairs.push(LayerPair {
                    name,
                    norms: [module.norm(), its.norm()],
                    distance: module.distance(its),
                }),
                _ => apart[0].push(name.as_str()),
            }
        }
        let is_paired =
            |name: &str| pairs.binary_search_by(|pair: &LayerPair<'_>| pair.name.cmp(name)).is_ok();
        apart[1] = other.modules.keys().map(String::as_str).filter(|name| !is_paired(name)).collect();
        Self { pairs, apart, options: options(&one.options, &other.options) }
    }

    /// Returns the relative distance over all layers that both adapters change.
    fn relative(&self) -> f64 {
        let root = |of: &dyn Fn(&LayerPair<'_>) -> f64| {
            self.pairs.iter().map(|pair| of(pair).powi(2)).sum::<f64>().sqrt()
        };
        share(root(&|pair| pair.distance), [root(&|pair| pair.norms[0]), root(&|pair| pair.norms[1])])
    }

    fn json(&self) -> Value {
        let module = |pair: &LayerPair<'_>| json!({ "module": pair.name, "relative_difference": pair.relative(), "norms": pair.norms });
        json!({
            "relative_difference": self.relative(),
            "modules": self.pairs.iter().map(module).collect::<Vec<_>>(),
            "only_in_first": self.apart[0],
            "only_in_second": self.apart[1],
            "options": self.options,
        })
    }

    fn text(&self, ink: TextStyle) -> String {
        let targets: BTreeSet<&str> = self.pairs.iter().map(|pair| TargetStats::of(pair.name)).collect();
        let rows = targets.into_iter().map(|target| {
            let of = self.pairs.iter().filter(|pair| TargetStats::of(pair.name) == target);
            let largest = of.clone().max_by(|one, other| one.relative().total_cmp(&other.relative()));
            let (count, sum) = of.fold((0, 0.0), |(count, sum), pair| (count + 1, sum + pair.relative()));
            let largest = largest
                .map_or_else(String::new, |pair| format!("{:.4} {}", pair.relative(), printable(pair.name)));
            [printable(target), count.to_string(), format!("{:.4}", sum / f64::from(count)), largest]
        });
        let head = ["TARGET", "MODULES", "DIFFERENCE", "LARGEST"];
        let mut text = table(ink, head, &rows.collect::<Vec<_>>());
        let mut facts = vec![("difference of all".to_owned(), format!("{:.4}", self.relative()))];
        for (which, names) in ["only in the first", "only in the second"].iter().zip(&self.apart) {
            if !names.is_empty() {
                facts.push(((*which).to_owned(), format!("{} modules", names.len())));
            }
        }
        facts.extend(
            self.options.iter().map(|(option, values)| (printable(option), printable(&values.to_string()))),
        );
        text.push_str("\n\n");
        text.push_str(&pairs(ink, &facts));
        text
    }
}

fn options(one: &Map<String, Value>, other: &Map<String, Value>) -> Map<String, Value> {
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let both = names.into_iter().map(|name| (name, [one, other].map(|options| options.get(name))));
    let differ =
        both.filter(|(_, [one, other])| one.unwrap_or(&Value::Null) != other.unwrap_or(&Value::Null));
    differ.map(|(name, values)| (name.clone(), json!(values))).collect()
}

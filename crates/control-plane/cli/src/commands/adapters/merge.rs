//! `holobiont adapters merge`: merges several adapters into one that computes exactly their weighted sum, or
//! combines their factors as PEFT does.

use std::path::{Path, PathBuf};

use model::adapter::{
    by_name::NamedLora,
    combination::{Combination, CombinationMethod, MajoritySign},
    limits::MAX_RANK,
};
use serde_json::json;

use super::AdaptersError;
use crate::terminal::{PrintFormat, Terminal, table::size};

/// Arguments of the subcommand `adapters merge`.
#[derive(Debug, clap::Args)]
pub(crate) struct MergeArguments {
    /// Directories of PEFT adapters, each with an optional weight, as DIR:0.7; the default weight is 1
    #[arg(value_name = "DIR[:WEIGHT]", required = true)]
    adapters: Vec<String>,
    /// Directory of the merged adapter; it must not exist
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// How values are combined, as in PEFT's add_weighted_adapter; all but `cat` approximate the sum
    #[arg(long, value_enum, default_value = "cat")]
    combination: CombinationName,
    /// Rank of each layer with `svd` [default: the largest rank of the adapters]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_RANK as u64))]
    rank: Option<u64>,
    /// Share of the values that `ties`, `dare_linear`, `dare_ties` and `magnitude_prune` keep
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    density: f64,
    /// How `ties` and `dare_ties` find the sign of the majority
    #[arg(long, value_enum, default_value = "total")]
    majority_sign: SignName,
    /// Seed of the random choices of `dare_linear` and `dare_ties`
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
}

/// PEFT's names of combinations.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum CombinationName {
    Cat,
    Linear,
    Svd,
    Ties,
    DareLinear,
    DareTies,
    MagnitudePrune,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum SignName {
    Total,
    Frequency,
}

impl MergeArguments {
    fn combination(&self) -> Combination {
        let method = match self.combination {
            CombinationName::Cat => CombinationMethod::Cat,
            CombinationName::Linear => CombinationMethod::Linear,
            CombinationName::Svd => CombinationMethod::Svd,
            CombinationName::Ties => CombinationMethod::Ties,
            CombinationName::DareLinear => CombinationMethod::DareLinear,
            CombinationName::DareTies => CombinationMethod::DareTies,
            CombinationName::MagnitudePrune => CombinationMethod::MagnitudePrune,
        };
        let sign = match self.majority_sign {
            SignName::Total => MajoritySign::Total,
            SignName::Frequency => MajoritySign::Frequency,
        };
        let rank = self.rank.and_then(|rank| usize::try_from(rank).ok());
        Combination { method, rank, density: self.density, sign, seed: self.seed }
    }
}

/// Parses a share of a whole, above 0.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err("must be a number above 0, up to 1".to_owned()),
    }
}

pub(super) fn run(arguments: &MergeArguments, terminal: Terminal) -> Result<(), AdaptersError> {
    let output = &arguments.output;
    if output.exists() {
        return Err(AdaptersError::Exists(output.clone()));
    }
    let read = |asked: &String| -> Result<(NamedLora, f32), AdaptersError> {
        let (directory, weight) = weighted(asked)?;
        Ok((NamedLora::read(directory)?, weight))
    };
    let parts = arguments.adapters.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let merged = NamedLora::combine(&parts, &arguments.combination())?;
    merged.write(output).map_err(model::adapter::by_name::MergeError::from)?;
    let rank = merged.modules.values().map(|module| module.rank).max().unwrap_or(0);
    let bytes = super::stats::weight_bytes(output);
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({
            "output": output,
            "modules": merged.modules.len(),
            "rank": rank,
            "bytes": bytes,
        })),
        PrintFormat::Human => terminal.print(format!(
            "{} is written: rank {rank}, {}, {} modules changed",
            output.display(),
            size(bytes),
            merged.modules.len()
        )),
    }
    Ok(())
}

/// Parses a directory with an optional weight. An existing directory with the whole text as its name has
/// precedence.
fn weighted(asked: &str) -> Result<(&Path, f32), AdaptersError> {
    let Some((directory, weight)) = asked.rsplit_once(':').filter(|_| !Path::new(asked).exists()) else {
        return Ok((Path::new(asked), 1.0));
    };
    match weight.parse::<f32>() {
        Ok(number) if number.is_normal() => Ok((Path::new(directory), number)),
        _ => Err(AdaptersError::Weight(weight.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_stands_behind_a_colon_and_a_directory_comes_first() {
        assert_eq!(weighted("here/a:0.5").unwrap(), (Path::new("here/a"), 0.5));
        assert_eq!(weighted("here/a").unwrap(), (Path::new("here/a"), 1.0));
        for wrong in ["a:", "a:x", "a:0", "a:inf"] {
            assert!(matches!(weighted(wrong), Err(AdaptersError::Weight(_))), "{wrong}");
        }
        let directory = tempfile::tempdir().unwrap();
        let odd = directory.path().join("a:0.5");
        std::fs::create_dir(&odd).unwrap();
        assert_eq!(weighted(odd.to_str().unwrap()).unwrap(), (&*odd, 1.0));
    }
}

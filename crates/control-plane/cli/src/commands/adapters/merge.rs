//! `holobiont adapters merge`: merges several adapters into one that computes exactly their weighted sum, or
//! combines their factors as PEFT does.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
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
    #[arg(long, default_value = "cat", value_parser = one_of(CombinationMethod::NAMED))]
    combination: CombinationMethod,
    /// Rank of each layer with `svd` [default: the largest rank of the adapters]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_RANK as u64))]
    rank: Option<u64>,
    /// Share of the values that `ties`, `dare_linear`, `dare_ties` and `magnitude_prune` keep
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share)]
    density: f64,
    /// How `ties` and `dare_ties` find the sign of the majority
    #[arg(long, default_value = "total", value_parser = one_of(MajoritySign::NAMED))]
    majority_sign: MajoritySign,
    /// Seed of the random choices of `dare_linear` and `dare_ties`
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
}

impl MergeArguments {
    fn combination(&self) -> Combination {
        let rank = self.rank.and_then(|rank| usize::try_from(rank).ok());
        let (method, sign) = (self.combination, self.majority_sign);
        Combination { method, rank, density: self.density, sign, seed: self.seed }
    }
}

/// Parses one of the names in `named`.
fn one_of<T: Copy + Send + Sync + 'static, const N: usize>(
    named: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let find = move |name: &str| named.into_iter().find(|(known, _)| *known == name);
    let parser = PossibleValuesParser::new(named.map(|(name, _)| name));
    parser.try_map(move |name| find(&name).map(|(_, value)| value).ok_or("the name is unknown"))
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

//! Ranks and alphas of LyCORIS's methods, by pattern.

use serde_json::Value;

use super::super::{
    error::AdapterError,
    limits::MAX_RANK,
    options::{ConfigOptions, as_count, option_error},
    patterns::ByPattern,
    selection::TrainedLayer,
    weight_file::WeightFile,
};

#[derive(Debug)]
pub(super) struct RankOptions {
    rank: usize,
    ranks: ByPattern<usize>,
    alpha: f64,
    alphas: ByPattern<f64>,
}

impl RankOptions {
    /// Takes `r`, `rank_pattern`, `alpha_pattern` and the option `alpha`, with the default `usual` for both.
    pub(super) fn take(
        options: &mut ConfigOptions<'_>,
        alpha: &str,
        usual: usize,
    ) -> Result<Self, AdapterError> {
        Ok(Self {
            rank: options.count("r")?.unwrap_or(usual),
            ranks: options.by_pattern("rank_pattern", as_count)?,
            alpha: options.number(alpha)?.unwrap_or(usual as f64),
            alphas: options.by_pattern("alpha_pattern", Value::as_f64)?,
        })
    }

    /// Returns the rank of a layer, and `alpha / rank`.
    pub(super) fn of(
        &self,
        weights: &WeightFile<'_>,
        layer: &TrainedLayer,
    ) -> Result<(usize, f32), AdapterError> {
        let path = weights.path();
        let problem = |option| move |problem| option_error(path, option, problem);
        let rank = self.ranks.get(&layer.written, self.rank).map_err(problem("rank_pattern"))?;
        check_rank(weights, layer, rank)?;
        let alpha = self.alphas.get(&layer.written, self.alpha).map_err(problem("alpha_pattern"))?;
        #[expect(clippy::cast_possible_truncation, reason = "PEFT rounds the scale to single precision too")]
        let scale = (alpha / rank as f64) as f32;
        if scale.is_finite() { Ok((rank, scale)) } else { Err(problem("alpha")("is too large".to_owned())) }
    }
}

/// Checks that the rank of a layer is at least 1, and that factors of this rank may be stored.
pub(super) fn check_rank(
    weights: &WeightFile<'_>,
    layer: &TrainedLayer,
    rank: usize,
) -> Result<(), AdapterError> {
    if (1..=MAX_RANK).contains(&rank) {
        return Ok(());
    }
    let (path, module) = (weights.path().to_path_buf(), layer.name.clone());
    Err(AdapterError::Rank { path, module, rank })
}

/// Takes the rank of a method whose layers all have one.
pub(super) fn take_rank(options: &mut ConfigOptions<'_>, usual: usize) -> Result<usize, AdapterError> {
    let rank = options.count("r")?.unwrap_or(usual);
    if (1..=MAX_RANK).contains(&rank) {
        return Ok(rank);
    }
    Err(options.problem("r", format!("is {rank}, which is not between 1 and {MAX_RANK}")))
}

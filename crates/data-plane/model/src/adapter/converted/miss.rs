//! MiSS: inputs are added up in blocks of `rank` features, and multiplied with `miss_block`, `[rank, out]`.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::LowRankProduct,
    rank::take_rank,
};

const INITIALIZATION: &str = "init_weights";

/// Initialization that makes the change depend on the base's weights.
const BAT: &str = "bat";

/// Initialization that stores some outputs, which the others repeat.
const MINI: &str = "mini";

#[derive(Debug)]
struct Miss {
    rank: usize,
    /// Stored outputs, or `None` if all are stored.
    repeated: Option<usize>,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let initialization = options.take(INITIALIZATION);
    let named = initialization.as_ref().and_then(|value| value.as_str());
    if named == Some(BAT) {
        return Err(options.problem(
            INITIALIZATION,
            "is \"bat\", which changes the base's weights by themselves; merge the adapter into its base (in \
             PEFT: merge_and_unload)",
        ));
    }
    let stored = options.count("mini_r")?.unwrap_or(1);
    if stored == 0 {
        return Err(options.problem("mini_r", "is 0, but must be at least 1"));
    }
    let repeated = (named == Some(MINI)).then_some(stored);
    Ok(Box::new(Miss { rank: take_rank(options, 64)?, repeated }))
}

impl ConvertedMethod for Miss {
    fn history(&self) -> &'static [&'static str] {
        &["miss_dropout"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([block]) = weights.take_layer(layer, ["miss_block"])? else { return Ok(None) };
        let ([outputs, inputs], rank) = (layer.shape, self.rank);
        let stored = self.repeated.unwrap_or(outputs);
        let block = weights.numbers(block, &[rank, stored])?;
        budget.check(weights.path(), rank, layer.shape)?;
        let chosen =
            |rank_index| (0..inputs).map(move |input| f32::from(u8::from(input % rank == rank_index)));
        let a = (0..rank).flat_map(chosen).collect();
        let column = |output: usize| block.iter().skip(output % stored).step_by(stored).copied();
        let b = (0..outputs).flat_map(column).collect();
        Ok(Some(LowRankProduct::exact(rank, 1.0, a, b)))
    }
}

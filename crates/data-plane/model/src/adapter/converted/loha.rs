//! LoHa: the elementwise product of two low-rank matrices, `(B1 A1) * (B2 A2)`.
//!
//! The product of ranks i and j is one rank of the result: the columns of B1 and B2 are multiplied element by
//! element, and so are the rows of A1 and A2. The result has `rank * rank` ranks at most.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::LowRankProduct,
    rank::RankOptions,
};

const PARTS: [&str; 4] = ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"];

#[derive(Debug)]
struct LoHa(RankOptions);

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    Ok(Box::new(LoHa(RankOptions::take(options, "alpha", 8)?)))
}

impl ConvertedMethod for LoHa {
    fn history(&self) -> &'static [&'static str] {
        // The option on convolutions changes nothing in linear layers.
        &["init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([b1, a1, b2, a2]) = weights.take_layer(layer, PARTS)? else { return Ok(None) };
        let [outputs, inputs] = layer.shape;
        let (rank, scale) = self.0.of(weights, layer)?;
        let (b1, a1) = (weights.numbers(b1, &[outputs, rank])?, weights.numbers(a1, &[rank, inputs])?);
        let (b2, a2) = (weights.numbers(b2, &[outputs, rank])?, weights.numbers(a2, &[rank, inputs])?);
        budget.check(weights.path(), rank * rank, layer.shape)?;
        let pairs =
            a1.chunks_exact(inputs).flat_map(|one| a2.chunks_exact(inputs).map(move |two| (one, two)));
        let a = pairs.flat_map(|(one, two)| one.iter().zip(two).map(|(x, y)| x * y)).collect();
        let rows = b1.chunks_exact(rank).zip(b2.chunks_exact(rank));
        let b = rows.flat_map(|(one, two)| one.iter().flat_map(move |x| two.iter().map(move |y| x * y)));
        Ok(Some(LowRankProduct::exact(rank * rank, scale, a, b.collect())))
    }
}

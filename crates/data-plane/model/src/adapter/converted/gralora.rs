//! GraLoRA: inputs and outputs are cut into blocks, and each pair of blocks has its own share of the ranks.
//!
//! `gralora_A` is `[blocks, in / blocks, rank]`, and `gralora_B` is `[blocks, rank, out / blocks]`. Ranks of
//! an input block are cut into as many shares as there are output blocks. Share j of input block i meets
//! share i of output block j. A hybrid adapter has a LoRA besides, `gralora_A_general` and
//! `gralora_B_general`.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::take_rank,
};

const GENERAL: [&str; 2] = ["gralora_A_general.weight", "gralora_B_general.weight"];

#[derive(Debug)]
struct GraLora {
    rank: usize,
    /// Ranks of the LoRA besides, or 0.
    hybrid: usize,
    blocks: usize,
    alpha: f64,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let (rank, alpha) = (take_rank(options, 32)?, options.number("alpha")?.unwrap_or(64.0));
    let (hybrid, blocks) =
        (options.count("hybrid_r")?.unwrap_or(0), options.count("gralora_k")?.unwrap_or(2));
    if blocks == 0 || rank % blocks != 0 {
        return Err(options.problem("gralora_k", format!("is {blocks}, but must divide the rank, {rank}")));
    }
    Ok(Box::new(GraLora { rank, hybrid, blocks, alpha }))
}

impl ConvertedMethod for GraLora {
    fn history(&self) -> &'static [&'static str] {
        &["gralora_dropout", "init_weights"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([a, b]) = weights.take_layer(layer, ["gralora_A", "gralora_B"])? else { return Ok(None) };
        let (shape @ [outputs, inputs], blocks, hybrid) = (layer.shape, self.blocks, self.hybrid);
        let a = weights.numbers(a, &[blocks, inputs / blocks, self.rank])?;
        let b = weights.numbers(b, &[blocks, self.rank, outputs / blocks])?;
        budget.check(weights.path(), blocks * self.rank + hybrid, shape)?;
        let scale = rounded(self.alpha / (self.rank + hybrid) as f64);
        let blocked = self.blocked(&a, &b, shape, scale);
        if hybrid == 0 {
            return Ok(Some(blocked));
        }
        let Some([a, b]) = weights.take_layer(layer, GENERAL)? else { return Ok(None) };
        let (a, b) = (weights.numbers(a, &[hybrid, inputs])?, weights.numbers(b, &[outputs, hybrid])?);
        Ok(Some(blocked.plus(&LowRankProduct::exact(hybrid, scale, a, b), shape)))
    }
}

impl GraLora {
    fn blocked(&self, a: &[f32], b: &[f32], [outputs, inputs]: [usize; 2], scale: f32) -> LowRankProduct {
        let (blocks, own) = (self.blocks, self.rank);
        let (rank, share) = (blocks * own, own / blocks);
        let [width, height] = [inputs / blocks, outputs / blocks];
        let (mut wide, mut tall) = (vec![0.0; rank * inputs], vec![0.0; outputs * rank]);
        for at in 0..rank {
            let (from, to, nth) = (at / own, at % own / share, at % share);
            for i in 0..width {
                wide[at * inputs + from * width + i] = a[(from * width + i) * own + to * share + nth];
            }
            for o in 0..height {
                tall[(to * height + o) * rank + at] = b[(to * own + from * share + nth) * height + o];
            }
        }
        LowRankProduct::exact(rank, scale, wide, tall)
    }
}

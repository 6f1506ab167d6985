//! Poly: several LoRAs, the *skills*, mixed with weights that depend on the task alone.
//!
//! `poly_lora_A` is `[splits, skills, in / splits, rank]`, and `poly_lora_B` is `[splits, skills, rank, out /
//! splits]`. The mixing weights are the sigmoids of `poly_router.module_logits`, `[tasks, splits * skills]`,
//! as shares of their sum. Requests name no task, so an adapter with several is refused.

use super::{
    super::{error::AdapterError, options::ConfigOptions, selection::TrainedLayer, weight_file::WeightFile},
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::take_rank,
};

const TASKS: &str = "n_tasks";

const PARTS: [&str; 3] = ["poly_lora_A", "poly_lora_B", "poly_router.module_logits"];

#[derive(Debug)]
struct Poly {
    rank: usize,
    skills: usize,
    splits: usize,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    options.one_of("poly_type", &["poly"])?;
    let tasks = options.count(TASKS)?.unwrap_or(1);
    if tasks != 1 {
        let problem = format!("is {tasks}, but requests name no task; save an adapter of one task");
        return Err(options.problem(TASKS, problem));
    }
    let (skills, splits) = (options.count("n_skills")?.unwrap_or(4), options.count("n_splits")?.unwrap_or(1));
    if skills == 0 || splits == 0 {
        return Err(options.problem("n_skills", "or `n_splits` is 0"));
    }
    Ok(Box::new(Poly { rank: take_rank(options, 8)?, skills, splits }))
}

impl ConvertedMethod for Poly {
    fn history(&self) -> &'static [&'static str] {
        &["init_weights"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        _budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([a, b, logits]) = weights.take_layer(layer, PARTS)? else { return Ok(None) };
        let (&Self { rank, skills, splits }, [outputs, inputs]) = (self, layer.shape);
        let [width, height] = [inputs / splits, outputs / splits];
        let a = weights.numbers(a, &[splits, skills, width, rank])?;
        let b = weights.numbers(b, &[splits, skills, rank, height])?;
        let shares = shares(&weights.numbers(logits, &[1, splits * skills])?, skills);
        let (mut wide, mut tall) = (vec![0.0; rank * inputs], vec![0.0; outputs * rank]);
        for (at, share) in shares.into_iter().enumerate() {
            let split = at / skills;
            for (nth, value) in a[at * width * rank..][..width * rank].iter().enumerate() {
                wide[nth % rank * inputs + split * width + nth / rank] += share * value;
            }
            for (nth, value) in b[at * rank * height..][..rank * height].iter().enumerate() {
                tall[(split * height + nth % height) * rank + nth / height] += share * value;
            }
        }
        Ok(Some(LowRankProduct::exact(rank, rounded(1.0 / rank as f64), wide, tall)))
    }
}

/// Returns the mixing weights of each split's skills.
fn shares(logits: &[f32], skills: usize) -> Vec<f32> {
    let sigmoids = logits.iter().map(|&logit| 1.0 / (1.0 + (-f64::from(logit)).exp()));
    let sigmoids: Vec<f64> = sigmoids.collect();
    let split = |split: &[f64]| {
        let sum: f64 = split.iter().sum();
        split.iter().map(|sigmoid| rounded(sigmoid / (sum + 1e-12))).collect::<Vec<_>>()
    };
    sigmoids.chunks_exact(skills).flat_map(split).collect()
}

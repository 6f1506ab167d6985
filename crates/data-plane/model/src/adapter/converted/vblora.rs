//! VB-LoRA: a LoRA whose factors are cut into short vectors, each a mixture of vectors from one bank.
//!
//! The bank is `vblora_vector_bank`, `[vectors, length]`. A vector has a logit for each vector of the bank,
//! and mixes the `topk` largest by their softmax: `vblora_logits_A`, `[rank, in / length, vectors]`, and
//! `vblora_logits_B`, `[out / length, rank, vectors]`. A file may have the chosen vectors instead of logits:
//! their numbers, `[.., topk]`, and all weights but the last, `[.., topk - 1]`.

use super::{
    super::{
        error::AdapterError,
        options::{ConfigOptions, option_error},
        selection::TrainedLayer,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::{LowRankProduct, rounded},
    rank::take_rank,
};

const BANK: &str = "base_model.vblora_vector_bank";

const LENGTH: &str = "vector_length";

#[derive(Debug)]
struct VbLora {
    rank: usize,
    chosen: usize,
    vectors: usize,
    length: usize,
    is_chosen_stored: bool,
    /// Matrix of shape `[vectors, length]`, once it is taken.
    bank: Vec<f32>,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let (rank, chosen) = (take_rank(options, 4)?, options.count("topk")?.unwrap_or(2));
    let (vectors, length) =
        (options.count("num_vectors")?.unwrap_or(256), options.count(LENGTH)?.unwrap_or(256));
    if chosen == 0 || chosen > vectors || length == 0 {
        return Err(options.problem("topk", format!("is {chosen} of {vectors} vectors of length {length}")));
    }
    let is_chosen_stored = options.flag("save_only_topk_weights")?;
    Ok(Box::new(VbLora { rank, chosen, vectors, length, is_chosen_stored, bank: Vec::new() }))
}

impl ConvertedMethod for VbLora {
    fn history(&self) -> &'static [&'static str] {
        &["init_logits_std", "init_vector_bank_bound", "vblora_dropout"]
    }

    fn share(&mut self, weights: &mut WeightFile<'_>, _layers: &[TrainedLayer]) -> Result<(), AdapterError> {
        let bank = weights.required(BANK)?;
        self.bank = weights.numbers(bank, &[self.vectors, self.length])?;
        Ok(())
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let ([outputs, inputs], rank) = (layer.shape, self.rank);
        if outputs % self.length != 0 || inputs % self.length != 0 {
            let problem = format!("is {}, but must divide {outputs} and {inputs}", self.length);
            return Err(option_error(weights.path(), LENGTH, problem));
        }
        let (tall, wide) = (outputs / self.length, inputs / self.length);
        let Some(a) = self.mixtures(weights, layer, "vblora_logits_A", [rank, wide])? else {
            return Ok(None);
        };
        let Some(b) = self.mixtures(weights, layer, "vblora_logits_B", [tall, rank])? else {
            return Ok(None);
        };
        budget.check(weights.path(), rank, layer.shape)?;
        let a = a.iter().flat_map(|mixture| self.mixed(mixture)).collect();
        let vectors: Vec<Vec<f32>> = b.iter().map(|mixture| self.mixed(mixture)).collect();
        let value =
            |output: usize, nth: usize| vectors[output / self.length * rank + nth][output % self.length];
        let b = (0..outputs).flat_map(|output| (0..rank).map(move |nth| (output, nth)));
        let b = b.map(|(output, nth)| value(output, nth)).collect();
        Ok(Some(LowRankProduct::exact(rank, 1.0, a, b)))
    }
}

/// Vectors of the bank, each with its weight.
type Mixture = Vec<(usize, f32)>;

impl VbLora {
    /// Takes the mixtures of a factor with `rows * columns` short vectors.
    fn mixtures(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        part: &str,
        [rows, columns]: [usize; 2],
    ) -> Result<Option<Vec<Mixture>>, AdapterError> {
        if self.is_chosen_stored {
            return self.stored_mixtures(weights, layer, part, [rows, columns]);
        }
        let Some([logits]) = weights.take_layer(layer, [part])? else { return Ok(None) };
        let logits = weights.numbers(logits, &[rows, columns, self.vectors])?;
        Ok(Some(logits.chunks_exact(self.vectors).map(|logits| self.chosen(logits)).collect()))
    }

    fn stored_mixtures(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        part: &str,
        [rows, columns]: [usize; 2],
    ) -> Result<Option<Vec<Mixture>>, AdapterError> {
        let (numbers_name, weights_name) = (format!("{part}_topk_indices"), format!("{part}_topk_weights"));
        let Some([shares]) = weights.take_layer(layer, [&weights_name[..]])? else { return Ok(None) };
        let shares = weights.numbers(shares, &[rows, columns, self.chosen - 1])?;
        let name = format!("{}.{numbers_name}", layer.name);
        let Some(numbers) = weights.take_integers(&name, &[rows, columns, self.chosen])? else {
            let (path, tensor) = (weights.path().to_path_buf(), name);
            return Err(AdapterError::Missing { path, tensor, foreign: None });
        };
        let numbers: Option<Vec<usize>> = numbers.into_iter().map(|number| self.number(number)).collect();
        let Some(numbers) = numbers else {
            let problem = format!("has numbers outside the {} vectors of the bank", self.vectors);
            return Err(option_error(weights.path(), &name, problem));
        };
        let mixture = |(nth, numbers): (usize, &[usize])| {
            let shares = &shares[nth * (self.chosen - 1)..][..self.chosen - 1];
            let last = 1.0 - shares.iter().sum::<f32>();
            numbers.iter().copied().zip(shares.iter().copied().chain([last])).collect()
        };
        Ok(Some(numbers.chunks_exact(self.chosen).enumerate().map(mixture).collect()))
    }

    fn number(&self, number: i64) -> Option<usize> {
        usize::try_from(number).ok().filter(|&number| number < self.vectors)
    }

    /// Returns the vectors with the largest logits, weighted by their softmax.
    fn chosen(&self, logits: &[f32]) -> Mixture {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&one, &other| logits[other].total_cmp(&logits[one]));
        order.truncate(self.chosen);
        let largest = f64::from(logits[order[0]]);
        let powers: Vec<f64> = order.iter().map(|&at| (f64::from(logits[at]) - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        order.into_iter().zip(powers).map(|(at, power)| (at, rounded(power / sum))).collect()
    }

    fn mixed(&self, mixture: &Mixture) -> Vec<f32> {
        let mut sum = vec![0.0; self.length];
        for &(vector, share) in mixture {
            let vector = &self.bank[vector * self.length..][..self.length];
            sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += share * value);
        }
        sum
    }
}
